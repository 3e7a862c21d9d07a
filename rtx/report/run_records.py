"""Runs read from their folders, as they are: a record that is missing or half written is told and left out.

Nothing here imports torch or Hydra.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rtx.identity import digest
from rtx.training.run_folder import run_state

RECORDS = ("config.yaml", "status.json", "environment.json", "metrics.jsonl")


@dataclass(frozen=True)
class Cell:
    """A run as its folder tells it."""

    folder: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    """Every value by its dotted key."""
    state: str = "unknown"
    """done, running, failed, interrupted, preempted, killed, not started, or unknown."""
    reason: str = ""
    step: int = 0
    final: Mapping[str, Any] | None = None
    """The closing score on the validation split."""
    evals: tuple[Mapping[str, Any], ...] = ()
    analyses: tuple[Mapping[str, Any], ...] = ()
    """What `rtx analyze` wrote."""
    metrics: tuple[Mapping[str, Any], ...] = ()
    environment: Mapping[str, Any] = field(default_factory=dict)
    title: str = ""
    """What its sweep called it."""

    @property
    def name(self) -> str:
        """The folder as one would type it."""
        short = os.path.relpath(self.folder)
        return str(self.folder) if short.startswith("..") else short

    @property
    def seed(self) -> str:
        """The seed, as text: a damaged record may hold anything."""
        return str(self.config.get("seed", ""))

    @property
    def data(self) -> Mapping[str, Any]:
        """What the run recorded of its data."""
        return part(self.environment, "data")


@dataclass
class Collection:
    """All that was found, and a line for each thing that is wrong."""

    cells: list[Cell] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    """The sweeps' own command lines."""
    empty: list[str] = field(default_factory=list)
    """A line for each folder that holds no run."""
    first: Path | None = None
    """The first folder with a run."""


def real(value: object) -> float | None:
    """Return a finite number of a record, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < 1e300 else None


def whole(value: object) -> int:
    """Return a whole number of a record, or 0."""
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63 else 0


def part(record: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return an object inside a record; empty where there is none."""
    found = record.get(key)
    return found if isinstance(found, Mapping) else {}


def collect(folders: Iterable[Path]) -> Collection:
    """Read every run in these folders: each is a run, or holds runs, or folders of runs."""
    found = Collection()
    seen: set[Path] = set()
    for folder in folders:
        if not folder.is_dir():
            found.empty.append(f"{folder}: no such folder; a run is a folder such as outputs/<name>/<run>")
            continue
        runs = run_folders(folder)
        for root in dict.fromkeys(run.parent for run in runs) if not is_run(folder) else ():
            read_sweeps(root, {run.name for run in runs}, found)
        if not runs:
            found.empty.append(f"{folder}: holds no run; a run has a config.yaml, as rtx train writes it")
        found.first = found.first or (folder if runs else None)
        for run in runs:
            if run.resolve() not in seen:
                seen.add(run.resolve())
                found.cells.append(read_cell(run, found))
    return found


def is_run(folder: Path) -> bool:
    """Tell whether a folder has the records of a run."""
    return any((folder / name).is_file() for name in RECORDS)


def run_folders(folder: Path) -> list[Path]:
    """Return the runs that a folder is, or holds, at most two levels down."""
    if is_run(folder):
        return [folder]
    for pattern in ("*", "*/*"):
        runs = sorted(path for path in folder.glob(pattern) if path.is_dir() and is_run(path))
        if runs:
            return runs
    return []


def read_sweeps(root: Path, present: set[str], found: Collection) -> None:
    """Take from sweeps.jsonl the sweeps' commands, and the cells that have not been started."""
    path = root / "sweeps.jsonl"
    cells: dict[str, str] = {}
    for row in read_lines(path, found) if path.is_file() else ():
        if isinstance(row.get("cells"), dict) and isinstance(row.get("command"), str):
            cells |= row["cells"]
            found.commands += [row["command"]] if row["command"] not in found.commands else []
    for name in (name for name in cells if name not in present):
        found.cells.append(Cell(root / name, state="not started", title=str(cells[name])))


