"""The lock of a run's folder, and the status of the run from its start to its end."""

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Callable, Generator
from pathlib import Path
from typing import BinaryIO

from rtx.disk import is_full, make_folder, open_inside, remove_leftovers, status_inside
from rtx.errors import RunFailed, UserError
from rtx.machine import out_of_memory, system_reason
from rtx.processes import launch
from rtx.runs.folder import LOCK, refuse_links, unwritable
from rtx.runs.records import StatusRecord
from rtx.runs.signals import Stopped, state_after
from rtx.runs.status import Status, read_status, seems_running

WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of a file system that has no locks."""
LESS_MEMORY = (
    "a smaller trainer.micro_batch_size, or model.recompute=true, needs less with the same result"
)


def lock(folder: Path) -> BinaryIO:
    """Keep two runs out of one folder until the returned file is closed or the process ends.

    `UserError` where another process has the lock. The lock is fcntl's: children do not inherit it.
    """
    while True:
        # A lock tells nothing where its file was removed, and some file systems have no locks.
        refuse_busy(folder)
        file = open_inside(folder, LOCK, "a+")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            file.close()
            raise UserError(busy(folder, read_status(folder))) from None
        except OSError as error:
            if error.errno not in WITHOUT_LOCKS:
                file.close()
                raise
        # Another process may have removed and made it between the two calls above.
        named = status_inside(folder, LOCK)
        if named is not None and os.path.samestat(named, os.fstat(file.fileno())):
            return file
        file.close()


def refuse_busy(folder: Path) -> None:
    """Raise `UserError` for a run that another process works on, by its status."""
    status = read_status(folder)
    # The first process of a run has the lock for all of them.
    if launch().rank > 0 or status is None:
        return
    is_ours = (status.pid, status.host) == (os.getpid(), socket.gethostname())
    if seems_running(status) and not is_ours:
        raise UserError(busy(folder, status))


def busy(folder: Path, status: StatusRecord | None) -> str:
    """Return the message for a folder that is in use."""
    user = "another process"
    if status and seems_running(status):
        user = f"process {status.pid} on {status.host}"
    return f"{folder} is in use by {user}; wait for it, or stop it first"


@contextlib.contextmanager
def working_in(folder: Path, begin: Callable[[], object] = lambda: None) -> Generator[Status]:
    """Lock a run's folder, call `begin`, and yield the status of the run.

    At the end of the block the status is done, or failed, or that of a signal. After `UserError` it
    is as before.
    """
    with contextlib.ExitStack() as stack:
        try:
            make_folder(folder)
            refuse_links(folder)
            make_folder(folder, "checkpoints")
            stack.enter_context(lock(folder))
            remove_leftovers(folder)
            remove_leftovers(folder, "checkpoints")
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
