"""Files on disk: which ones data.path means, their identity, their rows, and errors of the disk."""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from rtx.data.sets import SPLITS
from rtx.disk import is_full, make_folder, open_named
from rtx.errors import RunFailed, UserError, nearest
from rtx.paths import expand_path

if TYPE_CHECKING:
    import datasets

Pieces = Iterator[tuple[bytes, bool]]
"""Pieces of documents, each with whether it is the first of its document."""
SPLIT_NAMES = {
    "train": ("train",),
    "valid": ("validation", "valid", "val", "dev"),
    "test": ("test",),
}
"""How others name our splits."""
COPIED_ROWS = 16
"""Rows of a parquet file that are in memory at once."""
LONGEST_REASON = 300


def reason_of(error: object) -> str:
    """Return the message of an error in one line."""
    reason = error.strerror if isinstance(error, OSError) else None
    reason = reason or str(error) or type(error).__name__
    return " ".join(reason.split())


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file that the user or a library has named; OSError as it is opened."""
    with open_named(path) as file:
        return sha256_of(file)


def sha256_of(file: BinaryIO) -> str:
    """Return the sha256 of an open file in hexadecimal."""
    return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


def text_sha256(text: str) -> str:
    """Return the sha256 of a text in hexadecimal; names of files may have any bytes."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def disk_size(path: Path) -> str:
    """Return the size of a file, or of all files below a folder, as text: 36.4MB."""
    from tqdm import tqdm

    size = 0
    for file in (path, *path.rglob("*")):
        if file.is_file():
            size += file.lstat().st_size
    return tqdm.format_sizeof(size, "B")


@contextlib.contextmanager
def disk_errors(root: Path) -> Iterator[None]:
    """Raise RunFailed or UserError, in one line, where the disk below `root` is full or read-only.

    Their causes are searched, because `datasets` raises errors of its own.
    """
    try:
        yield
    except Exception as error:
        for cause in causes(error):
            if isinstance(cause, UserError | RunFailed):
                raise cause from cause.__cause__
            replacement = disk_error(cause, root) if isinstance(cause, OSError) else None
            if replacement is not None:
                raise replacement from error
        raise


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, what it was raised for, what that was raised for, and so on."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def disk_error(error: OSError, root: Path) -> Exception | None:
    """Return what users read instead of an error of a full or read-only disk; None for others."""
    if is_full(error):
        advice = "free some, or set RTX_DATA to a folder on a larger disk"
        return RunFailed(f"{root}: no space left to write; {advice}")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        advice = "set RTX_DATA to a folder that you may write"
        return UserError(f"{error.filename or root}: {reason_of(error)}; {advice}")
    return None


@contextlib.contextmanager
def load_errors(place: str) -> Iterator[None]:
    """Raise UserError, in one line, where `place` cannot be loaded, whatever the reason.

    Errors of the disk that is written (`disk_error`), and a lack of memory, are raised as they are.
    """
    try:
        yield
    except (UserError, RunFailed, MemoryError):
        raise
    # The readers of each format, and the packages that they need, raise errors of their own.
    except Exception as error:
        cause = error.__cause__ or error
        if isinstance(cause, OSError) and disk_error(cause, Path(place)):
            raise
        reason = reason_of(cause)[:LONGEST_REASON]
        raise UserError(f"{place}: cannot be loaded: {reason}") from error


def identity_of(paths: Iterable[Path]) -> list[int | str]:
    """Return the number of files, and a digest of their paths, sizes and times.

    UserError for a path that is no file.
    """
    lines = []
    for path in paths:
        if not path.is_file():
            raise UserError(f"{path}: expected a regular file or a folder, found neither")
        status = path.stat()
        lines.append(f"{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}\n")
    return [len(lines), text_sha256("".join(lines))]


def walk(root: Path, skipped: Sequence[str] = (), leave_out: Path | None = None) -> list[Path]:
    """Return the files below `root`, ordered by path components.

    Hidden files and folders, folders named in `skipped`, and the folder `leave_out` are left out.
    UserError for a folder that cannot be read.
    """

    def stop(error: OSError) -> None:
        raise UserError(f"{error.filename}: cannot be read: {error.strerror}") from error

    def is_entered(folder: Path) -> bool:
        if folder.name.startswith(".") or folder.name in skipped:
            return False
        return leave_out is None or folder.resolve() != leave_out.resolve()

    files: list[Path] = []
    for folder, folders, names in os.walk(root, onerror=stop):
        # `os.walk` enters the folders that remain in this list.
        folders[:] = [name for name in folders if is_entered(Path(folder, name))]
        files += [Path(folder, name) for name in names if not name.startswith(".")]
    regular = [path for path in files if path.is_file()]
    return sorted(regular, key=lambda path: path.parts)


