"""Sets of images: CIFAR-10, ImageNet 64 x 64, and your files.

The tokens of an image are its sub-pixels row by row: red, green, blue.
"""

from __future__ import annotations

import contextlib
import io
import re
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rtx.data.download import Remote
from rtx.data.files import column_of, identity_of, table_rows, walk
from rtx.data.origins import Files, Origin, origin_of, row_count
from rtx.data.sampler import permuted
from rtx.data.sets import FACTS, SPLITS, Report, Source
from rtx.disk import open_named
from rtx.errors import UserError
from rtx.paths import expand_path
from rtx.settings.data_sets import SETS
from rtx.settings.schema import DataConfig

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

# Others of Pillow's formats start programs (EPS).
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm")
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA")
DEEP = re.compile(";16[BLN]$")
"""Ends Pillow's names of arrangements with 16 bits a channel; BMP has 16 bits a pixel, `BGR;16`."""
COLUMNS = ("img", "image", "png")
HELD_KEY = b"rtx: the training images that are held out"
EVERY = 20
"""Of your images, one in EVERY is in split valid, and one in test."""

CIFAR10 = Remote(**FACTS["cifar10"]["archive"])
CIFAR10_HUB = FACTS["cifar10"]["hub"]
CIFAR10_SIDE = 32
IMAGENET64 = {
    "train": Remote(**FACTS["imagenet64"]["files"]["train"]),
    "valid": Remote(**FACTS["imagenet64"]["files"]["valid"]),
}
TORRENT = "academictorrents.com/details/96816a530ee002254d29bf7a61c0c158d3dedc3b"
FORMS = {
    "cifar10": [{"train": "cifar-10-binary.tar.gz", "test": "cifar-10-binary.tar.gz"}],
    "imagenet64": [
        {"train": "train_64x64.tar", "valid": "valid_64x64.tar"},
        {"train": "train_64x64/*.png", "valid": "valid_64x64/*.png"},
    ],
}
PUBLISHED = {name: FACTS[name]["images"] for name in FORMS}
"""Number of images of each published split; the second one is our split test."""


@dataclass(frozen=True)
class Pixels:
    """The size of every image of a set; called with rows, it yields their sub-pixels."""

    height: int
    width: int
    scaled: bool = False
    """Whether images of another size are scaled with a box filter; else they are refused."""
    lossy: bool = False
    """Whether lossy files are read; else they are refused, because the stamps would not say so."""

    def __call__(self, table: pa.Table) -> Iterator[bytes]:
        """Yield each image of some rows (paths, or image files); raises as `decode`."""
        for value in table.column(0).to_pylist():
            if isinstance(value, str):
                yield self.decode(None, value)
            elif isinstance(value, dict):
                yield self.decode(value.get("bytes") or b"", value.get("path") or "an image")
            else:
                yield self.decode(value or b"", "an image")

    def decode(self, content: bytes | None, name: str) -> bytes:
        """Return the sub-pixels of an image file, its `content` or the file `name`.

        UserError, if possible by the header alone.
        """
        from PIL import Image

        with open_image(content, name) as image:
            self.check(image, name)
            rgb = image.convert("RGB")
        if rgb.size != (self.width, self.height):
            rgb = rgb.resize((self.width, self.height), Image.Resampling.BOX)
        return rgb.tobytes()

    def check(self, image: Any, name: str) -> None:
        """Raise UserError for an image of another mode, size or kind of compression."""
        problems = []
        if image.mode not in MODES:
            problems.append(f"mode {image.mode}")
        if has_deep_channels(image):
            problems.append("16 bits a channel")
        if image.format in ("JPEG", "WEBP") and not self.lossy:
            problems.append("a lossy one")
        if image.size != (self.width, self.height) and not self.scaled:
            problems.append(f"{image.height} x {image.width}")
        if not problems:
            return
        kind = "image" if self.lossy else "lossless image"
        expected = f"a {kind} of {self.height} x {self.width} (height x width) and 8 bits a channel"
        advice = "convert it, leave it out, or scale all images: data.size=<side>"
        raise UserError(f"{name}: expected {expected}, found {', '.join(problems)}; {advice}")


def has_deep_channels(image: Any) -> bool:
    """Return whether the file of an image has more than 8 bits a channel.

    Pillow gives such an image mode RGB or RGBA and cuts its values. Before it reads them, it has
    the arrangement of the file, such as `RGB;16B`, and of a PPM the largest value.
    """
    for _, _, _, facts in image.tile:
        for fact in facts if isinstance(facts, tuple) else (facts,):
            if isinstance(fact, str) and DEEP.search(fact):
                return True
            if image.format == "PPM" and isinstance(fact, int) and fact > 255:
                return True
    return False


