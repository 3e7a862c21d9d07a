"""CIFAR-10, ImageNet 64 x 64 and users' images: the same pixels from every form of files."""

import struct
import tarfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rtx.data import images
from rtx.data.download import Remote
from rtx.data.images import Pixels, cut, held_images
from rtx.data.store import TokenStore
from rtx.errors import UserError
from tests.helpers.made_sets import (
    encoded,
    opened,
    random_images,
    refused,
    remote,
    tables,
    write_images,
    write_table,
    write_tar,
)

TRAIN = random_images(12, seed=1)
TEST = random_images(4, seed=2)


def pictures(store: TokenStore, split: str) -> np.ndarray:
    assert store.image is not None
    return store.split(split).reshape(-1, *store.image, 3)


def records(pictures: np.ndarray) -> bytes:
    """Return CIFAR-10's binary records: a label, then the red, green and blue planes."""
    planes = pictures.transpose(0, 3, 1, 2).reshape(len(pictures), -1)
    labels = (np.arange(len(pictures), dtype=np.uint8) % 10)[:, None]
    return np.concatenate([labels, planes], axis=1).tobytes()


def archive(folder: Path) -> Path:
    parts = enumerate(np.array_split(TRAIN, 5), 1)
    members = {
        f"cifar-10-batches-bin/data_batch_{number}.bin": records(pixels) for number, pixels in parts
    }
    members |= {
        "cifar-10-batches-bin/test_batch.bin": records(TEST),
        "cifar-10-batches-bin/readme.html": b"<html>",
    }
    write_tar(folder / "cifar-10-binary.tar.gz", members)
    return folder


def as_hub_has_it(folder: Path, kind: str = "PNG") -> Path:
    return tables(folder, kind=kind, train=TRAIN, test=TEST)


@pytest.mark.parametrize("make", [as_hub_has_it, archive])
def test_every_form_of_cifar10_gives_the_same_images(tmp_path, root, monkeypatch, make):
    place = make(tmp_path)
    monkeypatch.setitem(images.PUBLISHED, "cifar10", {"train": 12, "test": 4})
    if make is archive:
        monkeypatch.setattr(images, "CIFAR10", remote(tmp_path / "cifar-10-binary.tar.gz"))
    store = opened(root, "cifar10", place, 3072, held_out=3)
    held = held_images(12, 3)
    assert (pictures(store, "valid") == TRAIN[held]).all()
    assert (pictures(store, "train") == np.delete(TRAIN, held, axis=0)).all()
    assert (pictures(store, "test") == TEST).all()
    assert store.unit == "dim" and store.stamps == {}


def test_held_out_images_are_the_same_everywhere_and_none_makes_test_valid(
    tmp_path, root, monkeypatch
):
    assert held_images(50_000, 5_000)[:4].tolist() == [24, 27, 41, 46]
    assert set(held_images(100, 7)) < set(held_images(100, 20))
    monkeypatch.setitem(images.PUBLISHED, "cifar10", {"train": 12, "test": 4})
    store = opened(root, "cifar10", as_hub_has_it(tmp_path), 3072, held_out=0)
    assert (pictures(store, "valid") == TEST).all() and store.stamps == {"valid": "test"}
    refused(
        root,
        "cifar10",
        tmp_path,
        r"data\.held_out=12: expected fewer than the 12 tra",
        3072,
        held_out=12,
    )


def test_what_is_not_as_published_is_stamped(tmp_path, root):
    store = opened(root, "cifar10", as_hub_has_it(tmp_path, "JPEG"), 3072, held_out=3)
    assert store.stamps == {"images": {"train": 12, "test": 4}, "complete": False, "lossy": True}
    scaled = opened(root, "cifar10", tmp_path, 192, held_out=3, size=8)
    assert scaled.stamps["scaled"] == "8x8" and scaled.image == (8, 8)
    refused(
        root, "cifar10", tmp_path, r"data\.length=192: expected 3072, for one im", 192, held_out=3
    )


