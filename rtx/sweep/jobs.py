"""The cells of a sweep as jobs of submitit's: of a Slurm cluster, or of this machine to try that out.

`hydra.launcher.*` says what a job asks for, as hydra-submitit-launcher has it; its launcher is not used, for it waits
for all jobs together and loses what they return to the first that fails.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import FrameType
from typing import Any

import submitit
from hydra_plugins.hydra_submitit_launcher.config import BaseQueueConf

from rtx.errors import UserError
from rtx.options import SweepOptions
from rtx.sweep.cells import Cell
from rtx.sweep.launcher import Launcher, Processes, recorded_threads

QUEUE_SECONDS = 5.0
"""Time between two looks at the queue of a cluster."""

RESULT_SECONDS = 15.0
"""Time for what a job returns to appear on a disk that machines share."""


class LocalLauncher(Launcher):
    """Runs every cell as a job of its own on this machine."""

    cluster = "local"

    def __init__(self, cells: Sequence[Cell], options: SweepOptions, at_once: int = 1, **parameters: Any) -> None:
        super().__init__(cells, options, at_once)
        self.quiet = True
        del parameters["submitit_folder"]
        for key in ("nodes", "tasks_per_node"):
            if (value := parameters[key]) != 1:
                advice = "a cell is one task, which starts the processes of hardware=ddp itself"
                raise UserError(f"hydra.launcher.{key}={value}: must be 1; {advice}")
        shared = {field.name for field in fields(BaseQueueConf)}
        self.parameters = {key if key in shared else f"{self.cluster}_{key}": parameters[key] for key in parameters}
        self.jobs: set[submitit.Job[Any]] = set()

    def attempt(self, cell: Cell, place: int) -> tuple[int | None, list[str], bool]:
        """Run the job of a cell to its end, whatever comes of it."""
        # What submitit starts on this machine is spared the keyboard's signals: the sweep tells the jobs.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
        job = self.submit(cell)
        while not self.is_over(job):
            time.sleep(0.5)
        self.jobs.discard(job)
        until = time.monotonic() + RESULT_SECONDS
        while not (left := job.paths.result_pickle.exists()) and time.monotonic() < until:
            time.sleep(0.5)
        with contextlib.suppress(Exception):  # of the job, by whatever name submitit calls it
            if left:
                return *job.result(), False
        log = f"{job.stdout() or ''}\n{job.stderr() or ''}".strip().splitlines()
        return None, [f"its job ended: {log[-1] if log else 'it left no word'}"], "oom" in " ".join(log[-9:]).lower()

    def submit(self, cell: Cell) -> submitit.Job[Any]:
        """Submit the job of a cell."""
        attempt, asked = Attempt(cell.overrides, recorded_threads(cell), cell.folder), dict(self.parameters)
        timeouts = {key: asked.pop(key) for key in list(asked) if key.endswith("max_num_timeout")}
        # An rtx.py in the current folder is not to be run for ours.
        with self.guard, submitit.helpers.environment_variables(PYTHONSAFEPATH="1"):
            try:
                folder = cell.folder.parent / ".submitit" / "%j"
                executor = submitit.AutoExecutor(folder, cluster=self.cluster, **timeouts)
                executor.update_parameters(**asked)
                job = executor.submit(attempt)
            except Exception as error:  # by whatever name submitit calls it
                said = str(error).strip().splitlines() or [type(error).__name__]
                raise UserError(f"its job cannot be submitted: {said[-1]}") from error
            self.jobs.add(job)
            if self.stopped_by:
                self.cancel(job)
        return job

    def is_over(self, job: submitit.Job[Any]) -> bool:
        """Tell whether a job has ended for good."""
        return job.done()

    def cancel(self, job: submitit.Job[Any]) -> None:
        """Tell a job to save and end."""
        with contextlib.suppress(OSError):  # `Job.cancel` sends SIGINT, at which submitit kills
            os.kill(int(job.job_id), signal.SIGTERM)

    def stop(self, number: int, frame: FrameType | None = None) -> None:
        """Handle a signal: no job is submitted any more; those that run save and end, those that wait never begin."""
        first = not self.stopped_by
        super().stop(number, frame)
        with self.guard:
            for job in set(self.jobs) if first else ():
                self.cancel(job)


class SlurmLauncher(LocalLauncher):
    """Runs every cell as a job of Slurm, all at once: as the queue takes them.

    A job is over when the queue no longer has it. submitit asks `sacct`, which on a cluster without accounts never
    tells of the end of a job that was killed; and a job that was put back into the queue has not ended.
    """

    cluster = "slurm"

    def __init__(self, cells: Sequence[Cell], options: SweepOptions, **parameters: Any) -> None:
        if shutil.which("srun") is None:
            advice = "there is no srun; hardware=auto runs the cells here"
            raise UserError(f"this machine is no part of a Slurm cluster: {advice}")
        super().__init__(cells, options, len(cells), **parameters)
        self.queue: set[str] = set()
        self.looked = float("-inf")

    def is_over(self, job: submitit.Job[Any]) -> bool:
        """Look into the queue, for all jobs together."""
        with self.guard:
            if job.job_id not in self.queue or time.monotonic() - self.looked > QUEUE_SECONDS:
                command = ["squeue", "--me", "--noheader", "--format=%i"]
                answer = subprocess.run(command, capture_output=True, text=True)
                if answer.returncode:  # the controller is busy
                    return False
                self.queue, self.looked = set(answer.stdout.split()), time.monotonic()
            return job.job_id not in self.queue

    def cancel(self, job: submitit.Job[Any]) -> None:
        """Take a job from the queue; one that runs gets SIGTERM, and is killed only where it takes too long to save."""
        job.cancel(check=False)


class Attempt:
    """What a job runs: the process of a cell."""

    def __init__(self, words: Sequence[str], variables: Mapping[str, str], folder: Path) -> None:
        self.words, self.variables, self.folder = words, variables, folder

    def __call__(self) -> tuple[int, list[str]]:
        """Run the process to its end; returns its exit code, and its last lines."""
        self.cell = Processes()
        signal.signal(signal.SIGTERM, self.save)
        return self.cell.process(self.words, self.variables, self.folder, shown=False)

    def save(self, *signaled: Any) -> None:
        """Let the cell save and end. A scheduler may have told it, too: a second SIGUSR2 changes nothing."""
        self.cell.stop(signal.SIGUSR2)

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """Let the cell save, and return what is to be run when the job comes back: its time is nearly up.

        submitit calls this in a signal handler, which has interrupted `__call__`.
        """
        self.save()
        for process in self.cell.processes:
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        return submitit.helpers.DelayedSubmission(Attempt(self.words, self.variables, self.folder))


LAUNCHERS = {"slurm": SlurmLauncher, "submitit_local": LocalLauncher}
"""By the options of hardware."""