@contextlib.contextmanager
def open_image(content: bytes | None, name: str) -> Iterator[Any]:
    """Open an image file by its header; UserError for whatever is wrong with it."""
    from PIL import Image

    try:
        file = open_named(Path(name)) if content is None else io.BytesIO(content)
        # by path: an open file
        with file, Image.open(file, formats=FORMATS) as image:
            yield image
    except UserError:
        raise
    # Decoders raise many kinds of errors: OSError, SyntaxError, struct.error, EOFError.
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        advice = "get it anew, or leave it out"
        raise UserError(f"{name}: expected a whole image: {reason}; {advice}") from error


def benchmark(data: DataConfig, root: Path, report: Report) -> Source:
    """Return CIFAR-10 (Krizhevsky 2009) or ImageNet 64 x 64, with valid held out of train.

    Stamps record what differs from the published set. The ImageNet 64 x 64 of the papers is that of
    PixelRNN (van den Oord et al. 2016), in PNG files; parquet files have another one.
    """
    name = data.name
    if data.path is None and name == "imagenet64":
        expected = "data.path=<folder with train_64x64.tar and valid_64x64.tar>"
        raise UserError(f"data=imagenet64 needs {expected}: {TORRENT}")
    test = list(PUBLISHED[name])[1]
    origin = origin_of(data, root, report, FORMS[name], CIFAR10_HUB, CIFAR10)
    counts = image_counts(data, origin)
    train = counts["train"]
    if data.held_out >= train:
        expected = f"fewer than the {train:,} training images"
        raise UserError(f"data.held_out={data.held_out}: expected {expected}")
    is_parquet = local_suffix(data, origin) == ".parquet"
    lossy = is_parquet and begins_with_jpeg(origin.files()["train"])

    def load(split: str, work: Path) -> datasets.Dataset:
        is_test = split == "test" or (split == "valid" and not data.held_out)
        if is_test:
            return image_rows(origin.files()[test], test, work)
        is_chosen = np.zeros(train, dtype=bool)
        is_chosen[held_images(train, data.held_out)] = True
        if split == "train":
            is_chosen = ~is_chosen
        rows = image_rows(origin.files()["train"], "train", work)
        return rows.select(np.flatnonzero(is_chosen))

    side = data.size or SETS[name].side or 0
    stamps = benchmark_stamps(data, side, counts, is_parquet, lossy)
    pixels = Pixels(side, side, data.size is not None, lossy)
    identity = [*origin.identity, data.held_out]
    return Source(name, identity, origin.place, load, pixels, stamps, (side, side))


def local_suffix(data: DataConfig, origin: Origin) -> str:
    """Return the suffix of the training files in data.path; ".tar" without data.path."""
    if data.path is None:
        return ".tar"
    return origin.files()["train"][0].suffix


def image_counts(data: DataConfig, origin: Origin) -> dict[str, int]:
    """Return the number of images of each published split; files in data.path are counted."""
    if local_suffix(data, origin) in (".parquet", ".png"):
        return {split: row_count(paths) for split, paths in origin.files().items()}
    return PUBLISHED[data.name]


def benchmark_stamps(
    data: DataConfig,
    side: int,
    counts: dict[str, int],
    is_parquet: bool,
    lossy: bool,
) -> dict[str, Any]:
    """Return what differs from the published set, for the records of every result."""
    stamps: dict[str, Any] = {}
    if lossy:
        stamps["lossy"] = True
    if not data.held_out:
        stamps["valid"] = "test"
    if data.size:
        stamps["scaled"] = f"{side}x{side}"
    if data.name == "imagenet64":
        stamps["variant"] = "other" if is_parquet else "PixelRNN"
    if counts != PUBLISHED[data.name]:
        stamps["images"] = counts
        stamps["complete"] = False
    return stamps


def held_images(images: int, held_out: int) -> np.ndarray:
    """Return the numbers of the held-out training images, int64 `[held_out]`, ascending.

    They are the first of a fixed permutation.
    """
    numbers = [permuted(index, images, HELD_KEY) for index in range(held_out)]
    return np.sort(np.array(numbers, dtype=np.int64))


def begins_with_jpeg(files: Sequence[Path]) -> bool:
    """Return whether the first image of parquet files is a JPEG, as all may be then."""
    from pyarrow import parquet

    column = column_of(files, COLUMNS)
    with parquet.ParquetFile(files[0]) as file:
        batch = next(file.iter_batches(1, columns=[column]))
    value = batch.column(0)[0].as_py()
    if not isinstance(value, dict):
        return False
    return (value["bytes"] or b"").startswith(b"\xff\xd8")


