"""Writing folders so that nobody ever sees half of one: locks, temporary siblings, renames, and errors in one line."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rtx.disk import is_full, sync_folder
from rtx.errors import RunFailed, UserError

REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)
DAY = 24 * 3600.0
LOCK_TIMEOUT = 3600.0  # seconds; a lock whose owner died is free at once, so this is patience with a living one

Report = Callable[[str], object]


@contextlib.contextmanager
def disk_errors(root: Path) -> Iterator[None]:
    """Turn an OSError of writing below `root` into one line that says what to do.

    Raises:
        RunFailed: the disk is full.
        UserError: the folder cannot be written, or is no folder.
    """
    try:
        yield
    except OSError as error:
        if is_full(error):
            raise RunFailed(
                f"{root}: no space left to write; free some, or set RTX_DATA to a folder on a larger disk"
            ) from error
        reason = error.strerror or str(error)
        if error.errno in REFUSED:
            raise UserError(
                f"{root}: cannot be written ({reason}); set RTX_DATA to a folder that you may write"
            ) from error
        raise UserError(f"{error.filename or root}: {reason}") from error


def need_space(root: Path, size: int) -> None:
    """Raise RunFailed if the disk of `root` has less than `size` bytes free."""
    free = shutil.disk_usage(root).free
    if free < size:
        raise RunFailed(
            f"{root}: {size:,} bytes are needed and {free:,} are free; "
            "free some, or set RTX_DATA to a folder on a larger disk"
        )


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file's bytes, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def locked(path: Path, what: str, report: Report, timeout: float | None = None) -> Iterator[None]:
    """Hold the lock file `path` while the block runs; it is removed afterwards, and free at once if its owner dies.

    Where the file system has no locks the block runs without: then only the renames keep two processes apart.

    Raises:
        RunFailed: another process held it for longer than `timeout` seconds (unset: an hour).
    """
    handle = _acquire(path, what, report, LOCK_TIMEOUT if timeout is None else timeout)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)


def _acquire(path: Path, what: str, report: Report, timeout: float) -> int:
    deadline = time.monotonic() + timeout
    told = False
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(handle, 200, 0).decode(errors="replace").strip() or "another process"
            os.close(handle)
            if time.monotonic() > deadline:
                raise RunFailed(
                    f"{path}: {owner} has held this lock for {timeout:.0f} s; end it, then try again"
                ) from None
            if not told:
                report(f"{what}: waiting for {owner}, which is preparing it")
            told = True
            time.sleep(0.1)
            continue
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                os.close(handle)
                raise
        if _still_there(handle, path):
            os.truncate(handle, 0)
            os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
            return handle
        os.close(handle)  # the last owner removed the file between our open and our lock


def is_held(path: Path) -> bool:
    """Tell whether a process holds the lock file `path`; where the file system has no locks nobody does."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _still_there(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def temporary_sibling(folder: Path, use: str = "new") -> Path:
    """Return the name, hidden and beside `folder`, that this process may use for a folder in the making."""
    return folder.with_name(f".{folder.name}.{use}.tmp-{socket.gethostname()}-{os.getpid()}")


def write_whole(path: Path, content: bytes) -> None:
    """Write a file beside its place, durably, and rename it there: it is replaced at once, or stays as it was."""
    temporary = temporary_sibling(path)
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def remove_leftovers(root: Path, ours: Path) -> None:
    """Remove the temporary folders in `root` whose owner is dead: a process that was killed while it prepared.

    `ours`: the folder whose lock we hold; an earlier process with our number may have left something under its name.
    Owners on other machines cannot be asked: what they left goes after a day.
    """
    for path in root.glob(".*.tmp-*-*"):
        owner = path.name.rpartition(".tmp-")[2]
        host, _, process = owner.rpartition("-")
        if host == socket.gethostname() and process.isdecimal():
            mine = int(process) == os.getpid()
            dead = path.name.startswith(f".{ours.name}.") if mine else not _alive(int(process))
        else:
            dead = _age(path) > DAY
        if dead:
            shutil.rmtree(path, ignore_errors=True)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it lives, and is not ours
        return True
    return True


def _age(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def install(temporary: Path, folder: Path) -> None:
    """Put the finished folder `temporary` in the place of `folder`, durably, by renames; what stood there goes."""
    sync_folder(temporary)
    aside = temporary_sibling(folder, "old")
    with contextlib.suppress(FileNotFoundError):
        os.rename(folder, aside)
    os.rename(temporary, folder)
    sync_folder(folder.parent)
    shutil.rmtree(aside, ignore_errors=True)
