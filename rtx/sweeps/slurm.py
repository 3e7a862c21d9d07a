"""Cells as jobs of Slurm, by submitit: a `Job` is polled and signalled like a local process.

hydra-submitit-launcher submits all cells as one array and loses all to the first that fails.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import pickle
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rtx.disk import append, is_file_inside, read_inside, status_inside
from rtx.errors import UserError
from rtx.sweeps.cells import Cell
from rtx.sweeps.launcher import OUTPUT, Starter, start
from rtx.sweeps.outcomes import NO_CODE

QUEUE_SECONDS = 5.0
"""Seconds between two queries of the queue of a cluster."""
RESULT_SECONDS = 15.0
"""Seconds in which the result of a job must appear on a shared disk."""
JOBS = ".submitit"
"""The folder of submitit's files, in that of the sweep."""
SHARED = (
    "timeout_min",
    "cpus_per_task",
    "gpus_per_node",
    "tasks_per_node",
    "mem_gb",
    "nodes",
    "name",
    "stderr_to_stdout",
)
"""Parameters that submitit has for every kind of cluster; the others are Slurm's."""


def submitter(parameters: Mapping[str, Any]) -> Starter:
    """Return the function that submits the job of a cell with parameters of submitit."""
    if shutil.which("srun") is None:
        instead = "hardware=auto runs the cells here"
        raise UserError(f"hardware=slurm: there is no srun on this machine; {instead}")
    # An extra.
    import submitit

    timeouts = parameters["max_num_timeout"]
    requested = {}
    for name, value in parameters.items():
        if name != "max_num_timeout":
            requested[name if name in SHARED else f"slurm_{name}"] = value

    def submit(cell: Cell) -> Job:
        folder = make_jobs_folder(cell.folder.parent) / "%j"
        request = dict(requested)
        request["name"] = request["name"] or cell.config.name
        try:
            # An rtx.py in the current folder must not be imported in place of ours.
            with submitit.helpers.environment_variables(PYTHONSAFEPATH="1"):
                executor = submitit.AutoExecutor(
                    folder, cluster="slurm", slurm_max_num_timeout=timeouts
                )
                executor.update_parameters(**request)
                return Job(executor.submit(Attempt(cell.overrides, cell.folder)), cell.folder)
        except Exception as error:
            # submitit raises errors of many kinds.
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise UserError(f"its job cannot be submitted: {lines[-1]}") from error

    return submit


def make_jobs_folder(sweep: Path) -> Path:
    """Make the folder of submitit's files, and return it.

    A job runs what it finds there, so `UserError` for a link, and where another user may write.
    """
    folder = sweep / JOBS
    with contextlib.suppress(FileExistsError):
        # by path: it follows no link of this name, and the mode keeps other users out
        os.mkdir(folder, 0o700)
    status = status_inside(sweep, JOBS)
    is_private = (
        status is not None
        and status.st_uid == os.getuid()
        and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    )
    if not is_private:
        problem = "jobs run what is in it, and another user may write there"
        raise UserError(f"{folder}: {problem}; move it away, and rtx makes it anew")
    return folder


class PlainUnpickler(pickle.Unpickler):
    """Reads texts, numbers and tuples of them alone: a pickle of anything else may run code."""

    def find_class(self, module: str, name: str, /) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is none of them")


def returned_code(content: bytes) -> int | None:
    """Return the exit code in a file by submitit on the end of a job; None: it failed."""
    try:
        outcome, result = PlainUnpickler(io.BytesIO(content)).load()
    # A damaged pickle raises errors of many kinds.
    except Exception:
        return None
    return result if outcome == "success" and isinstance(result, int) else None


@functools.lru_cache(maxsize=1)
def queue(moment: int) -> set[str] | None:
    """Return the numbers of the user's jobs in the queue, None if it does not answer.

    The queue is asked once in a `moment`.
    """
    # submitit asks `sacct`, which without accounting never reports the end of a job that was
    # killed.
    answer = subprocess.run(
        ["squeue", "--me", "--noheader", "--format=%i"], capture_output=True, text=True
    )
    return None if answer.returncode else set(answer.stdout.split())


class Job:
    """The job of a cell."""

    def __init__(self, job: Any, folder: Path) -> None:
        self.job = job
        self.folder = folder
        self.seen = time.monotonic()
        """When it was last in the queue."""

    def poll(self) -> int | None:
        """Return the exit code that the job returned, None before its end.

        `NO_CODE`: it ended without a result. Then the last line of its log is added to the cell's
        output.
        """
        queued = queue(int(time.monotonic() / QUEUE_SECONDS))
        if queued is None or self.job.job_id in queued:
            self.seen = time.monotonic()
            return None
        sweep = self.folder.parent
        result = Path(JOBS, self.job.job_id, self.job.paths.result_pickle.name)
        if is_file_inside(sweep, result):
            code = returned_code(read_inside(sweep, result))
            if code is not None:
                return code
        elif time.monotonic() - self.seen < RESULT_SECONDS:
            return None
        log = f"{self.job.stdout() or ''}\n{self.job.stderr() or ''}".strip().splitlines()
        last = log[-1] if log else "it left no word"
        append(self.folder, OUTPUT, f"rtx: its job ended: {last}\n".encode())
        return NO_CODE

    def send_signal(self, number: int, /) -> None:
        """Cancel the job.

        One that runs saves first, and is killed only where that takes too long.
        """
        self.job.cancel(check=False)


class Attempt:
    """What a job runs: the process of a cell."""

    def __init__(self, words: Sequence[str], folder: Path) -> None:
        self.words = words
        self.folder = folder

    def __call__(self) -> int:
        """Run the process to its end; returns its exit code."""
        self.process = start(self.words, self.folder, {})
        # A scheduler may have signalled the cell, too: a second SIGUSR2 changes nothing.
        signal.signal(signal.SIGTERM, lambda *_: self.process.send_signal(signal.SIGUSR2))
        while (code := self.process.poll()) is None:
            time.sleep(0.5)
        return code

    def checkpoint(self) -> Any:
        """Let the cell save, and return what runs when the job comes back.

        It has interrupted `__call__`.
        """
        from submitit.helpers import DelayedSubmission

        self.process.send_signal(signal.SIGUSR2)
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        return DelayedSubmission(Attempt(self.words, self.folder))
