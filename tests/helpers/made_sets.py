"""Small versions of all data sets: files in their schema, constants, and options for them."""

import functools
import gzip
import hashlib
import io
import lzma
import random
import tarfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rtx.data import images, kernel, text
from rtx.data.catalog import open_data
from rtx.data.download import Remote
from rtx.data.sets import WORDS
from rtx.data.store import TokenStore
from rtx.errors import UserError
from rtx.settings.schema import DataConfig

Made = list[str]  # the options of a set


@functools.cache
def made_words(different: int) -> list[str]:
    """Return made words, some of which are not ASCII."""
    stems = random.Random(7)
    words = [
        "".join(stems.choices("abcdefghijklmnoprstuvwy", k=stems.randint(2, 9)))
        for _ in range(different)
    ]
    words[::25] = [f"{word}é" for word in words[::25]]
    return words


def prose(words: int, seed: int = 0, different: int = 400) -> bytes:
    """Return lines of made words, some frequent, some rare, some not ASCII."""
    draw = random.Random(seed)
    known = made_words(different)
    chosen = draw.choices(known, weights=[1 / (rank + 1) for rank in range(different)], k=words)
    lines = [" ".join(chosen[start : start + 11]) for start in range(0, words, 11)]
    return "\n".join(line.capitalize() + "." for line in lines).encode() + b"\n"


def articles(count: int, seed: int = 0) -> bytes:
    """Return text as in Wikitext: headings, paragraphs between blank lines, ` <unk> ` words."""
    lines = [b" "]
    for number in range(count):
        body = prose(80, 1_000 * seed + number).replace(b"\n", b" ").replace(b".", b" .")
        lines += [b" = Article %d of %d = " % (number, seed), b" ", b" %s<unk> " % body, b" "]
    return b"\n".join(lines) + b"\n"


def opened(
    root: Path, name: str, path: Path | str | None, length: int = 4, **options: Any
) -> TokenStore:
    """Return the store of a set at `path`."""
    data = DataConfig(name=name, path=None if path is None else str(path), length=length, **options)
    found = open_data(data, root, lambda line: None)
    assert isinstance(found, TokenStore)
    return found


def refused(
    root: Path, name: str, path: Path | str | None, message: str, length: int = 4, **options: Any
) -> None:
    """Check that a set at `path` is refused with `message`, and that no file is left."""
    before = set(root.glob("*"))
    with pytest.raises(UserError, match=message):
        opened(root, name, path, length, **options)
    assert set(root.glob("*")) == before


def remote(path: Path) -> Remote:
    content = path.read_bytes()
    return Remote(
        f"https://nowhere.invalid/{path.name}", len(content), hashlib.sha256(content).hexdigest()
    )


def write_table(path: Path, group: int = 1000, **columns: Sequence[Any]) -> Path:
    """Write a parquet file; bytes become text, valid or not."""
    import pyarrow as pa
    from pyarrow import parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {
        name: pa.array(rows, pa.binary()).view(pa.string())
        if rows and isinstance(rows[0], bytes)
        else pa.array(rows)
        for name, rows in columns.items()
    }
    parquet.write_table(pa.table(arrays), path, row_group_size=group)
    return path


def random_images(count: int, height: int = 32, width: int = 32, seed: int = 0) -> np.ndarray:
    """Return images that compress badly: uint8 `[count, height, width, 3]`."""
    return np.random.default_rng(seed).integers(0, 256, (count, height, width, 3), dtype=np.uint8)


def encoded(image: np.ndarray | Image.Image, kind: str = "PNG") -> bytes:
    target = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(target, kind)
    return target.getvalue()


def write_images(path: Path, rows: Sequence[bytes | None], column: str = "img") -> Path:
    """Write a parquet file in the hub's schema: image files as bytes and path, and a label."""
    files = [{"bytes": raw, "path": f"{place}.png"} for place, raw in enumerate(rows)]
    return write_table(path, 4, **{column: files, "label": list(range(len(rows)))})