def test_other_files_than_cifar10s_are_refused(tmp_path, root, monkeypatch):
    name = "cifar-10-binary.tar.gz"
    archive(tmp_path)
    monkeypatch.setattr(tarfile, "open", lambda *_: pytest.fail("it was opened"))
    for place in (tmp_path, tmp_path / name):
        refused(
            root,
            "cifar10",
            place,
            rf"{name}: expected {name} .*with sha256 c4a38c.*, found [\d,]+ bytes",
            3072,
        )
    (tmp_path / name).unlink()
    (tmp_path / "cifar-10-python.tar.gz").touch()
    refused(
        root, "cifar10", tmp_path, r"expected cifar-10-binary\.tar\.gz or parquet files, found none"
    )
    as_hub_has_it(tmp_path / "half")
    (tmp_path / "half" / "test-00000-of-00001.parquet").unlink()
    refused(root, "cifar10", tmp_path / "half", r"missing split: test; found only train-")
    for split in ("train", "test"):
        write_table(tmp_path / "other" / f"{split}.parquet", img=["text", "more"])
        write_table(tmp_path / "labels" / f"{split}.parquet", label=[1, 2])
    refused(
        root,
        "cifar10",
        tmp_path / "other",
        r"(text|more): expected a whole image: ",
        3072,
        held_out=1,
    )
    refused(
        root,
        "cifar10",
        tmp_path / "labels",
        r"expected a column img or image or png; found l",
        3072,
        held_out=1,
    )


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (None, "expected a whole image: cannot identify"),
        (b"no image", "expected a whole image: cannot identify"),
        (encoded(TRAIN[0])[:-900], "expected a whole image: image file is truncated"),
        (
            encoded(TRAIN[0, :16]),
            r"expected a lossless image of 32 x 32 \(height x width\) .*, found 16 x 32; convert",
        ),
        (encoded(TRAIN[0], "JPEG"), "found a lossy one; convert it, leave it out, or scale all"),
        (encoded(Image.new("CMYK", (32, 32)), "TIFF"), "8 bits a channel, found mode CMYK"),
    ],
)
def test_an_image_that_will_not_do_is_named(tmp_path, root, bad, message):
    rows = [encoded(image) for image in TRAIN]
    write_images(tmp_path / "train.parquet", [*rows[:5], bad, *rows[6:]])
    write_images(tmp_path / "test.parquet", rows[:3])
    refused(root, "cifar10", tmp_path, rf"5\.png: .*{message}", 3072, held_out=1)


def test_an_image_that_unpacks_to_gigabytes_is_refused_by_its_header():
    header = bytearray(encoded(Image.new("1", (8, 8))))
    header[16:29] = (60_000).to_bytes(4, "big") * 2 + header[24:29]
    header[29:33] = zlib.crc32(header[12:29]).to_bytes(4, "big")
    with pytest.raises(UserError, match=r"bomb\.png: .* exceeds limit of"):
        Pixels(8, 8, scaled=True).decode(bytes(header), "bomb.png")


def test_other_kinds_of_images_become_rgb():
    grey = np.arange(64, dtype=np.uint8).reshape(8, 8)
    want = Pixels(8, 8)
    as_rgb = np.repeat(grey[..., None], 3, axis=2).tobytes()
    for kind in ("L", "P", "RGBA"):
        assert want.decode(encoded(Image.fromarray(grey).convert(kind)), kind) == as_rgb
    image = random_images(1, 8, 8)[0]
    for kind in ("PNG", "BMP", "TIFF", "PPM"):
        assert want.decode(encoded(image, kind), kind) == image.tobytes(), (
            "row by row, red, green, blue"
        )
    box = Pixels(4, 4, scaled=True).decode(encoded(image), "scaled")
    assert (
        np.abs(
            np.frombuffer(box, np.uint8).reshape(4, 4, 3)
            - image.reshape(4, 2, 4, 2, 3).mean((1, 3))
        ).max()
        <= 1
    )


def deep_png(values: np.ndarray, kind: int) -> bytes:
    """Return a PNG of 16 bits a channel; `kind` is the PNG specification's colour type."""
    height, width, _ = values.shape
    header = struct.pack(">IIBBBBB", width, height, 16, kind, 0, 0, 0)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    content = b"\x89PNG\r\n\x1a\n"
    for name, part in ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")):
        checksum = struct.pack(">I", zlib.crc32(name + part))
        content += struct.pack(">I", len(part)) + name + part + checksum
    return content


def test_images_of_16_bits_a_channel_are_refused_and_not_cut():
    values = 999 * np.arange(64).reshape(4, 4, 4)
    files = [deep_png(values[..., :c], kind) for kind, c in ((0, 1), (2, 3), (4, 2), (6, 4))]
    files.append(b"P6 4 4 65535\n" + values[..., :3].astype(">u2").tobytes())
    for content in files:
        with pytest.raises(UserError, match=r"found .*16 bits a channel; convert"):
            Pixels(4, 4).decode(content, "deep")


BIG = {"train": random_images(6, 64, 64, 3), "valid": random_images(3, 64, 64, 4)}