def image_rows(paths: Sequence[Path], split: str, work: Path) -> datasets.Dataset:
    """Return the images of parquet files, of a published archive in order, or of image files."""
    import datasets

    cache = work / "cache"
    suffix = paths[0].suffix
    if suffix == ".parquet":
        return table_rows(paths, COLUMNS, cache / "tables")
    if suffix == ".tar":
        IMAGENET64[split].check(paths[0])
        files = {split: str(paths[0])}
        rows = datasets.load_dataset(
            "webdataset", data_files=files, split=split, cache_dir=str(cache / "tars")
        )
        return rows.select_columns(["png"])
    if suffix == ".gz":
        CIFAR10.check(paths[0])
        kind = datasets.Features({"ppm": datasets.Value("binary")})
        return datasets.Dataset.from_dict({"ppm": cifar_images(paths[0], split)}, kind)
    return datasets.Dataset.from_dict({"path": [str(path) for path in paths]})


def cifar_images(archive: Path, split: str) -> list[bytes]:
    """Return the images of the binary archive as PPM files.

    A record of the archive is a label, then the red, green and blue planes.
    """
    batch = "test_batch" if split == "test" else "data_batch"
    contents: dict[str, bytes] = {}
    # by path: an open file
    with open_named(archive) as file, tarfile.open(fileobj=file, mode="r|gz") as members:
        for entry in members:
            if batch in entry.name:
                contents[entry.name] = members.extractfile(entry).read()  # type: ignore[union-attr]
    side = CIFAR10_SIDE
    content = b"".join(contents[name] for name in sorted(contents))
    values = np.frombuffer(content, np.uint8)
    records = values.reshape(-1, 1 + 3 * side * side)
    planes_BCHW = records[:, 1:].reshape(-1, 3, side, side)
    images_BHWC = planes_BCHW.transpose(0, 2, 3, 1)
    header = b"P6 %d %d 255\n" % (side, side)
    return [header + image_HWC.tobytes() for image_HWC in images_BHWC]


def own_images(data: DataConfig, root: Path, report: Report) -> Source:
    """Return the images below data.path, as large as the first one or scaled to data.size.

    The splits are its folders train, valid and test, else see `cut`.
    """
    folder = expand_path(data.path or "", "data.path")
    files = walk(folder, leave_out=root)
    files = [path for path in files if path.suffix.lower() in SUFFIXES]
    paths = folder_splits(folder, files) or cut(files)
    if not all(paths.get(split) for split in SPLITS):
        actual = ", ".join(f"{split} {len(images):,}" for split, images in paths.items())
        expected = (
            f"a folder with at least {EVERY} images (.png, .jpg, ...), "
            "or some in each of train, valid and test"
        )
        raise UserError(f"data.path={data.path}: expected {expected}, found {actual}")
    height, width = image_size(data, paths["train"][0])

    def load(split: str, work: Path) -> datasets.Dataset:
        return image_rows(paths[split], split, work)

    stamps = {}
    if data.size:
        stamps["scaled"] = f"{height}x{width}"
    pixels = Pixels(height, width, data.size is not None, lossy=True)
    identity = identity_of(chain(*paths.values()))
    place = {"place": data.path}
    return Source("images", identity, place, load, pixels, stamps, (height, width))


def folder_splits(folder: Path, files: list[Path]) -> Files:
    """Return the files in each of the folders train, valid and test that exist."""
    splits = {}
    for split in SPLITS:
        inner = folder / split
        if inner.is_dir():
            splits[split] = [file for file in files if inner in file.parents]
    return splits


def cut(files: list[Path]) -> Files:
    """Share files out: of each 20, the one at place 9 is valid, the one at 19 test, from 0 on."""
    splits: Files = {"train": [], "valid": [], "test": []}
    for index, file in enumerate(files):
        place = index % EVERY
        if place == EVERY // 2 - 1:
            splits["valid"].append(file)
        elif place == EVERY - 1:
            splits["test"].append(file)
        else:
            splits["train"].append(file)
    return splits


def image_size(data: DataConfig, path: Path) -> tuple[int, int]:
    """Return height and width of all images: data.size, else those of the image at `path`."""
    with open_image(None, str(path)) as image:
        if data.size:
            return data.size, data.size
        return image.height, image.width


def png(pixels: np.ndarray, image: tuple[int, int]) -> bytes:
    """Return a PNG of an image of `(height, width)`; `pixels` are uint8 `[height * width * 3]`."""
    from PIL import Image

    target = io.BytesIO()
    Image.fromarray(pixels.reshape(*image, 3)).save(target, "PNG")
    return target.getvalue()
