"""The contents of a report, whatever it is written as: tables, curves, samples, what differs, where it ran."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rtx.report.cells import Cell, Collection
from rtx.report.compared import own_view, paper_view
from rtx.report.divergence import divergence_curves, divergence_views
from rtx.report.figures import Curves, TradeOff, learning_curves, trade_off
from rtx.report.glance import glance
from rtx.report.listing import tables_view
from rtx.report.matching import by_paper_table, differing_keys
from rtx.report.names import in_order, labels
from rtx.report.plots import Series
from rtx.report.scores import Row, has_effect, tables_by_protocol
from rtx.report.text import printable
from rtx.report.views import Column, Value, View, text
from rtx.wording import written

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
    """The tables of scores, of divergences and of speeds."""
    glance: View | None = None
    """The few rows that answer a table's question, where it is a long one."""
    curves: list[Curves] = field(default_factory=list)
    trade_off: TradeOff = field(default_factory=TradeOff)
    """Of the rows of the first table."""
    divergences: list[tuple[str, list[Series]]] = field(default_factory=list)
    """The divergence of heads by layer: a caption and the lines of a chart for each run that has one."""
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
                report.glance = report.glance or glance(table, protocol, mine)
            elif mine:
                report.views.append(own_view(f"Runs: {where}", protocol, mine))
    protocol, rows = by_protocol[0]
    names = labels(cells)
    report.views += divergence_views(cells, names)
    report.unit = protocol.unit if protocol else "unit"
    report.trade_off = trade_off(rows)
    report.curves = learning_curves(cells)
    report.divergences = divergence_curves(cells, names)
    report.samples = [(cell.name, sample) for cell in cells if (sample := newest_sample(cell.folder))]
    report.pictures = pictures(cells)
    report.differences = differences_view(cells)
    report.environment = environment_view(cells)
    report.commands = found.commands or commands_of(cells)
    report.tables = tables_view(cells)
    return report


def apart_lines(by_protocol: Sequence[tuple[Any, list[Row]]]) -> list[str]:
    """Say that runs of different data or protocol are set apart, and by what."""
    protocols = [protocol for protocol, _ in by_protocol if protocol]
    if len(protocols) < 2:
        return []
    names = ("split", "mode", "unit", "data", "fingerprint", "length", "stride", "windows", "ablate", "stamps")
    differing = [name for name in names if len({repr(getattr(p, name)) for p in protocols}) > 1]
    said = ", ".join({"fingerprint": "data fingerprint"}.get(name, name) for name in differing)
    return [f"scores of {len(protocols)} protocols are set apart, a table each: they differ by {said}"]


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
    rows = [
        [
            text(cell.name),
            *(text(written(cell.config.get(key))) if has_effect(key, cell.config) else Value() for key in keys),
        ]
        for cell in known
    ]
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
    facts |= {"precision": cell.precision, "data": str(cell.data.get("name", ""))}
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
