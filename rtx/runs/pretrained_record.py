"""The record of `rtx analyze pretrained`: what selections cost a pretrained model on one text.

The command writes it to `<outputs>/pretrained/<model>/*.json`, and `rtx report` reads it. Bits are
bits per token, errors are standard errors over windows, None for a single window.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field, FiniteFloat, model_validator

from rtx.errors import plural
from rtx.runs.older import json_object
from rtx.runs.records import Count, DataRecord, Record

PRETRAINED = "pretrained"
"""The folder of these records below the folder of runs, and what a record says it is."""
FILES = "*-N*-????????.json"
"""The names of the files: data set, length, and a hash of the settings."""
Grid = list[list[FiniteFloat | None]]
"""A value for each layer and head; None: the head has no weight on far keys."""


class DenseRow(Record):
    """The loss of the model as it is.

    `keys`: the mean number of keys that a query reads.
    """

    bits: FiniteFloat
    error: FiniteFloat | None = None
    bits_per_byte: FiniteFloat
    bits_of_windows: list[FiniteFloat]
    keys: FiniteFloat


class WeightRow(Record):
    """The shares of the model's attention weight on sinks and on far keys, and those of heads."""

    sinks: FiniteFloat
    sinks_error: FiniteFloat | None = None
    far: FiniteFloat
    far_error: FiniteFloat | None = None
    sinks_of_heads: Grid
    far_of_heads: Grid


class ChoiceFields(Record):
    """What each head reads: the fields of `rtx.hf.Choice`, of which the others are kept as well."""

    model_config = ConfigDict(extra="allow")

    selection: str
    keys: int
    per: str = "head"
    rotary: str = "after"
    dense_layers: int = 0

    @property
    def label(self) -> str:
        """The name of the choice in tables and plots, which leaves out `keys`."""
        if self.selection == "none":
            return "none (local)"
        if self.selection == "next":
            return "next (longer window)"
        label = self.selection
        if self.per == "group":
            label += ", one choice per group"
        if self.rotary == "before":
            label += ", before rotary"
        if self.dense_layers:
            label += f", {plural(self.dense_layers, 'first layer')} dense"
        return label


class SelectionCostRow(Record):
    """The cost of one choice.

    Args:
        k: the keys that the choice may read beside window and sinks.
        above: bits more than the dense model, the mean over windows.
        late: the same of the second half of each window.
        keys, pairs: the mean number of keys that a query reads, and of products that it takes part
            in.
        kept: the share of the weight on far keys that the choice reads; None: some layers stay
            dense, or the model has no weight on far keys.
    """

    label: str
    choice: ChoiceFields
    k: Count
    above: FiniteFloat
    error: FiniteFloat | None = None
    above_of_windows: list[FiniteFloat]
    late: FiniteFloat
    late_error: FiniteFloat | None = None
    keys: FiniteFloat
    pairs: FiniteFloat
    kept: FiniteFloat | None = None
    kept_error: FiniteFloat | None = None
    kept_of_layers: list[FiniteFloat | None] | None = None
    kept_of_heads: Grid | None = None


class PretrainedRecord(Record):
    """What selections cost a model on the windows of one text.

    Args:
        analyze: the options of the command.
        parameters, memory: the model's, and the bytes that were counted before loading.
        seconds: the duration of the measurement.
    """

    most_bytes: ClassVar[int] = 1 << 26

    what: Literal["pretrained"]
    dense: DenseRow
    weight: WeightRow
    rows: list[SelectionCostRow] = Field(min_length=1)
    seconds: FiniteFloat
    parameters: Count
    memory: Count
    precision: str
    analyze: dict[str, Any]
    data: DataRecord
    time: str

    @model_validator(mode="after")
    def check_sizes(self) -> PretrainedRecord:
        """Raise ValueError unless all rows have the same windows, layers and heads."""
        windows = len(self.dense.bits_of_windows)
        shape = shape_of(self.weight.far_of_heads)
        if shape_of(self.weight.sinks_of_heads) != shape:
            raise ValueError("sinks_of_heads and far_of_heads are of different heads")
        for row in self.rows:
            name = f"the row of {row.label}, k = {row.k},"
            if len(row.above_of_windows) != windows:
                raise ValueError(f"{name} has not as many windows as the dense model: {windows}")
            if row.kept_of_heads is not None and shape_of(row.kept_of_heads) != shape:
                raise ValueError(f"{name} has other heads than the dense model")
        return self

    @property
    def model(self) -> str:
        """The last part of the model's name."""
        return PurePath(str(self.analyze.get("model", ""))).name

    @property
    def length(self) -> int:
        """N, the tokens of a window."""
        return int(self.analyze.get("length", 0))

    @property
    def text(self) -> str:
        """The name of the text: that of its file or folder, or of the data set."""
        place = json_object(getattr(self.data, "source", None)).get("place")
        if self.data.name == "text" and isinstance(place, str):
            return PurePath(place).name
        return self.data.name


def shape_of(grid: Grid) -> Sequence[int]:
    """Return the number of heads of each layer."""
    return [len(heads) for heads in grid]


def pretrained_files(folder: Path) -> list[Path]:
    """Return the records of pretrained models in a folder, or at most two levels down."""
    files: set[Path] = set()
    for depth in ("", "*/", f"{PRETRAINED}/*/"):
        files |= set(folder.glob(depth + FILES))
    return sorted(files)
