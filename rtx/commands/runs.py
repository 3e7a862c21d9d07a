"""`rtx runs [folder]`: a list of runs with the overrides that differ, the last active first."""

import sys
from pathlib import Path

from pydantic import ConfigDict

from rtx.cli.request import Request
from rtx.colour import with_state
from rtx.errors import UserError, printable
from rtx.runs.folder import ENVIRONMENT, outputs_root, runs_below, shown
from rtx.runs.records import Record, read_record
from rtx.runs.status import SAMPLED, bits_of, read_status, state_of
from rtx.tables import aligned, room_for, shortened
from rtx.terminal import terminal_width

HEADS = ["run", "what differs", "step", "bits", "state"]
DIFFERS = 1
"""The column of what differs, which alone is shortened."""
RIGHT = (2, 3)
"""Columns that are aligned at their right."""
LEAST_DIFFERS = 12
"""The least width of that column, in characters; in a narrower terminal it is left out."""


class CommandRecord(Record):
    """The part of an environment.json that the list needs, whatever else is damaged."""

    model_config = ConfigDict(extra="allow")

    command: str = ""


def main(request: Request) -> int:
    """Print a row for each run in a folder, or in outputs/.

    Other commands take the names that the rows begin with.
    """
    root = outputs_root()
    folder = request.runs[0] if request.runs else root
    runs = runs_below(folder.absolute())
    if not runs:
        reason = "holds no run" if folder.is_dir() else "no such folder"
        raise UserError(f"{shown(folder)}: {reason}; rtx train makes one")
    overrides = [overrides_of(run) for run in runs]
    shared: set[str] = set()
    if len(runs) > 1:
        shared = set.intersection(*map(set, overrides))
    rows = []
    for run, words in zip(runs, overrides, strict=True):
        differs = " ".join(word for word in words if word not in shared)
        rows.append(row_of(run, root, differs))
    width = terminal_width() if sys.stdout.isatty() else None
    # The row's state is the last word of its line; the first line has the titles.
    head, *lines = listed(rows, width)
    states = [row[-1] for row in rows]
    for number, state in enumerate(states):
        lines[number] = with_state(lines[number], state)
    print("\n".join([head, *lines]))
    return 0


def row_of(run: Path, root: Path, differs: str) -> list[str]:
    """Return the texts of a run's row."""
    status = read_status(run)
    name = str(run.relative_to(root)) if root in run.parents else shown(run)
    step = f"{status.step:,}/{status.steps:,}" if status and status.steps else ""
    texts = (name, differs, step, bits_of(status), state_of(status))
    return [printable(text) for text in texts]


def overrides_of(run: Path) -> list[str]:
    """Return the overrides of the command that began a run."""
    record = read_record(CommandRecord, run, ENVIRONMENT, problems=[])
    if record is None:
        return []
    return [word for word in record.command.split() if "=" in word]


def listed(rows: list[list[str]], width: int | None) -> list[str]:
    """Return the lines of the list for a terminal of `width` columns; None: for any width.

    Names of runs are never broken.
    """
    table = [HEADS, *rows]
    right = set(RIGHT)
    if width:
        room = room_for(DIFFERS, table, width)
        if room < LEAST_DIFFERS:
            table = [[*row[:DIFFERS], *row[DIFFERS + 1 :]] for row in table]
            right = {column - 1 for column in RIGHT}
        else:
            texts = shortened([row[DIFFERS] for row in rows], room)
            for row, text in zip(rows, texts, strict=True):
                row[DIFFERS] = text
    lines = aligned(table, right)
    if any("~" in row[-2] for row in rows):
        lines.append(SAMPLED)
    return lines
