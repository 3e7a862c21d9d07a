"""The contents of a report, whatever it is written as: tables, curves, samples, what differs, where it ran."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rtx.report.cells import Cell, Collection
from rtx.report.compared import own_view, paper_view, shown
from rtx.report.matching import by_paper_table, differing_keys, kind_of, model_name, paper_row
from rtx.report.paper import PaperTable, paper_tables, table_of
from rtx.report.plots import Series
from rtx.report.scores import Row, tables_by_protocol
from rtx.report.text import printable
from rtx.report.views import Column, View, count, text

SAMPLE_LETTERS = 600
"""Of a sample that are shown."""

PICTURE_BYTES, PICTURES_BYTES = 60_000, 900_000
"""The largest sample picture that is put into the page, and all of them together."""


@dataclass
class Report:
    """What a report says."""

    title: str
    problems: list[str]
    views: list[View]
    curves: list[Series] = field(default_factory=list)
    curve_kind: str = "valid"
    points: list[tuple[str, float, float]] = field(default_factory=list)
    """Name, steps per second and bits of each row of the first table."""
    paper_points: list[tuple[str, float, float]] = field(default_factory=list)
    unit: str = "unit"
    samples: list[tuple[str, str]] = field(default_factory=list)
    pictures: list[tuple[str, bytes]] = field(default_factory=list)
    differences: View | None = None
    environment: View | None = None
    commands: list[str] = field(default_factory=list)
    tables: View | None = None
    """The paper's tables, and how much of each has been run."""


def build(found: Collection, title: str) -> Report:
    """Return the report of all runs that were found."""
    cells = sorted(found.cells, key=in_order)
    report = Report(title, list(found.problems), [])
    by_protocol = tables_by_protocol(cells)
    report.problems += apart_lines(by_protocol)
    for protocol, rows in by_protocol:
        for table, mine in by_paper_table(rows):
            where = f"{protocol.split} split of {protocol.data}" if protocol else "no scores yet"
            where += ", streaming" if protocol and protocol.mode == "streaming" else ""
            if table:
                report.views.append(paper_view(f"{table.name}. {table.title}: {where}", table, protocol, mine))
            elif mine:
                report.views.append(own_view(f"Runs: {where}", protocol, mine))
    protocol, rows = by_protocol[0]
    report.unit = protocol.unit if protocol else "unit"
    report.points, report.paper_points = trade_off(rows)
    report.curves, report.curve_kind = learning_curves(cells)
    report.samples = [(cell.name, sample) for cell in cells if (sample := newest_sample(cell.folder))]
    report.pictures = pictures(cells)
    report.differences = differences_view(cells)
    report.environment = environment_view(cells)
    report.commands = found.commands or commands_of(cells)
    report.tables = tables_view(cells)
    return report


def in_order(cell: Cell) -> tuple[Any, ...]:
    """Return what runs are sorted by: as the paper's first table, then by seed and folder."""
    kinds = ("full", "local", "random", "routing")
    kind = kind_of(cell.config) if cell.config else ""
    keys = ("routing.window", "routing.layers", "routing.heads", "seed")
    numbers = [float(cell.config.get(key) or 0) for key in keys]
    return (kinds.index(kind) if kind in kinds else len(kinds), *numbers, str(cell.folder))


def apart_lines(by_protocol: Sequence[tuple[Any, list[Row]]]) -> list[str]:
    """Say that runs of different data or protocol are set apart, and by what."""
    protocols = [protocol for protocol, _ in by_protocol if protocol]
    if len(protocols) < 2:
        return []
    names = ("split", "mode", "unit", "data", "fingerprint", "length", "stride", "windows", "ablate", "stamps")
    differing = [name for name in names if len({repr(getattr(p, name)) for p in protocols}) > 1]
    said = ", ".join({"fingerprint": "data fingerprint"}.get(name, name) for name in differing)
    return [f"scores of {len(protocols)} protocols are set apart, a table each: they differ by {said}"]


