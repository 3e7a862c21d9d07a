"""The paper's Tables 1 to 7 as data (`tables.json`), which of their rows a configuration is, and how it differs.

`tables.json` names the source of each compared setting, one of `SOURCES`: what the paper states, what
the released code has, what we chose. `settings` are of all rows that the paper trained, `routing` of
those with routing or random heads, `local` of those with local heads alone; what a table prints of a
row is the paper's, too. `every_table` holds what all tables share. A setting is one value, or

- a list of the values that it may have,
- `{"from": .., "to": ..}`: any number between these, where the paper rounds,
- `{"as": key}`: the value of another key of the same run,
- `{"values": [..], "said": ".."}`: values of ours for what the source says in other words.

A run departs from the paper where the paper states a setting and the run's value is that of no source.
It differs from the released code, or from what we chose, where the paper is silent. It also differs where
both the paper and its code are named: there the printed numbers are of the code, and either value may
stand beside them. What has no key is not compared, such as initial weights and dropout of embeddings.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rtx.errors import written
from rtx.evaluation.protocol import routes
from rtx.settings.schema import SPARSE

FULL_SIZE = {"model.heads": 8, "model.layers": 12, "data.length": 3072}
"""What the routing heads, routing layers and windows of Table 1 are out of."""

ROUTED = {"routing": "topk", "random": "random"}
"""What selects in the paper's rows whose heads read clusters, by the kind of their heads."""

SOURCES = ("paper", "released code", "ours")
"""Where a setting is from. The first that has one counts: what the paper states, else the code, else what we chose."""

GROUPS = ("settings", "routing", "local")
"""The settings of all rows that the paper trained, of those with routing or random heads, of local ones."""

Config = Mapping[str, Any]  # every value of a configuration by its dotted key
Sources = Mapping[str, Config]  # settings by their source


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
        sizes = (
            f" {self.routing_heads}x{self.routing_layers} W={self.window}"
            if self.routing_heads
            else ""
        )
        return self.model.removesuffix(" Transformer") + sizes


@dataclass(frozen=True)
class Other:
    """A setting of a run beside what the sources have, by source."""

    key: str
    sources: Mapping[str, Any]
    config: Config

    @property
    def holder(self) -> str:
        """The first source that has the run's value; empty: none."""
        able = (
            source
            for source, stated in self.sources.items()
            if allowed(self.key, stated, self.config)
        )
        return next(able, "")

    @property
    def departs(self) -> bool:
        return "paper" in self.sources and not self.holder

    @property
    def text(self) -> str:
        """The setting as `key=ours (source: theirs; ...)`; the source that has our value comes without one."""
        of_holder, others = "", []
        for source, stated in self.sources.items():
            if source == self.holder and not in_words(stated):
                of_holder = source
            else:
                others.append(f"{source}: {said(stated)}")
        sources = [of_holder, *others] if of_holder else others
        return f"{self.key}={written(self.config.get(self.key))} ({'; '.join(sources)})"


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
    settings: Sources
    rows: Sequence[PaperRow]
    footnotes: Sequence[str]
    routing: Sources = field(default_factory=dict)
    local: Sources = field(default_factory=dict)
    speed: str = ""  # what its steps per second were measured on
    divergences: Sequence[
        Sequence[tuple[float, float]]
    ] = ()  # Table 6: mean and deviation of columns, by layer

    @property
    def of_paper(self) -> Config:
        """What the paper states of all rows that it trained."""
        return self.settings["paper"]

    def row_of(self, config: Config) -> PaperRow | None:
        """Return the row that a configuration is.

        Those of Table 1 are told by the shares of heads, layers and sequence that route, so that a miniature has them.
        """
        layers = config.get("model.layers")
        able = [
            row for row in self.rows if row.kind == kind_of(config) and same_shares(config, row)
        ]
        able = [row for row in able if not row.source or row.layers in (None, layers)]
        return next((row for row in able if row.layers == layers), able[0] if able else None)

    def printed(self, row: PaperRow) -> dict[str, Any]:
        """Return what the table itself has of a row, by the keys of the configuration."""
        found: dict[str, Any] = {"model.layers": row.layers, "model.heads": row.heads}
        if row.kind in ROUTED:
            found["routing.selection"] = ROUTED[row.kind]
            found["routing.heads"] = row.routing_heads
            found["routing.layers"] = row.routing_layers
            found["routing.window"] = row.window
            found["model.window"] = self.local_windows(row)
        else:
            found["model.base"] = row.kind
        if row.kind == "local":
            found["model.window"] = row.window
        return {key: value for key, value in found.items() if value is not None}

    def local_windows(self, row: PaperRow) -> list[int] | None:
        """Return what the local heads of a routing row may read: its window, or that of the row of local heads.

        The paper does not say which of them it is.
        """
        others = [other.window for other in self.rows if other.kind == "local"]
        windows = {window for window in (row.window, *others) if window is not None}
        return sorted(windows) or None

    def stated(self, row: PaperRow) -> dict[str, dict[str, Any]]:
        """Return all settings of a row: for each key its values by source, in the order of `SOURCES`."""
        groups: list[Sources] = [self.settings, {"paper": self.printed(row)}]
        if row.kind in ROUTED:
            groups.append(self.routing)
        if row.kind == "local":
            groups.append(self.local)
        found: dict[str, dict[str, Any]] = {}
        for source in SOURCES:
            for (
                group
            ) in groups:  # the text, where it gives more than the table prints, has the last word
                for key, value in group.get(source, {}).items():
                    found.setdefault(key, {})[source] = value
        return found

    def departures(self, config: Config) -> list[str]:
        """Return what forbids to compare a run with the paper's row, each as `key=ours (paper: theirs)`.

        That is a value which contradicts the paper, and which no other source has.
        """
        row = self.row_of(config)
        if row is None:
            return ["no row of the paper"]
        if row.source:
            return [f"the number is of {row.source}, with another recipe"]
        return [setting.text for setting in self.others(row, config) if setting.departs]

    def differences(self, config: Config) -> list[str]:
        """Return what else is not as in the first source that has it, each as `key=ours (source: theirs)`.

        The paper is silent there, or its released code has another value than the paper prints. None of
        this forbids a comparison.
        """
        row = self.row_of(config)
        if row is None or row.source:
            return []
        return [setting.text for setting in self.others(row, config) if not setting.departs]

    def others(self, row: PaperRow, config: Config) -> list[Other]:
        """Return the settings in which a configuration is not as the first source of each has it.

        A key that the record of an old run lacks is left out: it had no choice there.
        """
        stated = self.stated(row).items()
        found = [Other(key, sources, config) for key, sources in stated if key in config]
        return [setting for setting in found if setting.holder != next(iter(setting.sources))]


