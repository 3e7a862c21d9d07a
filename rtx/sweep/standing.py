"""How a sweep stands, from its records alone: what is done, what runs and for how long yet, what failed, what waits.

Read again and again while it runs, so only the end of a metrics.jsonl is read, and no lock is touched. No torch here.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rtx.errors import UserError, nearest
from rtx.training.run_folder import boot_id, process_exists, read_status, seems_running

TAIL_BYTES = 1 << 14
"""Of a metrics.jsonl that are read: some dozen rows."""

STATES = ("running", "failed", "killed", "interrupted", "preempted", "waiting", "done")
"""What a cell may be, in the order of interest."""

OVER = ("done", "failed")
"""States of a cell that no sweep works on any more."""


@dataclass(frozen=True)
class Standing:
    """A cell as it is now."""

    title: str
    state: str
    """One of `STATES`."""
    step: int = 0
    steps: int | None = None
    bits: float | None = None
    """The closing score of a cell that is done, else of the last training row."""
    left: float | None = None
    """Seconds until a running cell has taken its steps."""
    whole: float | None = None
    """Seconds that all its steps take, as far as is known."""
    reason: str = ""


def read_standing(root: Path) -> tuple[list[Standing], str]:
    """Return every cell of the sweeps in a folder, runs of no sweep last, and a command that nobody works on, if any.

    Raises:
        UserError: there is no such folder, or no sweep and no run in it.
    """
    if not root.is_dir():
        near = nearest(root.name, [path.parent.name for path in root.parent.glob("*/sweeps.jsonl")])
        raise UserError(f"{root}: no such folder{near}; a sweep is a folder such as outputs/<name>")
    rows = [row for row in json_rows(root / "sweeps.jsonl") if isinstance(row.get("cells"), dict)]
    titles = {name: str(title) for row in rows for name, title in row["cells"].items()}
    others = (path.parent.name for path in sorted(root.glob("*/status.json")))
    cells = {name: standing(root / name, titles.get(name, name)) for name in dict.fromkeys([*titles, *others])}
    if not cells:
        inside = [str(path.parent) for path in sorted(root.glob("*/sweeps.jsonl"))]
        raise UserError(f"{root}: holds no sweep" + (f"; there is one in {', '.join(inside[:5])}" if inside else ""))
    left = [row for row in rows if any(cells[name].state not in OVER for name in row["cells"])]
    idle = left and not any(map(at_work, rows)) and all(cell.state != "running" for cell in cells.values())
    return list(cells.values()), str(left[-1].get("command", "")) if idle else ""


def json_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects among the last lines of a file; what is half written, or cut, is passed over."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES) if path.name == "metrics.jsonl" else 0)
        for line in file:
            with contextlib.suppress(ValueError):
                if isinstance(row := json.loads(line), dict):
                    yield row


def at_work(row: Mapping[str, Any]) -> bool:
    """Tell whether the process that a row of sweeps.jsonl names may live: on other machines nobody can tell."""
    if row.get("host") != socket.gethostname() or not isinstance(row.get("pid"), int):
        return True
    return row.get("boot_id") == boot_id() and process_exists(row["pid"])


def standing(folder: Path, title: str) -> Standing:
    """Return how a cell stands."""
    status = read_status(folder)
    if status is None:
        return Standing(title, "waiting")
    state, step, steps = status["state"], status.get("step") or 0, status.get("steps")
    if state == "done":
        bits = (status.get("final") or {}).get("bits")
        return Standing(title, state, step, steps, bits, whole=status.get("seconds"))
    if state == "running" and not seems_running(folder, status):
        state = "killed"
    rows = [row for row in json_rows(folder / "metrics.jsonl") if row.get("kind") == "train" and row.get("step")]
    row, left = rows[-1] if rows else {}, None
    whole = steps * row["seconds"] / row["step"] if steps and row.get("seconds") else None
    if state == "running" and whole and steps:
        left = max(0.0, whole * (1 - row["step"] / steps) - age(row.get("time")))
    reason = str(status.get("reason") or "") if state == "failed" else ""
    return Standing(title, state, max(step, row.get("step", 0)), steps, row.get("bits"), left, whole, reason)


def age(time: Any) -> float:
    """Return the seconds since a moment as the records write it; 0 where it is none."""
    try:
        return (datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(time)).total_seconds()
    except (TypeError, ValueError):
        return 0.0


def time_left(cells: Sequence[Standing]) -> float | None:
    """Return the seconds until all cells are done at the pace of now; None where nothing runs, or nothing is known.

    A cell that has not begun is taken to need as long as the others on average.
    """
    running = [cell.left for cell in cells if cell.state == "running"]
    known = [left for left in running if left is not None]
    whole = [cell.whole for cell in cells if cell.whole]
    if not known or not whole or len(known) < len(running):
        return None
    to_begin = [cell for cell in cells if cell.state not in (*OVER, "running")]
    to_come = sum(1 - cell.step / cell.steps if cell.steps else 1 for cell in to_begin) * sum(whole) / len(whole)
    return max(*known, (sum(known) + to_come) / len(known))
