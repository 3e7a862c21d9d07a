from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_cases import encoded, random_images, read_source, write_table, write_tar
from PIL import Image

from rtx.config import DataConfig
from rtx.data import imagenet64
from rtx.data.imagenet64 import source
from rtx.data.imageset import held_images
from rtx.errors import UserError

TRAIN, TEST = random_images(23, 64, 64, seed=1), random_images(6, 64, 64, seed=2)


def open_source(path: Path | None, **data):
    settings: dict[str, Any] = {"length": 12288, "held_out": 4} | data
    return source(DataConfig(name="imagenet64", path=str(path) if path else None, **settings), Path("nowhere"), print)


def refusal(path: Path | None, read: bool = False, **data) -> str:
    with pytest.raises(UserError) as caught:
        made = open_source(path, **data)
        if read:
            read_source(made)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def folders(place: Path) -> Path:
    for name, images in (("train_64x64", TRAIN), ("valid_64x64", TEST)):
        (place / name).mkdir(parents=True)
        for number in np.random.default_rng(0).permutation(len(images)):  # written in no order
            (place / name / f"{number:07d}.png").write_bytes(encoded(images[number]))
    (place / "train_64x64" / ".DS_Store").write_bytes(b"hidden")
    return place


def tars(place: Path) -> Path:
    for name, images in (("train_64x64", TRAIN), ("valid_64x64", TEST)):
        members = [(f"{name}/{99 - number:07d}.png", encoded(image)) for number, image in enumerate(images)]
        write_tar(place / f"{name}.tar", members)  # the names fall: the order is that of the tar
    return place


def arrays(place: Path) -> Path:
    np.save(place / "imagenet64-train.npy", TRAIN)
    np.save(place / "imagenet64-valid.npy", TEST)
    return place


def tables(place: Path) -> Path:
    write_table(place / "data" / "train-00000-of-00002.parquet", [encoded(image) for image in TRAIN[:13]], "image")
    write_table(place / "data" / "train-00001-of-00002.parquet", [encoded(image) for image in TRAIN[13:]], "image")
    write_table(place / "data" / "validation-00000-of-00001.parquet", [encoded(image) for image in TEST], "image")
    write_table(place / "data" / "test-00000-of-00001.parquet", [encoded(TRAIN[0])], "image")  # has no labels
    return place


def lists(place: Path) -> Path:
    """As `datasets` writes a column of Array3D."""
    import datasets

    features = datasets.Features({"image": datasets.Array3D((64, 64, 3), "uint8"), "label": datasets.Value("int32")})
    for name, images in (("train-0.parquet", TRAIN), ("val-0.parquet", TEST)):
        rows = {"image": list(images), "label": [0] * len(images)}
        datasets.Dataset.from_dict(rows, features=features).to_parquet(str(place / name))
    return place


@pytest.mark.parametrize(
    ("make", "variant"),
    [(folders, "PixelRNN"), (tars, "PixelRNN"), (arrays, "PixelRNN"), (tables, "other"), (lists, "other")],
)
def test_every_kind_of_file_gives_the_same_images(tmp_path, make, variant):
    found = open_source(make(tmp_path))
    splits = read_source(found)
    held = held_images(23, 4)
    assert (splits["test"] == TEST).all()
    assert (splits["valid"] == TRAIN[held]).all()
    assert (splits["train"] == np.delete(TRAIN, held, axis=0)).all()
    assert found.image == (64, 64)
    assert found.stamps == {"variant": variant, "images": {"train": 23, "test": 6}}


def test_a_part_of_a_tar_begins_in_its_middle(tmp_path, monkeypatch):
    monkeypatch.setattr(imagenet64, "ImageTar", lambda path, limit: ImageTar(path, limit, per_part=5))
    from rtx.data.imagefiles import ImageTar

    found = open_source(tars(tmp_path), held_out=0)
    parts = found.parts()
    assert {name: len(split) for name, split in parts.items()} == {"train": 5, "valid": 2, "test": 2}
    assert (read_source(found)["train"] == TRAIN).all()
    assert found.stamps["valid"] == "test"


def test_only_the_published_numbers_follow_the_papers_protocol(tmp_path, monkeypatch):
    arrays(tmp_path)
    monkeypatch.setattr(imagenet64, "SET", imagenet64.ImageSet("imagenet64", 64, 64, train=23, test=6, held_out=4))
    assert open_source(tmp_path).stamps["protocol"] == "paper"
    assert "protocol" not in open_source(tmp_path, size=32, length=3072).stamps
    np.save(tmp_path / "imagenet64-valid.npy", TEST[:5])
    assert "protocol" not in open_source(tmp_path).stamps
    np.save(tmp_path / "imagenet64-valid.npy", TRAIN[:7])  # more than there are
    assert open_source(tmp_path).stamps["variant"] == "other"


