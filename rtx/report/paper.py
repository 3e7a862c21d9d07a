"""The paper's Tables 1 to 7 as data, and how a configuration differs from their rows.

`tables.json` names the source of each compared setting, one of `SOURCES`: what the paper states,
what the released code has, what we chose. `settings` are of all rows that the paper trained,
`routing` of those with routing or random heads, `local` of those with local heads alone; what a
table prints of a row is the paper's, too. `every_table` holds what all tables share. A setting is
one value, or

- a list of the values that it may have,
- `{"from": .., "to": ..}`: any number between these, where the paper rounds,
- `{"as": key}`: the value of another key of the same run,
- `{"values": [..], "text": ".."}`: values of ours for what the source says in other words.

A run departs from the paper where the paper states a setting and the run's value is that of no
source. It differs from the released code, or from what we chose, where the paper is silent. It also
differs where both the paper and its code are named: the printed numbers are of the code there, and
either value is accepted. What has no key is not compared, such as initial weights and dropout of
embeddings.
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
"""The heads, layers and positions of the models of Table 1."""

ROUTED = {"routing": "topk", "random": "random"}
"""What selects in the paper's rows whose heads read clusters, by the kind of their heads."""

SOURCES = ("paper", "released code", "ours")
"""Sources of a setting, the first that states it counts."""

GROUPS = ("settings", "routing", "local")
"""Settings of all rows that the paper trained, of rows with routing or random heads, of local rows.

They are the names of fields of `PaperTable`.
"""

DIVERGENCE_TABLE = 6

Config = Mapping[str, Any]
"""Every value of a configuration by its dotted key."""
Sources = Mapping[str, Config]
"""Settings by their source."""


@dataclass(frozen=True)
class Spread:
    """The mean and the standard deviation of a divergence over pairs of heads, in nats."""

    mean: float
    deviation: float


@dataclass(frozen=True)
class PaperRow:
    """A row as printed; None: the table does not print it.

    Args:
        kind: the kind of its heads, as of `kind_of`; empty for models that rtx does not have.
        source: the other paper that the number is from; empty: this paper.
    """

    model: str
    kind: str = ""
    layers: int | None = None
    heads: int | None = None
    routing_heads: int | None = None
    routing_layers: int | None = None
    window: int | None = None
    value: float | None = None
    steps_per_second: float | None = None
    source: str = ""

    @property
    def label(self) -> str:
        """The name of the row, such as `Routing 4x8 W=512`."""
        name = self.model.removesuffix(" Transformer")
        if not self.routing_heads:
            return name
        return f"{name} {self.routing_heads}x{self.routing_layers} W={self.window}"


@dataclass(frozen=True)
class Setting:
    """A setting of a run, `config`, beside what each source states of its key."""

    key: str
    sources: Mapping[str, Any]
    config: Config

    @property
    def matching_source(self) -> str:
        """The first source that allows the run's value; empty: none does."""
        for source, stated in self.sources.items():
            if allowed(self.key, stated, self.config):
                return source
        return ""

    @property
    def differs(self) -> bool:
        """Whether the run's value is not that of the first source."""
        return self.matching_source != next(iter(self.sources))

    @property
    def departs(self) -> bool:
        """Whether the value contradicts the paper, and is that of no other source."""
        return "paper" in self.sources and not self.matching_source

    @property
    def text(self) -> str:
        """The setting as `key=ours (source: theirs; ...)`.

        The source that has the run's value comes first and without one.
        """
        matching = []
        others = []
        for source, stated in self.sources.items():
            if source == self.matching_source and not has_text(stated):
                matching.append(source)
            else:
                others.append(f"{source}: {stated_text(stated)}")
        sources = "; ".join([*matching, *others])
        return f"{self.key}={written(self.config.get(self.key))} ({sources})"