def label_of(config: Mapping[str, Any], variants: Sequence[str] = ()) -> str:
    """Return a short name of a configuration: its heads, and what else tells it apart."""
    name = model_name(config).removesuffix(" Transformer")
    if name in ("Routing", "Random"):
        routing = (config.get(f"routing.{key}") for key in ("heads", "layers", "window"))
        name += " {}x{} W={}".format(*routing)
    own = ("routing.heads", "routing.layers", "routing.window", "model.base")
    extra = [f"{key.rpartition('.')[2]}={shown(config.get(key))}" for key in variants if key not in own]
    return " ".join([name, *extra]) if len(extra) <= 3 else name


def labels(cells: Sequence[Cell]) -> dict[Path, str]:
    """Return a name for each run; runs of the same name are told apart by seed, then by folder."""
    variants = differing_keys([Row([cell]) for cell in cells])
    selections = {cell.config.get("routing.selection") for cell in cells if kind_of(cell.config) == "routing"}
    if len(selections) < 2:  # random members are told by the name
        variants = [key for key in variants if key != "routing.selection"]
    table = all(table_of(cell.config) for cell in cells if cell.config)
    names = {c.folder: label_of(c.config, () if table and len(variants) > 6 else variants) for c in cells if c.config}
    for extra in (lambda c: f" seed {c.config.get('seed')}", lambda c: f" {c.folder.name}"):
        taken = list(names.values())
        for cell in cells:
            if cell.folder in names and taken.count(names[cell.folder]) > 1:
                names[cell.folder] += extra(cell)
    return names


def learning_curves(cells: Sequence[Cell]) -> tuple[list[Series], str]:
    """Return a curve for each run, of validations where they have several, else of training rows; and which."""
    names = labels(cells)
    for kind in ("valid", "train"):
        series = []
        for cell in cells:
            rows = [row for row in cell.metrics if row.get("kind") == kind]
            points = [(float(r["step"]), float(r["bits"])) for r in rows if isinstance(r.get("bits"), int | float)]
            if points:
                series.append(Series(names.get(cell.folder, cell.name), points))
        if any(len(one.points) > 1 for one in series):
            return series, kind
    return [], "valid"


def trade_off(rows: Sequence[Row]) -> tuple[list[tuple[str, float, float]], list[tuple[str, float, float]]]:
    """Return name, steps per second and bits of our rows, and of the paper's where they are rows of Table 1."""
    names = labels([row.cells[0] for row in rows])
    ours = []
    for row in rows:
        speed, bits = row.speed, row.mean()
        if speed is not None and bits is not None:
            ours.append((names.get(row.cells[0].folder, row.cells[0].name), speed, bits))
    theirs = []
    table = paper_tables()[0]
    if any(row.config and (t := table_of(row.config)) and t.number == 1 and paper_row(row.config, t) for row in rows):
        for printed in table.rows:
            if printed.steps_per_second and printed.value:
                name = printed.model.removesuffix(" Transformer")
                if printed.kind in ("routing", "random"):
                    name += f" {printed.routing_heads}x{printed.routing_layers} W={printed.window}"
                theirs.append((name, printed.steps_per_second, printed.value))
    return ours, theirs


def newest_sample(folder: Path) -> str:
    """Return the beginning of the last text that a run wrote, or nothing."""
    try:
        newest = max(folder.glob("samples/*.txt"), key=lambda path: path.stat().st_mtime, default=None)
        content = newest.read_bytes()[: 4 * SAMPLE_LETTERS] if newest else b""
    except OSError:
        return ""
    return printable(content.decode("utf-8", "replace"))[:SAMPLE_LETTERS]


def pictures(cells: Sequence[Cell]) -> list[tuple[str, bytes]]:
    """Return the last picture that each run made, as long as there is room."""
    found, total = [], 0
    for cell in cells:
        try:
            newest = max(cell.folder.glob("samples/*.png"), key=lambda path: path.stat().st_mtime, default=None)
            content = newest.read_bytes() if newest and newest.stat().st_size <= PICTURE_BYTES else b""
        except OSError:
            continue
        if content and total + len(content) <= PICTURES_BYTES:
            total += len(content)
            found.append((cell.name, content))
    return found


