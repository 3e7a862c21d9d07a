"""`rtx sweep FOLDER`: how a sweep stands by its records, a table refreshed in place until it is over."""

import shutil
import time
from collections import Counter
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from rtx.errors import UserError, printable
from rtx.options import read_words
from rtx.progress import clock
from rtx.report.run_records import Collection, read_lines, sweeps_of
from rtx.training.run_folder import bits_of, read_status, run_state, shown

ORDER = ("running", "failed", "killed", "interrupted", "preempted", "waiting", "done")  # those of interest first


def main(arguments: list[str]) -> int:
    """Run `rtx sweep FOLDER`: on a terminal until the sweep is over or Ctrl-C (130), elsewhere once."""
    words = read_words("sweep", arguments)
    console, folder, code = Console(width=shutil.get_terminal_size().columns, highlight=False), words.runs[0], 0
    if console.is_terminal and not console.is_dumb_terminal:
        try:
            with Live(console=console, screen=True, auto_refresh=False) as live:
                while not (state := board(folder))[1]:
                    live.update(Group(state[0], Text("\nCtrl-C leaves; the sweep goes on")), refresh=True)
                    time.sleep(2)
        except KeyboardInterrupt:
            code = 130
    console.print(board(folder)[0])
    return code


def board(root: Path) -> tuple[Group, bool]:
    """Return the cells of the sweeps in a folder, and whether all are over."""
    path = root / "sweeps.jsonl"
    if not path.is_file():
        raise UserError(f"{root}: holds no sweep; a sweep is a folder such as outputs/<name>")
    if not (sweeps := sweeps_of(path, Collection())):
        raise UserError(f"{path}: holds no sweep; half written, or damaged")
    titles = {name: title for sweep in sweeps for name, title in sweep["cells"].items()}
    cells = sorted((standing(root / name, title) for name, title in titles.items()), key=lambda c: ORDER.index(c[0]))
    counts = Counter(state for state, _ in cells)
    figures = [Column(name, justify="right") for name in ("step", "bits", "left")]
    table = Table("cell", "state", *figures, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for _, columns in cells:
        table.add_row(*columns)
    said = ", ".join(f"{counts[state]} {state}" for state in reversed(ORDER) if counts[state])
    again = "made by" if counts.keys() == {"done"} else "asked again it goes on"
    head = Text(printable(f"{shown(root)}: {len(cells)} cells: {said}; {again}: {sweeps[-1]['command']}"))
    return Group(head, table), counts.keys() <= {"done", "failed"}


def standing(folder: Path, title: str) -> tuple[str, list[Text]]:
    """Return the state of a cell, and its row of the table."""
    status = read_status(folder) or {}
    state = run_state(folder) if status else "waiting"
    rows = [] if state == "done" else read_lines(folder / "metrics.jsonl", Collection())
    numbers = [[row.get(key) for key in ("step", "bits", "seconds")] for row in rows if row.get("kind") == "train"]
    sound = [row for row in numbers if all(isinstance(number, int | float) and number > 0 for number in row)]
    at, last, seconds = sound[-1] if sound else (0, 0.0, 0.0)
    step, steps = max(status.get("step") or 0, at), status.get("steps") or 0
    bits = bits_of(status) if state == "done" else f"{last:.4f}" if last else ""
    left = seconds * (steps / at - 1) if state == "running" and steps and at else 0.0
    cell = printable(f"{title}\n  {status['reason']}" if state == "failed" else title)
    figures = (f"{step:,}" + f"/{steps:,}" * bool(steps) if step else "", bits, clock(min(left, 1e9)) if left else "")
    return state, [Text(word) for word in (cell, state, *figures)]
