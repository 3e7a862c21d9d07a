"""Rows that take training steps in turn, each in a process of its own: the asking side of `rtx/training/stepping.py`.

Times on a shared machine drift; where every row steps in every turn, drift reaches all rows alike, and their ratios
mean something. A row that fails, or is killed, is left out from then on, and the others go on.
"""

from __future__ import annotations

import multiprocessing
import signal
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from typing import Any

from rtx.options import BenchOptions
from rtx.training.stepping import Failure, Turn, Work, serve

ADVICE = "bench.together=false holds one row at a time, a smaller trainer.micro_batch_size needs less"
"""What to do where memory is short."""


@dataclass
class Timing:
    """What is known of a row so far."""

    turns: list[Turn] = field(default_factory=list)
    reason: str = ""
    """Why it takes no more steps."""

    @property
    def milliseconds(self) -> float | None:
        """Of a step: the median over turns; None before the first."""
        return statistics.median(turn.milliseconds for turn in self.turns) if self.turns else None


class Row:
    """The process of a row, begun when it is first asked."""

    def __init__(self, work: Work, warmup: int) -> None:
        self.work, self.warmup = work, warmup
        self.process: BaseProcess | None = None

    def take(self, steps: int) -> Turn | Failure:
        """Let the row take steps, its warm-up before the first ones."""
        if self.process is None:
            try:
                self.begin()
            except (OSError, EOFError) as error:
                return Failure(f"its process could not be started: {error or type(error).__name__}")
            if self.warmup and isinstance(failure := self.ask(self.warmup), Failure):
                return failure
        return self.ask(steps)

    def begin(self) -> None:
        """Start the process."""
        context = starting_point()
        self.door, far = context.Pipe()
        process = self.process = context.Process(target=serve, args=(far, self.work), daemon=True)
        process.start()
        far.close()

    def ask(self, steps: int) -> Turn | Failure:
        """Ask for steps, and wait for the answer."""
        try:
            self.door.send(steps)
            return self.door.recv()
        except (EOFError, ConnectionError):
            return Failure(self.how_it_ended())

    def how_it_ended(self) -> str:
        """Say how a process ended that did not say why."""
        assert self.process is not None
        self.process.join()
        code = self.process.exitcode or 0
        if code == -signal.SIGKILL:
            return "out of memory, it seems: the process was killed (SIGKILL)"
        return (
            f"the process was killed by {signal.Signals(-code).name}" if code < 0 else f"the process left with {code}"
        )

    def end(self) -> None:
        """End the process, whatever it does, and wait until its memory is free."""
        if self.process is not None:
            self.door.close()
            if self.process.pid:  # it did start
                self.process.kill()
                self.process.join()
                self.process.close()
            self.process = None


def starting_point() -> Any:
    """Return where processes come from: on Linux one that has imported everything, and shares it with all rows."""
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([serve.__module__])
    return context


def measure(
    work: Sequence[Work], bench: BenchOptions, timings: Sequence[Timing], show: Callable[[int, int], None]
) -> None:
    """Let every row take its steps in every turn; what is known at any moment stands in `timings`.

    Args:
        work: of each row.
        bench: turns, steps and warm-up.
        timings: one for each row, to be filled.
        show: called with the turn and the row, both from 1, before that row steps.
    """
    rows = [Row(each, bench.warmup) for each in work]
    try:
        for turn in range(bench.turns):
            for number, (row, timing) in enumerate(zip(rows, timings, strict=True)):
                if timing.reason:
                    continue
                show(turn + 1, number + 1)
                answer = row.take(bench.per_turn)
                if isinstance(answer, Turn):
                    timing.turns.append(answer)
                else:
                    timing.reason = advised(answer.reason)
                if timing.reason or not bench.together:
                    row.end()
    finally:
        for row in rows:
            row.end()


def advised(reason: str) -> str:
    """Return a reason, with what to do about it where memory is short."""
    return f"{reason}; {ADVICE}" if reason.startswith("out of memory") else reason
