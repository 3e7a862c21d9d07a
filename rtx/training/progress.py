"""The progress line: rewritten in place on a terminal, a plain line now and then where it is not one."""

from __future__ import annotations

import resource
import shutil
import sys
import time
from typing import TextIO

REDRAW_SECONDS = 0.2
"""Shortest time between two drawings on a terminal."""

PLAIN_SECONDS = 15.0
"""Shortest time between two lines elsewhere."""


class Progress:
    """Shows one line at a time.

    Args:
        stream: where to write; unset: standard output.
        quiet: show nothing (all ranks but the first).
    """

    def __init__(self, stream: TextIO | None = None, *, quiet: bool = False) -> None:
        self.stream = stream or sys.stdout
        self.quiet = quiet
        self.in_place = self.stream.isatty()
        self.shown_at = -float("inf")
        self.width = 0

    def show(self, line: str, *, force: bool = False) -> None:
        """Show a line, unless the last one is too fresh; `force` shows it anyway."""
        now = time.monotonic()
        if self.quiet or (not force and now - self.shown_at < (REDRAW_SECONDS if self.in_place else PLAIN_SECONDS)):
            return
        self.shown_at = now
        if not self.in_place:
            self._write(line + "\n")
            return
        line = line[: shutil.get_terminal_size().columns - 1]
        self._write("\r" + line.ljust(self.width))
        self.width = len(line)

    def say(self, line: str) -> None:
        """Print a line that stays."""
        if not self.quiet:
            self.clear()
            self._write(line + "\n")

    def clear(self) -> None:
        """Take the progress line off the terminal."""
        if self.width:
            self._write("\r" + " " * self.width + "\r")
            self.width = 0

    def _write(self, text: str) -> None:
        try:
            self.stream.write(text)
            self.stream.flush()
        except OSError:  # nobody reads any more (`rtx train | head`): no reason to end the run
            self.quiet = True


def training_line(
    step: int, steps: int, bits: float, rate: float, units_per_second: float, seconds_left: float, memory: int
) -> str:
    """Return `step 1,200/4,000 | 2.713 bits | lr 2.9e-03 | 84,210 units/s | 3:21 left | 1.2 GB`."""
    return (
        f"step {step:,}/{steps:,} | {bits:.3f} bits | lr {rate:.1e} | {units_per_second:,.0f} units/s | "
        f"{clock(seconds_left)} left | {memory / 1e9:.1f} GB"
    )


def clock(seconds: float) -> str:
    """Return seconds as 3:21, 1:03:21 or 2d 1:03:21."""
    days, rest = divmod(round(max(0.0, seconds)), 86_400)
    hours, rest = divmod(rest, 3600)
    minutes, second = divmod(rest, 60)
    short = f"{hours}:{minutes:02}:{second:02}" if days or hours else f"{minutes}:{second:02}"
    return f"{days}d {short}" if days else short


def peak_memory() -> int:
    """Return the most memory used so far in bytes: of the GPU if there is one in use, else of this process."""
    import torch  # takes seconds, and clock times are told without it

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
