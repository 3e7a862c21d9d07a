"""How a sweep stands, from its records alone: what is done, what runs and for how long yet, what failed, what waits.

Read again and again while it runs, so only the end of a metrics.jsonl is read, and no lock is touched. No torch here.
"""

from __future__ import annotations

import datetime
import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rtx.errors import UserError, nearest
from rtx.report.cells import Collection, is_run, read_lines
from rtx.training.run_folder import boot_id, process_exists, read_status, seems_running

TAIL_BYTES = 1 << 16
"""Of a metrics.jsonl that are read: some dozen rows."""

WAITING, RUNNING, DONE, FAILED = "waiting", "running", "done", "failed"
BROKEN_OFF = ("interrupted", "preempted", "killed")
"""States of cells that go on when the sweep is asked again."""


@dataclass(frozen=True)
class Standing:
    """A cell as it is now."""

    title: str
    state: str
    """waiting, running, done, failed, interrupted, preempted or killed."""
    step: int = 0
    steps: int | None = None
    bits: float | None = None
    """The closing score of a cell that is done, else of the last training row."""
    left: float | None = None
    """Seconds until a running cell has taken its steps."""
    whole: float | None = None
    """Seconds that all its steps take, as far as is known."""
    reason: str = ""


@dataclass(frozen=True)
class Sweep:
    """The cells of one command, or of several that share some."""

    command: str
    """The last one."""
    cells: tuple[Standing, ...]
    at_work: bool | None
    """Whether the process that started it lives; None where nobody can tell."""


def read_standing(root: Path) -> list[Sweep]:
    """Return the sweeps of a folder, each cell once; runs of no sweep come last, without a command.

    Raises:
        UserError: there is no such folder, or no sweep and no run in it.
    """
    if not root.is_dir():
        near = nearest(root.name, [path.parent.name for path in root.parent.glob("*/sweeps.jsonl")])
        raise UserError(f"{root}: no such folder{near}; a sweep is a folder such as outputs/<name>")
    rows = [row for row in read_lines(root / "sweeps.jsonl", Collection()) if is_row(row)]
    sweeps, listed = [], set()
    for cells, own in grouped(rows):
        listed |= cells.keys()
        standings = tuple(standing(root / name, str(title)) for name, title in cells.items())
        sweeps.append(Sweep(own[-1]["command"], standings, at_work(own)))
    others = [path for path in sorted(root.glob("*")) if path.name not in listed and path.is_dir() and is_run(path)]
    if others:
        sweeps.append(Sweep("", tuple(standing(path, path.name) for path in others), None))
    if not sweeps:
        inside = [str(path.parent) for path in sorted(root.glob("*/sweeps.jsonl"))]
        raise UserError(f"{root}: holds no sweep" + (f"; there is one in {', '.join(inside[:5])}" if inside else ""))
    return sweeps


def is_row(row: Mapping[str, Any]) -> bool:
    """Tell whether a row of sweeps.jsonl is whole."""
    return isinstance(row.get("cells"), dict) and isinstance(row.get("command"), str)


def grouped(rows: Sequence[Mapping[str, Any]]) -> list[tuple[dict[str, str], list[Mapping[str, Any]]]]:
    """Return the cells of each sweep and its rows, in the order of their first ones: rows that share a cell are one."""
    groups: list[tuple[dict[str, str], list[Mapping[str, Any]]]] = []
    for row in rows:
        shared = [group for group in groups if group[0].keys() & row["cells"].keys()]
        cells, own = shared[0] if shared else ({}, [])
        for others, theirs in shared[1:]:
            groups.remove((others, theirs))
            cells |= others
            own += theirs
        cells |= {name: title for name, title in row["cells"].items() if name not in cells}
        own.append(row)
        if not shared:
            groups.append((cells, own))
    return groups


def at_work(rows: Sequence[Mapping[str, Any]]) -> bool | None:
    """Tell whether a process that was given a sweep lives on this machine; None where nobody can tell."""
    known = [row for row in rows if isinstance(row.get("pid"), int) and row.get("host") == socket.gethostname()]
    if not known or len(known) < len(rows):
        return None
    return any(row.get("boot_id") == boot_id() and process_exists(row["pid"]) for row in known)


def standing(folder: Path, title: str) -> Standing:
    """Return how a cell stands."""
    status = read_status(folder)
    if status is None:
        return Standing(title, WAITING)
    try:
        state = status["state"]
        if state == RUNNING and not seems_running(folder, status):
            state = "killed"
    except (KeyError, TypeError, ValueError):
        state = str(status.get("state", "unknown"))
    rows = training_rows(folder / "metrics.jsonl")
    step, steps = (value if isinstance(value := status.get(key), int) else 0 for key in ("step", "steps"))
    bits = final["bits"] if isinstance(final := status.get("final"), dict) and state == DONE else None
    if rows and state != DONE:
        step, bits = max(step, rows[-1]["step"]), rows[-1].get("bits")
    pace = seconds_per_step(rows)
    left = None
    if state == RUNNING and pace is not None and steps:
        left = max(0.0, pace * (steps - rows[-1]["step"]) - age(rows[-1].get("time")))
    known = status.get("seconds")
    whole = float(known) if state == DONE and isinstance(known, int | float) else pace * steps if pace else None
    reason = str(status.get("reason") or "") if state not in (RUNNING, "killed") else ""
    return Standing(title, state, step, steps or None, bits, left, whole, reason)


def training_rows(path: Path) -> list[dict[str, Any]]:
    """Return the last training rows of a metrics.jsonl; those before a step that was taken again are left out."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return []
    rows: list[dict[str, Any]] = []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue  # the first one may be cut, the last one half written
        if isinstance(row, dict) and row.get("kind") == "train" and isinstance(row.get("step"), int):
            rows = [before for before in rows if before["step"] < row["step"]] + [row]
    return rows


def seconds_per_step(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the seconds that a step takes, validations and checkpoints included; None where too little is known."""
    timed = [row for row in rows if isinstance(row.get("seconds"), int | float)]
    if not timed:
        return None
    first, last = timed[0], timed[-1]
    if last["step"] > first["step"] and last["seconds"] > first["seconds"]:
        return (last["seconds"] - first["seconds"]) / (last["step"] - first["step"])
    return last["seconds"] / last["step"] if last["step"] > 0 and last["seconds"] > 0 else None


def age(time: Any) -> float:
    """Return the seconds since a moment as the records write it; 0 where it is none."""
    try:
        return (datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(time)).total_seconds()
    except (TypeError, ValueError):
        return 0.0


def is_over(sweeps: Sequence[Sweep]) -> bool:
    """Tell whether every cell is done or has failed."""
    return all(cell.state in (DONE, FAILED) for sweep in sweeps for cell in sweep.cells)


def time_left(cells: Sequence[Standing]) -> float | None:
    """Return the seconds until all cells are done at the pace of now; None where nothing runs, or nothing is known.

    A cell that has not begun is taken to need as long as the others on average.
    """
    running = [cell for cell in cells if cell.state == RUNNING]
    whole = [cell.whole for cell in cells if cell.whole]
    if not running or not whole or any(cell.left is None for cell in running):
        return None
    mean = sum(whole) / len(whole)
    to_come = sum(
        mean * (1 - (cell.step / cell.steps if cell.steps else 0.0))
        for cell in cells
        if cell.state == WAITING or cell.state in BROKEN_OFF
    )
    ahead = [cell.left or 0.0 for cell in running]
    return max(max(ahead), (sum(ahead) + to_come) / len(running))
