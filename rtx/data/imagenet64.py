"""ImageNet 64 x 64, from local files: the downsampled set of PixelRNN (van den Oord et al. 2016), or another variant.

Two data sets go by this name. The papers' is the one of PixelRNN: 1,281,149 and 49,999 PNGs without labels, published
as two tars, or as two arrays. Those on the hub (parquet) were scaled another way and are easier; a result says so.
A tar is read in its own order, a folder in sorted order, an array and a parquet file row by row.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rtx.config import DataConfig
from rtx.data.disk import Report, file_sha256
from rtx.data.files import SourceFile, found_instead
from rtx.data.imagefiles import ImageFolder, ImageTar, list_images, read_image
from rtx.data.imageset import PER_PART, ImageFile, ImageSet, Rows, RowsPart, file_identity, listed
from rtx.data.imagetable import ImageTable, open_table
from rtx.data.pixels import HEAD, Want, check_size, is_lossy, scaled
from rtx.data.source import Document, Source
from rtx.errors import UserError

SET = ImageSet("imagenet64", height=64, width=64, train=1_281_149, test=49_999, held_out=50_000)
TARS = {
    "train_64x64.tar": (12_112_588_800, "e2a2c1947a748d0d256e98e6d82800d855441dc9e4de2e71a773f1324c4524d7"),
    "valid_64x64.tar": (477_255_680, "eeac03ec4f585baf871d2b4cb9c974bfe345e74878a74e5820fe6eb1041629cd"),
}
ARRAYS = ("imagenet64-{}.npy", "{}_64x64.npy", "{}.npy")
TEST_TABLES = ("validation", "valid", "val", "test")
LARGEST = 1 << 36  # bytes of an unpacked tar
HOW = (
    "get train_64x64.tar and valid_64x64.tar (http://image-net.org/small/ no longer has them; "
    "academictorrents.com/details/96816a530ee002254d29bf7a61c0c158d3dedc3b does) and name their folder: "
    "data.path=<folder>"
)


@dataclass(frozen=True)
class Half:
    """The training images, or those published as valid."""

    files: list[ImageFile]
    listing: list[SourceFile]
    lossy: bool
    original: bool
    """Whether it may be PixelRNN's: PNGs or an array, not parquet."""

    @property
    def images(self) -> int:
        """How many."""
        return sum(file.images for file in self.files)


def source(data: DataConfig, root: Path, report: Report) -> Source:
    """Return ImageNet 64 x 64 from data.path; there is nothing to download it from.

    Raises:
        UserError: data.path is missing, is none of what can be read or lacks a split, or settings do not fit; one line.
    """
    if data.path is None:
        raise UserError(f"data=imagenet64 needs data.path: {HOW}")
    place = Path(data.path).expanduser()
    if not place.exists():
        raise UserError(f"data.path={data.path}: expected a folder with ImageNet 64 x 64, found nothing; {HOW}")
    folder = place if place.is_dir() else place.parent
    train, test = _half(data.path, folder, "train"), _half(data.path, folder, "valid")
    for name, half in (("train", train), ("valid", test)):
        if half.images == 0:
            raise UserError(f"data.path={data.path}: expected images in {name}, found none; {HOW}")

    def files() -> tuple[list[ImageFile], list[ImageFile]]:
        _check_tars([*train.listing, *test.listing])
        return train.files, test.files

    listing = [*train.listing, *test.listing]
    return SET.source(
        data,
        f"data=imagenet64 data.path={shlex.quote(data.path)}",
        file_identity(listing),
        {"place": data.path, "files": len(listing)},
        (train.images, test.images),
        files,
        _stamps(data, train, test),
        lossy=train.lossy or test.lossy,
    )


def _stamps(data: DataConfig, train: Half, test: Half) -> dict[str, object]:
    """Variant and number of images; only both published numbers of the original images make the paper's protocol."""
    counts = (train.images, test.images)
    lossless = not (train.lossy or test.lossy)
    original = train.original and test.original and lossless and counts[0] <= SET.train and counts[1] <= SET.test
    stamps: dict[str, object] = {
        "variant": "PixelRNN" if original else "other",
        "images": {"train": counts[0], "test": counts[1]},
    }
    if original and counts == (SET.train, SET.test) and data.size is None:
        stamps["protocol"] = "paper"
    return stamps