def test_a_tar_of_the_published_size_must_have_the_published_content(tmp_path, monkeypatch):
    size = tars(tmp_path).joinpath("train_64x64.tar").stat().st_size
    monkeypatch.setitem(imagenet64.TARS, "train_64x64.tar", (size, "0" * 64))
    found = open_source(tmp_path)
    assert found.stamps["images"] == {"train": 1_281_149, "test": 6}
    with pytest.raises(UserError, match=r"train_64x64\.tar: expected sha256 0000"):
        found.parts()


def test_what_is_missing_is_named_with_where_to_get_it(tmp_path):
    said = refusal(None)
    assert said.startswith("data=imagenet64 needs data.path: get train_64x64.tar and valid_64x64.tar")
    assert "96816a530ee002254d29bf7a61c0c158d3dedc3b" in said
    assert "found nothing" in refusal(tmp_path / "none")
    assert "expected train_64x64.tar, the folder train_64x64" in refusal(tmp_path)
    tars(tmp_path).joinpath("valid_64x64.tar").unlink()
    assert "expected valid_64x64.tar" in refusal(tmp_path / "train_64x64.tar")
    (tmp_path / "valid_64x64").mkdir()
    assert "expected images in valid, found none" in refusal(tmp_path)


def test_tars_that_will_not_do(tmp_path):
    tars(tmp_path)
    tar = tmp_path / "train_64x64.tar"
    small = encoded(random_images(1, 32, 32)[0])
    write_tar(tar, [*((f"{n}.png", encoded(TRAIN[n])) for n in range(9)), ("9.png", small)])
    assert f"{tar}: 9.png: expected an image of 64 x 64" in refusal(tmp_path, read=True)
    write_tar(tar, [*((f"{n}.png", encoded(TRAIN[n])) for n in range(9)), ("9.png", encoded(TRAIN[9])[:500])])
    assert f"{tar}: 9.png: expected a whole image" in refusal(tmp_path, read=True)
    write_tar(tar, [("a.png", encoded(TRAIN[0])), ("../b.png", encoded(TRAIN[1]))])
    assert "member '../b.png' leads out" in refusal(tmp_path)
    write_tar(tar, [("a.png", encoded(TRAIN[0])), ("labels.txt", b"1")])
    assert "expected nothing but image files, found labels.txt" in refusal(tmp_path)
    tar.write_bytes(tar.read_bytes()[:3000])
    assert "cut short or altered" in refusal(tmp_path)


def test_arrays_that_will_not_do(tmp_path):
    train = arrays(tmp_path) / "imagenet64-train.npy"
    whole = train.read_bytes()
    train.write_bytes(whole[:-10])
    assert f"{train}: expected a whole file with an array [images, height, width, 3] of uint8" in refusal(tmp_path)
    for wrong in (TRAIN.astype(np.float32), TRAIN[..., 0], TRAIN.transpose(0, 3, 1, 2)):
        np.save(train, wrong)
        assert f"found {wrong.dtype} {list(wrong.shape)}" in refusal(tmp_path)
    np.save(train, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    assert "bytes that are not one" in refusal(tmp_path)
    np.save(train, TRAIN[:, :32, :32])
    assert f"{train}: expected an image of 64 x 64 (height x width), found 32 x 32" in refusal(tmp_path, read=True)


def test_lists_that_will_not_do(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    arrays(tmp_path)
    (tmp_path / "imagenet64-train.npy").unlink()
    table = tmp_path / "train-0.parquet"
    kind = pa.list_(pa.list_(pa.list_(pa.uint8())))
    rows = [image.tolist() for image in TRAIN[:7]]
    rows[5] = rows[5][:60]
    pq.write_table(pa.table({"image": pa.array(rows, kind)}), table)
    assert f"{table}: row 5: expected lists [height, width, 3] of one size" in refusal(tmp_path, read=True)
    pq.write_table(pa.table({"image": pa.array([row[:60] for row in rows], kind)}), table)
    assert "row 1: expected an image of 64 x 64 (height x width), found 60 x 64" in refusal(tmp_path, read=True)
    pq.write_table(pa.table({"image": pa.array([[1, 2]], pa.list_(pa.int64()))}), table)
    assert "expected column image with image files (bytes) or lists" in refusal(tmp_path)
    scaled = open_source(arrays(tmp_path), size=16, length=768)
    assert read_source(scaled)["test"].shape == (6, 16, 16, 3) and scaled.stamps["scaled"] == "16x16"


def test_jpeg_is_stamped_and_never_the_papers(tmp_path):
    folders(tmp_path)
    for place in sorted((tmp_path / "train_64x64").glob("*.png")):
        place.write_bytes(encoded(Image.open(place), "JPEG"))
    found = open_source(tmp_path)
    assert found.stamps == {"variant": "other", "images": {"train": 23, "test": 6}, "lossy": True}
    read_source(found)


def test_a_touched_file_is_another_source(tmp_path):
    folders(tmp_path)
    before = open_source(tmp_path).identity
    assert open_source(tmp_path).identity == before
    os.utime(tmp_path / "valid_64x64" / "0000003.png", (1, 1))
    assert open_source(tmp_path).identity != before
