"""Files as a source of bytes: which ones a path means, in which order, and how they are read."""

from __future__ import annotations

import glob
import os
import stat
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rtx.errors import UserError, nearest

CHUNK = 1 << 20
NOT_LIBRARY = ("test", "tests", "site-packages", "dist-packages")


@dataclass(frozen=True)
class SourceFile:
    """A file, and what it was when it was listed."""

    path: Path
    size: int
    modified_ns: int


def library_files() -> list[SourceFile]:
    """Return the Python standard library beside the interpreter: real text that is on every machine.

    The `*.py` files below `sysconfig.get_paths()["stdlib"]`, ordered by their path in it (component by component),
    without any that lie, at any depth, in a folder named test, tests, site-packages or dist-packages (where Debian
    installs packages): `lib2to3/tests/...` goes, a file `test.py` stays. 12,602,225 bytes for CPython 3.11.7.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [listed(path) for path in _walk(root, skipped=NOT_LIBRARY) if path.suffix == ".py"]
    if not files:
        version = sys.version.split()[0]
        raise UserError(
            f"{root}: Python {version} has no *.py files here; use data=text data.path=<your files> instead"
        )
    return files


def text_files(path: str, leave_out: Path) -> list[SourceFile]:
    """Return the regular files that `path` means: a file, all files below a folder, or the matches of a glob.

    Hidden files and folders are skipped, links to folders are not followed, and `leave_out` (the folder of the stores)
    is not read even where it lies inside. The order is that of the paths, component by component.

    Raises:
        UserError: nothing is there, or it cannot be read.
    """
    place = Path(path).expanduser()
    try:
        if path and place.is_dir():
            files = [listed(file) for file in _walk(place, leave_out=leave_out.resolve()) if file.is_file()]
            wanted = "a folder with at least one file that is not hidden"
        elif path and place.exists():
            files = [listed(place)]
        else:
            matches = glob.glob(str(place), recursive=True) if path and glob.has_magic(path) else []
            files = [listed(file) for file in sorted(Path(match) for match in matches) if file.is_file()]
            wanted = "a file, a folder or a glob that matches files"
    except OSError as error:
        raise UserError(f"{error.filename or path}: cannot be read: {error.strerror}") from error
    if not files:
        raise UserError(f"data.path={path}: expected {wanted}, found none{_neighbour(place)}")
    return files


def read_files(files: list[SourceFile]) -> Iterator[bytes]:
    """Yield the bytes of all files, one after another, in chunks.

    Raises:
        UserError: a file cannot be read, or is no longer as long as it was when it was listed.
    """
    for file in files:
        yield from read_range(file, 0, file.size)


def read_range(file: SourceFile, start: int, stop: int) -> Iterator[bytes]:
    """Yield the bytes `[start, stop)` of a file in chunks, none of them empty; raises as `read_files`."""
    try:
        with open(file.path, "rb") as handle:
            handle.seek(start)
            left = stop - start
            while left > 0 and (chunk := handle.read(min(CHUNK, left))):
                left -= len(chunk)
                yield chunk
            found = os.fstat(handle.fileno())
    except OSError as error:
        raise UserError(f"{file.path}: cannot be read: {error.strerror}") from error
    if found.st_size != file.size:
        raise UserError(
            f"{file.path}: changed while it was read: expected {file.size:,} bytes, found {found.st_size:,}"
        )
    if left or found.st_mtime_ns != file.modified_ns:
        raise UserError(f"{file.path}: changed while it was read; prepare it again")


def found_instead(path: Path) -> str:
    """Return what lies in the place of an archive or a table: often the web page that a dead link leads to."""
    try:
        with open(path, "rb") as file:
            head = file.read(512).lstrip().lower()
        size = path.stat().st_size
    except OSError:
        return "none"
    if head.startswith((b"<!doctype html", b"<html", b"<head")):
        return f"a web page (HTML) of {size:,} bytes"
    return f"{size:,} bytes that are not one"


def _walk(root: Path, skipped: tuple[str, ...] = (), leave_out: Path | None = None) -> list[Path]:
    """Return the files below `root`, neither hidden nor in a folder named in `skipped`, ordered by path components."""

    def stop(error: OSError) -> None:
        raise error

    found = []
    for folder, folders, names in os.walk(root, onerror=stop):
        here = Path(folder)
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skipped]
        if leave_out is not None:
            folders[:] = [name for name in folders if (here / name).resolve() != leave_out]
        found += [here / name for name in names if not name.startswith(".")]
    return sorted(found, key=lambda path: path.parts)


def listed(path: Path) -> SourceFile:
    """Return what a file is now.

    Raises:
        UserError: it is not a regular file, or cannot be read.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"{path}: expected a regular file or a folder, found something else (a device, pipe or socket)")
    if not os.access(path, os.R_OK):
        raise UserError(f"{path}: cannot be read: permission denied")
    return SourceFile(path.resolve(), status.st_size, status.st_mtime_ns)


def _neighbour(place: Path) -> str:
    try:
        return nearest(place.name, [name for name in os.listdir(place.parent) if name != place.name], cutoff=0.75)
    except OSError:
        return ""