@dataclass(frozen=True)
class PaperTable:
    """A table of the paper, and what a run must have to be compared with it.

    Args:
        data: values of data.name of the runs that belong to the table.
        presets: values of model.name of such runs.
        settings: of all rows that the paper trained, by source.
        routing: of rows with routing or random heads.
        local: of rows with local heads.
        speed: what steps per second were measured on; empty: the table has none.
        divergences: of Table 6: of each layer those of the columns.
    """

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
    speed: str = ""
    divergences: Sequence[Sequence[Spread]] = ()

    @property
    def of_paper(self) -> Config:
        """What the paper states of all rows that it trained."""
        return self.settings["paper"]

    def row_of(self, config: Config) -> PaperRow | None:
        """Return the row that a configuration is.

        In Table 1 the shares of heads, layers and positions that route count, so that a smaller
        model has a row, too.
        """
        layers = config.get("model.layers")
        first = None
        for row in self.rows:
            if row.kind != kind_of(config) or not has_shares_of(config, row):
                continue
            if row.layers == layers:
                return row
            is_possible = not row.source or row.layers is None
            if is_possible and first is None:
                first = row
        return first

    def printed(self, row: PaperRow) -> dict[str, Any]:
        """Return what the table prints of a row, by the keys of the configuration."""
        settings: dict[str, Any] = {"model.layers": row.layers, "model.heads": row.heads}
        if row.kind in ROUTED:
            settings["routing.selection"] = ROUTED[row.kind]
            settings["routing.heads"] = row.routing_heads
            settings["routing.layers"] = row.routing_layers
            settings["routing.window"] = row.window
            settings["model.window"] = self.local_windows(row)
        else:
            settings["model.base"] = row.kind
        if row.kind == "local":
            settings["model.window"] = row.window
        return {key: value for key, value in settings.items() if value is not None}

    def local_windows(self, row: PaperRow) -> list[int] | None:
        """Return the windows that the local heads of a routing row may have.

        They are its window and that of the local row: the paper does not say which of them it is.
        """
        windows = {row.window}
        windows |= {other.window for other in self.rows if other.kind == "local"}
        return sorted(window for window in windows if window is not None) or None

    def stated(self, row: PaperRow) -> dict[str, dict[str, Any]]:
        """Return all settings of a row: for each key its values by source, as in `SOURCES`."""
        # The text is last: it may say more than the table prints.
        groups: list[Sources] = [self.settings, {"paper": self.printed(row)}]
        if row.kind in ROUTED:
            groups.append(self.routing)
        if row.kind == "local":
            groups.append(self.local)
        stated: dict[str, dict[str, Any]] = {}
        for source in SOURCES:
            for group in groups:
                for key, value in group.get(source, {}).items():
                    stated.setdefault(key, {})[source] = value
        return stated

    def departures(self, config: Config) -> list[str]:
        """Return why a run may not be compared with the paper's row.

        Each is a setting as `key=ours (paper: theirs)`, whose value contradicts the paper and is
        that of no other source.
        """
        row = self.row_of(config)
        if row is None:
            return ["no row of the paper"]
        if row.source:
            return [f"the number is of {row.source}, with another recipe"]
        return [setting.text for setting in self.differing(row, config) if setting.departs]

    def differences(self, config: Config) -> list[str]:
        """Return the other differences from a row, each as `key=ours (source: theirs)`.

        The paper is silent there, or its released code has another value than the paper prints.
        None of them forbids a comparison.
        """
        row = self.row_of(config)
        if row is None or row.source:
            return []
        return [setting.text for setting in self.differing(row, config) if not setting.departs]

    def differing(self, row: PaperRow, config: Config) -> list[Setting]:
        """Return the settings in which a configuration is not as the first source of each.

        A key that the record of an old run lacks is left out: the run had no choice there.
        """
        settings = []
        for key, sources in self.stated(row).items():
            setting = Setting(key, sources, config)
            if key in config and setting.differs:
                settings.append(setting)
        return settings


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


def has_text(stated: Any) -> bool:
    """Tell whether a source states a setting in other words."""
    return isinstance(stated, Mapping) and "text" in stated


def stated_text(stated: Any) -> str:
    """Return what a source states, in words."""
    if isinstance(stated, list):
        return " or ".join(map(written, stated))
    if not isinstance(stated, Mapping):
        return written(stated)
    if "as" in stated:
        return f"as {stated['as']}"
    if has_text(stated):
        return stated["text"]
    return f"{stated['from']:,} to {stated['to']:,}"