def allowed(key: str, stated: Any, config: Config) -> bool:
    """Tell whether a configuration has what a source states of a key."""
    value = config.get(key)
    if isinstance(stated, list):
        return value in stated
    if not isinstance(stated, Mapping):
        return value == stated
    if "as" in stated:
        return value == config.get(stated["as"])
    if "values" in stated:
        return value in stated["values"]
    return isinstance(value, int) and stated["from"] <= value <= stated["to"]


def in_words(stated: Any) -> bool:
    return isinstance(stated, Mapping) and "said" in stated


def said(stated: Any) -> str:
    """Return what a source states, in words."""
    if isinstance(stated, list):
        return " or ".join(map(written, stated))
    if not isinstance(stated, Mapping):
        return written(stated)
    if "as" in stated:
        return f"as {stated['as']}"
    if in_words(stated):
        return stated["said"]
    return f"{stated['from']:,} to {stated['to']:,}"


def kind_of(config: Config) -> str:
    """Return what heads a model has: full, local, random, random_blocks, routing, sparse, lsh, or its base."""
    base, chosen = str(config.get("model.base", "")), config.get("routing.selection")
    every_key = chosen == "exact" or (chosen == "nearest" and config.get("routing.clusters") == 1)
    if (
        routes(config)
        and every_key
        and config.get("routing.window", 0) >= config.get("data.length", 1)
    ):
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
    return (
        f"{kind} ({config.get(chooser[kind])})"
        if kind in chooser
        else kind.replace("_", " ") or "unknown"
    )


def same_shares(config: Config, row: PaperRow) -> bool:
    """Tell whether heads, layers and window stand to the model's as in a row of Table 1, where it is one of those."""
    if not row.routing_heads:
        return True
    ours = [config.get(key) or 0 for key in ("routing.heads", "routing.layers", "routing.window")]
    printed = (row.routing_heads, row.routing_layers or 0, row.window or 0)
    sizes = FULL_SIZE.items()
    return all(
        a * whole == b * (config.get(key) or 0)
        for a, b, (key, whole) in zip(ours, printed, sizes, strict=True)
    )


@functools.cache
def paper_tables() -> tuple[PaperTable, ...]:
    """Return the tables in their order."""
    content = json.loads((Path(__file__).parent / "tables.json").read_text(encoding="utf-8"))
    common = content["every_table"]
    tables = []
    for table in content["tables"]:
        own = {group: joined(common.get(group, {}), table.get(group, {})) for group in GROUPS}
        rows = [PaperRow(**row) for row in table["rows"]]
        tables.append(PaperTable(**{**table, **own, "rows": rows}))
    return tuple(tables)


def joined(common: Sources, own: Sources) -> dict[str, dict[str, Any]]:
    """Return the settings of two, those of the second where both have one of the same source."""
    return {source: {**common.get(source, {}), **own.get(source, {})} for source in SOURCES}


def setting_lines(departures: Sequence[str], differences: Sequence[str]) -> list[str]:
    """Return the lines of a report on what runs have otherwise than the paper, and than other sources."""
    lines = []
    if departures:
        lines.append(f"Not the paper's setting: {'; '.join(departures)}.")
    if differences:
        lines.append(f"Where the paper is silent or its code differs: {'; '.join(differences)}.")
    return lines


def numbered(number: int) -> PaperTable:
    return paper_tables()[number - 1]


def table_of(config: Config, timed: bool = False) -> PaperTable | None:
    """Return the table of scores, or of steps per second, that a run belongs to: by its data, else by its preset."""
    tables = [
        table
        for table in paper_tables()
        if (table.speed if timed else table.split and table.number != 6)
    ]
    by_data = [table for table in tables if config.get("data.name") in table.data]
    by_preset = [table for table in tables if config.get("model.name") in table.presets]
    return next(iter(by_data or by_preset), None)
