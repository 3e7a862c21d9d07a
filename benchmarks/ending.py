"""How a benchmark that starts processes is ended from outside: with all of them."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path


def end_with_children(at_once: bool = False) -> None:
    """Let SIGTERM and SIGHUP end this process with 143, and all that it has started with it.

    `at_once`: without the way out of what is under way, where a thread would start the next
    process.
    """

    def end(number: int, frame: object) -> None:
        for child in children(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGTERM)
        if at_once:
            os._exit(143)
        sys.exit(143)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)


def children(process: int) -> list[int]:
    """Return the numbers of the processes that a process has started, as Linux knows them;
    elsewhere none.
    """
    numbers: list[int] = []
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        numbers += [int(number) for number in path.read_text().split()]
    return numbers
