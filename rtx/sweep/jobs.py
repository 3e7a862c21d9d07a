"""The cells of a sweep as jobs of Slurm, by submitit.

`hydra.launcher.*` says what a job asks for, as hydra-submitit-launcher has it; its launcher is not used, for it waits
for all jobs together and loses what they return to the first that fails.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import submitit
from hydra_plugins.hydra_submitit_launcher.config import BaseQueueConf
from omegaconf import OmegaConf

from rtx.compose import composed, user_errors
from rtx.errors import UserError
from rtx.options import SweepOptions
from rtx.sweep.cells import NO_CODE, Cell
from rtx.sweep.launcher import OUTPUT, Launcher, share, start

QUEUE_SECONDS = 5.0
"""Time between two looks at the queue of a cluster."""
RESULT_SECONDS = 15.0
"""Time for what a job returns to appear on a disk that machines share."""


class SlurmLauncher(Launcher):
    """Runs every cell as a job, all at once: as the queue takes them."""

    def __init__(self, cells: Sequence[Cell], options: SweepOptions, words: Sequence[str]) -> None:
        if shutil.which("srun") is None:
            raise UserError("hardware=slurm: there is no srun on this machine; hardware=auto runs the cells here")
        super().__init__(cells, options, len(cells))
        self.quiet, name = True, json.dumps(cells[0].config.name, ensure_ascii=False)
        with user_errors():
            asked: Any = OmegaConf.to_container(composed((*words, f"name={name}")).hydra.launcher, resolve=True)
        del asked["_target_"], asked["submitit_folder"]
        self.timeouts, shared = asked.pop("max_num_timeout"), {field.name for field in fields(BaseQueueConf)}
        self.asked = {key if key in shared else f"slurm_{key}": value for key, value in asked.items()}

    def begin(self, cell: Cell, place: int) -> Job:
        """Submit the job of a cell; an rtx.py in the current folder is not to be run for ours."""
        try:
            with submitit.helpers.environment_variables(PYTHONSAFEPATH="1"):
                folder = cell.folder.parent / ".submitit" / "%j"
                executor = submitit.AutoExecutor(folder, cluster="slurm", slurm_max_num_timeout=self.timeouts)
                executor.update_parameters(**self.asked)
                return Job(executor.submit(Attempt(cell.overrides, cell.folder, share(cell))), cell.folder)
        except Exception as error:  # by whatever name submitit calls it
            said = str(error).strip().splitlines() or [type(error).__name__]
            raise UserError(f"its job cannot be submitted: {said[-1]}") from error


@functools.lru_cache(maxsize=1)
def queue(moment: int) -> set[str] | None:
    """Return the numbers of the user's jobs in the queue, None where it does not answer; asked once in a `moment`.

    (submitit asks `sacct`, which on a cluster without accounts never tells of the end of a job that was killed.)
    """
    answer = subprocess.run(["squeue", "--me", "--noheader", "--format=%i"], capture_output=True, text=True)
    return None if answer.returncode else set(answer.stdout.split())


class Job:
    """The job of a cell, polled and signalled as a process is."""

    def __init__(self, job: submitit.Job[Any], folder: Path) -> None:
        self.job, self.folder, self.seen = job, folder, time.monotonic()

    def poll(self) -> int | None:
        """Return what the job has returned, or `NO_CODE` where it is gone without; its last line is the cell's then."""
        if (queued := queue(int(time.monotonic() / QUEUE_SECONDS))) is None or self.job.job_id in queued:
            self.seen = time.monotonic()
            return None
        if self.job.paths.result_pickle.exists():
            with contextlib.suppress(Exception):  # of the job, by whatever name submitit calls it
                return self.job.result()
        elif time.monotonic() - self.seen < RESULT_SECONDS:
            return None
        log = f"{self.job.stdout() or ''}\n{self.job.stderr() or ''}".strip().splitlines()
        with open(self.folder / OUTPUT, "a") as output:
            output.write(f"rtx: its job ended: {log[-1] if log else 'it left no word'}\n")
        return NO_CODE

    def send_signal(self, number: int) -> None:
        """Take the job from the queue; one that runs saves, and is killed only where that takes too long."""
        self.job.cancel(check=False)


class Attempt:
    """What a job runs: the process of a cell."""

    def __init__(self, words: Sequence[str], folder: Path, variables: Mapping[str, str]) -> None:
        self.given = words, folder, variables

    def __call__(self) -> int:
        """Run the process to its end; returns its exit code."""
        self.process = start(*self.given)
        # A scheduler may have told the cell, too: a second SIGUSR2 changes nothing.
        signal.signal(signal.SIGTERM, lambda *_: self.process.send_signal(signal.SIGUSR2))
        while (code := self.process.poll()) is None:
            time.sleep(0.5)
        return code

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """Let the cell save, and return what is to be run when the job comes back: its time is nearly up.

        submitit calls this in a signal handler, which has interrupted `__call__`.
        """
        self.process.send_signal(signal.SIGUSR2)
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        return submitit.helpers.DelayedSubmission(Attempt(*self.given))
