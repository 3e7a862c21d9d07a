"""How far a preparation has come: a line that renews itself on a terminal; elsewhere one line per quarter."""

from __future__ import annotations

import sys
import time

from rtx.data.disk import Report


class Progress:
    """Bytes and parts done, at which rate, and the time that is left.

    Args:
        name: of what is prepared.
        total: bytes, about.
        parts: their number.
        quiet: say nothing at all: it is done in a moment.
    """

    def __init__(self, name: str, total: int, parts: int, report: Report, quiet: bool = False) -> None:
        self.name, self.total, self.parts, self.report, self.quiet = name, max(total, 1), parts, report, quiet
        self.terminal = sys.stderr.isatty()
        self.done, self.parts_done = 0, 0
        self.begin, self.at, self.shown = time.monotonic(), 0.0, 0

    def advance(self, amount: int) -> None:
        """Say that `amount` more bytes are done."""
        self.done += amount
        self._show()

    def part_done(self) -> None:
        """Say that one more part is done."""
        self.parts_done += 1
        self._show()

    def end(self) -> None:
        """Leave the last line standing."""
        if self.terminal and self.at:
            self._show(force=True)
            print(file=sys.stderr, flush=True)

    def _show(self, force: bool = False) -> None:
        if self.quiet:
            return
        now = time.monotonic()
        percent = min(100, 100 * self.done // self.total)
        if self.terminal and (force or now - self.at > 0.2):
            self.at = now
            print(f"\r{self._line(percent):<78}", end="", file=sys.stderr, flush=True)
        elif not self.terminal and percent // 25 > self.shown // 25:
            self.report(self._line(percent))
        self.shown = percent

    def _line(self, percent: int) -> str:
        rate = self.done / max(time.monotonic() - self.begin, 1e-3)
        left = max(0, self.total - self.done) / max(rate, 1.0)
        parts = f"{self.parts_done} of {self.parts} parts, " if self.parts > 1 else ""
        return f"{self.name} {percent:3d}%  {parts}{rate / 1e6:.1f} MB/s, {int(left // 60)}:{int(left % 60):02d} left"
