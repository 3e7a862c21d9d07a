"""Sets of images: CIFAR-10, ImageNet 64 x 64, and your own; an image is a row of `height * width * 3` sub-pixels.

Sub-pixels go row by row, red, green, blue. Grey, palette and alpha become RGB as Pillow converts them; other modes (16
bits, CMYK) are refused. Orientation tags are not followed, and of an animation the first image is taken.
"""

from __future__ import annotations

import io
import tarfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rtx.config import DataConfig
from rtx.data.fetch import Remote, download, hub_files
from rtx.data.files import column_of, identity_of, parquet_splits, table_rows, walk
from rtx.data.permutation import permuted
from rtx.data.sets import SETS, SPLITS, Report, Source
from rtx.data.text import check_archive
from rtx.errors import UserError

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
"""Formats that are read; others of Pillow's start programs (EPS) or hold no photographs."""
LOSSY = {".jpg": True, ".jpeg": True, ".webp": True}
SUFFIXES = {**dict.fromkeys((".png", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm"), False), **LOSSY}
"""Endings of the files that count as images, and whether such a file may have lost something."""
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA")
COLUMNS = ("img", "image", "png")
LARGEST_FILE = 1 << 28  # bytes of one image file
HELD_KEY = b"rtx: the training images that are held out"
EVERY, FEWEST = 20, 3

CIFAR10 = Remote(
    "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    size=170_052_171,
    sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
)
CIFAR10_HUB = ("uoft-cs/cifar10", "0b2714987fa478483af9968de7c934580d0bb9a2")
CIFAR10_RECORDS = {"train": [f"data_batch_{number}.bin" for number in range(1, 6)], "test": ["test_batch.bin"]}
RECORD = 1 + 32 * 32 * 3  # a label, then the red, the green and the blue plane
PICKLED = ("cifar-10-python.tar.gz", "data_batch_1", "cifar-10-batches-py")

IMAGENET64 = {
    "train": Remote(
        "train_64x64.tar", 12_112_588_800, "e2a2c1947a748d0d256e98e6d82800d855441dc9e4de2e71a773f1324c4524d7"
    ),
    "test": Remote("valid_64x64.tar", 477_255_680, "eeac03ec4f585baf871d2b4cb9c974bfe345e74878a74e5820fe6eb1041629cd"),
}
IMAGENET64_HOW = (
    "get train_64x64.tar and valid_64x64.tar (http://image-net.org/small/ no longer has them; "
    "academictorrents.com/details/96816a530ee002254d29bf7a61c0c158d3dedc3b does): data.path=<their folder>"
)
PUBLISHED = {"cifar10": {"train": 50_000, "test": 10_000}, "imagenet64": {"train": 1_281_149, "test": 49_999}}
"""Images of each set."""

Load = Callable[[str, Path], "datasets.Dataset"]


@dataclass(frozen=True)
class Pixels:
    """What every image of a set is, or is made to be; called with rows it returns their sub-pixels."""

    height: int
    width: int
    scaled: bool = False
    """Scale images of any size to this one with a box filter; else another size is refused."""
    lossy: bool = False
    """Whether lossy files are expected; else one is refused, for the set would be stamped wrongly."""

    @property
    def units(self) -> int:
        """Sub-pixels of an image."""
        return self.height * self.width * 3

    def __call__(self, table: pa.Table) -> Iterator[bytes]:
        """Yield each image of some rows: of paths, of image files, or of CIFAR-10's raw pixels.

        Raises:
            UserError: one cannot be read or decoded, has another size, or is lossy where none is expected.
        """
        name = table.column_names[0]
        for value in table.column(name).to_pylist():
            if name == "path":
                yield self.decode(read_image(value), value)
            elif name == "pixels":
                yield self.fit(np.frombuffer(value, np.uint8).reshape(32, 32, 3))
            else:
                raw, where = (value or {}).get("bytes"), (value or {}).get("path") or "an image"
                yield self.decode(raw or b"", where)

    def decode(self, raw: bytes, where: str) -> bytes:
        """Return the sub-pixels of an image file; `where`: what messages call it."""
        from PIL import Image

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                warnings.simplefilter("error", Image.DecompressionBombWarning)  # beyond 89 million pixels
                image = Image.open(io.BytesIO(raw), formats=FORMATS)  # reads the header alone
                self.check(image, where)
                return self.fit(np.asarray(image.convert("RGB")))
        except UserError:
            raise
        except Exception as error:  # decoders raise whatever they like: OSError, SyntaxError, struct.error, EOFError
            reason = " ".join(str(error).split()) or type(error).__name__
            found = f"{len(raw):,} bytes that cannot be decoded ({reason})" if raw else "nothing"
            raise UserError(f"{where}: expected a whole image, found {found}; get it anew, or leave it out") from error

    def check(self, image: Any, where: str) -> None:
        """Refuse an image of another size or mode, or a lossy one; the size is asked before anything is decoded."""
        if image.mode not in MODES:
            raise UserError(f"{where}: expected 8 bits a channel, grey or RGB, found mode {image.mode}; convert it")
        if not self.lossy and is_lossy(image):
            kept = "keep lossy images (.jpg, .webp, ...) in a set of their own"
            raise UserError(f"{where}: expected a lossless image like the first of the set, found a lossy one; {kept}")
        if not self.scaled and image.size != (self.width, self.height):
            raise UserError(
                f"{where}: expected an image of {self.height} x {self.width} (height x width), found {image.height} x "
                f"{image.width}; leave it out, or scale all images: data.size={self.height} "
                f"data.length={3 * self.height**2}"
            )

    def fit(self, image_HWC: np.ndarray) -> bytes:
        """Return the sub-pixels of an image, scaled where that is wanted."""
        if image_HWC.shape[:2] != (self.height, self.width):
            from PIL import Image

            scaled = Image.fromarray(image_HWC).resize((self.width, self.height), Image.Resampling.BOX)
            image_HWC = np.asarray(scaled)
        return image_HWC.tobytes()


def is_lossy(image: Any) -> bool:
    """Tell whether an opened image is of a format that loses something, or may have."""
    return image.format in ("JPEG", "WEBP") or "jpeg" in str(image.info.get("compression"))


def read_image(path: str) -> bytes:
    """Return the content of an image file; raises UserError where it cannot be read, or is far too large for one."""
    try:
        with open(path, "rb") as file:
            raw = file.read(LARGEST_FILE + 1)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    if len(raw) > LARGEST_FILE:
        raise UserError(f"{path}: expected an image file of at most {LARGEST_FILE:,} bytes, found more; leave it out")
    return raw


def first_image(raw: bytes, where: str) -> tuple[int, int, bool]:
    """Return height and width of an image file, and whether it is lossy, from its header; raises UserError."""
    from PIL import Image

    try:
        image = Image.open(io.BytesIO(raw), formats=FORMATS)
        return image.height, image.width, is_lossy(image)
    except OSError as error:
        raise UserError(f"{where}: expected a whole image, found {error}; get it anew, or leave it out") from error


def source(data: DataConfig, root: Path, report: Report) -> Source:
    """Return the images that `data` names; files below `root`, the folder of the stores, are left out.

    Raises:
        UserError: nothing is there, it is not what can be read, lacks a split, or settings do not fit; one line.
    """
    return {"cifar10": cifar10, "imagenet64": imagenet64, "images": own_images}[data.name](data, root, report)


def wanted(data: DataConfig, height: int, width: int, lossy: bool) -> Pixels:
    """Return what every image is to be: data.size, or the size of the set's own.

    Raises:
        UserError: data.length is not height x width x 3.
    """
    want = Pixels(data.size or height, data.size or width, data.size is not None, lossy)
    if data.length != want.units:
        scaling = "" if data.size else "; data.size=<side> scales them"
        raise UserError(
            f"data.length={data.length}: an image of {want.height} x {want.width} is one sequence of {want.units} "
            f"sub-pixels; set data.length={want.units}{scaling}"
        )
    return want


def stamps_of(want: Pixels) -> dict[str, Any]:
    """Return what a result on such images must say."""
    scaled = {"scaled": f"{want.height}x{want.width}"} if want.scaled else {}
    return scaled | ({"lossy": True} if want.lossy else {})


# The benchmarks: train and test as published, valid held out of train


def benchmark(
    data: DataConfig,
    identity: Sequence[Any],
    place: dict[str, Any],
    counts: Mapping[str, int],
    load: Load,
    stamps: Mapping[str, Any],
    lossy: bool = False,
) -> Source:
    """Return the source of the training and test images that `load` returns, as many as `counts` says.

    Raises:
        UserError: data.length is not that of an image, or more images are to be held out than there are.
    """
    side = SETS[data.name].side or 0
    want, train = wanted(data, side, side, lossy), counts["train"]
    if data.held_out >= train:
        raise UserError(
            f"data.held_out={data.held_out}: expected fewer than the {train:,} training images; hold out fewer, such "
            f"as data.held_out={train // 10}"
        )

    def load_split(split: str, work: Path) -> datasets.Dataset:
        if split == "test" or (split == "valid" and not data.held_out):
            return load("test", work)
        held = np.zeros(train, dtype=bool)
        held[held_images(train, data.held_out)] = True
        return load("train", work).select(np.flatnonzero(held if split == "valid" else ~held))

    images = {"train": train - data.held_out, "valid": data.held_out or counts["test"], "test": counts["test"]}
    return Source(
        name=data.name,
        identity=[*identity, [want.height, want.width, want.scaled], data.held_out],
        place=place,
        load=load_split,
        read=want,
        stamps={**stamps, **stamps_of(want), **({} if data.held_out else {"valid": "test"})},
        units={name: count * want.units for name, count in images.items()},
        image=(want.height, want.width),
    )


def held_images(images: int, held_out: int) -> np.ndarray:
    """Return the numbers of the training images that are held out, in order: int64 `[held_out]`.

    They are the first `held_out` of a fixed keyed permutation of all training images: the same on every machine, and
    those for a smaller number are among those for a larger one.
    """
    return np.sort(np.array([permuted(k, images, HELD_KEY) for k in range(held_out)], dtype=np.int64))


def tables(path: str, test: str = "test") -> tuple[dict[str, list[Path]], dict[str, int], bool]:
    """Return the parquet files of train and test below a folder, how many images, and whether they are lossy.

    Args:
        test: what the set calls its test images: valid or test.
    """
    from pyarrow import parquet

    found = parquet_splits(path, [Path(path).expanduser()], ("train", test))
    found = {"train": found["train"], "test": found[test]} if found else {}
    counts = {split: sum(parquet.read_metadata(file).num_rows for file in files) for split, files in found.items()}
    if not all(counts.values()):
        raise UserError(f"data.path={path}: expected training and test images, found files with none: {counts}")
    return found, counts, bool(found) and first_is_lossy(found["train"])


def first_is_lossy(files: Sequence[Path]) -> bool:
    """Return whether the first image is lossy; raises UserError where there is no column of image files."""
    from pyarrow import parquet

    name = column_of(files, COLUMNS)
    with parquet.ParquetFile(files[0]) as file:
        value = next(file.iter_batches(1, columns=[name])).column(0)[0].as_py()
    if not isinstance(value, dict) or not isinstance(value.get("bytes"), bytes):
        raise UserError(f"{files[0]}: expected column {name} with image files (bytes and path), found something else")
    return first_image(value["bytes"], f"{files[0]}: row 0")[2]


def table_load(files: Callable[[], Mapping[str, Sequence[Path]]]) -> Load:
    """Return what loads the images of parquet files."""
    return lambda split, work: table_rows(files()[split], column_of(files()[split], COLUMNS), work / "cache" / "tables")


def count_stamps(counts: Mapping[str, int], published: Mapping[str, int]) -> dict[str, Any]:
    """Return what a result must say of a set that has not as many training and test images as published."""
    return {} if counts == published else {"images": dict(counts), "complete": False}


def cifar10(data: DataConfig, root: Path, report: Report) -> Source:
    """Return CIFAR-10 (Krizhevsky 2009): PNG in the hub's parquet files, or the binary archive."""
    published, (repository, revision) = PUBLISHED["cifar10"], CIFAR10_HUB
    if data.path is None and data.fetch == "hub":
        fetch = cache(lambda: hub_files(repository, ["plain_text/*.parquet"], revision, report))
        place = {"place": f"hf://datasets/{repository}", "revision": revision}
        load = table_load(lambda: parquet_splits(repository, [fetch()], ("train", "test")))
        return benchmark(data, ["hub", repository, revision], place, published, load, {})
    if data.path is None or not (local := Path(data.path).expanduser()).is_dir() or (local / CIFAR10.name).is_file():
        archive = cache(lambda: cifar10_archive(data.path, root, report))
        if data.path is not None:
            archive()
        load = record_load(archive)
        return benchmark(data, ["binary", CIFAR10.sha256], {"place": CIFAR10.url}, published, load, {})
    files, counts, lossy = tables(data.path)
    if not files:
        pickled = next((name for name in PICKLED if (local / name).exists()), None)
        found = f"{pickled}, whose pickles could run anything and are never loaded" if pickled else "none"
        wanted = f"{CIFAR10.name} or parquet files of {repository}"
        raise UserError(f"data.path={data.path}: expected {wanted}, found {found}; get {CIFAR10.url}")
    identity, stamps = identity_of(chain(*files.values())), count_stamps(counts, published)
    return benchmark(data, identity, {"place": data.path}, counts, table_load(lambda: files), stamps, lossy)


def cifar10_archive(path: str | None, root: Path, report: Report) -> Path:
    """Return the binary archive, fetched or at `path` or in that folder; raises UserError for another file."""
    place = Path(path).expanduser() if path else download(CIFAR10, root / "downloads", report)
    place = place / CIFAR10.name if place.is_dir() else place
    if not place.is_file():
        raise UserError(
            f"data.path={path}: expected {CIFAR10.name}, or a folder with it or with parquet files, found none"
        )
    check_archive(place, CIFAR10)
    return place


def record_load(archive: Callable[[], Path]) -> Load:
    """Return what loads the images of the binary archive, streamed, their planes interleaved."""

    def load(split: str, work: Path) -> datasets.Dataset:
        import datasets

        images: list[bytes] = []
        with tarfile.open(archive(), "r|gz") as members:
            contents = {
                member.name.rpartition("/")[2]: file.read()
                for member in members
                if member.isfile() and (file := members.extractfile(member)) and member.name.endswith(".bin")
            }
        for name in CIFAR10_RECORDS[split]:
            planes = np.frombuffer(contents[name], np.uint8).reshape(-1, RECORD)[:, 1:].reshape(-1, 3, 32, 32)
            images += [image_HWC.tobytes() for image_HWC in planes.transpose(0, 2, 3, 1)]
        return datasets.Dataset.from_dict({"pixels": images}, datasets.Features({"pixels": datasets.Value("binary")}))

    return load


def imagenet64(data: DataConfig, root: Path, report: Report) -> Source:
    """Return ImageNet 64 x 64 from data.path: PixelRNN's tars or the folders from them, or parquet of another variant.

    Two data sets go by this name. The papers' is the one of PixelRNN (van den Oord et al. 2016): 1,281,149 and 49,999
    PNGs without labels. Those on the hub were scaled another way and are easier; a result says so.
    """
    if data.path is None or not (place := Path(data.path).expanduser()).is_dir():
        found = "needs data.path" if data.path is None else f"data.path={data.path}: no such folder"
        raise UserError(f"data=imagenet64 {found}: {IMAGENET64_HOW}")
    published = PUBLISHED["imagenet64"]
    tars = {split: place / archive.name for split, archive in IMAGENET64.items()}
    folders = {split: tar.with_suffix("") for split, tar in tars.items()}
    original, lossy = True, False
    if all(tar.is_file() for tar in tars.values()):
        for split, tar in tars.items():
            if tar.stat().st_size != IMAGENET64[split].size:
                check_archive(tar, IMAGENET64[split])
        identity, counts, load = [archive.sha256 for archive in IMAGENET64.values()], dict(published), tar_load(tars)
    elif all(folder.is_dir() for folder in folders.values()):
        paths = {split: image_files(folder) for split, folder in folders.items()}
        lossy = any(SUFFIXES[path.suffix.lower()] for path in chain(*paths.values()))
        identity = identity_of(chain(*paths.values()))
        counts, load = {split: len(files) for split, files in paths.items()}, folder_load(paths)
    else:
        files, counts, lossy = tables(data.path, "valid")
        if not files:
            wanted = "train_64x64 and valid_64x64 (.tar or folders) or parquet files"
            raise UserError(f"data.path={data.path}: expected {wanted}, found none; {IMAGENET64_HOW}")
        identity, load, original = identity_of(chain(*files.values())), table_load(lambda: files), False
    original = original and not lossy and all(counts[split] <= published[split] for split in counts)
    stamps: dict[str, Any] = {"variant": "PixelRNN" if original else "other", "images": counts}
    if original and counts == published and data.size is None:
        stamps["protocol"] = "paper"
    return benchmark(data, identity, {"place": data.path}, counts, load, stamps, lossy)


def tar_load(tars: Mapping[str, Path]) -> Load:
    """Return what loads the images of tars, in their own order, once their sha256 is that of the published ones."""

    @cache
    def check(split: str) -> str:
        check_archive(tars[split], IMAGENET64[split])
        return str(tars[split])

    def load(split: str, work: Path) -> datasets.Dataset:
        import datasets

        options = {"data_files": {split: check(split)}, "split": split, "cache_dir": str(work / "cache" / "tars")}
        return datasets.load_dataset("webdataset", **options).select_columns(["png"])

    return load


# Your own images, from a folder


def own_images(data: DataConfig, root: Path, report: Report) -> Source:
    """Return the images below data.path, as large as the first one or scaled to data.size.

    Folders named train, valid and test are the splits where there are such. Else, in the sorted order of all images,
    every 20th (9, 29, ...) is valid and every 20th (19, 39, ...) test, counted from 0; of fewer than 20 the last but
    one and the last.
    """
    place = Path(data.path or "").expanduser()
    if not data.path or not place.is_dir():
        found = "a file" if data.path and place.exists() else "nothing"
        raise UserError(f"data.path={data.path}: expected a folder with images, found {found}; give the folder")
    named = [name for name in SPLITS if (place / name).is_dir()]
    if named and len(named) < len(SPLITS):
        raise UserError(
            f"data.path={data.path}: expected folders train, valid and test, found {' and '.join(named)} alone; add "
            "the others, or give a folder without any of the three, which is cut by itself"
        )
    paths = {name: image_files(place / name, root) for name in named} or cut(image_files(place, root, FEWEST))
    first = paths["train"][0]
    height, width = (1, 1) if data.size else first_image(read_image(str(first)), str(first))[:2]
    lossy = any(SUFFIXES[path.suffix.lower()] for path in chain(*paths.values()))
    want = wanted(data, height, width, lossy)
    identity = identity_of(chain(*paths.values()))
    return Source(
        name="images",
        identity=[*identity, *map(len, paths.values()), [want.height, want.width, want.scaled]],
        place={"place": data.path, "files": sum(map(len, paths.values()))},
        load=folder_load(paths),
        read=want,
        stamps=stamps_of(want),
        units={name: len(files) * want.units for name, files in paths.items()},
        image=(want.height, want.width),
    )


def image_files(folder: Path, leave_out: Path | None = None, fewest: int = 1) -> list[Path]:
    """Return the image files below a folder, sorted; hidden ones, links to folders and other files are left out."""
    files = walk(folder, leave_out=leave_out)
    images = [path for path in files if path.suffix.lower() in SUFFIXES]
    if len(images) < fewest:
        others = f" and {len(files) - len(images):,} other files" if len(files) > len(images) else ""
        raise UserError(
            f"{folder}: expected at least {fewest} image{'s' if fewest > 1 else ''} (.png, .jpg, ...), found "
            f"{len(images)}{others}; give a folder with more"
        )
    return images


def cut(files: list[Path]) -> dict[str, list[Path]]:
    """Share sorted files out among train, valid and test, as `own_images` says."""
    if len(files) < EVERY:
        return {"train": files[:-2], "valid": files[-2:-1], "test": files[-1:]}
    valid, test = EVERY // 2 - 1, EVERY - 1
    train = [file for place, file in enumerate(files) if place % EVERY not in (valid, test)]
    return {"train": train, "valid": files[valid::EVERY], "test": files[test::EVERY]}


def folder_load(paths: Mapping[str, Iterable[Path]]) -> Load:
    """Return what loads image files by their paths."""

    def load(split: str, work: Path) -> datasets.Dataset:
        import datasets

        return datasets.Dataset.from_dict({"path": [str(path) for path in paths[split]]})

    return load


def png_grid(images: Sequence[np.ndarray], image: tuple[int, int]) -> bytes:
    """Return a PNG with images, each `[height * width * 3]` sub-pixels, in a grid about as wide as high."""
    from PIL import Image

    height, width = image
    columns = min(len(images), max(1, round((len(images) * height / width) ** 0.5)))
    rows, gap = -(-len(images) // columns), 2
    sheet_HWC = np.full((rows * (height + gap) - gap, columns * (width + gap) - gap, 3), 128, dtype=np.uint8)
    for place, pixels in enumerate(images):
        top, left = place // columns * (height + gap), place % columns * (width + gap)
        sheet_HWC[top : top + height, left : left + width] = pixels.reshape(height, width, 3)
    target = io.BytesIO()
    Image.fromarray(sheet_HWC).save(target, "PNG")
    return target.getvalue()
