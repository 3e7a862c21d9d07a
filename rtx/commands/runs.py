"""`rtx runs [folder]`: what was run, the one last at work first: in what their commands differ, how they ended."""

import sys
from pathlib import Path

from rtx.cli.help import terminal_width
from rtx.cli.request import Request
from rtx.errors import UserError, printable
from rtx.report.tables import GAP, aligned, shortened
from rtx.runs.folder import ENVIRONMENT, outputs_root, runs_below, shown
from rtx.runs.records import EnvironmentRecord, read_record
from rtx.runs.status import SAMPLED, bits_of, read_status, state_of

HEADS = ["run", "what differs", "step", "bits", "state"]
LEAST_DIFFERS = 12  # columns below which what differs is left out: nothing of it could be read


def main(request: Request) -> int:
    """Print a row for each run in a folder, or in outputs/; its name there is what other commands take."""
    root = outputs_root()
    folder = request.runs[0] if request.runs else root
    if not (runs := runs_below(folder.absolute())):
        why = "holds no run" if folder.is_dir() else "no such folder"
        raise UserError(f"{shown(folder)}: {why}; rtx train makes one")
    asked = [overrides_of(run) for run in runs]
    shared = set.intersection(*map(set, asked)) if len(runs) > 1 else set()
    rows = []
    for run, words in zip(runs, asked, strict=True):
        status = read_status(run)
        name = str(run.relative_to(root)) if root in run.parents else shown(run)
        differs = " ".join(word for word in words if word not in shared)
        step = f"{status.step:,}/{status.steps:,}" if status and status.steps else ""
        rows.append(
            [printable(text) for text in (name, differs, step, bits_of(status), state_of(status))]
        )
    print("\n".join(listed(rows, terminal_width() if sys.stdout.isatty() else None)))
    return 0


def overrides_of(run: Path) -> list[str]:
    """Return the overrides of the command that began a run."""
    record = read_record(EnvironmentRecord, run / ENVIRONMENT, problems=[])
    if record is None:
        return []
    return [word for word in record.command.split() if "=" in word]


def listed(rows: list[list[str]], width: int | None) -> list[str]:
    """Return the lines of the list in a terminal of so many columns, None: of any; names of runs are never broken."""
    heads, right = HEADS, {2, 3}
    if width:
        beside = [max(map(len, column)) + GAP for column in zip(heads, *rows, strict=True)]
        room = width - sum(beside) + beside[1]
        differs = shortened([row[1] for row in rows], room)
        rows = [[row[0], text, *row[2:]] for row, text in zip(rows, differs, strict=True)]
        if room < LEAST_DIFFERS:
            heads, right = [heads[0], *heads[2:]], {1, 2}
            rows = [[row[0], *row[2:]] for row in rows]
    lines = aligned([heads, *rows], right)
    is_sampled = any("~" in row[-2] for row in rows)
    return [*lines, *([SAMPLED] if is_sampled else [])]