def kind_of(config: Config) -> str:
    """Return the kind of a model's heads.

    One of full, local, local+full, random, random_blocks, routing, sparse, lsh, adaptive_input and
    compressive, or its base.
    """
    base = str(config.get("model.base", ""))
    if routes(config):
        return kind_of_routing(base, config)
    if base == "full" and config.get("model.embedding") == "adaptive":
        return "adaptive_input"
    if base == "recurrent" and config.get("model.compressed"):
        return "compressive"
    has_sparse_heads = not set(SPARSE).isdisjoint(base.split("+"))
    return "sparse" if has_sparse_heads else base


def kind_of_routing(base: str, config: Config) -> str:
    """Return the kind of heads of a model with routing heads on a base.

    Heads that read the best of all keys, and as many as there are, are full attention. So are
    those of a single cluster.
    """
    selection = config.get("routing.selection")
    one_cluster = selection == "nearest" and config.get("routing.clusters") == 1
    reads_all = config.get("routing.window", 0) >= config.get("data.length", 1)
    if reads_all and (selection == "exact" or one_cluster):
        return f"{base}+full"
    if selection == "random":
        return "random"
    return "random_blocks" if selection == "blocks_random" else "routing"


def heads_label(config: Config) -> str:
    """Return the kind of a model's heads in words, with what selects: `routing (causal)`."""
    kind = kind_of(config)
    if kind == "routing":
        return f"routing ({config.get('routing.selection')})"
    if kind == "lsh":
        return f"lsh ({config.get('model.lsh')})"
    return kind.replace("_", " ") or "unknown"


def has_shares_of(config: Config, row: PaperRow) -> bool:
    """Tell whether as large a share of heads, layers and positions routes as in a row of Table 1.

    True of rows of other tables.
    """
    if not row.routing_heads:
        return True
    printed = {
        "routing.heads": row.routing_heads,
        "routing.layers": row.routing_layers or 0,
        "routing.window": row.window or 0,
    }
    for (part, theirs), (whole, full_size) in zip(printed.items(), FULL_SIZE.items(), strict=True):
        ours = config.get(part) or 0
        size = config.get(whole) or 0
        if ours * full_size != theirs * size:
            return False
    return True


@functools.cache
def paper_tables() -> tuple[PaperTable, ...]:
    """Return the tables in their order."""
    # by path: installed with rtx
    content = json.loads((Path(__file__).parent / "tables.json").read_text(encoding="utf-8"))
    return tuple(table_from(table, content["every_table"]) for table in content["tables"])


def table_from(table: Mapping[str, Any], common: Mapping[str, Sources]) -> PaperTable:
    """Return a table from its JSON; `common`: settings of all tables, by their group."""
    values = dict(table)
    for group in GROUPS:
        values[group] = joined(common.get(group, {}), table.get(group, {}))
    values["rows"] = [PaperRow(**row) for row in table["rows"]]
    values["divergences"] = []
    for layer in table.get("divergences", []):
        values["divergences"].append([Spread(*numbers) for numbers in layer])
    return PaperTable(**values)


def joined(common: Sources, table: Sources) -> dict[str, dict[str, Any]]:
    """Return the settings of all tables and of one, which overrides them, by source."""
    return {source: {**common.get(source, {}), **table.get(source, {})} for source in SOURCES}


def setting_lines(departures: Sequence[str], differences: Sequence[str]) -> list[str]:
    """Return lines on the settings in which runs differ from the paper and from other sources."""
    lines = []
    if departures:
        lines.append(f"Not the paper's setting: {'; '.join(departures)}.")
    if differences:
        lines.append(f"Where the paper is silent or its code differs: {'; '.join(differences)}.")
    return lines


def numbered(number: int) -> PaperTable:
    """Return a table of the paper by its number."""
    return paper_tables()[number - 1]


def table_of(config: Config, timed: bool = False) -> PaperTable | None:
    """Return the table that a run belongs to, by its data or else by its preset.

    `timed`: of the tables with steps per second; else of those with scores.
    """
    tables = [table for table in paper_tables() if has_numbers(table, timed)]
    for table in tables:
        if config.get("data.name") in table.data:
            return table
    for table in tables:
        if config.get("model.name") in table.presets:
            return table
    return None


def has_numbers(table: PaperTable, timed: bool) -> bool:
    """Tell whether a table has steps per second, if `timed`, else scores."""
    if timed:
        return bool(table.speed)
    return bool(table.split) and table.number != DIVERGENCE_TABLE
