"""The paper's Tables 1 to 7 as data (`tables.json`), which of their rows a configuration is, and what it has otherwise.

Every setting that the paper or the text of a table states is compared: `setting` is of all rows that the paper trained,
`routing` of those with routing or random heads. A list holds all values that it allows, `from` and `to` what it gives
roughly.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rtx.config import SPARSE
from rtx.errors import written

FULL_SIZE = {"model.heads": 8, "model.layers": 12, "data.length": 3072}
"""What the routing heads, routing layers and windows of Table 1 are out of."""

Config = Mapping[str, Any]  # every value of a configuration by its dotted key


@dataclass(frozen=True)
class PaperRow:
    """A row as printed; what a table does not have is None."""

    model: str
    kind: str = ""  # what heads it has, as `kind_of`; empty for models that rtx has not
    layers: int | None = None
    heads: int | None = None
    routing_heads: int | None = None
    routing_layers: int | None = None
    window: int | None = None
    value: float | None = None
    steps_per_second: float | None = None
    source: str = ""  # the other paper whose number it is

    @property
    def label(self) -> str:
        sizes = f" {self.routing_heads}x{self.routing_layers} W={self.window}" if self.routing_heads else ""
        return self.model.removesuffix(" Transformer") + sizes


@dataclass(frozen=True)
class PaperTable:
    """A table with what a run must have to be compared with it: `data` as data.name, `presets` as model.name."""

    number: int
    title: str
    metric: str
    split: str
    data: Sequence[str]
    presets: Sequence[str]
    commands: Sequence[str]
    setting: Config
    rows: Sequence[PaperRow]
    footnotes: Sequence[str]
    routing: Config = field(default_factory=dict)
    speed: str = ""  # what its steps per second were measured on
    divergences: Sequence[Sequence[tuple[float, float]]] = ()  # Table 6: mean and deviation of columns, by layer

    def row_of(self, config: Config) -> PaperRow | None:
        """Return the row that a configuration is.

        Those of Table 1 are told by the shares of heads, layers and sequence that route, so that a miniature has them.
        """
        layers = config.get("model.layers")
        able = [row for row in self.rows if row.kind == kind_of(config) and same_shares(config, row)]
        able = [row for row in able if not row.source or row.layers in (None, layers)]
        return next((row for row in able if row.layers == layers), able[0] if able else None)

    def stated(self, row: PaperRow) -> dict[str, Any]:
        """Return all that is stated of a row, by the keys of the configuration."""
        sizes: dict[str, Any] = {"model.layers": row.layers, "model.heads": row.heads}
        if row.kind in ("routing", "random"):
            sizes |= {"routing.heads": row.routing_heads, "routing.layers": row.routing_layers}
            sizes |= {"routing.window": row.window}
            own = {"routing.selection": "topk" if row.kind == "routing" else "random", **self.routing}
        else:
            sizes |= {"model.window": row.window if row.kind == "local" else None}
            own = {"model.base": row.kind}
        return {**self.setting, **own, **{key: size for key, size in sizes.items() if size is not None}}

    def departures(self, config: Config) -> list[str]:
        """Return what a configuration has otherwise than the paper's row, each as `key=ours (paper: theirs)`."""
        row = self.row_of(config)
        if row is None:
            return ["no row of the paper"]
        if row.source:
            return [f"the number is of {row.source}, with another recipe"]
        return [
            f"{key}={written(config.get(key))} (paper: {said(value)})"
            for key, value in self.stated(row).items()
            if not allowed(config.get(key), value)
        ]


def allowed(value: Any, stated: Any) -> bool:
    if isinstance(stated, Mapping):
        return isinstance(value, int) and stated["from"] <= value <= stated["to"]
    return value in stated if isinstance(stated, list) else value == stated


def said(stated: Any) -> str:
    if isinstance(stated, Mapping):
        return f"{stated['from']:,} to {stated['to']:,}"
    return " or ".join(map(written, stated)) if isinstance(stated, list) else written(stated)


def routes(config: Config) -> bool:
    return bool(config.get("routing.heads")) and bool(config.get("routing.layers"))


def hashes(config: Config) -> bool:
    """Tell whether some heads read by hashing."""
    all_route = all(config.get(f"routing.{part}") == config.get(f"model.{part}") for part in ("heads", "layers"))
    return "lsh" in str(config.get("model.base")).split("+") and not all_route


def looks_ahead(config: Config, ablate: str = "none") -> bool:
    """Tell whether a teacher-forced score may depend on later units: top-w selection, or LSH as published."""
    selects = routes(config) and ablate == "none" and config.get("routing.selection") == "topk"
    return selects or (hashes(config) and config.get("model.lsh") == "reformer")


def kind_of(config: Config) -> str:
    """Return what heads a model has: full, local, random, random_blocks, routing, sparse, lsh, or its base."""
    base, chosen = str(config.get("model.base", "")), config.get("routing.selection")
    every_key = chosen == "exact" or (chosen == "nearest" and config.get("routing.clusters") == 1)
    if routes(config) and every_key and config.get("routing.window", 0) >= config.get("data.length", 1):
        return f"{base}+full"  # the best of all keys are all, and so is the one cluster
    if routes(config):
        return {"random": "random", "blocks_random": "random_blocks"}.get(str(chosen), "routing")
    if base == "full" and config.get("model.embedding") == "adaptive":
        return "adaptive_input"
    if base == "recurrent" and config.get("model.compressed"):
        return "compressive"
    return "sparse" if {*SPARSE} & {*base.split("+")} else base


def heads_label(config: Config) -> str:
    """Return the kind of heads in words, with what selects."""
    kind, chooser = kind_of(config), {"routing": "routing.selection", "lsh": "model.lsh"}
    return f"{kind} ({config.get(chooser[kind])})" if kind in chooser else kind.replace("_", " ") or "unknown"


def same_shares(config: Config, row: PaperRow) -> bool:
    """Tell whether heads, layers and window stand to the model's as in a row of Table 1, where it is one of those."""
    if not row.routing_heads:
        return True
    ours = [config.get(key) or 0 for key in ("routing.heads", "routing.layers", "routing.window")]
    printed = (row.routing_heads, row.routing_layers or 0, row.window or 0)
    sizes = FULL_SIZE.items()
    return all(a * whole == b * (config.get(key) or 0) for a, b, (key, whole) in zip(ours, printed, sizes, strict=True))


@functools.cache
def paper_tables() -> tuple[PaperTable, ...]:
    """Return the tables in their order."""
    content = json.loads((Path(__file__).parent / "tables.json").read_text(encoding="utf-8"))["tables"]
    return tuple(PaperTable(**{**table, "rows": [PaperRow(**row) for row in table["rows"]]}) for table in content)


def numbered(number: int) -> PaperTable:
    return paper_tables()[number - 1]


def table_of(config: Config, timed: bool = False) -> PaperTable | None:
    """Return the table of scores, or of steps per second, that a run belongs to: by its data, else by its preset."""
    tables = [table for table in paper_tables() if (table.speed if timed else table.split and table.number != 6)]
    by_data = [table for table in tables if config.get("data.name") in table.data]
    by_preset = [table for table in tables if config.get("model.name") in table.presets]
    return next(iter(by_data or by_preset), None)