def _half(path: str, folder: Path, split: str) -> Half:
    """Return the files of split train or valid: a tar, a folder, an array or parquet files, the first that is there."""
    name = f"{split}_64x64"
    if (tar := folder / f"{name}.tar").is_file():
        return _tar(tar)
    if (folder / name).is_dir():
        listing = list_images(folder / name).images
        lossy = bool(listing) and is_lossy(read_image(listing[0].path)[:HEAD])
        return Half([ImageFolder(tuple(file.path for file in listing))], listing, lossy, original=True)
    for pattern in ARRAYS:
        if (array := folder / pattern.format(split)).is_file():
            return Half([open_array(array)], [listed(array)], lossy=False, original=True)
    if tables := _tables(folder, split):
        opened: list[ImageTable] = [open_table(table) for table in tables]
        lossy = any(table.lossy for table in opened)
        return Half([*opened], [listed(table) for table in tables], lossy, original=False)
    raise UserError(
        f"data.path={path}: expected {name}.tar, the folder {name}, {ARRAYS[0].format(split)} or {split}*.parquet in "
        f"{folder}, found none; {HOW}"
    )


def _tables(folder: Path, split: str) -> list[Path]:
    """Return the parquet files of a split, in sorted order; what other sets call validation or test is our test."""
    files = sorted(file for file in folder.rglob("*.parquet") if not file.name.startswith("."))
    for start in ("train",) if split == "train" else TEST_TABLES:
        if found := [file for file in files if file.name.startswith(start)]:
            return found
    return []


def _tar(path: Path) -> Half:
    """Return a tar, whose content is known where it has the published size, and is counted where not."""
    file = listed(path)
    if file.size == TARS[path.name][0]:
        images = SET.train if path.name.startswith("train") else SET.test
        return Half([PublishedTar(path, LARGEST, known=images)], [file], lossy=False, original=True)
    tar = ImageTar(path, LARGEST)
    return Half([tar], [file], tar.lossy, original=True)


@dataclass(frozen=True)
class PublishedTar(ImageTar):
    """A tar that must be the published one: its number of images is known without reading it."""

    known: int = 0

    @property
    def images(self) -> int:
        """How many."""
        return self.known


def _check_tars(listing: list[SourceFile]) -> None:
    """Compare tars of the published size with the published sha256.

    Raises:
        UserError: one is another file.
    """
    for file in listing:
        size, sha256 = TARS.get(file.path.name, (0, ""))
        if file.size == size and (found := file_sha256(file.path)) != sha256:
            raise UserError(f"{file.path}: expected sha256 {sha256}, found {found}: damaged or altered; {HOW}")


@dataclass(frozen=True)
class ArrayFile:
    """A .npy file, uint8 `[images, height, width, 3]`."""

    path: Path
    images: int
    per_part: int = PER_PART

    def part(self, rows: Rows, want: Want) -> ArrayPart:
        """Return the part that reads `rows`."""
        return ArrayPart(rows, want, self.path)


@dataclass(frozen=True)
class ArrayPart(RowsPart):
    """Some images of an array."""

    path: Path

    def documents(self) -> Iterator[Document]:
        """Yield each image; raises UserError where they have another size."""
        images_BHWC = _mapped(self.path)
        if not self.want.scaled:
            check_size(str(self.path), images_BHWC.shape[1], images_BHWC.shape[2], self.want)
        for row in self.rows:
            yield (scaled(np.asarray(images_BHWC[row]), self.want),)


def open_array(path: Path) -> ArrayFile:
    """Return what a .npy file holds, from its header.

    Raises:
        UserError: it is no array of colour images, is cut short, or holds Python objects.
    """
    return ArrayFile(path, len(_mapped(path)))


def _mapped(path: Path) -> np.ndarray:
    wanted = "an array [images, height, width, 3] of uint8 (.npy)"
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:  # its reasons advise to load pickles, which could run anything
        raise UserError(
            f"{path}: expected a whole file with {wanted}, found {found_instead(path)}; get it anew"
        ) from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error
    if not isinstance(array, np.ndarray) or array.dtype != np.uint8 or array.ndim != 4 or array.shape[3] != 3:
        found = f"{array.dtype} {list(array.shape)}" if isinstance(array, np.ndarray) else "an archive of arrays"
        raise UserError(f"{path}: expected {wanted}, found {found}; convert it, or give the published files")
    return array
