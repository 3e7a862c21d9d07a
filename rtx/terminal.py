"""How wide the lines of help, tables and text are."""

import shutil

MOST_PROSE = 120
"""Columns beyond which lines of text are hard to read."""


def terminal_width() -> int:
    """Return COLUMNS where it is set, else the columns of the terminal, else 100."""
    return shutil.get_terminal_size(fallback=(100, 24)).columns


def prose_width() -> int:
    """Return how long a line of text may be: as the terminal is wide, at most 120 columns.

    Without a terminal it is 80.
    """
    return min(MOST_PROSE, shutil.get_terminal_size(fallback=(80, 24)).columns)
