"""Parquet files with a column of images: the hub's schema (bytes and path), plain bytes, or nested lists (Array3D)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rtx.data.imageset import PER_PART, Rows, RowsPart
from rtx.data.parquet import table_errors
from rtx.data.pixels import HEAD, Want, check_size, is_lossy, pixels, scaled
from rtx.data.source import Document
from rtx.errors import UserError

if TYPE_CHECKING:
    import pyarrow as pa

COLUMNS = ("img", "image")
ROWS = 256  # read at once


@dataclass(frozen=True)
class ImageTable:
    """A parquet file with images."""

    path: Path
    images: int
    column: str
    nested: bool
    """Whether the images are lists of lists of lists of numbers, not files."""
    lossy: bool
    """Whether the first one is."""
    per_part: int = PER_PART

    def part(self, rows: Rows, want: Want) -> TablePart:
        """Return the part that reads `rows`."""
        return TablePart(rows, want, self.path, self.column, self.nested)


@dataclass(frozen=True)
class TablePart(RowsPart):
    """Some rows of a parquet file, in order."""

    path: Path
    column: str
    nested: bool

    def documents(self) -> Iterator[Document]:
        """Yield each image; raises UserError naming file and row where one cannot be decoded or has another size."""
        read = self._arrays if self.nested else self._files
        with table_errors(self.path):
            for first, batch in _batches(self.path, self.column, self.nested, self.rows):
                yield from read(first, batch)

    def _files(self, first: int, batch: pa.Array) -> Iterator[Document]:
        for place, raw in enumerate(batch, first):
            if self.rows.takes(place):
                yield (pixels(_content(raw.as_py(), self._where(place)), self._where(place), self.want),)

    def _arrays(self, first: int, batch: pa.Array) -> Iterator[Document]:
        images = _array(batch, lambda row: self._where(first + row))
        for place, image_HWC in enumerate(images, first):
            if self.rows.takes(place):
                if not self.want.scaled:
                    check_size(self._where(place), image_HWC.shape[0], image_HWC.shape[1], self.want)
                yield (scaled(image_HWC, self.want),)

    def _where(self, row: int) -> str:
        return f"{self.path}: row {row}"


def open_table(path: Path) -> ImageTable:
    """Return what a parquet file holds, from its footer and its first image.

    Raises:
        UserError: it is no parquet file, or has no column of images.
    """
    import pyarrow.parquet as pq

    with table_errors(path), pq.ParquetFile(path) as file:
        schema = file.schema_arrow
        rows = file.metadata.num_rows
        column = next((name for name in COLUMNS if name in schema.names), None)
        if column is None:
            raise UserError(
                f"{path}: expected a column {' or '.join(COLUMNS)} with images, found {', '.join(schema.names[:8])}; "
                "give the files of an image set, or rename the column"
            )
        nested = _is_nested(path, column, schema.field(column).type)
        lossy = rows > 0 and not nested and _first_is_lossy(path, column)
    return ImageTable(path, rows, column, nested, lossy)


def _is_nested(path: Path, column: str, kind: pa.DataType) -> bool:
    """Tell lists of numbers from files, and refuse what is neither."""
    import pyarrow as pa

    kind = _plain(kind)
    if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        return False
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return False
    inner: Any = kind
    for _ in range(3):
        inner = inner.value_type if _is_list(inner) else None
    if inner is not None and pa.types.is_uint8(inner):
        return True
    raise UserError(
        f"{path}: expected column {column} with image files (bytes) or lists [height, width, 3] of uint8, found {kind}"
    )


def _plain(kind: Any) -> Any:
    """Return the type that an extension type (Array3D, where `datasets` is imported) stores its values in."""
    return getattr(kind, "storage_type", kind)


def _is_list(kind: Any) -> bool:
    import pyarrow as pa

    return kind is not None and (
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def _first_is_lossy(path: Path, column: str) -> bool:
    for _, batch in _batches(path, column, False, Rows(0, 1)):
        return is_lossy(_content(batch[0].as_py(), f"{path}: row 0")[:HEAD])
    return False


def _batches(path: Path, column: str, nested: bool, rows: Rows) -> Iterator[tuple[int, pa.Array]]:
    """Yield runs of the file's rows that may hold some of `rows`, each with the number of its first row.

    Only the row groups that hold some are read; of an image file only its bytes.
    """
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        before, groups, start = 0, [], 0
        for group in range(file.metadata.num_row_groups):
            size = file.metadata.row_group(group).num_rows
            if before < rows.stop and before + size > rows.first:
                start = before if not groups else start
                groups.append(group)
            before += size
        struct = not nested and hasattr(file.schema_arrow.field(column).type, "get_field_index")
        columns = [f"{column}.bytes" if struct else column]
        for batch in file.iter_batches(ROWS, row_groups=groups, columns=columns, use_threads=False):
            values = batch.column(0)
            stop = start + len(values)
            if stop > rows.first:
                yield start, values.field("bytes") if struct else values
            if stop >= rows.stop:
                return
            start = stop


def _content(raw: bytes | None, where: str) -> bytes:
    if raw is None:
        raise UserError(
            f"{where}: expected the bytes of an image, found none (a path alone is not followed); get it anew"
        )
    return raw


def _array(batch: Any, where: Any) -> np.ndarray:
    """Return nested lists as uint8 `[rows, height, width, 3]`; raises UserError where a row is of another shape."""
    import pyarrow.compute

    compute: Any = pyarrow.compute  # its functions are made at run time
    values, shape = getattr(batch, "storage", batch), [len(batch)]
    for _ in range(3):
        lengths = compute.list_value_length(values).to_numpy(zero_copy_only=False)
        odd = np.flatnonzero(lengths != lengths[0]) if len(lengths) else []
        if len(odd) or values.null_count or not len(lengths):
            per_row = max(1, len(values) // shape[0])
            row = int(odd[0]) // per_row if len(odd) else 0
            raise UserError(f"{where(row)}: expected lists [height, width, 3] of one size, found others")
        shape.append(int(lengths[0]))
        values = values.flatten()
    if shape[3] != 3 or values.null_count:
        raise UserError(f"{where(0)}: expected 3 numbers a pixel, found {shape[3]} or empty ones")
    return values.to_numpy(zero_copy_only=False).reshape(shape)
