"""`rtx sweep FOLDER`: the state of a sweep by its records, refreshed in place until it is over."""

from __future__ import annotations

import shutil
import textwrap
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from rtx.cli.request import Request
from rtx.colour import with_state
from rtx.disk import is_file_inside
from rtx.errors import UserError, printable
from rtx.progress import clock
from rtx.runs.folder import METRICS, outputs_root, shown
from rtx.runs.records import MetricsRow, StatusRecord, last_rows
from rtx.runs.status import SAMPLED, bits_of, read_status, state_of
from rtx.runs.study import read_sweeps
from rtx.tables import aligned, room_for, shortened

LONGEST_SECONDS = 1e9
"""The longest time left that is shown."""
ORDER = (
    "running",
    "failed",
    "killed",
    "interrupted",
    "preempted",
    "waiting",
    "done",
)
"""States of a cell, those of interest first."""
REFRESH_SECONDS = 2
LEAVE = "\nCtrl-C leaves; the sweep goes on"


def main(request: Request) -> int:
    """Run `rtx sweep FOLDER`: on a terminal until the sweep is over or Ctrl-C (130), else once."""
    if not request.runs:
        folders = sweeps_here()
        listed = f"here are {', '.join(folders)}" if folders else "there is none here"
        raise UserError(f"rtx sweep needs the sweep's folder: rtx sweep outputs/<name>; {listed}")
    width = shutil.get_terminal_size().columns
    console = Console(width=width, highlight=False)
    code = 0
    if console.is_terminal and not console.is_dumb_terminal:
        try:
            watch(console, request.run, width)
        except KeyboardInterrupt:
            code = 130
    table, _ = board(request.run, width)
    console.print(table)
    return code


def watch(console: Console, folder: Path, width: int) -> None:
    """Show the cells of a sweep in place until all are over."""
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            table, is_over = board(folder, width)
            if is_over:
                return
            live.update(Group(table, Text(LEAVE)), refresh=True)
            time.sleep(REFRESH_SECONDS)


def board(root: Path, width: int = 80) -> tuple[Group, bool]:
    """Return the cells of the sweeps in a folder, and whether all are over.

    `width` is that of the terminal in columns.
    """
    path = root / "sweeps.jsonl"
    if not is_file_inside(root, path.name):
        raise UserError(f"{root}: holds no sweep; a sweep is a folder such as outputs/<name>")
    sweeps = read_sweeps(root, problems=[])
    if not sweeps:
        raise UserError(f"{path}: holds no sweep; half written, or damaged")
    titles: dict[str, str] = {}
    for sweep in sweeps:
        titles |= sweep.cells
    cells = [standing(root / name, title) for name, title in titles.items()]
    cells.sort(key=place)
    counts = Counter(cell.state for cell in cells)
    states = [f"{counts[state]} {state}" for state in reversed(ORDER) if counts[state]]
    again = "made by" if counts.keys() == {"done"} else "asked again it goes on"
    summary = f"{len(cells)} cells: {', '.join(states)}; {again}: {sweeps[-1].command}"
    head = printable(f"{shown(root)}: {summary}")
    lines = textwrap.wrap(head, width, break_on_hyphens=False)
    lines += cell_lines(cells, width)
    if any("~" in cell.bits for cell in cells):
        lines.append(SAMPLED)
    return Group(*map(Text.from_ansi, lines)), counts.keys() <= {"done", "failed"}


def cell_lines(cells: Sequence[Standing], width: int) -> list[str]:
    """Return a line for each cell, below a failed one its reason."""
    heads = ["cell", "state", "step", "bits", "left"]
    rows = []
    for cell in cells:
        rows.append([printable(cell.title), cell.state, cell.step, cell.bits, cell.left])
    room = room_for(0, [heads, *rows], width)
    titles = shortened([row[0] for row in rows], room)
    for row, title in zip(rows, titles, strict=True):
        row[0] = title
    head, *texts = aligned([heads, *rows], right={2, 3, 4})
    lines = [head]
    for cell, text in zip(cells, texts, strict=True):
        lines.append(with_state(text, cell.state))
        lines += textwrap.wrap(
            printable(cell.reason), width, initial_indent="  ", subsequent_indent="  "
        )
    return lines


@dataclass(frozen=True)
class Standing:
    """The state of a cell, as texts of its row; `reason`: of a failed cell."""

    title: str
    state: str
    step: str
    bits: str
    left: str
    reason: str


def place(cell: Standing) -> tuple[int, float]:
    """Return the sort key of a cell: its state, then, of cells that are done, the bits."""
    bits = float(cell.bits.lstrip("~") or "inf") if cell.state == "done" else 0.0
    return ORDER.index(cell.state), bits


def standing(folder: Path, title: str) -> Standing:
    """Return the state of a cell by its records."""
    status = read_status(folder)
    if status is None:
        return Standing(title, "waiting", "", "", "", "")
    state = state_of(status)
    last = None if state == "done" else last_train_row(folder)
    step = status.step
    if last is not None:
        step = max(step, last.step)
    bits = bits_of(status) if state == "done" else ""
    if last is not None:
        bits = f"{last.get('train/bits'):.4f}"
    of_steps = f"/{status.steps:,}" if status.steps else ""
    return Standing(
        title,
        state,
        f"{step:,}{of_steps}" if step else "",
        bits,
        time_left(status, last) if state == "running" else "",
        status.reason or "" if state == "failed" else "",
    )


def last_train_row(folder: Path) -> MetricsRow | None:
    """Return the last row with the bits and seconds of training steps."""
    for row in reversed(last_rows(MetricsRow, folder, METRICS)):
        bits = row.get("train/bits") or 0
        seconds = row.get("train/seconds") or 0
        if row.step > 0 and bits > 0 and seconds > 0:
            return row
    return None


def time_left(status: StatusRecord, last: MetricsRow | None) -> str:
    """Return the time until the last step at the mean pace so far, empty where it is not known."""
    if last is None or not status.steps:
        return ""
    left = (last.get("train/seconds") or 0) * (status.steps / last.step - 1)
    return clock(min(left, LONGEST_SECONDS)) if left > 0 else ""


def sweeps_here() -> list[str]:
    """Return the folders in outputs/ that hold a sweep, the newest first, as one types them."""
    paths = sorted(
        outputs_root().glob("*/sweeps.jsonl"), key=lambda path: path.stat().st_mtime, reverse=True
    )
    return [shown(path.parent) for path in paths]