def read_cell(folder: Path, found: Collection) -> Cell:
    """Read a run; what cannot be read is told in a line and left out."""
    config = read_config(folder / "config.yaml", found)
    status = read_object(folder / "status.json", found)
    try:
        state = str(run_state(folder))
    except (KeyError, TypeError, ValueError):
        state = str(status.get("state", "unknown"))
    final = part(status, "final")
    cell = Cell(
        folder=folder,
        config=config,
        state=state,
        reason=str(status.get("reason") or ""),
        step=whole(status.get("step")),
        final=final if real(final.get("bits")) is not None else None,
        evals=tuple(read_object(path, found) for path in sorted(folder.glob("eval/*.json"))),
        analyses=tuple(read_object(path, found) for path in sorted(folder.glob("analysis/*.json"))),
        metrics=tuple(read_rows(folder / "metrics.jsonl", found)),
        environment=read_object(folder / "environment.json", found),
    )
    found.problems += suspicions(cell)
    return cell


def suspicions(cell: Cell) -> list[str]:
    """Return a line for each thing that makes a run other than it seems."""
    lines = []
    if cell.state == "done" and not (cell.folder / "eval").is_dir() and cell.final is None:
        lines.append(f"{cell.name}: done, but no score is recorded; rtx eval {cell.name} gives one")
    resumed = cell.folder / "resumes.jsonl"
    rows = read_lines(resumed, Collection()) if resumed.is_file() else []
    if changed := [key for row in rows for key in row.get("changed") or {}]:
        lines.append(f"{cell.name}: resumed with other values of {', '.join(dict.fromkeys(changed))}")
    elif re.fullmatch("[0-9a-f]{12}", cell.folder.name) and cell.config and digest(cell.config) != cell.folder.name:
        lines.append(f"{cell.name}: its configuration changed under the sweep; its name is the hash of another")
    return lines


def read_config(path: Path, found: Collection) -> dict[str, Any]:
    """Return the values of config.yaml by dotted keys; empty where it cannot be read."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=loader)  # a safe loader, whichever it is
    except (OSError, ValueError, yaml.YAMLError) as error:
        found.problems.append(f"{path}: cannot be read ({str(error).splitlines()[0]}); listed without configuration")
        return {}
    if not isinstance(content, dict) or not content:
        found.problems.append(f"{path}: is not the configuration of a run")
        return {}
    return flat(content)


def flat(content: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values by dotted keys."""
    values: dict[str, Any] = {}
    for key, value in content.items():
        values |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return values


def read_object(path: Path, found: Collection) -> dict[str, Any]:
    """Return a JSON object; an empty one after a line about why."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        found.problems.append(f"{path}: missing")
        return {}
    except (OSError, ValueError):
        content = None
    if not isinstance(content, dict):
        found.problems.append(f"{path}: cannot be read; half written, or damaged")
        return {}
    return content


def read_rows(path: Path, found: Collection) -> list[dict[str, Any]]:
    """Return the rows of a metrics.jsonl that count, in the order of their steps: of each kind and step the last."""
    rows: dict[tuple[int, str], dict[str, Any]] = {}
    for row in read_lines(path, found):
        if whole(row.get("step")) and isinstance(row.get("kind"), str):
            rows[row["step"], row["kind"]] = row
    return [rows[key] for key in sorted(rows)]


def read_lines(path: Path, found: Collection) -> list[dict[str, Any]]:
    """Return the JSON objects of a file, one a line; broken lines are counted. A last line may lack its end."""
    rows, broken = [], 0
    try:
        content = path.read_bytes()
    except OSError as error:
        found.problems.append(f"{path}: cannot be read ({error.strerror})")
        return []
    for line in content.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        rows += [row] if isinstance(row, dict) else []
        broken += not isinstance(row, dict)
    if broken:
        found.problems.append(f"{path}: {broken} broken row{'s' * (broken > 1)} left out")
    return rows


def training_pace(cell: Cell) -> float | None:
    """Return the median optimizer steps a second over the rows of metrics.jsonl, without the first one: it warms up."""
    units = whole(cell.config.get("trainer.batch_size")) * whole(cell.config.get("data.length"))
    paces = [real(row.get("tokens_per_second")) for row in cell.metrics if row.get("kind") == "train"]
    known = sorted(pace for pace in (paces[1:] or paces) if pace)
    return known[math.floor(len(known) / 2)] / units if known and units else None
