"""Runs read from their folders, as they are: a record that is missing or half written is told and left out.

Nothing here imports torch or Hydra.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rtx.identity import digest
from rtx.report.values import real, whole
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
    def precision(self) -> str:
        """The arithmetic that the run was trained in; auto where neither its machine nor its configuration says."""
        hardware = self.environment.get("hardware")
        found = hardware.get("precision") if isinstance(hardware, Mapping) else None
        return str(found or self.config.get("hardware.precision", ""))

    @property
    def data(self) -> Mapping[str, Any]:
        """What the run recorded of its data."""
        data = self.environment.get("data")
        return data if isinstance(data, Mapping) else {}


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
    if not path.is_file():
        return
    cells: dict[str, str] = {}
    for row in read_lines(path, found):
        if isinstance(row.get("cells"), dict) and isinstance(row.get("command"), str):
            cells |= row["cells"]
            if row["command"] not in found.commands:
                found.commands.append(row["command"])
    for name in (name for name in cells if name not in present):
        found.cells.append(Cell(root / name, state="not started", title=str(cells[name])))


def read_cell(folder: Path, found: Collection) -> Cell:
    """Read a run; what cannot be read is told in a line and left out."""
    config = read_config(folder, found)
    status = read_object(folder / "status.json", found) or {}
    try:
        state = str(run_state(folder))
    except (KeyError, TypeError, ValueError):
        state = str(status.get("state", "unknown"))
    final = status.get("final")
    cell = Cell(
        folder=folder,
        config=config,
        state=state,
        reason=str(status.get("reason") or ""),
        step=whole(status.get("step")),
        final=final if isinstance(final, dict) and real(final.get("bits")) is not None else None,
        evals=read_objects(folder, "eval/*.json", found),
        analyses=read_objects(folder, "analysis/*.json", found),
        metrics=tuple(read_rows(folder / "metrics.jsonl", found)),
        environment=read_object(folder / "environment.json", found) or {},
    )
    found.problems += suspicions(cell)
    return cell


def suspicions(cell: Cell) -> list[str]:
    """Return a line for each thing that makes a run other than it seems."""
    lines = []
    if cell.state == "done" and not any((cell.folder / "checkpoints").glob("*.ckpt")):
        lines.append(f"{cell.name}: no checkpoint is left; its numbers stand, but it cannot be scored again")
    if cell.state == "done" and not (cell.folder / "eval").is_dir() and cell.final is None:
        lines.append(f"{cell.name}: done, but no score is recorded; rtx eval {cell.name} gives one")
    changed = [key for row in resumptions(cell.folder) for key in row.get("changed") or {}]
    if changed:
        lines.append(f"{cell.name}: resumed with other values of {', '.join(dict.fromkeys(changed))}")
    elif re.fullmatch("[0-9a-f]{12}", cell.folder.name) and cell.config and digest(cell.config) != cell.folder.name:
        lines.append(
            f"{cell.name}: its configuration changed under the sweep; the folder's name is the hash of another"
        )
    return lines


def resumptions(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of resumes.jsonl, where there is one."""
    path = folder / "resumes.jsonl"
    return read_lines(path, Collection()) if path.is_file() else []


def read_config(folder: Path, found: Collection) -> dict[str, Any]:
    """Return the values of config.yaml by dotted keys; empty where it cannot be read."""
    import yaml

    path = folder / "config.yaml"
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=loader)  # a safe loader, whichever it is
    except FileNotFoundError:
        found.problems.append(f"{path}: missing; the run is listed without its configuration")
        return {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        found.problems.append(f"{path}: cannot be read ({str(error).splitlines()[0]})")
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


def read_object(path: Path, found: Collection) -> dict[str, Any] | None:
    """Return a JSON object, or None after a line about why not."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        found.problems.append(f"{path}: missing")
        return None
    except (OSError, ValueError):
        found.problems.append(f"{path}: cannot be read; half written, or damaged")
        return None
    if isinstance(content, dict):
        return content
    found.problems.append(f"{path}: is not a record")
    return None


def read_objects(folder: Path, pattern: str, found: Collection) -> tuple[dict[str, Any], ...]:
    """Return the JSON objects of the files of a pattern; what is none is told."""
    return tuple(content for path in sorted(folder.glob(pattern)) if (content := read_object(path, found)))


def read_rows(path: Path, found: Collection) -> list[dict[str, Any]]:
    """Return the rows of a metrics.jsonl that count, in the order of their steps: of each kind and step the last."""
    if not path.is_file():
        found.problems.append(f"{path}: missing")
        return []
    rows: dict[tuple[int, str], dict[str, Any]] = {}
    for row in read_lines(path, found):
        if isinstance(row.get("step"), int) and isinstance(row.get("kind"), str):
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
    for line in content.splitlines(keepends=True):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict):
            rows.append(row)
        else:
            broken += 1
    if broken:
        found.problems.append(f"{path}: {broken} broken row{'s' * (broken > 1)} left out")
    return rows
