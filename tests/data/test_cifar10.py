from __future__ import annotations

import os
import pickle
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_cases import encoded, random_images, read_parts, read_source, records, write_table, write_tar
from PIL import Image

from rtx.config import DataConfig
from rtx.data import cifar10, hub
from rtx.data.cifar10 import RECORD, source
from rtx.data.imageset import held_images
from rtx.errors import RunFailed, UserError

TRAIN, TEST = random_images(53, seed=1), random_images(7, seed=2)
REAL = Path(__file__).parents[3] / "shared" / "data" / "cifar10" / "jpeg_plain_text"


def open_source(path: Path | None, root: Path = Path("nowhere"), **data):
    settings: dict[str, Any] = {"length": 3072, "held_out": 3} | data
    return source(DataConfig(name="cifar10", path=str(path) if path else None, **settings), root, print)


def refusal(path: Path | None, kind: type[Exception] = UserError, read: bool = False, **data) -> str:
    with pytest.raises(kind) as caught:
        made = open_source(path, **data)
        if read:
            read_source(made)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def tables(folder: Path, kind: str = "PNG") -> Path:
    write_table(folder / "plain_text" / "train-00000-of-00002.parquet", [encoded(image, kind) for image in TRAIN[:30]])
    write_table(folder / "plain_text" / "train-00001-of-00002.parquet", [encoded(image, kind) for image in TRAIN[30:]])
    write_table(folder / "plain_text" / "test-00000-of-00001.parquet", [encoded(image, kind) for image in TEST])
    return folder


def binary(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, rows in enumerate(np.array_split(np.arange(53), 5), 1):
        (folder / f"data_batch_{number}.bin").write_bytes(records(TRAIN[rows]))
    (folder / "test_batch.bin").write_bytes(records(TEST))
    (folder / "batches.meta.txt").write_text("airplane\n")
    return folder


def archive(folder: Path) -> Path:
    inside = binary(folder / "files")
    members = {f"cifar-10-batches-bin/{path.name}": path.read_bytes() for path in sorted(inside.iterdir())[::-1]}
    return write_tar(folder / "cifar-10-binary.tar.gz", members)


@pytest.mark.parametrize("make", [tables, binary, archive])
def test_every_route_gives_the_same_images_in_order(tmp_path, make):
    found = open_source(make(tmp_path))
    splits = read_source(found)
    held = held_images(53, 3)
    assert (splits["test"] == TEST).all()
    assert (splits["valid"] == TRAIN[held]).all()
    assert (splits["train"] == np.delete(TRAIN, held, axis=0)).all()
    assert (found.name, found.image) == ("cifar10", (32, 32))
    assert found.stamps == {"images": {"train": 53, "test": 7}, "complete": False}
    assert found.options == f"data=cifar10 data.path={make(tmp_path)} data.held_out=3"


def test_parts_pickle_and_are_cut_by_content(tmp_path):
    from rtx.data.imageset import parts_of
    from rtx.data.imagetable import open_table
    from rtx.data.pixels import Want

    tables(tmp_path)
    files = [replace(open_table(path), per_part=9) for path in sorted(tmp_path.rglob("train*.parquet"))]
    chosen = np.ones(53, dtype=bool)
    chosen[9:18] = chosen[40] = False
    parts = parts_of(files, Want(32, 32), chosen)
    assert [part.size // 3072 for part in parts] == [9, 9, 3, 9, 8, 5]  # an empty part is left out
    assert all(len(pickle.dumps(part)) < 1000 for part in parts)
    again = pickle.loads(pickle.dumps(parts))
    assert (read_parts(again, (32, 32)) == TRAIN[chosen]).all()


def test_parts_may_begin_within_a_row_group(tmp_path):
    from rtx.data.imageset import Rows
    from rtx.data.imagetable import open_table
    from rtx.data.pixels import Want

    table = open_table(write_table(tmp_path / "train.parquet", [encoded(image) for image in TRAIN], group=10))
    mask = np.arange(14) % 3 == 0
    part = table.part(Rows(17, 31, mask), Want(32, 32))
    found = [np.frombuffer(b"".join(document), dtype=np.uint8) for document in part.documents()]
    assert (np.stack(found) == TRAIN[17:31][mask].reshape(5, -1)).all()
    assert part.size == 5 * 3072


def test_held_out_images_are_the_same_everywhere():
    assert held_images(50_000, 5).tolist() == [26768, 32247, 34511, 41244, 47612]
    assert set(held_images(50_000, 5)) < set(held_images(50_000, 5_000))
    assert len(set(held_images(1000, 999))) == 999


def test_without_held_out_images_the_test_images_serve_as_valid(tmp_path):
    found = open_source(tables(tmp_path), held_out=0)
    splits = read_source(found)
    assert (splits["valid"] == TEST).all() and (splits["train"] == TRAIN).all()
    assert found.stamps["valid"] == "test"
    assert "data.held_out=53: expected fewer than the 53 training images" in refusal(tmp_path, held_out=53)


def test_the_settings_tell_sources_apart(tmp_path):
    tables(tmp_path)
    sources = [open_source(tmp_path), open_source(tmp_path, held_out=4), open_source(tmp_path, size=16, length=768)]
    os.utime(tmp_path / "plain_text" / "test-00000-of-00001.parquet", (1, 1))
    sources.append(open_source(tmp_path))
    assert len({str(found.identity) for found in sources}) == 4


@pytest.mark.parametrize("make", [tables, binary])
def test_scaled_images_are_stamped(tmp_path, make):
    found = open_source(make(tmp_path), size=16, length=768)
    splits = read_source(found)
    assert found.stamps["scaled"] == "16x16" and found.image == (16, 16)
    means = TEST.reshape(7, 16, 2, 16, 2, 3).mean((2, 4))
    assert np.abs(splits["test"] - means).max() <= 1
    assert "data.size=16 data.length=768" not in refusal(tmp_path, size=16)
    assert "set data.length=768" in refusal(tmp_path, size=16)
    assert "set data.length=3072; data.size=<side>" in refusal(tmp_path, length=1024)


def test_jpeg_inside_parquet_is_stamped(tmp_path):
    found = open_source(tables(tmp_path, "JPEG"))
    assert found.stamps["lossy"] is True
    assert read_source(found)["train"].shape == (50, 32, 32, 3)
    table = tmp_path / "plain_text" / "test-00000-of-00001.parquet"
    tables(tmp_path)
    write_table(table, [*(encoded(image) for image in TEST[:5]), encoded(TEST[5], "JPEG")])
    said = refusal(tmp_path, read=True)
    assert said.startswith(f"{table}: row 5: expected a lossless image") and "found a lossy one" in said


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (encoded(random_images(1, 40, 30)[0]), "expected an image of 32 x 32 (height x width), found 40 x 30"),
        (encoded(TRAIN[0])[:900], "expected a whole image, found 900 bytes that cannot be decoded"),
        (b"<html>", "no image format that is read"),
        (b"", "expected a whole image, found nothing"),
        (None, "expected the bytes of an image, found none"),
    ],
)
def test_a_row_that_is_no_image_is_named(tmp_path, row, said):
    tables(tmp_path)
    table = tmp_path / "plain_text" / "train-00001-of-00002.parquet"
    write_table(table, [*(encoded(image) for image in TRAIN[:9]), row, encoded(TRAIN[0])])
    assert (text := refusal(tmp_path, read=True)).startswith(f"{table}: row 9: {said}") or said in text
    assert f"{table}: row 9: " in text


