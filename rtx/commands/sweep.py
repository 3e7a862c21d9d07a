"""`rtx sweep FOLDER`: how a sweep stands by its records, a table refreshed in place until it is over."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rtx.errors import UserError, printable
from rtx.options import read_words
from rtx.progress import clock
from rtx.training.run_folder import read_status, run_state, shown

ORDER = ("running", "failed", "killed", "interrupted", "preempted", "waiting", "done")
"""States of cells, those of interest first."""
STYLES = {"running": "cyan", "failed": "red", "waiting": "dim", "done": "green"}


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
    sweeps = json_rows(path.read_bytes())
    titles = {name: title for sweep in sweeps for name, title in sweep["cells"].items()}
    cells = sorted((standing(root / name, title) for name, title in titles.items()), key=lambda c: ORDER.index(c[0]))
    counts = Counter(state for state, _ in cells)
    table = Table("cell", "state", box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("step", "bits", "left"):
        table.add_column(name, justify="right")
    for _, columns in cells:
        table.add_row(*columns)
    said = ", ".join(f"{counts[state]} {state}" for state in reversed(ORDER) if counts[state])
    head = Text(f"{shown(root)}: {len(cells)} cells: {said}; asked again it goes on: {sweeps[-1]['command']}")
    return Group(head, table), counts.keys() <= {"done", "failed"}


def standing(folder: Path, title: str) -> tuple[str, list[Text]]:
    """Return the state of a cell, and its row of the table."""
    status, metrics = read_status(folder) or {}, folder / "metrics.jsonl"
    state = run_state(folder) if status else "waiting"
    tail = metrics.read_bytes()[-(1 << 14) :] if metrics.is_file() else b""
    last = next((row for row in reversed(json_rows(tail)) if row.get("kind") == "train"), {})
    step, steps = max(status.get("step") or 0, last.get("step", 0)), status.get("steps") or 0
    bits = status["final"]["bits"] if state == "done" and status.get("final") else last.get("bits")
    left = clock(last["seconds"] * (steps / last["step"] - 1)) if state == "running" and steps and last else ""
    reason = f"\n  {status['reason']}" if state == "failed" else ""
    cell = Text(printable(title)).append(printable(reason), "red")
    cells = (f"{step:,}/{steps:,}" if step else "", f"{bits:.4f}" if bits else "", left)
    return state, [cell, Text(state, STYLES.get(state, "yellow")), *map(Text, cells)]


def json_rows(content: bytes) -> list[dict[str, Any]]:
    """Return the objects of JSON lines; the last may be half written, and the first cut."""
    rows = []
    for line in content.splitlines():
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return rows
