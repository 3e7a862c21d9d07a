"""CIFAR-10: 60,000 colour images of 32 x 32 (Krizhevsky 2009), from the binary archive or the hub's parquet files.

Lossless PNG and raw pixels follow the protocol; JPEG inside a parquet file is read and stamped: such images are others.
"""

from __future__ import annotations

import glob
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rtx.config import DataConfig
from rtx.data.archives import is_gzip, tar_members
from rtx.data.disk import Report, file_sha256
from rtx.data.download import Remote, download
from rtx.data.hub import HubFile, hub_file
from rtx.data.imageset import Files, ImageSet, Rows, RowsPart, count_stamps, file_identity, listed
from rtx.data.imagetable import open_table
from rtx.data.pixels import Want, scaled
from rtx.data.source import Document, Source
from rtx.errors import UserError

SET = ImageSet("cifar10", height=32, width=32, train=50_000, test=10_000, held_out=5_000)
ARCHIVE = Remote(
    url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    size=170_052_171,
    sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
)
HUB = "uoft-cs/cifar10"
HUB_FILES = (
    HubFile(
        *(HUB, "plain_text/train-00000-of-00001.parquet", 119_705_255),
        sha256="ead8c41c0968c6f96c522dfaa5393b361819ee998968037cce7c7efc3396568e",
    ),
    HubFile(
        *(HUB, "plain_text/test-00000-of-00001.parquet", 23_940_850),
        sha256="a4b5762d285d0775cfd7bd06b30c514f3bf98f8feab7f15f672bfe8161c14735",
    ),
)
INSTEAD = (
    f"get {ARCHIVE.name} ({ARCHIVE.url}) or the parquet files of {HUB} some other way and name them: data.path=<the "
    "archive, or their folder>"
)
PICKLED = "cifar-10-python.tar.gz"
FOLDER = "cifar-10-batches-bin"
TRAIN = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST = ("test_batch.bin",)
RECORD = 1 + 32 * 32 * 3  # a label, then the red, the green and the blue plane
LARGEST = 1 << 28  # bytes of the unpacked archive, which has 184,380,000 and a page of text
RECORDS = 1_000  # read at once


def source(data: DataConfig, root: Path, report: Report) -> Source:
    """Return CIFAR-10 from data.path, or from where data.fetch says.

    Raises:
        UserError: data.path is none of what can be read, lacks a split, or settings do not fit; one line.
    """
    options = "data=cifar10"
    published = (SET.train, SET.test)
    if data.path is None and data.fetch == "hub":
        identity = ["hub", *(file.sha256 for file in HUB_FILES)]
        files, place = partial(_fetch_tables, report), {"hub": HUB, "files": [file.path for file in HUB_FILES]}
        return SET.source(data, options, identity, place, published, files, {})
    if data.path is None:
        options += " data.fetch=archive"
        files, place = partial(_fetch_archive, root, report), {"place": ARCHIVE.url, "sha256": ARCHIVE.sha256}
        return SET.source(data, options, ["binary", ARCHIVE.sha256], place, published, files, {})
    options += f" data.path={shlex.quote(data.path)}"
    (train, test), paths, lossy = _local(data.path)
    counts = (sum(file.images for file in train), sum(file.images for file in test))
    for name, found in zip(("training", "test"), counts, strict=True):
        if found == 0:
            raise UserError(f"data.path={data.path}: expected {name} images, found files with none; {INSTEAD}")
    identity = file_identity(listed(path) for path in paths)
    stamps = count_stamps(counts, published)
    place = {"place": data.path, "files": [path.name for path in paths]}
    return SET.source(
        data, options, identity, place, counts, lambda: _checked((train, test), paths), stamps, lossy=lossy
    )


def _fetch_tables(report: Report) -> Files:
    train, test = (open_table(hub_file(file, report, INSTEAD)) for file in HUB_FILES)
    return [train], [test]


def _fetch_archive(root: Path, report: Report) -> Files:
    return _archived(download(ARCHIVE, root / "downloads", report))[0]


def _checked(files: Files, paths: Sequence[Path]) -> Files:
    """Compare an archive of the published size with the published sha256, before anything is made from it.

    Raises:
        UserError: it is another file.
    """
    for path in paths:
        if path.stat().st_size == ARCHIVE.size and (found := file_sha256(path)) != ARCHIVE.sha256:
            raise UserError(f"{path}: expected {ARCHIVE.name} with sha256 {ARCHIVE.sha256}, found {found}; get it anew")
    return files


def _local(path: str) -> tuple[Files, list[Path], bool]:
    """Return the files that data.path means, their paths, and whether their images are lossy."""
    place = Path(path).expanduser()
    try:
        if place.is_dir():
            return _in_folder(path, place)
        if place.is_file():
            with open(place, "rb") as file:
                head = file.read(4)
            if head == b"PAR1":
                return _tables(path, sorted(place.parent.glob("*.parquet")))
            if is_gzip(place) or place.suffix in (".tar", ".gz", ".tgz"):
                return _archived(place)
        elif matches := [Path(match) for match in sorted(glob.glob(str(place))) if match.endswith(".parquet")]:
            return _tables(path, matches)
    except OSError as error:
        raise UserError(f"{error.filename or path}: cannot be read: {error.strerror}") from error
    found = f"a file of {place.stat().st_size:,} bytes that is neither" if place.exists() else "nothing"
    raise UserError(
        f"data.path={path}: expected {ARCHIVE.name}, its folder, or parquet files, found {found}; {INSTEAD}"
    )