def test_grey_and_palette_rows_become_rgb(tmp_path):
    grey, palette = Image.fromarray(TEST[0]).convert("L"), Image.fromarray(TEST[1]).quantize(8)
    tables(tmp_path)
    write_table(tmp_path / "plain_text" / "test-00000-of-00001.parquet", [encoded(grey), encoded(palette)])
    found = read_source(open_source(tmp_path))["test"]
    assert (found[0] == np.asarray(grey)[:, :, None]).all() and (found[1] == np.asarray(palette.convert("RGB"))).all()


def test_parquet_files_that_will_not_do(tmp_path):
    tables(tmp_path)
    table = tmp_path / "plain_text" / "test-00000-of-00001.parquet"
    write_table(table, [b"x"], column="text")
    assert f"{table}: expected a column img or image with images, found text, label" in refusal(tmp_path)
    table.write_bytes(table.read_bytes()[:-100])
    assert f"{table}: expected a whole parquet file" in refusal(tmp_path)
    table.unlink()
    assert "expected parquet files named test-*.parquet" in refusal(tmp_path)
    assert "found train-00000-of-00002.parquet" in refusal(tmp_path / "plain_text" / "*.parquet")
    write_table(table, [])
    assert "expected test images, found files with none" in refusal(tmp_path)


def test_a_glob_or_one_of_the_files_names_the_tables(tmp_path):
    tables(tmp_path)
    first = tmp_path / "plain_text" / "train-00000-of-00002.parquet"
    counts = [open_source(path).units for path in (tmp_path, first, tmp_path / "plain_text" / "*.parquet")]
    assert counts[0] == counts[1] == counts[2]


