"""Rows from files: local ones, exact to the byte, parquet files, and (data=hub) any data set that `datasets` loads."""

from __future__ import annotations

import glob
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rtx.config import DataConfig
from rtx.data.fetch import INSTEAD, reason_of, unreachable
from rtx.data.sets import SPLITS, Report, Source, column_text
from rtx.errors import RunFailed, UserError, nearest

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

NAMES = {"train": ("train",), "valid": ("validation", "valid", "val", "dev"), "test": ("test",)}
"""What files, folders and splits of a set are called."""
TEXTS = ("string", "large_string", "binary", "large_binary")


class SourceFile(NamedTuple):
    """A file, and what it was when it was listed."""

    path: Path
    size: int
    modified_ns: int


def listed(path: Path) -> SourceFile:
    """Return what a file is now; raises UserError for one that is not there, and for a device or pipe."""
    if not path.is_file():
        raise UserError(f"{path}: expected a regular file or a folder, found neither")
    status = path.stat()
    return SourceFile(path.resolve(), status.st_size, status.st_mtime_ns)


def identity_of(paths: Iterable[Path]) -> list[Any]:
    """Return what tells files from others: how many, and a digest of their paths, sizes and times; raises as listed."""
    files = [listed(path) for path in paths]
    lines = [f"{file.path}\0{file.size}\0{file.modified_ns}\n" for file in files]
    return [len(files), hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()]


def walk(root: Path, skipped: Sequence[str] = (), leave_out: Path | None = None) -> list[Path]:
    """Return the files below `root`, ordered by path components; UserError where a folder cannot be read.

    Left out are hidden ones, folders named in `skipped`, and the folder `leave_out` (that of the stores).
    """

    def stop(error: OSError) -> None:
        raise UserError(f"{error.filename}: cannot be read: {error.strerror}") from error

    found: list[Path] = []
    for folder, folders, names in os.walk(root, onerror=stop):
        kept = [name for name in folders if not name.startswith(".") and name not in skipped]
        folders[:] = [name for name in kept if not leave_out or Path(folder, name).resolve() != leave_out.resolve()]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted((path for path in found if path.is_file()), key=lambda path: path.parts)


def files_of(path: str, leave_out: Path) -> list[Path]:
    """Return the files that `path` means: a file, all below a folder, or the matches of a glob; UserError for none."""
    place = Path(path).expanduser()
    files = [place] if place.exists() else sorted(map(Path, glob.glob(str(place), recursive=True)))
    files = walk(place, leave_out=leave_out) if place.is_dir() else [file for file in files if not file.is_dir()]
    if not files:
        near = nearest(place.name, [] if place.exists() else [other.name for other in place.parent.glob("*")])
        raise UserError(f"data.path={path}: expected a file, a folder or a glob that matches files, found none{near}")
    return files


def parquet_splits(path: str, folders: Iterable[Path], splits: Sequence[str] = SPLITS) -> dict[str, list[Path]]:
    """Return the parquet files of each split in the first of `folders` that has some, by their names; {}: none has.

    Raises UserError where a split is missing, and for a file that is no whole parquet file.
    """
    import pyarrow as pa
    from pyarrow import parquet

    names = {split: re.compile(rf"({'|'.join(NAMES[split])})\b") for split in splits}
    for folder in folders:
        tables = sorted(folder.rglob("[!.]*.parquet"))
        found = {split: [table for table in tables if name.match(table.name)] for split, name in names.items()}
        if lacking := [split for split, files in found.items() if not files]:
            if len(lacking) == len(splits):
                continue
            raise UserError(
                f"data.path={path}: missing split: {' and '.join(lacking)}; found only {tables[0].name}, ..."
            )
        for table in tables:
            try:
                parquet.read_schema(table)
            except (pa.ArrowException, OSError) as error:
                raise UserError(f"{table}: expected a whole parquet file, found {reason_of(error)}") from error
        return found
    return {}


def column_of(paths: Sequence[Path], wanted: Sequence[str]) -> str:
    """Return the first of the columns `wanted` that parquet files have; raises UserError where they have none."""
    from pyarrow import parquet

    names = parquet.read_schema(paths[0]).names
    if not (found := [name for name in wanted if name in names]):
        raise UserError(f"{paths[0]}: expected a column {' or '.join(wanted)}; found {', '.join(names[:8])}")
    return found[0]


def table_rows(paths: Sequence[Path], column: str, cache: Path) -> datasets.Dataset:
    """Return one column of parquet files, as it lies in them; raises UserError where one is damaged."""
    options = {"data_files": {"rows": list(map(str, paths))}, "split": "rows", "columns": [column]}
    return loaded(str(paths[0].parent), "parquet", cache_dir=str(cache), **options)


