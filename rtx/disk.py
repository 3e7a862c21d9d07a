"""Whole files, names that last, and the errors of a full disk."""

import errno
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from rtx.errors import UserError

MARK = ".writing"  # ends the name of a file that is being written; without its writer it may be deleted


def is_full(error: OSError) -> bool:
    """Tell whether an error means that no more can be written: a full disk, a spent quota, a file over its limit."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def open_regular(path: Path, mode: str = "rb", *, follow: bool = True) -> BinaryIO:
    """Open a regular file; OSError for what is none: a FIFO, a device, a folder.

    Nobody need open the other end of a FIFO. With `follow=False` a link is an error, too: it may
    lead anywhere.
    """
    kept = os.O_NONBLOCK if follow else os.O_NONBLOCK | os.O_NOFOLLOW

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | kept, 0o666)

    try:
        file = open(path, mode, opener=opener)  # noqa: SIM115
    except ValueError as error:
        raise OSError(errno.EINVAL, "Not the name of a file", str(path)) from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    return cast(BinaryIO, file)


def open_no_link(path: Path, mode: str) -> IO[Any]:
    """Open a file, in any mode; OSError for a link, which may lead anywhere.

    A pipe is an error, too: nobody need open its other end.
    """

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)

    return open(path, mode, opener=opener)


def read_file(path: Path) -> bytes:
    """Return the bytes of a regular file; OSError for what is none."""
    with open_regular(path) as file:
        return file.read()


def refuse_link(path: Path) -> None:
    """Raise `UserError` for a link in place of what is made or deleted: it may lead anywhere."""
    if path.is_symlink():
        rule = "behind which rtx makes and deletes nothing"
        raise UserError(f"{path}: is a link, {rule}; remove it, then again")


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk (a file's bytes are synced by whoever writes them)."""
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def write_beside(path: Path, write: Callable[[BinaryIO], object], *, durable: bool = True) -> Path:
    """Write a temporary file in the folder of `path` and return its path; nothing is left behind on an error."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}{MARK}")
    temporary.unlink(missing_ok=True)  # of a process that had this number before
    try:
        with open(temporary, "x+b") as file:  # which follows no link
            write(file)
            file.flush()
            if durable:
                os.fsync(file.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def replace_file(path: Path, write: Callable[[BinaryIO], object], *, durable: bool = True) -> None:
    """Let `write` fill a file beside `path`, and rename it; `durable`: wait until both are on the disk."""
    os.replace(write_beside(path, write, durable=durable), path)
    if durable:
        sync_folder(path.parent)


def remove_leftovers(folder: Path) -> None:
    """Delete what writers that were killed have left in a folder."""
    for leftover in folder.glob(f".*{MARK}"):
        leftover.unlink(missing_ok=True)


def write_json(path: Path, content: Any, *, durable: bool = True) -> None:
    """Replace a file with `content` as indented JSON."""
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    replace_file(path, lambda file: file.write(text.encode()), durable=durable)