def differences_view(cells: Sequence[Cell]) -> View | None:
    """Return the keys by which the configurations differ, a run a row."""
    known = [cell for cell in cells if cell.config]
    keys = differing_keys([Row([cell]) for cell in known])
    if len({repr(cell.config.get("seed")) for cell in known}) > 1:
        keys = [*keys, "seed"]
    if not keys or len(known) < 2:
        return None
    rows = [[text(cell.name), *(text(shown(cell.config.get(key))) for key in keys)] for cell in known]
    return View("Configuration differences", [Column("run", "run"), *(Column(key, key) for key in keys)], rows)


def environment_view(cells: Sequence[Cell]) -> View | None:
    """Return software and machine: what all runs share, and for how many runs the rest holds."""
    facts = [facts_of(cell) for cell in cells if cell.environment]
    if not facts:
        return None
    rows = []
    for key in dict.fromkeys(key for fact in facts for key in fact):
        values = [fact.get(key, "") for fact in facts]
        kinds = dict.fromkeys(values)
        said = (
            next(iter(kinds))
            if len(kinds) == 1
            else "; ".join(f"{v or 'none'} ({values.count(v)} runs)" for v in kinds)
        )
        rows.append([text(key), text(said)])
    return View("Environment", [Column("what", "what"), Column("value", "value")], rows)


def facts_of(cell: Cell) -> dict[str, str]:
    """Return software and machine of a run, in words."""
    env = cell.environment
    versions = env.get("versions") if isinstance(env.get("versions"), Mapping) else {}
    git = env.get("git") if isinstance(env.get("git"), Mapping) else {}
    assert isinstance(versions, Mapping) and isinstance(git, Mapping)
    commit = str(git.get("commit", ""))[:12] + (" with changes" if git.get("changed") else "")
    facts = {name: str(value) for name, value in versions.items() if value}
    facts |= {"git commit": commit, "device": str(env.get("gpu") or f"CPU, {env.get('threads')} threads")}
    facts |= {key: str(env.get(key) or "") for key in ("python", "platform", "cpus")}
    facts |= {"precision": str(cell.config.get("hardware.precision", "")), "data": str(cell.data.get("name", ""))}
    facts |= {"data fingerprint": str(cell.data.get("fingerprint", ""))}
    return {key: value for key, value in facts.items() if value}


def commands_of(cells: Sequence[Cell]) -> list[str]:
    """Return the command line of each run, as a user would type it."""
    commands = []
    for cell in cells:
        line = cell.environment.get("command")
        if isinstance(line, str) and line:
            try:
                words = shlex.split(line)
            except ValueError:
                words = line.split()
            commands.append(shlex.join(["rtx", *words[1:]]))
    return list(dict.fromkeys(commands))


def tables_view(cells: Sequence[Cell]) -> View:
    """Return the paper's tables: how many rows of each have a score here, and the commands for the rest."""
    columns = [
        Column("table", "table", brief=True),
        Column("title", "about", brief=True),
        Column("rows", "rows", True),
        Column("run", "run here", brief=True),
        Column("command", "command", brief=True),
    ]
    rows = [
        [
            text(table.name),
            text(table.title),
            count(len(table.rows) or len(table.divergences)),
            text(run_of(table, cells)),
            text("; ".join(table.commands)),
        ]
        for table in paper_tables()
    ]
    return View("The paper's tables", columns, rows)


def run_of(table: PaperTable, cells: Sequence[Cell]) -> str:
    """Return how many of a table's rows have a score among these runs."""
    done = set()
    for cell in cells:
        scored = cell.final is not None or cell.evals
        if cell.config and scored and (own := table_of(cell.config)) and own.number == table.number:
            done.add(paper_row(cell.config, table))
    done.discard(None)
    return f"{len(done)} of {len(table.rows)} rows" if done else "not run"
