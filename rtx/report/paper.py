"""The paper's Tables 1 to 7 as data: `tables.json`, facts and figures alone, with footnotes of our own on where the
paper disagrees with itself or with its released code."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class PaperRow:
    """A row as printed; what a table does not have is None."""

    model: str
    kind: str = ""
    """What heads it has: full, local, random, routing, sparse, lsh, adaptive_span; empty for models of other kinds."""
    layers: int | None = None
    heads: int | None = None
    routing_heads: int | None = None
    routing_layers: int | None = None
    window: int | None = None
    value: float | None = None
    steps_per_second: float | None = None


@dataclass(frozen=True)
class PaperTable:
    """A table with what a run must have to be compared with it."""

    number: int
    key: str
    title: str
    metric: str
    split: str
    data: tuple[str, ...]
    """The data sets it is about, as data.name."""
    presets: tuple[str, ...]
    """The presets that are its rows, as model.name."""
    commands: tuple[str, ...]
    """What to run for it."""
    setting: Mapping[str, Any]
    """Keys of the configuration with the paper's values."""
    rows: tuple[PaperRow, ...]
    footnotes: tuple[str, ...]
    speed: str = ""
    """What its steps per second were measured on."""
    columns: tuple[str, ...] = ()
    divergences: tuple[tuple[tuple[float, float], ...], ...] = field(default=())
    """Table 6: for each layer, mean and deviation of each column."""

    @property
    def name(self) -> str:
        """As one would cite it."""
        return f"Table {self.number}"

    @property
    def steps(self) -> int | None:
        """Optimizer steps of its runs, where the paper says."""
        return self.setting.get("trainer.steps")

    @property
    def digits(self) -> int:
        """Digits behind the point that its values are printed with."""
        return max((len(str(row.value).partition(".")[2]) for row in self.rows if row.value is not None), default=3)

    def local_speed(self) -> float | None:
        """Steps per second of the local row, which the others are compared with."""
        return next((row.steps_per_second for row in self.rows if row.kind == "local"), None)


@functools.cache
def paper_tables() -> tuple[PaperTable, ...]:
    """Return the tables in their order."""
    content = json.loads((Path(__file__).parent / "tables.json").read_text(encoding="utf-8"))
    return tuple(read_table(table) for table in content["tables"])


def read_table(values: dict[str, Any]) -> PaperTable:
    """Return a table from its JSON."""
    lists = ("data", "presets", "commands", "footnotes", "columns")
    plain = {key: tuple(value) if key in lists else value for key, value in values.items()}
    rows = tuple(PaperRow(**row) for row in values["rows"])
    layers = tuple(tuple((mean, spread) for mean, spread in layer) for layer in values.get("divergences", ()))
    return PaperTable(**{**plain, "rows": rows, "divergences": layers})


def numbered(number: int) -> PaperTable:
    """Return a table by its number."""
    return next(table for table in paper_tables() if table.number == number)


def table_of(config: Mapping[str, Any]) -> PaperTable | None:
    """Return the table of scores that a run belongs to: by the name of its preset, else by its data."""
    return belonging(config, [table for table in paper_tables() if table.split])


def timed_table_of(config: Mapping[str, Any]) -> PaperTable | None:
    """Return the table with steps per second that a configuration belongs to, told as in `table_of`."""
    return belonging(config, [table for table in paper_tables() if table.speed])


def belonging(config: Mapping[str, Any], tables: Sequence[PaperTable]) -> PaperTable | None:
    """Return the first of these tables that has the preset of a configuration, else the first with its data."""
    for table in tables:
        if config.get("model.name") in table.presets:
            return table
    return next((table for table in tables if config.get("data.name") in table.data), None)