def files_of(path: str, leave_out: Path) -> list[Path]:
    """Return the files that data.path means: a file, all below a folder, or matches of a glob.

    UserError where there are none.
    """
    place = expand_path(path, "data.path")
    if place.is_dir():
        files = walk(place, leave_out=leave_out)
    elif place.exists():
        files = [place]
    else:
        matches = sorted(map(Path, glob.glob(str(place), recursive=True)))
        files = [match for match in matches if not match.is_dir()]
    if not files:
        near = ""
        if not place.exists():
            near = nearest(place.name, [other.name for other in place.parent.glob("*")])
        expected = "a file, a folder or a glob that matches files"
        raise UserError(f"data.path={path}: expected {expected}, found none{near}")
    return files


def tables_of(
    path: str,
    folders: Iterable[Path],
    splits: Sequence[str] = SPLITS,
) -> dict[str, list[Path]]:
    """Return the parquet files of each split in the first of `folders` that has some, else {}.

    UserError where a split is missing or a file is not whole.
    """
    for folder in folders:
        tables = sorted(folder.rglob("[!.]*.parquet"))
        files = {split: tables_named(split, tables) for split in splits}
        missing = [split for split in splits if not files[split]]
        if len(missing) == len(splits):
            continue
        if missing:
            raise UserError(
                f"data.path={path}: missing split: {' and '.join(missing)}; "
                f"found only {tables[0].name}, ..."
            )
        for table in tables:
            check_table(table)
        return files
    return {}


def tables_named(split: str, tables: Sequence[Path]) -> list[Path]:
    """Return the files whose names begin with a name of a split."""
    pattern = re.compile(rf"({'|'.join(SPLIT_NAMES[split])})\b")
    return [table for table in tables if pattern.match(table.name)]


def check_table(table: Path) -> None:
    """Raise UserError for a parquet file that is not whole."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with open_named(table) as file:
            parquet.read_schema(file)
    except (pa.ArrowException, OSError) as error:
        actual = reason_of(error)
        raise UserError(f"{table}: expected a whole parquet file, found {actual}") from error


def column_of(paths: Sequence[Path], wanted: Sequence[str]) -> str:
    """Return the first of the columns `wanted` that parquet files have; UserError for none."""
    from pyarrow import parquet

    names = parquet.read_schema(paths[0]).names
    for name in wanted:
        if name in names:
            return name
    actual = ", ".join(names[:8])
    raise UserError(f"{paths[0]}: expected a column {' or '.join(wanted)}; found {actual}")


def table_rows(paths: Sequence[Path], wanted: Sequence[str], cache: Path) -> datasets.Dataset:
    """Return one column (`column_of`) of parquet files, copied COPIED_ROWS rows at a time.

    `datasets.load_dataset` would need three times the memory of a row group.
    """
    import datasets
    import pyarrow as pa
    from pyarrow import parquet

    make_cache(cache)
    column = column_of(paths, wanted)
    # by path: the name is a new one
    copy = tempfile.NamedTemporaryFile(dir=cache, suffix=".arrow", delete=False)  # noqa: SIM115
    with load_errors(str(paths[0].parent)), copy as file:
        schema = pa.schema([parquet.read_schema(paths[0]).field(column)])
        with pa.ipc.new_stream(file, schema) as stream:
            for path in paths:
                table = parquet.ParquetFile(path, memory_map=True)
                for batch in table.iter_batches(COPIED_ROWS, columns=[column], use_threads=False):
                    stream.write_batch(batch)
    return datasets.Dataset.from_file(copy.name)


def make_cache(cache: Path) -> None:
    """Make `cache/<split>` of a work folder, for a library that opens files by their paths."""
    root = cache.parents[2]
    make_folder(root, cache.relative_to(root))


def rows_of(pieces: Pieces, cache: Path) -> datasets.Dataset:
    """Return pieces of documents as rows of exact bytes."""
    import datasets

    kinds = datasets.Features(
        {"text": datasets.Value("large_binary"), "first": datasets.Value("bool")}
    )
    make_cache(cache)

    def rows() -> Iterator[dict[str, bytes | bool]]:
        for text, is_first in pieces:
            yield {"text": text, "first": is_first}

    # A random fingerprint, because `datasets` would hash the generator.
    return datasets.Dataset.from_generator(
        rows,
        features=kinds,
        writer_batch_size=COPIED_ROWS,
        cache_dir=str(cache),
        fingerprint=os.urandom(8).hex(),
        split=datasets.NamedSplit(cache.name),
    )
