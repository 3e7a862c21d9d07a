"""The lock of a run's folder, and the status of the run from its start to its end."""

import contextlib
import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from rtx.disk import is_full, open_no_link, remove_leftovers
from rtx.errors import RunFailed, UserError
from rtx.machine import out_of_memory, system_reason
from rtx.processes import launch
from rtx.runs.folder import unwritable
from rtx.runs.records import StatusRecord
from rtx.runs.signals import Stopped, state_after
from rtx.runs.status import Status, read_status, seems_running

LESS_MEMORY = (
    "a smaller trainer.micro_batch_size, or model.recompute=true, needs less with the same result"
)


def lock(file: IO[bytes], folder: Path) -> None:
    """Keep two runs out of one folder until the file is closed or the process ends.

    `UserError` where another process has the lock. The lock is fcntl's: children do not inherit it.
    """
    status = read_status(folder)
    is_busy = False
    if status is not None and status.host != socket.gethostname():
        is_busy = seems_running(status)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        is_busy = True
    except OSError:
        # Some file systems have no locks.
        pass
    if is_busy:
        raise UserError(busy(folder, read_status(folder)))


def refuse_busy(folder: Path) -> None:
    """Raise `UserError` early for a run that another process works on; `working_in` locks it."""
    status = read_status(folder)
    rank = launch().rank
    # The first process of a run has the lock for all of them.
    if rank > 0 or status is None or not seems_running(status):
        return
    # A process that opens and closes the file of its own lock loses the lock.
    if status.pid == os.getpid():
        return
    with contextlib.suppress(OSError), open_no_link(folder / "lock", "r+b") as file:
        lock(file, folder)


def busy(folder: Path, status: StatusRecord | None) -> str:
    """Return the message for a folder that is in use."""
    user = "another process"
    if status and seems_running(status):
        user = f"process {status.pid} on {status.host}"
    return f"{folder} is in use by {user}; wait for it, or stop it first"


@contextlib.contextmanager
def working_in(folder: Path, begin: Callable[[], object] = lambda: None) -> Iterator[Status]:
    """Lock a run's folder, call `begin`, and yield the status of the run.

    At the end of the block the status is done, or failed, or that of a signal. After `UserError` it
    is as before.
    """
    with contextlib.ExitStack() as stack:
        try:
            (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(open_no_link(folder / "lock", "a+b"))
            lock(file, folder)
            remove_leftovers(folder)
            remove_leftovers(folder / "checkpoints")
            begin()
            status = Status(folder)
        except OSError as error:
            raise UserError(unwritable(folder, error)) from error
        try:
            yield status
            status.end("done")
        except Stopped as stop:
            status.end(state_after(stop.code), str(stop))
            raise
        except BaseException as error:
            end_failed(status, error)
            refuse_disk_or_memory(folder, error)
            raise


def end_failed(status: Status, error: BaseException) -> None:
    """Write that a run has failed, or after `UserError` the status that it had before."""
    if isinstance(error, UserError):
        status.restore()
    status.end("failed", out_of_memory(error) or str(error) or type(error).__name__)


def refuse_disk_or_memory(folder: Path, error: BaseException) -> None:
    """Raise `RunFailed` with a remedy where a disk or the memory is full."""
    reason = out_of_memory(error)
    if reason:
        raise RunFailed(f"{reason}\n{LESS_MEMORY}") from error
    if isinstance(error, OSError):
        problem = f"{folder} cannot be worked in: {error}"
        if is_full(error):
            problem = f"the disk of {folder} is full: {error}"
        elif isinstance(error, BlockingIOError):
            problem = system_reason(error)
        raise RunFailed(problem) from error
