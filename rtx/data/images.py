"""Sets of images: CIFAR-10, ImageNet 64 x 64, and your own, as sub-pixels row by row, red, green, blue."""

from __future__ import annotations

import contextlib
import io
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rtx.data.files import Remote, column_of, identity_of, table_rows, walk
from rtx.data.sampler import permuted
from rtx.data.sets import FACTS, SETS, SPLITS, Report, Source
from rtx.data.text import Files, origin, row_count
from rtx.errors import UserError
from rtx.settings.schema import DataConfig

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

FORMATS = (
    "PNG",
    "JPEG",
    "WEBP",
    "GIF",
    "BMP",
    "TIFF",
    "PPM",
)  # others of Pillow's start programs (EPS)
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm")
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA")
COLUMNS = ("img", "image", "png")
HELD_KEY = b"rtx: the training images that are held out"
EVERY = 20

CIFAR10, CIFAR10_HUB = Remote(**FACTS["cifar10"]["archive"]), FACTS["cifar10"]["hub"]
IMAGENET64 = {split: Remote(**facts) for split, facts in FACTS["imagenet64"]["files"].items()}
FORMS = {
    "cifar10": [{"train": "cifar-10-binary.tar.gz", "test": "cifar-10-binary.tar.gz"}],
    "imagenet64": [
        {split: f"{split}_64x64{form}" for split in IMAGENET64} for form in (".tar", "/*.png")
    ],
}
PUBLISHED = {name: FACTS[name]["images"] for name in FORMS}


@dataclass(frozen=True)
class Pixels:
    """What every image of a set is, or is made to be; called with rows it returns their sub-pixels."""

    height: int
    width: int
    scaled: bool = False  # with a box filter; else images of another size are refused
    lossy: bool = False  # else lossy files are refused, for the set would be stamped wrongly

    def __call__(self, table: pa.Table) -> Iterator[bytes]:
        """Yield each image of some rows (of paths, or of image files); raises as `decode`."""
        for value in table.column(0).to_pylist():
            if isinstance(value, str):
                yield self.decode(None, value)
            else:
                file = value if isinstance(value, dict) else {"bytes": value}
                yield self.decode(file.get("bytes") or b"", file.get("path") or "an image")

    def decode(self, raw: bytes | None, where: str) -> bytes:
        """Return the sub-pixels of an image file, given or at `where`; raises UserError, by its header if it can."""
        from PIL import Image

        with opened(raw, where) as image:
            problems = {
                f"mode {image.mode}": image.mode not in MODES,
                "a lossy one": image.format in ("JPEG", "WEBP") and not self.lossy,
                f"{image.height} x {image.width}": image.size != (self.width, self.height)
                and not self.scaled,
            }
            if found := ", ".join(what for what, holds in problems.items() if holds):
                kind = f"{'' if self.lossy else 'lossless '}image of {self.height} x {self.width} (height x width)"
                mend = "convert it, leave it out, or scale all images: data.size=<side>"
                raise UserError(
                    f"{where}: expected a {kind} and 8 bits a channel, found {found}; {mend}"
                )
            rgb = image.convert("RGB")
        if rgb.size != (self.width, self.height):
            rgb = rgb.resize((self.width, self.height), Image.Resampling.BOX)
        return rgb.tobytes()


@contextlib.contextmanager
def opened(raw: bytes | None, where: str) -> Iterator[Any]:
    """Open an image file by its header; whatever is wrong with it becomes a UserError."""
    from PIL import Image

    try:
        with Image.open(where if raw is None else io.BytesIO(raw), formats=FORMATS) as image:
            yield image
    except UserError:
        raise
    except (
        Exception
    ) as error:  # decoders raise whatever they like: OSError, SyntaxError, struct.error, EOFError
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"{where}: expected a whole image: {reason}; get it anew, or leave it out"
        ) from error


def benchmark(data: DataConfig, root: Path, report: Report) -> Source:
    """Return CIFAR-10 (Krizhevsky 2009) or ImageNet 64 x 64, valid held out of train; else than published is stamped.

    The papers' ImageNet 64 x 64 is that of PixelRNN (van den Oord et al. 2016), PNGs; parquet files are of another.
    """
    published, side, form = PUBLISHED[data.name], data.size or SETS[data.name].side or 0, ".tar"
    if data.path is None and data.name == "imagenet64":
        torrent = "academictorrents.com/details/96816a530ee002254d29bf7a61c0c158d3dedc3b"
        raise UserError(
            f"data=imagenet64 needs data.path=<folder with train_64x64.tar and valid_64x64.tar>: {torrent}"
        )
    identity, place, files = origin(data, root, report, FORMS[data.name], CIFAR10_HUB, CIFAR10)
    counts, test = published, list(published)[1]
    if data.path is not None and (form := files()["train"][0].suffix) in (".parquet", ".png"):
        counts = {split: row_count(paths) for split, paths in files().items()}
    if data.held_out >= (train := counts["train"]):
        raise UserError(
            f"data.held_out={data.held_out}: expected fewer than the {train:,} training images"
        )
    lossy = form == ".parquet" and begins_with_jpeg(files()["train"])

    def load(split: str, work: Path) -> datasets.Dataset:
        if split == "test" or (split == "valid" and not data.held_out):
            return image_rows(files()[test], test, work)
        held = np.zeros(train, dtype=bool)
        held[held_images(train, data.held_out)] = True
        return image_rows(files()["train"], "train", work).select(
            np.flatnonzero(held if split == "valid" else ~held)
        )

    stamps: dict[str, Any] = {"lossy": True} if lossy else {}
    stamps |= {} if data.held_out else {"valid": "test"}
    stamps |= {"scaled": f"{side}x{side}"} if data.size else {}
    stamps |= (
        {"variant": "other" if form == ".parquet" else "PixelRNN"}
        if data.name == "imagenet64"
        else {}
    )
    stamps |= {} if counts == published else {"images": counts, "complete": False}
    want = Pixels(side, side, data.size is not None, lossy)
    return Source(data.name, [*identity, data.held_out], place, load, want, stamps, (side, side))


