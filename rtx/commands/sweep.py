"""`rtx sweep FOLDER [once=true]`: how a sweep stands, refreshed in place until it is over."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rtx.options import read_words
from rtx.report.board import board
from rtx.report.standing import is_over, read_standing
from rtx.training.run_folder import shown
from rtx.training.signals import INTERRUPTED

REFRESH_SECONDS = 2.0

ENTER, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""Onto the terminal's second screen, the cursor hidden, and back to the first as it was."""

HOME, TO_LINE_END, TO_END = "\x1b[H", "\x1b[K", "\x1b[J"


def main(arguments: list[str]) -> int:
    """Run `rtx sweep FOLDER [once=true]`: on a terminal until the sweep is over or Ctrl-C, elsewhere once.

    Returns:
        0, or 130 after Ctrl-C.

    Raises:
        UserError: not one folder, or none with a sweep.
    """
    words = read_words("sweep", arguments)
    folders = words.runs
    watching = sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb") and not words.options.once
    code = watch(folders[0]) if watching and not is_over(read_standing(folders[0])) else 0
    width = shutil.get_terminal_size().columns
    print("\n".join(board(shown(folders[0]), read_standing(folders[0]), width)))
    return code


def watch(folder: Path) -> int:
    """Show the sweep until it is over (0), or until Ctrl-C (130)."""
    with second_screen():
        try:
            while True:
                sweeps = read_standing(folder)
                if is_over(sweeps):
                    return 0
                width, height = shutil.get_terminal_size()
                lines = [
                    *board(shown(folder), sweeps, width, height - 2),
                    "",
                    "Ctrl-C leaves; the sweep goes on"[:width],
                ]
                sys.stdout.write(HOME + "\n".join(line + TO_LINE_END for line in lines) + TO_END)
                sys.stdout.flush()
                time.sleep(REFRESH_SECONDS)
        except KeyboardInterrupt:
            return INTERRUPTED


@contextlib.contextmanager
def second_screen() -> Iterator[None]:
    """Use the terminal's second screen; the first comes back however this ends."""
    sys.stdout.write(ENTER)
    try:
        yield
    finally:
        sys.stdout.write(LEAVE)
        sys.stdout.flush()