def tables(folder: Path, column: str = "img", kind: str = "PNG", **splits: np.ndarray) -> Path:
    for split, pixels in splits.items():
        write_images(
            folder / f"{split}-00000-of-00001.parquet",
            [encoded(image, kind) for image in pixels],
            column,
        )
    return folder


def write_tar(path: Path, members: Mapping[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz" if path.name.endswith("gz") else "w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def publish_enwik8(archive: Path, content: bytes, patch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("enwik8", content)
    patch.setattr(text, "ENWIK8", remote(archive))
    patch.setattr(text, "ENWIK8_TEXT", (len(content), hashlib.sha256(content).hexdigest()))


TEXTS = {"train": articles(30, 1), "valid": articles(3, 2), "test": articles(4, 3)}
"""The splits of a Wikitext-103."""


def wikitext(folder: Path) -> Path:
    for split, content in TEXTS.items():
        (folder / f"wiki.{split}.tokens").write_bytes(content)
    return folder


def publish_wikitext(patch: pytest.MonkeyPatch, texts: Mapping[str, bytes] = TEXTS) -> None:
    for split, content in texts.items():
        lines = content.split(b"\n")[:-1]
        kept = sum(len(line) + 1 for line in lines if line != b" ")
        md5 = {} if split == "train" else {"md5": hashlib.md5(content).hexdigest()}
        patch.setitem(text.WIKITEXT_FACTS, split, {"lines": len(lines), "bytes": kept, **md5})
        words = sum(len(line.split()) + 1 for line in lines)
        patch.setitem(WORDS["wikitext103"], split, words)


def made_text(folder: Path, patch: pytest.MonkeyPatch) -> Made:
    (folder / "book.txt").write_bytes(prose(700))
    return ["data=text", f"data.path={folder / 'book.txt'}", "data.length=32"]


def made_library(folder: Path, patch: pytest.MonkeyPatch) -> Made:
    paths = [folder / name for name in ("a.py", "b.py")]
    for path in paths:
        path.write_bytes(prose(300, ord(path.name[0])))
    patch.setattr(text, "library_files", lambda: paths)
    return ["data=stdlib", "data.length=32"]


def made_enwik8(folder: Path, patch: pytest.MonkeyPatch) -> Made:
    """A zip of 4,000 bytes, 3,600 of them for training."""
    publish_enwik8(folder / "enwik8.zip", prose(1_000)[:4_000], patch)
    return ["data=enwik8", f"data.path={folder / 'enwik8.zip'}", "data.length=32"]


def kernel_tree(files_each: int = 12) -> dict[str, bytes]:
    """Return a small kernel: by path, a Makefile, C files in every folder, and what is not read."""
    tree = {
        "Makefile": b"VERSION = 6\nPATCHLEVEL = 12\nSUBLEVEL = 0\nEXTRAVERSION =\nNAME = A Name\n",
        "README": b"not C",
        "fs/Kconfig": b"not C",
        "fs/.hidden.c": b"hidden",
        "fs/nls/nls_cp949.c": b"a table",
        "crypto/testmgr.h": b"test vectors",
        "drivers/crypto/chip.c": b"of no folder that is read",
    }
    for place, folder in enumerate(kernel.FOLDERS):
        for number in range(files_each):
            seed = 100 * place + number
            tree[f"{folder}/deep-{number % 3}/file{number}.c"] = prose(20, seed)
        tree[f"{folder}/head.h"] = prose(5, 100 * place + 99)
    return tree


def taken_files(tree: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return those files of `kernel_tree` that are documents."""
    single = ("Makefile", "README", "fs/Kconfig", "fs/.hidden.c", "crypto/testmgr.h")
    left_out = (*single, "fs/nls/", "drivers/")
    return {name: content for name, content in tree.items() if not name.startswith(left_out)}


def kernel_tarball(path: Path, tree: Mapping[str, bytes], top: str = "linux-6.12/") -> Path:
    """Write a tarball of files, compressed as its name says."""
    plain = path.with_name("plain.tar")
    content = write_tar(plain, {top + name: file for name, file in tree.items()}).read_bytes()
    plain.unlink()
    compress = {".xz": lzma.compress, ".gz": gzip.compress}.get(path.suffix, bytes)
    path.write_bytes(compress(content))
    return path


def kernel_folder(folder: Path, tree: Mapping[str, bytes]) -> Path:
    """Write files below a folder, as an unpacked tarball has them."""
    for name, content in tree.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def made_kernel(folder: Path, patch: pytest.MonkeyPatch) -> Made:
    """A tarball of another release than the published."""
    place = kernel_tarball(folder / "linux-6.1.tar.xz", kernel_tree())
    return ["data=kernel", f"data.path={place}", "data.length=32"]


def made_wikitext(folder: Path, patch: pytest.MonkeyPatch) -> Made:
    """The three extracted files, and their words as the published ones."""
    publish_wikitext(patch)
    return ["data=wikitext103", f"data.path={wikitext(folder)}", "data.length=32"]


def made_pg19(folder: Path, patch: pytest.MonkeyPatch) -> Made:
    """Write parquet files of seven, two and three books, and let the published counts be theirs."""
    for seed, (split, count, words) in enumerate(
        [("train", 7, 1_390), ("valid", 2, 390), ("test", 3, 590)]
    ):
        books = [prose(200, 10 * seed + number) for number in range(count)]
        place = folder / f"{split.replace('valid', 'validation')}-00000-of-00001.parquet"
        write_table(place, 2, text=books, publication_date=[1800] * count)
        patch.setitem(text.PG19_BOOKS, split, count)
        patch.setitem(WORDS["pg19"], split, words)
    return ["data=pg19", f"data.path={folder}", "data.length=32", "data.vocabulary=400"]


def made_hub(folder: Path, patch: pytest.MonkeyPatch) -> Made:
    """A folder as a data set of the hub, which has splits and a column of text."""
    for number, split in enumerate(("train", "validation", "test")):
        lines = prose(400, number).decode().splitlines()
        write_table(
            folder / f"{split}-00000-of-00001.parquet", said=lines, who=["nobody"] * len(lines)
        )
    return ["data=hub", f"data.path={folder}", "data.column=said", "data.length=32"]


def made_cifar10(folder: Path, patch: pytest.MonkeyPatch) -> Made:
    tables(folder, train=random_images(9, seed=9), test=random_images(3, seed=3))
    return ["data=cifar10", f"data.path={folder}", "data.held_out=2"]


def made_imagenet64(folder: Path, patch: pytest.MonkeyPatch) -> Made:
    """Tars of PNGs as published, scaled down so that a sequence is short."""
    published = {}
    for split, name, count in (("train", "train_64x64", 9), ("valid", "valid_64x64", 3)):
        members = {
            f"{name}/{n}.png": encoded(image)
            for n, image in enumerate(random_images(count, 64, 64, count))
        }
        published[split] = remote(write_tar(folder / f"{name}.tar", members))
    patch.setattr(images, "IMAGENET64", published)
    patch.setitem(images.PUBLISHED, "imagenet64", {"train": 9, "valid": 3})
    return ["data=imagenet64", f"data.path={folder}", "data.held_out=2", "data.size=8"]


def made_images(folder: Path, patch: pytest.MonkeyPatch) -> Made:
    for number, image in enumerate(random_images(20, 4, 6)):
        (folder / f"{number:02d}.png").write_bytes(encoded(image))
    return ["data=images", f"data.path={folder}", "data.length=72"]


SETS: dict[str, Callable[[Path, pytest.MonkeyPatch], Made]] = {
    **{
        "text": made_text,
        "stdlib": made_library,
        "hub": made_hub,
        "images": made_images,
        "cifar10": made_cifar10,
    },
    "kernel": made_kernel,
    **{
        "enwik8": made_enwik8,
        "wikitext103": made_wikitext,
        "pg19": made_pg19,
        "imagenet64": made_imagenet64,
    },
}
