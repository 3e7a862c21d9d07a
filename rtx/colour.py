"""Colour for states and verdicts on terminals; the words say the same without it.

`NO_COLOR` (any value but an empty one) and `TERM=dumb` turn it off, as does output to a file or a
pipe.
"""

import os
import sys

BOLD = 1
RED = 31
GREEN = 32
YELLOW = 33
CYAN = 36
STATES = {
    "done": GREEN,
    "running": CYAN,
    "failed": RED,
    "killed": RED,
    "interrupted": YELLOW,
    "preempted": YELLOW,
}
"""Colours of the states of a run; others, such as waiting, have none."""


def has_colour() -> bool:
    """Return whether stdout is a terminal whose user wants colour."""
    is_refused = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
    return sys.stdout.isatty() and not is_refused


def painted(text: str, code: int) -> str:
    """Return a text in a colour or in bold where there is colour, else as it is."""
    return f"\x1b[{code}m{text}\x1b[0m" if has_colour() else text


def with_state(line: str, state: str) -> str:
    """Return a line with the last occurrence of a state in its colour."""
    before, found, after = line.rpartition(state)
    code = STATES.get(state)
    if not found or code is None:
        return line
    return before + painted(found, code) + after