def held_images(images: int, held_out: int) -> np.ndarray:
    """Return the numbers of the held-out training images, int64 `[held_out]`: the first of a fixed permutation."""
    return np.sort(
        np.array([permuted(k, images, HELD_KEY) for k in range(held_out)], dtype=np.int64)
    )


def begins_with_jpeg(files: Sequence[Path]) -> bool:
    """Tell whether the first image of parquet files is a JPEG, as all may be then."""
    from pyarrow import parquet

    with parquet.ParquetFile(files[0]) as file:
        value = next(file.iter_batches(1, columns=[column_of(files, COLUMNS)])).column(0)[0].as_py()
    return isinstance(value, dict) and (value["bytes"] or b"").startswith(b"\xff\xd8")


def image_rows(paths: Sequence[Path], split: str, work: Path) -> datasets.Dataset:
    """Return the images of parquet files, of a published archive (in its order), or of image files."""
    import datasets

    if (form := paths[0].suffix) == ".parquet":
        return table_rows(paths, COLUMNS, work / "cache" / "tables")
    if form == ".tar":
        IMAGENET64[split].check(paths[0])
        options = {
            "data_files": {split: str(paths[0])},
            "split": split,
            "cache_dir": str(work / "cache" / "tars"),
        }
        return datasets.load_dataset("webdataset", **options).select_columns(["png"])
    if form == ".gz":
        CIFAR10.check(paths[0])
        kind = datasets.Features({"ppm": datasets.Value("binary")})
        return datasets.Dataset.from_dict({"ppm": cifar_images(paths[0], split)}, kind)
    return datasets.Dataset.from_dict({"path": [str(path) for path in paths]})


def cifar_images(archive: Path, split: str) -> list[bytes]:
    """Return the images of the binary archive as PPM files: a record is a label, then red, green and blue plane."""
    batch = "test_batch" if split == "test" else "data_batch"
    with tarfile.open(archive, "r|gz") as members:
        found = {
            entry.name: members.extractfile(entry).read()  # type: ignore[union-attr]
            for entry in members
            if batch in entry.name
        }
    records = np.frombuffer(b"".join(found[name] for name in sorted(found)), np.uint8).reshape(
        -1, 1 + 3 * 32 * 32
    )
    images_BHWC = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return [b"P6 32 32 255\n" + image_HWC.tobytes() for image_HWC in images_BHWC]


def own_images(data: DataConfig, root: Path, report: Report) -> Source:
    """Return the images below data.path, as large as the first one or scaled to data.size; see `cut`."""
    place = Path(data.path or "").expanduser()
    files = [path for path in walk(place, leave_out=root) if path.suffix.lower() in SUFFIXES]
    folders = [place / split for split in SPLITS if (place / split).is_dir()]
    paths = {
        folder.name: [file for file in files if folder in file.parents] for folder in folders
    } or cut(files)
    if not all(paths.get(split) for split in SPLITS):
        found = ", ".join(f"{split} {len(files):,}" for split, files in paths.items())
        wanted = f"a folder with at least {EVERY} images (.png, .jpg, ...), or some in each of train, valid and test"
        raise UserError(f"data.path={data.path}: expected {wanted}, found {found}")
    with opened(None, str(paths["train"][0])) as image:
        width, height = (data.size, data.size) if data.size else image.size

    def load(split: str, work: Path) -> datasets.Dataset:
        return image_rows(paths[split], split, work)

    want, identity = (
        Pixels(height, width, data.size is not None, lossy=True),
        identity_of(chain(*paths.values())),
    )
    stamps = {"scaled": f"{height}x{width}"} if data.size else {}
    return Source("images", identity, {"place": data.path}, load, want, stamps, (height, width))


def cut(files: list[Path]) -> Files:
    """Share sorted files out: every 20th (9, 29, ...) is valid, every 20th (19, 39, ...) test, counted from 0."""
    valid, test = EVERY // 2 - 1, EVERY - 1
    train = [file for place, file in enumerate(files) if place % EVERY not in (valid, test)]
    return {"train": train, "valid": files[valid::EVERY], "test": files[test::EVERY]}


def png(pixels: np.ndarray, image: tuple[int, int]) -> bytes:
    """Return a PNG of an image of `(height, width)` from its sub-pixels, uint8 `[height * width * 3]`."""
    from PIL import Image

    target = io.BytesIO()
    Image.fromarray(pixels.reshape(*image, 3)).save(target, "PNG")
    return target.getvalue()
