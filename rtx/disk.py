"""Open, write, rename and delete the files of runs, stores, exports, caches, sweeps and reports.

Most functions take a folder, which the user names or RTX_OUTPUTS or RTX_DATA, and a name below it.
The folder and its parents may be links. The name is a relative path, and no link in it is followed:
it could make rtx read or write any file. (Renaming or deleting a link acts on the link itself.)
Each part is opened by the descriptor of the one before, so that no link can come in between. Files
must be regular. No call waits for a FIFO. No owner is checked, so none of it loads code.
"""

import contextlib
import errno
import fnmatch
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, BinaryIO, cast

from rtx.errors import UserError

MARK = ".writing"
"""Ends the name of a temporary file; after a crash it may be deleted."""
ITSELF = "."
"""The name that means the folder itself."""
MOST_BYTES = 1 << 30
"""The most bytes of a file that is read whole, where its reader names no limit."""
OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY
Name = str | PurePath
"""A relative path below a folder, with slashes."""


class LinkRefused(UserError):
    """A link below a folder in which rtx works."""

    def __init__(self, folder: Path, path: Path) -> None:
        self.path = path
        rule = f"is a link, and rtx follows none below {folder}"
        remedy = "put what it leads to in its place, or move that folder as a whole and link to it"
        super().__init__(f"{path}: {rule}; {remedy}")


def is_full(error: OSError) -> bool:
    """Return whether an error means a full disk, a spent quota or a file over its size limit."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def parts_of(folder: Path, name: Name) -> tuple[str, ...]:
    """Return the parts of a name, none for `ITSELF`; OSError where it leads out of the folder."""
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts or "\0" in str(name):
        raise OSError(errno.EINVAL, "Not the name of a file below its folder", f"{folder}/{name}")
    return pure.parts


class Opened:
    """An open folder, `folder` or one below it; errors of its methods have the whole path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder
        try:
            self.descriptor = os.open(folder, OPEN_FOLDER)
        except ValueError as error:
            raise OSError(errno.EINVAL, "Not the name of a folder", str(folder)) from error

    def enter(self, part: str) -> None:
        """Go on to a folder in this one."""
        inner = self.open(part, OPEN_FOLDER)
        self.close()
        self.descriptor = inner
        self.path = self.path / part

    def open(self, part: str, flags: int) -> int:
        """Return the descriptor of a file or folder in this one."""
        with self.errors(part):
            return os.open(part, flags | os.O_NOFOLLOW, 0o666, dir_fd=self.descriptor)

    def status(self, part: str) -> os.stat_result | None:
        """Return the status of a file or folder; None on any error; LinkRefused for a link."""
        try:
            status = os.stat(part, dir_fd=self.descriptor, follow_symlinks=False)
        except OSError:
            return None
        if stat.S_ISLNK(status.st_mode):
            raise LinkRefused(self.folder, self.path / part)
        return status

    def close(self) -> None:
        os.close(self.descriptor)

    @contextlib.contextmanager
    def errors(self, part: str) -> Iterator[None]:
        """Raise an OSError again with the whole path, or `LinkRefused` if `part` is a link."""
        try:
            yield
        except OSError as error:
            # Raises LinkRefused for a link.
            self.status(part)
            path = str(self.path / part)
            raise OSError(error.errno, error.strerror or str(error), path) from error


@contextlib.contextmanager
def opened(folder: Path, parts: tuple[str, ...], *, make: bool = False) -> Iterator[Opened]:
    """Open a folder below another one, and close it after the block; `make` missing folders."""
    place = Opened(folder)
    try:
        for part in parts:
            if make:
                with contextlib.suppress(FileExistsError), place.errors(part):
                    os.mkdir(part, dir_fd=place.descriptor)
            place.enter(part)
        yield place
    finally:
        place.close()


@contextlib.contextmanager
def beside(folder: Path, name: Name) -> Iterator[tuple[Opened, str]]:
    """Open the folder in which a file is; yield it, and the last part of the file's name."""
    parts = parts_of(folder, name)
    if not parts:
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(folder))
    with opened(folder, parts[:-1]) as place:
        yield place, parts[-1]


def regular(path: Path, mode: str, opener: Callable[[str, int], int]) -> BinaryIO:
    """Return an open regular file; OSError for any other kind of file."""
    try:
        file = open(path, f"{mode}b", opener=opener)  # noqa: SIM115
    except OSError as error:
        # ENXIO: a socket, or a FIFO without a reader. None: Python's error if a file cannot seek.
        if error.errno not in (errno.ENXIO, None):
            raise
        raise OSError(errno.EINVAL, "Not a regular file", str(path)) from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    return cast(BinaryIO, file)


def open_inside(folder: Path, name: Name, mode: str = "r") -> BinaryIO:
    """Open a file below a folder: to read it (r, r+), append to it (a, a+) or create it (x+)."""
    with beside(folder, name) as (place, last):
        path = place.path / last
        return regular(path, mode, lambda _, flags: place.open(last, flags | os.O_NONBLOCK))


def open_named(path: Path) -> BinaryIO:
    """Open a file that the user has named, also by a link, to read it."""
    if "\0" in str(path):
        raise OSError(errno.EINVAL, "Not the name of a file", str(path))
    return regular(path, "r", lambda name, flags: os.open(name, flags | os.O_NONBLOCK))


