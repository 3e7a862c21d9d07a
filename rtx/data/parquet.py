"""Columns of text in parquet files: row by row, in bounded memory, errors in one line."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rtx.data.files import found_instead
from rtx.errors import UserError

ROWS = 4  # rows decoded at once; a row of PG-19 is a whole book
SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.parquet$")


class RowGroup(NamedTuple):
    """A part of a file that can be read on its own."""

    rows: int
    size: int
    """Bytes of the columns asked for, uncompressed, about."""


def check_columns(path: Path, columns: Sequence[str]) -> list[RowGroup]:
    """Return the row groups of a parquet file that has all of `columns`.

    Raises:
        UserError: it has others, is cut short, or is no parquet file.
    """
    with _open(path) as file:
        names = file.schema_arrow.names
        if missing := [name for name in columns if name not in names]:
            expected = ", ".join(columns)
            raise UserError(f"{path}: expected columns {expected}; found {', '.join(names)}, without {missing[0]}")
        groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
        wanted = [k for k in range(file.metadata.num_columns) if _top(file, k) in columns]
        return [RowGroup(g.num_rows, sum(g.column(k).total_uncompressed_size for k in wanted)) for g in groups]


def _top(file: Any, column: int) -> str:
    return file.metadata.schema.column(column).path.split(".")[0]


def text_rows(path: Path, column: str, groups: Sequence[int] | None = None, rows: int = ROWS) -> Iterator[bytes]:
    """Yield the bytes of a column of text, row by row, of all row groups or of `groups`.

    No more than a page of the file and `rows` rows are held at a time; but a writer may have made one page of a whole
    row group, which then takes up to three times its size.

    Raises:
        UserError: the file cannot be read, has no such column of text, or a row has nothing in it (not even "").
    """
    import pyarrow as pa

    check_columns(path, [column])
    with _open(path) as file:
        kind = file.schema_arrow.field(column).type
        views = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}
        if kind not in (*views, *views.values()):
            raise UserError(f"{path}: expected text in column {column}, found {kind}")
        wanted = range(file.num_row_groups) if groups is None else groups
        number = 0
        for batch in file.iter_batches(batch_size=rows, row_groups=list(wanted), columns=[column], use_threads=False):
            values = batch.column(0)
            # The bytes as they are: as text they would be decoded, and encoded again.
            for value in values.view(views[kind]) if kind in views else values:
                if (text := value.as_py()) is None:
                    raise UserError(f"{path}: expected text in column {column}, found none in row {number}")
                yield text
                number += 1


@contextlib.contextmanager
def _open(path: Path) -> Iterator[Any]:
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile

    with table_errors(path):
        # A stream instead of whole column chunks: a shard of PG-19 has chunks of hundreds of megabytes.
        with ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file:
            yield file
        pa.default_memory_pool().release_unused()  # a row group of the hub's PG-19 takes hundreds of megabytes


@contextlib.contextmanager
def table_errors(path: Path) -> Iterator[None]:
    """Turn what pyarrow raises while it reads a parquet file into one line.

    Raises:
        UserError: in the place of an error of pyarrow's or of the file system's.
    """
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError) as error:  # an OSError, too, where the bytes are wrong
        reason = " ".join(str(error).split())[:160]
        found = found_instead(path)
        raise UserError(f"{path}: expected a whole parquet file, found {found} ({reason}); get it anew") from error


def shards(folder: Path, names: Sequence[str]) -> list[Path]:
    """Return the parquet files in `folder` whose names start with one of `names`, in order: the shards of a split."""
    starts = tuple(f"{name}{mark}" for name in names for mark in ("-", "."))
    return sorted(path for path in folder.glob("*.parquet") if path.name.startswith(starts))


def missing_shards(paths: Sequence[Path]) -> list[str]:
    """Return the names of the shards that those of `paths` speak of ("-00000-of-00023") and that are not there."""
    names = {path.name for path in paths}
    said = [match for path in paths if (match := SHARD.match(path.name))]
    wanted = [f"{match[1]}-{k:05d}-of-{match[3]}.parquet" for match in said for k in range(int(match[3]))]
    return sorted(set(wanted) - names)
