"""`rtx sweep FOLDER [once=true]`: how a sweep stands, a table refreshed in place until the sweep is over."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rtx.options import read_words
from rtx.sweep.standing import OVER, STATES, Standing, read_standing, time_left
from rtx.training.progress import clock
from rtx.training.run_folder import shown
from rtx.wording import printable

REFRESH_SECONDS = 2.0
STYLES = {"done": "green", "running": "cyan", "failed": "red", "waiting": "dim"}
"""Of states; those of cells that broke off are yellow."""


def main(arguments: list[str]) -> int:
    """Run `rtx sweep FOLDER [once=true]`: on a terminal until the sweep is over or Ctrl-C (130), elsewhere once."""
    words = read_words("sweep", arguments)
    console, folder, code = Console(width=shutil.get_terminal_size().columns, highlight=False), words.runs[0], 0
    if console.is_terminal and not console.is_dumb_terminal and not words.options.once:
        try:
            watch(folder, console)
        except KeyboardInterrupt:
            code = 130
    console.print(board(folder, *read_standing(folder)))
    return code


def watch(folder: Path, console: Console) -> None:
    """Show the sweep, cells of interest first, until it is over."""
    leave = Text("\nCtrl-C leaves; the sweep goes on")
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            cells, command = read_standing(folder)
            if all(cell.state in OVER for cell in cells):
                return
            cells.sort(key=lambda cell: STATES.index(cell.state))
            live.update(Group(board(folder, cells, command), leave), refresh=True)
            time.sleep(REFRESH_SECONDS)


def board(folder: Path, cells: Sequence[Standing], command: str) -> Group:
    """Return how many cells are in each state and when all will be done, a row for each, and how the sweep goes on."""
    counts, left = Counter(cell.state for cell in cells), time_left(cells)
    said = ", ".join(f"{counts[state]} {state}" for state in ("done", *STATES[:-1]) if counts[state])
    tail = f"; about {clock(left)} left" if left is not None else ""
    table = Table("cell", "state", box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("step", "bits", "left"):
        table.add_column(name, justify="right")
    for cell in cells:
        title = Text(printable(cell.title)).append(printable(f"\n  {cell.reason}") if cell.reason else "", "red")
        step = f"{cell.step:,}" + (f"/{cell.steps:,}" if cell.steps else "") if cell.step or cell.steps else ""
        bits = "" if cell.bits is None else f"{cell.bits:.4f}"
        state = Text(cell.state, STYLES.get(cell.state, "yellow"))
        table.add_row(title, state, step, bits, "" if cell.left is None else clock(cell.left))
    goes_on = [Text("nobody works on it; it goes on with:"), Text(f"  {command}")] if command else []
    return Group(Text(f"{shown(folder)}: {len(cells)} cells: {said}{tail}"), table, *goes_on)
