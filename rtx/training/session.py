"""One process of one run: what it trains, where, and what it reports to."""

import contextlib
import math
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rtx.analysis.cost import Cost
from rtx.data.store import Store
from rtx.runs.folder import shown
from rtx.runs.signals import Signals, state_after
from rtx.runs.status import Status
from rtx.settings.schema import Config
from rtx.training.checkpoint import Checkpoint
from rtx.training.distributed import Ranks
from rtx.training.hardware import Hardware
from rtx.training.step_clock import RunClock

GPU_LOOKS = 8
"""Optimizer steps on a GPU from one reading of losses and norms to the next."""


@dataclass
class Session:
    """One process of one run. The callbacks of training read it, and share state through it."""

    config: Config
    """With a value in place of each `auto` that the run itself chooses."""
    requested: Config
    """As composed: keys that are `auto` here may get another value when memory runs out."""
    hardware: Hardware
    folder: Path
    store: Store
    cost: Cost
    """Of `requested`; micro-batch and recomputation do not change it."""
    signals: Signals
    ranks: Ranks
    status: Status | None = None
    """None on every rank but the first: they write nothing."""
    resumed: bool = False
    """Whether the run has begun in an earlier process, or earlier in this one."""
    reason: str = ""
    """Why a resumed run had stopped: killed, failed, out of memory and others."""
    command: str = ""
    """A command line that does the same, if Python code called `rtx.train`."""

    start: Checkpoint | None = field(default=None, init=False)
    """The checkpoint to go on from, as `newest_checkpoint` returns it; None: from the beginning."""
    clock: RunClock = field(init=False)
    bits: float = field(default=math.nan, init=False)
    """Bits per token of this process since the last row, when last read (`looks_at`)."""
    saved_step: int | None = field(default=None, init=False)
    """The step of the newest whole last.ckpt."""
    best: dict[str, Any] | None = field(default=None, init=False)
    """Bits, step and number of windows of the best validation."""
    children: Sequence[subprocess.Popen[bytes]] = field(default=(), init=False)
    """The other ranks, where this process has started them."""

    def __post_init__(self) -> None:
        self.begin(None)

    def begin(self, start: Checkpoint | None) -> None:
        """Begin at a checkpoint, or at the first step."""
        self.start = start
        tokens_per_step = self.config.trainer.batch_size * self.config.data.length
        self.clock = RunClock(self.first_step, tokens_per_step)
        self.saved_step = self.first_step or None

    @property
    def first_step(self) -> int:
        """The number of steps that earlier processes have taken."""
        return self.start["step"] if self.start else 0

    def looks_at(self, step: int) -> bool:
        """Return whether callbacks read losses and norms at a step; the same on all ranks.

        Reading them makes the CPU wait for the GPU.
        """
        trainer = self.config.trainer
        if step == self.first_step + 1 or step >= trainer.steps:
            return True
        interval = GPU_LOOKS if self.hardware.on_gpu else 1
        intervals = (interval, trainer.log_every, trainer.val_every, trainer.checkpoint_every)
        return any(step % steps == 0 for steps in intervals)

    def record(self, *, write: bool = False, **fields: Any) -> None:
        """Change fields of the run's status, on the first rank alone; see `Status.update`."""
        if self.status:
            self.status.update(write=write, **fields)

    def last_good(self) -> str:
        """Return a sentence on the last checkpoint, for the message of a run that ends early."""
        if self.saved_step is None:
            return "no checkpoint had been written yet"
        path = self.folder / "checkpoints" / "last.ckpt"
        return f"the last good checkpoint is {path} (step {self.saved_step:,})"

    def leave_at_once(self, how: str, code: int = 1) -> None:
        """End this process, and the ranks that it started, in the middle of a step.

        Called upon a second signal, or when one of these ranks has ended.
        """
        reason = f"{how}; {self.last_good()}"
        # Not `say`: the main thread may hold its lock while it waits for a lost process.
        with contextlib.suppress(OSError):
            print(f"rtx: {reason}" if code == 1 else reason, flush=True)
            if self.saved_step is not None:
                print(f"continue with: rtx resume {shown(self.folder)}", flush=True)
        if self.status:
            self.status.end(state_after(code), reason)
        for child in self.children:
            child.kill()
        os._exit(code)