def test_records_that_will_not_do(tmp_path):
    batch = binary(tmp_path) / "data_batch_3.bin"
    whole = batch.read_bytes()
    batch.write_bytes(whole[:-1])
    assert f"{batch}: expected records of {RECORD:,} bytes" in refusal(tmp_path)
    batch.write_bytes(whole[:RECORD] + b"\x2a" + whole[RECORD + 1 :])
    assert f"{batch}: expected labels 0 to 9, found 42 in record 1" in refusal(tmp_path, read=True)
    (tmp_path / "test_batch.bin").unlink()
    assert "expected test_batch.bin, found data_batch_1.bin" in refusal(tmp_path)


def test_pickles_are_never_loaded(tmp_path):
    path = write_tar(tmp_path / "cifar-10-python.tar.gz", {"cifar-10-batches-py/data_batch_1": b"\x80\x04."})
    for place in (path, tmp_path):
        said = refusal(place)
        assert "pickles could run anything" in said and "cifar-10-binary.tar.gz" in said
    path.rename(tmp_path / "renamed.tar.gz")
    assert "pickles" in refusal(tmp_path / "renamed.tar.gz")


def test_archives_that_will_not_do(tmp_path):
    path = archive(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert f"{path}: expected a whole archive" in refusal(path)
    write_tar(path, {"cifar-10-batches-bin/data_batch_1.bin": records(TRAIN), "../test_batch.bin": records(TEST)})
    assert "member '../test_batch.bin' leads out" in refusal(path)
    path.write_bytes(b"<html>moved</html>")
    assert f"{path}: expected a whole archive" in refusal(path)
    assert "found a file of 18 bytes that is neither" in refusal(path.rename(tmp_path / "page.html"))
    assert "found nothing" in refusal(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    assert "expected a folder with data_batch_1.bin" in refusal(tmp_path / "empty")


def test_an_archive_of_the_published_size_must_have_the_published_content(tmp_path, monkeypatch):
    path = archive(tmp_path)
    monkeypatch.setattr(cifar10, "ARCHIVE", cifar10.Remote(cifar10.ARCHIVE.url, path.stat().st_size, "0" * 64))
    found = open_source(path)
    assert found.stamps == {} and found.units == {"train": 49_997 * 3072, "valid": 3 * 3072, "test": 10_000 * 3072}
    with pytest.raises(UserError, match=r"expected cifar-10-binary\.tar\.gz with sha256 0000"):
        found.parts()


@pytest.fixture
def no_network(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.mark.usefixtures("no_network")
def test_without_a_network_the_hub_fails_at_once(tmp_path, monkeypatch):
    found = open_source(None, tmp_path)
    assert found.units == {"train": 49_997 * 3072, "valid": 3 * 3072, "test": 10_000 * 3072} and found.stamps == {}
    began = time.monotonic()
    with pytest.raises(RunFailed) as caught:
        found.parts()
    assert time.monotonic() - began < 10
    assert "hf://datasets/uoft-cs/cifar10/plain_text/train" in str(caught.value)
    assert "data.path=" in str(caught.value) and "\n" not in str(caught.value)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(RunFailed, match="HF_HUB_OFFLINE is set, and it is not in the hub's cache"):
        found.parts()


@pytest.mark.usefixtures("no_network")
def test_a_cached_hub_file_is_used_offline_and_its_content_checked(tmp_path, monkeypatch):
    snapshot = tmp_path / "hub" / "datasets--uoft-cs--cifar10" / "snapshots" / ("0" * 40)
    tables(snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
    train = snapshot / "plain_text" / "train-00000-of-00002.parquet"
    file = hub.HubFile("uoft-cs/cifar10", f"plain_text/{train.name}", train.stat().st_size, "f" * 64)
    with pytest.raises(RunFailed) as caught:
        hub.hub_file(file, print, "")
    assert "expected" in str(caught.value) and f"data.path={train.parent}" in str(caught.value)
    good = hub.HubFile(file.repository, file.path, file.size, hub.file_sha256(train))
    assert hub.hub_file(good, print, "") == train


@pytest.mark.skipif(not REAL.exists(), reason="no copy of CIFAR-10 in JPEG beside the project")
def test_the_real_images_in_jpeg():
    found = open_source(REAL, held_out=5000)
    assert found.stamps == {"lossy": True}
    assert found.units == {"train": 45_000 * 3072, "valid": 5_000 * 3072, "test": 10_000 * 3072}
    parts = found.parts()
    assert {name: len(split) for name, split in parts.items()} == {"train": 10, "valid": 10, "test": 2}
    images = np.stack([np.frombuffer(b"".join(image), dtype=np.uint8) for image in parts["valid"][3].documents()])
    assert 400 < len(images) < 600 and 90 < images.mean() < 150
