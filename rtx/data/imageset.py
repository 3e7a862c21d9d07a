"""What the image sets share: which images a part takes, which are held out, what a result says of them.

An image is one document of `height * width * 3` bytes. An `ImageFile` is anything that holds images in order: a
parquet file, a tar, an array, a folder; its parts take runs of about 5,000 of them and are read on their own.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rtx.config import DataConfig
from rtx.data.files import SourceFile
from rtx.data.permutation import permuted
from rtx.data.pixels import Want
from rtx.data.source import Part, Source
from rtx.errors import UserError
from rtx.sets import image_side

PER_PART = 5_000
HELD_KEY = b"rtx: the training images that are held out"


@dataclass(frozen=True)
class Rows:
    """The images `first..stop-1` of a file, or those of them that `mask` (bool, one for each) marks."""

    first: int
    stop: int
    mask: np.ndarray | None = None

    def __len__(self) -> int:
        """Return how many there are."""
        return self.stop - self.first if self.mask is None else int(np.count_nonzero(self.mask))

    def takes(self, index: int) -> bool:
        """Tell whether image `index` of the file is among them."""
        return self.first <= index < self.stop and (self.mask is None or bool(self.mask[index - self.first]))

    def __iter__(self) -> Iterator[int]:
        """Yield their numbers in the file, in order."""
        return (index for index in range(self.first, self.stop) if self.takes(index))


@dataclass(frozen=True)
class RowsPart:
    """What parts that read some images of one file share."""

    rows: Rows
    want: Want

    @property
    def size(self) -> int:
        """Bytes that it delivers."""
        return len(self.rows) * self.want.units


class ImageFile(Protocol):
    """Something on disk that holds images in an order of its own."""

    @property
    def images(self) -> int:
        """How many."""
        ...

    @property
    def per_part(self) -> int:
        """Images of one part."""
        ...

    def part(self, rows: Rows, want: Want) -> Part:
        """Return the part that reads some of them; it says what is wrong with one as `pixels` does."""
        ...


Files = tuple[Sequence[ImageFile], Sequence[ImageFile]]
"""Those with the training images, and those with the test images."""


def held_images(images: int, held_out: int) -> np.ndarray:
    """Return the numbers of the training images that are held out, in order: int64 `[held_out]`.

    They are the first `held_out` of a fixed keyed permutation of all training images (rtx/data/permutation.py): the
    same on every machine, and those for a smaller number are among those for a larger one.
    """
    return np.sort(np.array([permuted(k, images, HELD_KEY) for k in range(held_out)], dtype=np.int64))


def split_parts(files: Files, held_out: int, want: Want) -> dict[str, list[Part]]:
    """Return the parts of train, valid and test.

    The held-out training images are valid and the others train, both in the order of their files; with none held out
    the test images are valid, too.
    """
    train_files, test_files = files
    held = np.zeros(sum(file.images for file in train_files), dtype=bool)
    held[held_images(len(held), held_out)] = True
    test = parts_of(test_files, want)
    valid = parts_of(train_files, want, held) if held_out else list(test)
    return {"train": parts_of(train_files, want, ~held), "valid": valid, "test": test}


def parts_of(files: Sequence[ImageFile], want: Want, chosen: np.ndarray | None = None) -> list[Part]:
    """Return the parts of the `chosen` images (bool, one for each of all files together; None: all)."""
    parts, before = [], 0
    for file in files:
        for first in range(0, file.images, file.per_part):
            stop = min(first + file.per_part, file.images)
            mask = None if chosen is None else chosen[before + first : before + stop]
            if mask is None or mask.any():
                parts.append(file.part(Rows(first, stop, None if mask is None or mask.all() else mask), want))
        before += file.images
    return parts


@dataclass(frozen=True)
class ImageSet:
    """A benchmark of images: train and test as published, its valid held out of train."""

    name: str
    height: int
    width: int
    train: int
    """Training images as published."""
    test: int
    """Test images as published."""
    held_out: int
    """Training images held out where nothing else is asked for, as in conf/data."""

    def source(
        self,
        data: DataConfig,
        options: str,
        identity: Sequence[Any],
        place: Mapping[str, Any],
        counts: tuple[int, int],
        files: Callable[[], Files],
        stamps: Mapping[str, Any],
        lossy: bool = False,
    ) -> Source:
        """Return the source of `counts` training and test images that `files`, asked later, holds.

        Raises:
            UserError: data.length is not that of an image, or more images are to be held out than there are.
        """
        want = wanted(data, self.height, self.width, lossy)
        train, test = counts
        check_held_out(data, train)
        valid = data.held_out or test

        def parts() -> Mapping[str, Sequence[Part]]:
            return split_parts(files(), data.held_out, want)

        held = "" if data.held_out == self.held_out else f" data.held_out={data.held_out}"
        units = {"train": train - data.held_out, "valid": valid, "test": test}
        return Source(
            name=self.name,
            options=options + held + image_options(data, self.height * self.width * 3),
            identity=[*identity, image_settings(want), data.held_out],
            place=dict(place),
            parts=parts,
            stamps={**stamps, **image_stamps(want), **({} if data.held_out else {"valid": "test"})},
            units={name: images * want.units for name, images in units.items()},
            image=(want.height, want.width),
        )


def wanted(data: DataConfig, height: int, width: int, lossy: bool) -> Want:
    """Return what every image is to be: data.size, or the size of the set's own.

    Raises:
        UserError: data.length is not height x width x 3.
    """
    want = Want(data.size or height, data.size or width, data.size is not None, lossy)
    if data.length != want.units:
        scaling = "" if data.size else "; data.size=<side> scales them"
        raise UserError(
            f"data.length={data.length}: an image of {want.height} x {want.width} is one sequence of {want.units} "
            f"sub-pixels; set data.length={want.units}{scaling}"
        )
    return want


def check_held_out(data: DataConfig, train: int) -> None:
    """Refuse to hold out all training images, or more.

    Raises:
        UserError: names both numbers.
    """
    if data.held_out >= train:
        raise UserError(
            f"data.held_out={data.held_out}: expected fewer than the {train:,} training images; "
            f"hold out fewer, such as data.held_out={train // 10}"
        )


def image_shape(data: DataConfig, record: Mapping[str, Any]) -> tuple[int, int]:
    """Return height and width of the images that a run was trained on.

    Args:
        record: what the run recorded of its data; its `image` is asked first.

    Raises:
        UserError: neither record nor settings say.
    """
    if record.get("image"):
        height, width = record["image"]
        return height, width
    side = image_side(data) or math.isqrt(data.length // 3)
    if 3 * side**2 != data.length:
        raise UserError(f"data.length={data.length}: the run does not say the height and width of its images")
    return side, side


def image_options(data: DataConfig, length: int | None = None) -> str:
    """Return the options on the size of images, to stand behind others; `length`: what data.length is by itself."""
    size = f" data.size={data.size}" if data.size else ""
    return size + ("" if data.length == length else f" data.length={data.length}")


def image_settings(want: Want) -> list[Any]:
    """Return what of the settings decides the pixels, as JSON values for a source's identity."""
    return [want.height, want.width, want.scaled]


def image_stamps(want: Want) -> dict[str, Any]:
    """Return what a result on such images must say."""
    scaled = {"scaled": f"{want.height}x{want.width}"} if want.scaled else {}
    return scaled | ({"lossy": True} if want.lossy else {})


def count_stamps(counts: tuple[int, int], published: tuple[int, int]) -> dict[str, Any]:
    """Return what a result must say of a set that has not as many training and test images as published."""
    if counts == published:
        return {}
    return {"images": {"train": counts[0], "test": counts[1]}, "complete": False}


def file_identity(files: Iterable[SourceFile]) -> list[Any]:
    """Return what tells these files from others: how many, and a digest of their paths, sizes and times."""
    digest, number = hashlib.sha256(), 0
    for file in files:
        digest.update(f"{file.path}\0{file.size}\0{file.modified_ns}\n".encode("utf-8", "surrogateescape"))
        number += 1
    return [number, digest.hexdigest()]


def listed(path: Path) -> SourceFile:
    """Return a file and what it is now.

    Raises:
        UserError: it cannot be read.
    """
    try:
        status = path.stat()
        path.open("rb").close()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    return SourceFile(path.resolve(), status.st_size, status.st_mtime_ns)
