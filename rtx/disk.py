"""Files that are replaced as a whole, files that are no links, and the errors of a full disk."""

import errno
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from rtx.errors import UserError

MARK = ".writing"
"""Ends the name of a temporary file; after a crash it may be deleted."""


def is_full(error: OSError) -> bool:
    """Return whether an error means a full disk, a spent quota or a file over its size limit."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def open_regular(path: Path, mode: str = "rb", *, follow: bool = True) -> BinaryIO:
    """Open a regular file; OSError for a FIFO, a device or a folder.

    Opening never blocks, as it would for a FIFO that nothing writes to. With `follow=False` a link
    is an error, too: it may lead anywhere.
    """
    extra_flags = os.O_NONBLOCK
    if not follow:
        extra_flags |= os.O_NOFOLLOW

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | extra_flags, 0o666)

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

    A FIFO that nothing reads is an error, too, in place of a wait.
    """

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)

    return open(path, mode, opener=opener)


def read_file(path: Path) -> bytes:
    """Return the bytes of a regular file; OSError for any other kind of file."""
    with open_regular(path) as file:
        return file.read()


def refuse_link(path: Path) -> None:
    """Raise `UserError` if a path is a link; rtx would write or delete wherever it leads."""
    if path.is_symlink():
        rule = "behind which rtx makes and deletes nothing"
        raise UserError(f"{path}: is a link, {rule}; remove it, then again")


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk; the bytes of files are synced apart."""
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def write_beside(path: Path, write: Callable[[BinaryIO], object], *, durable: bool = True) -> Path:
    """Write a temporary file in the folder of `path` and return its path; delete it on an error."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}{MARK}")
    # An earlier process with the same id may have left one.
    temporary.unlink(missing_ok=True)
    try:
        # Mode x follows no link.
        with open(temporary, "x+b") as file:
            write(file)
            file.flush()
            if durable:
                os.fsync(file.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def replace_file(path: Path, write: Callable[[BinaryIO], object], *, durable: bool = True) -> None:
    """Let `write` fill a temporary file, and rename it to `path`.

    `durable`: wait until the bytes and the name are on the disk.
    """
    os.replace(write_beside(path, write, durable=durable), path)
    if durable:
        sync_folder(path.parent)


def remove_leftovers(folder: Path) -> None:
    """Delete the temporary files of killed processes in a folder."""
    for leftover in folder.glob(f".*{MARK}"):
        leftover.unlink(missing_ok=True)


def write_json(path: Path, content: Any, *, durable: bool = True) -> None:
    """Replace a file with `content` as indented JSON."""
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    replace_file(path, lambda file: file.write(text.encode()), durable=durable)