def read_open(file: BinaryIO, largest: int) -> bytes:
    """Return the bytes of a file; OSError where they are more than `largest`."""
    size = os.fstat(file.fileno()).st_size
    if size > largest:
        problem = f"{size:,} bytes, more than the {largest:,} that it may have"
        raise OSError(errno.EINVAL, problem, file.name)
    return file.read()


def read_inside(folder: Path, name: Name, largest: int = MOST_BYTES) -> bytes:
    """Return the bytes of a file below a folder; OSError where they are more than `largest`."""
    with open_inside(folder, name) as file:
        return read_open(file, largest)


def read_named(path: Path, largest: int = MOST_BYTES) -> bytes:
    """Return the bytes of a file that the user has named; OSError for more than `largest`."""
    with open_named(path) as file:
        return read_open(file, largest)


def status_inside(folder: Path, name: Name) -> os.stat_result | None:
    """Return the status of a file or folder; None if there is none; LinkRefused for a link."""
    try:
        with beside(folder, name) as (place, last):
            return place.status(last)
    except (FileNotFoundError, NotADirectoryError):
        return None


def is_file_inside(folder: Path, name: Name) -> bool:
    """Return whether there is a regular file of this name."""
    status = status_inside(folder, name)
    return status is not None and stat.S_ISREG(status.st_mode)


def names_inside(folder: Path, name: Name = ITSELF, pattern: str = "*") -> list[str]:
    """Return the names in a folder that match a pattern, in order; none without the folder."""
    try:
        with opened(folder, parts_of(folder, name)) as place:
            return sorted(fnmatch.filter(os.listdir(place.descriptor), pattern))
    except (FileNotFoundError, NotADirectoryError):
        return []


def append(folder: Path, name: Name, content: bytes) -> None:
    """Append to a file below a folder; create the file if it is missing."""
    with open_inside(folder, name, "a") as file:
        file.write(content)


def replace_inside(
    folder: Path,
    name: Name,
    write: Callable[[BinaryIO], object],
    *,
    durable: bool = True,
    former: str | None = None,
) -> None:
    """Let `write` fill a temporary file, and rename it to `name`; on an error delete it.

    Args:
        durable: whether to wait until the bytes and the name are on the disk.
        former: the new name of the file that had this name; None: that file is replaced.
    """
    with beside(folder, name) as (place, last):
        temporary = f".{last}.{os.getpid()}{MARK}"
        # An earlier process with the same id may have left one.
        unlink(place, temporary)
        try:
            path = place.path / temporary
            with regular(path, "x+", lambda _, flags: place.open(temporary, flags)) as file:
                write(file)
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            if former is not None:
                with contextlib.suppress(FileNotFoundError):
                    rename(place, last, former)
            rename(place, temporary, last)
        except BaseException:
            unlink(place, temporary)
            raise
        if durable:
            os.fsync(place.descriptor)


def rename(place: Opened, part: str, new: str) -> None:
    """Rename a file or folder in an open folder."""
    with place.errors(new):
        os.replace(part, new, src_dir_fd=place.descriptor, dst_dir_fd=place.descriptor)


def unlink(place: Opened, part: str) -> None:
    """Delete a file in an open folder; a missing one is no error."""
    with contextlib.suppress(FileNotFoundError), place.errors(part):
        os.unlink(part, dir_fd=place.descriptor)


def write_inside(folder: Path, name: Name, content: bytes, *, durable: bool = True) -> None:
    """Replace a file below a folder as a whole."""
    replace_inside(folder, name, lambda file: file.write(content), durable=durable)


def write_json(folder: Path, name: Name, content: Any, *, durable: bool = True) -> None:
    """Replace a file with `content` as indented JSON."""
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    write_inside(folder, name, text.encode(), durable=durable)


def rename_inside(folder: Path, name: Name, new: str) -> None:
    """Rename a file or folder within its folder."""
    with beside(folder, name) as (place, last):
        rename(place, last, new)


def make_folder(folder: Path, name: Name = ITSELF) -> Path:
    """Make a folder, and those that lead to it, where they are missing; return its path."""
    parts = parts_of(folder, name)
    folder.mkdir(parents=True, exist_ok=True)
    with opened(folder, parts, make=True) as place:
        return place.path


def remove_file(folder: Path, name: Name) -> None:
    """Delete a file, or a link; a missing one is no error."""
    with contextlib.suppress(FileNotFoundError), beside(folder, name) as (place, last):
        unlink(place, last)


def remove_tree(folder: Path, name: Name, *, ignore_errors: bool = False) -> None:
    """Delete a folder with all in it; a missing one is no error."""
    with contextlib.suppress(FileNotFoundError), beside(folder, name) as (place, last):
        # Raises LinkRefused for a link.
        place.status(last)
        shutil.rmtree(last, ignore_errors, dir_fd=place.descriptor)


def remove_leftovers(folder: Path, name: Name = ITSELF) -> None:
    """Delete the temporary files of killed processes in a folder."""
    for leftover in names_inside(folder, name, f".*{MARK}"):
        remove_file(folder, PurePosixPath(name, leftover))
