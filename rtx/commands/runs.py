"""`rtx runs [folder]`: what was run, the one last at work first: in what their commands differ, how they ended."""

import sys

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from rtx.errors import UserError, printable
from rtx.help import terminal_width
from rtx.options import read_words
from rtx.report.run_records import Collection, read_object
from rtx.training.run_folder import bits_of, outputs_root, read_status, run_state, runs_below, shown


def main(arguments: list[str]) -> int:
    """Print a row for each run in a folder, or in outputs/; its name there is what other commands take."""
    root = outputs_root()
    folder = next(iter(read_words("runs", arguments).runs), root)
    if not (runs := runs_below(folder.absolute())):
        why = "holds no run" if folder.is_dir() else "no such folder"
        raise UserError(f"{shown(folder)}: {why}; rtx train makes one")
    commands = [str(read_object(run / "environment.json", Collection()).get("command")) for run in runs]
    asked = [[word for word in command.split() if "=" in word] for command in commands]
    shared = set.intersection(*map(set, asked)) if len(runs) > 1 else set()
    figures = [Column(name, justify="right", no_wrap=True) for name in ("step", "bits")]
    table = Table(Column("run", overflow="fold"), "what differs", *figures, "state", box=None, pad_edge=False)
    for run, words in zip(runs, asked, strict=True):
        status, differs = read_status(run) or {}, " ".join(word for word in words if word not in shared)
        name = str(run.relative_to(root)) if root in run.parents else shown(run)
        step = f"{status.get('step', 0):,}/{status['steps']:,}" if status.get("steps") else ""
        table.add_row(*(Text(printable(cell)) for cell in (name, differs, step, bits_of(status), run_state(run))))
    Console(width=terminal_width() if sys.stdout.isatty() else 10_000, highlight=False).print(table)
    return 0