def _in_folder(path: str, place: Path) -> tuple[Files, list[Path], bool]:
    for folder in (place, place / FOLDER):
        if any((folder / name).is_file() for name in (*TRAIN, *TEST)):
            sizes = {name: (folder / name).stat().st_size for name in (*TRAIN, *TEST) if (folder / name).is_file()}
            return _binary(folder, sizes, in_archive=False), [folder / name for name in sizes], False
    if (place / ARCHIVE.name).is_file():
        return _archived(place / ARCHIVE.name)
    if tables := sorted(file for file in place.rglob("*.parquet") if not file.name.startswith(".")):
        return _tables(path, tables)
    for name in (PICKLED, "data_batch_1", "cifar-10-batches-py"):
        if (place / name).exists():
            raise _pickled(place / name)
    raise UserError(f"data.path={path}: expected a folder with {TRAIN[0]}, {ARCHIVE.name} or parquet files, found none")


def _tables(path: str, paths: list[Path]) -> tuple[Files, list[Path], bool]:
    """Parquet files: those whose names begin with train are for training, those with test for testing."""
    chosen = {name: [file for file in paths if file.name.startswith(name)] for name in ("train", "test")}
    for name, files in chosen.items():
        if not files:
            raise UserError(
                f"data.path={path}: expected parquet files named {name}-*.parquet beside the others, found "
                f"{', '.join(file.name for file in paths[:4])}; both train and test are needed"
            )
    train, test = ([open_table(file) for file in files] for files in chosen.values())
    lossy = any(table.lossy for table in (*train, *test))
    return (train, test), [*chosen["train"], *chosen["test"]], lossy


def _archived(path: Path) -> tuple[Files, list[Path], bool]:
    """The binary archive: of the published size its content is known (and its sha256 checked later), else it is read.

    Raises:
        UserError: it is the archive with pickles, or holds something else.
    """
    if path.stat().st_size == ARCHIVE.size:
        sizes = dict.fromkeys([f"{FOLDER}/{name}" for name in (*TRAIN, *TEST)], 10_000 * RECORD)
    else:
        sizes = {member.name: member.size for member, _ in tar_members(path, LARGEST)}
    names = {name.rpartition("/")[2] for name in sizes}
    if path.name == PICKLED or "data_batch_1" in names:
        raise _pickled(path)
    return _binary(path, sizes, in_archive=True), [path], False


def _binary(place: Path, sizes: dict[str, int], in_archive: bool) -> Files:
    """Return the record files among `sizes` (name, bytes) that are CIFAR-10's, in the order of their numbers."""
    chosen: list[list[RecordFile]] = [[], []]
    for split, names in zip(chosen, (TRAIN, TEST), strict=True):
        for name in names:
            for member in (member for member in sizes if member.rpartition("/")[2] == name):
                where = f"{place}: {member}" if in_archive else str(place / member)
                if sizes[member] % RECORD:
                    raise UserError(
                        f"{where}: expected records of {RECORD:,} bytes (label and 32 x 32 x 3), found "
                        f"{sizes[member]:,} bytes, no multiple of that; get it anew"
                    )
                path, inside = (place, member) if in_archive else (place / member, None)
                split.append(RecordFile(path, inside, sizes[member] // RECORD))
        if not split:
            found = ", ".join(sorted(name.rpartition("/")[2] for name in sizes)[:8]) or "nothing"
            raise UserError(f"{place}: expected {names[0]}, found {found}; get {ARCHIVE.url}")
    return chosen[0], chosen[1]


@dataclass(frozen=True)
class RecordFile:
    """A file of records, in a folder or in the archive (`member`)."""

    path: Path
    member: str | None
    images: int

    @property
    def per_part(self) -> int:
        """All of them: a part would unpack the archive from its beginning."""
        return self.images

    def part(self, rows: Rows, want: Want) -> RecordPart:
        """Return the part that reads `rows`."""
        return RecordPart(rows, want, self.path, self.member)


@dataclass(frozen=True)
class RecordPart(RowsPart):
    """Some records, each a label and three planes of 32 x 32."""

    path: Path
    member: str | None

    def documents(self) -> Iterator[Document]:
        """Yield each image, its planes interleaved; raises UserError where a record is none of CIFAR-10's."""
        if self.member is None:
            try:
                with open(self.path, "rb") as file:
                    file.seek(self.rows.first * RECORD)
                    yield from self._images(file, str(self.path))
            except OSError as error:
                raise UserError(f"{self.path}: cannot be read: {error.strerror}") from error
            return
        for member, file in tar_members(self.path, LARGEST):
            if member.name == self.member:
                file.skip(self.rows.first * RECORD)
                yield from self._images(file, f"{self.path}: {member.name}")
                return
        raise UserError(f"{self.path}: expected a member {self.member}, found none; get {ARCHIVE.url}")

    def _images(self, file: Any, where: str) -> Iterator[Document]:
        for first in range(self.rows.first, self.rows.stop, RECORDS):
            count = min(RECORDS, self.rows.stop - first)
            raw = file.read(count * RECORD)
            if len(raw) != count * RECORD:
                raise UserError(f"{where}: expected {self.rows.stop:,} records, found fewer; get it anew")
            records = np.frombuffer(raw, dtype=np.uint8).reshape(count, RECORD)
            if (worst := int(records[:, 0].max())) > 9:
                row = first + int(records[:, 0].argmax())
                raise UserError(
                    f"{where}: expected labels 0 to 9, found {worst} in record {row}; not CIFAR-10's binary"
                )
            images_BHWC = np.ascontiguousarray(records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
            for row, image_HWC in enumerate(images_BHWC, first):
                if self.rows.takes(row):
                    yield (scaled(image_HWC, self.want),)


def _pickled(path: Path) -> UserError:
    return UserError(
        f"{path}: expected the binary archive, found the one for Python, whose pickles could run anything and are "
        f"never loaded; get {ARCHIVE.url} instead"
    )