def tars(folder: Path) -> Path:
    for split, pixels in BIG.items():
        members = {f"{split}_64x64/{9 - n}.png": encoded(image) for n, image in enumerate(pixels)}
        write_tar(folder / f"{split}_64x64.tar", {**members, f"{split}_64x64/._1.png": b"hidden"})
    return folder


def folders(folder: Path) -> Path:
    for split, pixels in BIG.items():
        (folder / f"{split}_64x64").mkdir(parents=True)
        (folder / f"{split}_64x64" / "._1.png").touch()
        for n, image in enumerate(pixels):
            (folder / f"{split}_64x64" / f"{n}.png").write_bytes(encoded(image))
    return folder


def other_tables(folder: Path) -> Path:
    return tables(folder, "image", train=BIG["train"], validation=BIG["valid"])


@pytest.mark.parametrize(
    ("make", "variant"), [(tars, "PixelRNN"), (folders, "PixelRNN"), (other_tables, "other")]
)
def test_every_form_of_imagenet64_gives_the_same_images(tmp_path, root, monkeypatch, make, variant):
    place = make(tmp_path)
    monkeypatch.setitem(images.PUBLISHED, "imagenet64", {"train": 6, "valid": 3})
    if make is tars:
        monkeypatch.setattr(
            images, "IMAGENET64", {split: remote(place / f"{split}_64x64.tar") for split in BIG}
        )
    store = opened(root, "imagenet64", place, 12288, held_out=2)
    with (
        monkeypatch.context() as patch
    ):  # of a store that is there neither archives nor images are read again
        patch.setattr(Remote, "check", lambda *_: pytest.fail("it was read"))
        assert opened(root, "imagenet64", place, 12288, held_out=2).fingerprint == store.fingerprint
    assert (pictures(store, "test") == BIG["valid"]).all() and len(pictures(store, "train")) == 4
    assert store.stamps == {"variant": variant}
    if make is folders:
        (place / "train_64x64" / "5.png").unlink()
        fewer = opened(root, "imagenet64", place, 12288, held_out=2).stamps
        assert fewer == {"variant": variant, "images": {"train": 5, "valid": 3}, "complete": False}


def test_another_tar_and_nothing_are_refused(tmp_path, root):
    refused(
        root,
        "imagenet64",
        None,
        r"needs data\.path=<folder with train_64x64\.tar and .*>: academictorrents",
    )
    for place in (tmp_path, tmp_path / "nowhere"):
        refused(
            root,
            "imagenet64",
            place,
            r"expected train_64x64\.tar and valid_64x64\.tar or train_64x64/\*\.png",
        )
    message = r"train_64x64\.tar: expected train_64x64\.tar .*, found [\d,]+ bytes"
    refused(root, "imagenet64", tars(tmp_path), message, 12288, held_out=2)


def test_every_20th_image_is_valid_and_every_20th_test_or_folders_say(tmp_path, root):
    paths = [Path(f"{n:03d}") for n in range(45)]
    parts = cut(paths)
    assert parts["valid"] == [paths[9], paths[29]] and parts["test"] == [paths[19], paths[39]]
    assert len(parts["train"]) == 41
    pixels = random_images(5, 4, 6)
    for number, name in enumerate(("train/a", "train/b", "train/sub/c", "valid/a", "test/a")):
        (tmp_path / "own" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "own" / f"{name}.png").write_bytes(encoded(pixels[number]))
    (tmp_path / "own" / "train" / "notes.txt").touch()
    (tmp_path / "own" / "train" / ".hidden.png").touch()
    store = opened(root, "images", tmp_path / "own", 72)
    assert (pictures(store, "train") == pixels[:3]).all() and (
        pictures(store, "test") == pixels[4:]
    ).all()
    assert store.image == (4, 6) and store.stamps == {}
    (tmp_path / "own" / "valid" / "a.png").unlink()
    refused(
        root,
        "images",
        tmp_path / "own",
        r"some in each of train, valid and test, found train 3, valid 0, test 1",
    )


def test_what_is_no_folder_of_images_is_refused(tmp_path, root):
    (tmp_path / "a.png").write_bytes(encoded(TRAIN[0]))
    refused(
        root,
        "images",
        tmp_path,
        r"expected a folder with at least 20 images .*, found train 1, valid 0, test 0",
    )
    for place in (tmp_path / "a.png", tmp_path / "nowhere"):
        refused(root, "images", place, f"{place}: cannot be read: ")
    for number in range(20):
        (tmp_path / f"{number}.png").write_bytes(b"no image")
    refused(root, "images", tmp_path, r"\d\.png: expected a whole image")