def loaded(place: str, *words: Any, **options: Any) -> Any:
    """Return what `datasets.load_dataset` does; raises UserError, in one line, where `place` cannot be loaded."""
    import datasets
    from datasets.exceptions import DatasetsError

    try:
        return datasets.load_dataset(*words, **options)
    except (ValueError, RuntimeError, FileNotFoundError, DatasetsError) as error:
        cause = error.__cause__ or error
        if getattr(cause, "errno", None):  # of the disk that is written
            raise
        raise UserError(f"{place}: cannot be loaded: {reason_of(cause)[:300]}") from error


def rows_of(texts: Iterator[tuple[bytes, bool]], cache: Path) -> datasets.Dataset:
    """Return rows of exact bytes; each is given with whether a document starts with it."""
    import datasets

    kinds = datasets.Features({"text": datasets.Value("large_binary"), "first": datasets.Value("bool")})
    made = ({"text": text, "first": first} for text, first in texts)
    cache.mkdir(parents=True, exist_ok=True)
    return datasets.Dataset.from_generator(
        lambda: made, features=kinds, cache_dir=str(cache), fingerprint=os.urandom(8).hex(), writer_batch_size=16
    )


def source(data: DataConfig, root: Path, report: Report) -> Source:
    """Return the rows of column data.column, each a document, of data.path: owner/name on the hub, or a folder.

    Without data.revision the newest one is taken when a store is made; its commit stands in the record of the store and
    of every run on it. Splits that the data set lacks are cut from the end of its train, 5% of the rows each.
    """
    path, folder = data.path or "", Path(data.path or "").expanduser()
    identity: list[Any] = [path, data.subset, data.column, data.revision]
    if folder.is_dir():
        identity += identity_of(walk(folder, leave_out=root))
    elif path.count("/") != 1:
        raise UserError(f"data.path={path}: expected a folder, or owner/name of a data set of the hub, found neither")
    place: dict[str, Any] = {"place": path if folder.is_dir() else f"hf://datasets/{path}", "column": data.column}

    def load(split: str, work: Path) -> datasets.Dataset:
        where, options = str(folder), {"cache_dir": str(work / "cache" / "hub")}
        if not folder.is_dir():
            where, place["revision"] = path, commit_of(path, data.revision, work / "cache" / "revision")
        found = loaded(f"data.path={path}", where, data.subset, revision=place.get("revision"), **options)
        return hub_rows(found, split, data)

    return Source("hub", identity, place, load, read=with_newline)


def commit_of(repository: str, revision: str | None, kept: Path) -> str:
    """Return the commit that a preparation began with, that of `revision` or the newest; RunFailed without a hub."""
    from huggingface_hub import constants, dataset_info

    try:
        if not kept.exists():
            if problem := unreachable(constants.ENDPOINT):
                raise ConnectionError(problem)
            kept.write_text(str(dataset_info(repository, revision=revision).sha))
        return kept.read_text()
    except Exception as error:  # those of whichever HTTP library it uses among them
        reason = f"cannot be fetched: {reason_of(error)[:300]}; {INSTEAD}"
        raise RunFailed(f"hf://datasets/{repository}: {reason}") from error


def hub_rows(found: datasets.DatasetDict, split: str, data: DataConfig) -> datasets.Dataset:
    """Return the column of text of a split, cut out of train where there is none; UserError without train or column."""
    here = {ours: next((name for name in names if name in found), None) for ours, names in NAMES.items()}
    if here["train"] is None:
        raise UserError(f"data.path={data.path}: expected a split train, found {', '.join(map(str, found))}")
    rows = found[here[split] or here["train"]]
    if data.column not in rows.column_names or str(rows.features[data.column].dtype) not in TEXTS:
        columns = ", ".join(f"{name} ({rows.features[name].dtype})" for name in rows.column_names)
        raise UserError(f"data.column={data.column}: expected a column of text, found {columns}")
    order = ["train", *(ours for ours, name in here.items() if name is None)]
    if split in order:
        bounds = [0, *range(105 - 5 * len(order), 101, 5)]
        begin, end = (len(rows) * percent // 100 for percent in bounds[order.index(split) :][:2])
        rows = rows.select(range(begin, end))
    rows = rows.select_columns([data.column])
    return rows if data.column == "text" else rows.rename_column(data.column, "text")


def with_newline(table: pa.Table) -> list[bytes]:
    """Return the text of each row, with a newline behind it where it has none."""
    return [text if text.endswith(b"\n") or not text else text + b"\n" for text in column_text(table)]
