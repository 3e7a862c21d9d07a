from __future__ import annotations

import json
import os
import resource
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rtx.data.store import DamagedStore, Recipe, build_store, open_store, verify_store
from rtx.errors import RunFailed, UserError

RAW = bytes(range(200)) * 5


def recipe_of(*chunks: bytes, identity: str = "one") -> Recipe:
    def deliver() -> Iterator[bytes]:
        yield from chunks

    splits = {"train": 900, "valid": 50, "test": 50}
    source = {"place": "here", "bytes": 1000}
    return Recipe("text", "data=text data.path=book.txt", splits, [identity], source, deliver)


@pytest.fixture
def recipe() -> Recipe:
    return recipe_of(RAW[:1], RAW[1:899], RAW[899:990], RAW[990:])


def test_splits_are_the_bytes_in_order_whatever_the_chunks(tmp_path, recipe):
    build_store(tmp_path, recipe)
    store = open_store(tmp_path, recipe)
    assert store.split("train").tobytes() == RAW[:900]
    assert store.split("valid").tobytes() == RAW[900:950]
    assert store.split("test").tobytes() == RAW[950:]
    assert all(isinstance(tokens, np.memmap) and not tokens.flags.writeable for tokens in store.splits.values())
    assert (store.vocabulary, store.unit, store.name) == (256, "byte", "text")
    assert store.tokenizer.decode(store.split("valid")) == RAW[900:950]
    assert json.loads(json.dumps(store.describe())) == {
        "name": "text",
        "fingerprint": store.fingerprint,
        "tokenizer": "bytes",
        "vocabulary": 256,
        "unit": "byte",
        "splits": {"train": 900, "valid": 50, "test": 50},
        "source": {"place": "here", "bytes": 1000},
        "folder": str(recipe.folder(tmp_path)),
    }
    with pytest.raises(UserError, match=r"no split 'vald': one of train, valid, test .did you mean 'valid'"):
        store.split("vald")
    assert verify_store(tmp_path, recipe).fingerprint == store.fingerprint
    assert [path.name for path in tmp_path.iterdir()] == [store.folder.name]


def test_the_key_follows_the_source_and_the_fingerprint_the_content(tmp_path, recipe):
    elsewhere = recipe_of(RAW, identity="two")
    changed = recipe_of(RAW[::-1], identity="three")
    for each in (recipe, elsewhere, changed):
        build_store(tmp_path, each)
    first, second, third = (open_store(tmp_path, each) for each in (recipe, elsewhere, changed))
    assert len({store.folder for store in (first, second, third)}) == 3
    assert first.fingerprint == second.fingerprint != third.fingerprint
    assert (first.folder / "train.bin").read_bytes() == (second.folder / "train.bin").read_bytes()
    uncut = replace(recipe, splits={"train": 1000, "valid": 0, "test": 0})
    assert uncut.folder(tmp_path) != recipe.folder(tmp_path)


def damage_size(folder: Path) -> None:
    os.truncate(folder / "valid.bin", 49)


def damage_missing(folder: Path) -> None:
    (folder / "test.bin").unlink()


def damage_no_record(folder: Path) -> None:
    (folder / "store.json").unlink()


def damage_half_record(folder: Path) -> None:
    os.truncate(folder / "store.json", 100)


def damage_other_json(folder: Path) -> None:
    (folder / "store.json").write_text("[1, 2]")


def damage_edited_record(folder: Path) -> None:
    record = json.loads((folder / "store.json").read_text())
    record["splits"]["train"]["sha256"] = "0" * 64
    (folder / "store.json").write_text(json.dumps(record))


def damage_format(folder: Path) -> None:
    path = folder / "store.json"
    path.write_text(path.read_text().replace('"format": 1', '"format": 0'))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_size, r"valid\.bin: damaged: expected 50 bytes, found 49"),
        (damage_missing, r"test\.bin: damaged: expected 50 bytes, found No such file"),
        (damage_no_record, r"store\.json: damaged: expected the record of the store, found No such file"),
        (
            damage_half_record,
            r"store\.json: damaged: expected the record of the store, found 100 bytes that are not one",
        ),
        (damage_other_json, r"store\.json: damaged: .*found 6 bytes that are not one"),
        (damage_edited_record, r"store\.json: damaged: expected fingerprint [0-9a-f]{64}, found [0-9a-f]{64}"),
        (damage_format, r"store\.json: damaged: expected format 1, found 0"),
    ],
)
def test_damage_is_seen_when_the_store_is_opened(tmp_path, recipe, damage, message):
    build_store(tmp_path, recipe)
    damage(recipe.folder(tmp_path))
    with pytest.raises(DamagedStore, match=message) as error:
        open_store(tmp_path, recipe)
    assert str(error.value).endswith("to rebuild the store: rtx data prepare data=text data.path=book.txt")
    assert "\n" not in str(error.value)
    build_store(tmp_path, recipe)
    verify_store(tmp_path, recipe)


def test_an_altered_byte_is_seen_by_verification(tmp_path, recipe):
    build_store(tmp_path, recipe)
    path = recipe.folder(tmp_path) / "train.bin"
    path.write_bytes(b"x" + path.read_bytes()[1:])
    open_store(tmp_path, recipe)
    with pytest.raises(DamagedStore, match=r"train\.bin: damaged: expected sha256 [0-9a-f]{64}, found [0-9a-f]{64}"):
        verify_store(tmp_path, recipe)


@pytest.mark.parametrize("chunks", [(RAW[:-1],), (RAW, b"more"), (RAW + b"m",), ()])
def test_a_source_of_another_length_is_not_taken(tmp_path, chunks):
    with pytest.raises(UserError, match="the source changed while it was read"):
        build_store(tmp_path, recipe_of(*chunks))
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_the_system_cuts_off_leaves_nothing(tmp_path):
    old = recipe_of(RAW)
    build_store(tmp_path, old)
    before = {path.name: path.read_bytes() for path in old.folder(tmp_path).iterdir()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, hard))  # the kernel refuses what goes beyond, as a full disk does
    try:
        with pytest.raises(RunFailed, match="no space left to write"):
            build_store(tmp_path, old)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == [old.folder(tmp_path).name]
    assert {path.name: path.read_bytes() for path in old.folder(tmp_path).iterdir()} == before


def test_a_disk_without_room_is_told_before_writing(tmp_path, recipe, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10_000, 9001, 999))  # type: ignore
    with pytest.raises(RunFailed, match="1,000 bytes are needed and 999 are free"):
        build_store(tmp_path, recipe)
    assert list(tmp_path.iterdir()) == []
