from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_cases import encoded, random_images, read_source
from PIL import Image

from rtx.config import DataConfig
from rtx.data.images import source
from rtx.errors import UserError

IMAGES = random_images(43, 6, 4)


def open_source(path: Path | None, said: list[str] | None = None, root: Path = Path("nowhere"), **data):
    settings: dict[str, Any] = {"length": 72} | data
    report = print if said is None else said.append
    return source(DataConfig(name="images", path=str(path) if path else None, **settings), root, report)


def refusal(path: Path | None, read: bool = False, **data) -> str:
    with pytest.raises(UserError) as caught:
        made = open_source(path, **data)
        if read:
            read_source(made)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def write(folder: Path, images: np.ndarray, suffix: str = "png") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, image in enumerate(images):
        kind = {"png": "PNG", "jpg": "JPEG", "bmp": "BMP"}[suffix]
        (folder / f"{number:03d}.{suffix}").write_bytes(encoded(image, kind))
    return folder


def test_every_20th_image_is_valid_and_every_20th_test(tmp_path):
    found = open_source(write(tmp_path / "all", IMAGES))
    splits = read_source(found)
    assert (splits["valid"] == IMAGES[[9, 29]]).all() and (splits["test"] == IMAGES[[19, 39]]).all()
    assert (splits["train"] == np.delete(IMAGES, [9, 19, 29, 39], axis=0)).all()
    assert found.stamps == {} and found.image == (6, 4)
    assert found.options == f"data=images data.path={tmp_path / 'all'} data.length=72"


@pytest.mark.parametrize("count", [3, 4, 19])
def test_of_few_images_the_last_two_are_held_out(tmp_path, count):
    splits = read_source(open_source(write(tmp_path, IMAGES[:count])))
    assert [len(images) for images in splits.values()] == [count - 2, 1, 1]
    assert (splits["valid"][0] == IMAGES[count - 2]).all() and (splits["test"][0] == IMAGES[count - 1]).all()


def test_fewer_than_three_are_refused(tmp_path):
    write(tmp_path, IMAGES[:2])
    (tmp_path / "notes.txt").write_text("two")
    assert refusal(tmp_path).startswith(
        f"{tmp_path}: expected at least 3 images (.png, .jpg, ...), found 2 and 1 other"
    )


def test_folders_named_after_splits_are_the_splits(tmp_path):
    for name, images in (("train", IMAGES[:5]), ("valid", IMAGES[5:7]), ("test", IMAGES[7:8])):
        write(tmp_path / name / "deeper", images)
    splits = read_source(open_source(tmp_path))
    assert [len(images) for images in splits.values()] == [5, 2, 1]
    assert (splits["test"] == IMAGES[7:8]).all()
    for file in (tmp_path / "valid" / "deeper").iterdir():
        file.unlink()
    assert f"{tmp_path / 'valid'}: expected at least 1 image " in refusal(tmp_path)
    (tmp_path / "valid" / "deeper").rmdir()
    (tmp_path / "valid").rmdir()
    assert "expected folders train, valid and test, found train and test alone" in refusal(tmp_path)


def test_what_is_hidden_or_no_image_is_left_out_and_said(tmp_path, said):
    write(tmp_path / "a", IMAGES[:9])
    (tmp_path / "a" / ".hidden.png").write_bytes(b"no image")
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "x.png").write_bytes(b"no image")
    (tmp_path / "a" / "labels.csv").write_text("1,2")
    write(tmp_path / "stores", IMAGES[:5])
    found = open_source(tmp_path, said, root=tmp_path / "stores")
    assert read_source(found)["train"].shape[0] == 7
    assert said == [f"data.path={tmp_path}: 1 files are left out: their names do not end as an image's"]


def test_many_formats_and_a_stamp_for_what_is_lossy(tmp_path):
    write(tmp_path / "a", IMAGES[:3])
    write(tmp_path / "b", IMAGES[3:6], "bmp")
    found = open_source(tmp_path)
    assert (read_source(found)["train"] == IMAGES[:4]).all() and found.stamps == {}
    write(tmp_path / "c", IMAGES[6:8], "jpg")
    found = open_source(tmp_path)
    assert found.stamps == {"lossy": True} and len(read_source(found)["train"]) == 6
    (tmp_path / "c" / "000.jpg").unlink()
    (tmp_path / "c" / "001.jpg").rename(tmp_path / "c" / "001.png")
    assert "001.png: expected a lossless image" in refusal(tmp_path, read=True)


def test_another_size_is_refused_with_what_to_do(tmp_path):
    write(tmp_path, IMAGES[:8])
    odd = tmp_path / "004.png"
    odd.write_bytes(encoded(random_images(1, 10, 4)[0]))
    said = refusal(tmp_path, read=True)
    assert said.startswith(f"{odd}: expected an image of 6 x 4 (height x width), found 10 x 4; leave it out, or scale")
    assert "set data.length=72; data.size=<side> scales them" in refusal(tmp_path, length=3072)
    found = open_source(tmp_path, size=5, length=75)
    assert read_source(found)["train"].shape == (6, 5, 5, 3)
    assert found.stamps == {"scaled": "5x5"}
    assert found.options.endswith("data.size=5 data.length=75")


def test_images_that_cannot_be_decoded_are_named(tmp_path):
    write(tmp_path, IMAGES[:8])
    (tmp_path / "003.png").write_bytes(encoded(IMAGES[3])[:60])
    assert f"{tmp_path / '003.png'}: expected a whole image, found 60 bytes" in refusal(tmp_path, read=True)
    (tmp_path / "000.png").write_bytes(b"<html>")
    assert f"{tmp_path / '000.png'}: expected a whole image" in refusal(tmp_path)
    os.remove(tmp_path / "000.png")
    found = open_source(tmp_path)
    os.remove(tmp_path / "001.png")
    with pytest.raises(UserError, match=r"001\.png: cannot be read: No such file"):
        read_source(found)


def test_a_path_that_is_no_folder(tmp_path):
    (tmp_path / "a.png").write_bytes(encoded(Image.fromarray(IMAGES[0])))
    assert "expected a folder with images, found a file" in refusal(tmp_path / "a.png")
    assert "found nothing" in refusal(tmp_path / "none")
    assert refusal(None) == "data=images needs data.path=<folder with images>"
