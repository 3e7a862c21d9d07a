"""Local files as a source: which ones a path means, what tells them from others, and the columns of parquet files."""

from __future__ import annotations

import glob
import hashlib
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rtx.data.sets import SPLITS
from rtx.errors import UserError, nearest

if TYPE_CHECKING:
    import datasets

NAMES = {"train": ("train",), "valid": ("validation", "valid", "val", "dev"), "test": ("test",)}
"""What files, folders and splits of a set are called."""
SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.parquet$")


class SourceFile(NamedTuple):
    """A file, and what it was when it was listed."""

    path: Path
    size: int
    modified_ns: int


def listed(path: Path) -> SourceFile:
    """Return what a file is now.

    Raises:
        UserError: it is not a regular file, or cannot be read.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"{path}: expected a regular file or a folder, found something else (a device, pipe or socket)")
    if not os.access(path, os.R_OK):
        raise UserError(f"{path}: cannot be read: permission denied")
    return SourceFile(path.resolve(), status.st_size, status.st_mtime_ns)


def walk(root: Path, skipped: Sequence[str] = (), leave_out: Path | None = None) -> list[Path]:
    """Return the files below `root`, neither hidden nor in a folder named in `skipped`, ordered by path components.

    Args:
        leave_out: a folder that is not read (that of the stores).

    Raises:
        UserError: a folder cannot be read.
    """

    def stop(error: OSError) -> None:
        raise UserError(f"{error.filename}: cannot be read: {error.strerror}") from error

    found: list[Path] = []
    left_out = leave_out and leave_out.resolve()
    for folder, folders, names in os.walk(root, onerror=stop):
        here = Path(folder)
        kept = [name for name in folders if not name.startswith(".") and name not in skipped]
        folders[:] = [name for name in kept if left_out is None or (here / name).resolve() != left_out]
        found += [here / name for name in names if not name.startswith(".")]
    return sorted((path for path in found if path.is_file()), key=lambda path: path.parts)


def files_of(path: str, leave_out: Path) -> list[Path]:
    """Return the regular files that `path` means: a file, all files below a folder, or the matches of a glob, sorted.

    Raises:
        UserError: nothing is there, or it cannot be read.
    """
    place = Path(path).expanduser()
    if path and place.is_dir():
        files, wanted = walk(place, leave_out=leave_out), "a folder with at least one file that is not hidden"
    elif path and place.exists():
        return [place]
    else:
        matches = glob.glob(str(place), recursive=True) if glob.has_magic(path) else []
        files = [match for match in sorted(map(Path, matches)) if match.is_file()]
        wanted = "a file, a folder or a glob that matches files"
    if not files:
        names = [entry.name for entry in place.parent.glob("*") if entry.name != place.name]
        near = "" if place.exists() else nearest(place.name, names, cutoff=0.75)
        raise UserError(f"data.path={path}: expected {wanted}, found none{near}")
    return files


def identity_of(paths: Iterable[Path]) -> list[Any]:
    """Return what tells files from others: how many, and a digest of their paths, sizes and times; raises as listed."""
    files = [listed(path) for path in paths]
    lines = [f"{file.path}\0{file.size}\0{file.modified_ns}\n" for file in files]
    return [len(files), hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()]


def found_instead(path: Path) -> str:
    """Return what lies in the place of an archive or a table: often the web page that a dead link leads to."""
    with open(path, "rb") as file:
        head = file.read(512).lstrip().lower()
    if head.startswith((b"<!doctype html", b"<html", b"<head")):
        return f"a web page (HTML) of {path.stat().st_size:,} bytes"
    return f"{path.stat().st_size:,} bytes that are not one"


def parquet_splits(path: str, folders: Iterable[Path], splits: Sequence[str] = SPLITS) -> dict[str, list[Path]]:
    """Return the parquet files of each split in the first of `folders` that has some, by their names; {}: none has.

    Raises:
        UserError: a split or a shard is missing, or a file is no whole parquet file.
    """
    for folder in folders:
        tables = sorted(file for file in folder.rglob("*.parquet") if not file.name.startswith("."))
        found = {
            split: [table for table in tables if re.match(rf"({'|'.join(NAMES[split])})\b", table.name)]
            for split in splits
        }
        if not any(found.values()):
            continue
        if lacking := [split for split, files in found.items() if not files]:
            there = ", ".join(table.name for table in tables[:4])
            raise UserError(f"data.path={path}: missing split: {' and '.join(lacking)}; found only {there}")
        for table in (table for files in found.values() for table in files):
            check_table(table)
        return found
    return {}


def check_table(path: Path) -> None:
    """Raise UserError where a file is no whole parquet file, or where shards that its name speaks of are missing."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        parquet.read_schema(path)
    except (pa.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())[:160]
        raise UserError(
            f"{path}: expected a whole parquet file, found {found_instead(path)} ({reason}); get it anew"
        ) from error
    if match := SHARD.match(path.name):
        wanted = [path.with_name(f"{match[1]}-{k:05d}-of-{match[3]}.parquet") for k in range(int(match[3]))]
        if missing := [shard for shard in wanted if not shard.exists()]:
            raise UserError(f"{path.parent}: expected {missing[0].name} beside {path.name}, found none; fetch it, too")


def column_of(paths: Sequence[Path], wanted: Sequence[str]) -> str:
    """Return the first of the columns `wanted` that parquet files have; raises UserError where they have none."""
    from pyarrow import parquet

    for path in paths:
        names = parquet.read_schema(path).names
        found = next((name for name in wanted if name in names), None)
        if found is None:
            raise UserError(f"{path}: expected a column {' or '.join(wanted)}; found {', '.join(names[:8])}")
    return found or wanted[0]


def table_rows(paths: Sequence[Path], column: str, cache: Path) -> datasets.Dataset:
    """Return one column of parquet files, as it lies in them."""
    import datasets
    from datasets.exceptions import DatasetGenerationError

    files = {"rows": [str(path) for path in paths]}
    try:
        return datasets.load_dataset("parquet", data_files=files, split="rows", columns=[column], cache_dir=str(cache))
    except DatasetGenerationError as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno:  # of the disk that is written
            raise
        reason = " ".join(str(cause or error).split())[:160]
        raise UserError(
            f"{paths[0].parent}: expected whole parquet files, found others ({reason}); get them anew"
        ) from error


def rows_of(texts: Iterator[tuple[bytes, bool]], cache: Path) -> datasets.Dataset:
    """Return rows of exact bytes; each is given with whether a document starts with it."""
    import datasets

    kinds = datasets.Features({"text": datasets.Value("large_binary"), "first": datasets.Value("bool")})
    made = ({"text": text, "first": first} for text, first in texts)
    cache.mkdir(parents=True, exist_ok=True)
    return datasets.Dataset.from_generator(
        lambda: made, features=kinds, cache_dir=str(cache), fingerprint=os.urandom(8).hex(), writer_batch_size=16
    )
