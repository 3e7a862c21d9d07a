from __future__ import annotations

import json
import os
import resource
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from made_sources import Given, recipe_of

from rtx.data.build import build_store
from rtx.data.recipe import Recipe
from rtx.data.source import Part
from rtx.data.store import (
    DamagedStore,
    SplitFacts,
    TokenStore,
    fingerprint,
    is_verified,
    open_store,
    record_sum,
    verify_store,
)
from rtx.errors import RunFailed, UserError

RAW = bytes(range(200)) * 5
UNITS = {"train": 900, "valid": 50, "test": 50}


def cut(raw: bytes, **options: object) -> Recipe:
    splits = {"train": [Given((raw[:500], raw[500:900]))], "valid": [Given((raw[900:950],))]}
    splits["test"] = [Given((raw[950:],))]
    return recipe_of(splits, UNITS, **options)  # type: ignore


@pytest.fixture
def recipe() -> Recipe:
    return cut(RAW)


def opened(root: Path, recipe: Recipe) -> TokenStore:
    return open_store(recipe.folder(root), recipe.options)


def verified(root: Path, recipe: Recipe) -> TokenStore:
    return verify_store(recipe.folder(root), recipe.options)


def test_splits_are_the_bytes_in_order_with_their_documents(tmp_path, recipe):
    build_store(tmp_path, recipe)
    store = opened(tmp_path, recipe)
    assert store.split("train").tobytes() == RAW[:900]
    assert store.split("valid").tobytes() == RAW[900:950]
    assert store.split("test").tobytes() == RAW[950:]
    assert all(isinstance(tokens, np.memmap) and not tokens.flags.writeable for tokens in store.splits.values())
    assert store.documents("train").tolist() == [0, 500, 900] and store.documents("train").dtype == np.int64
    words = sum(len(text.split()) for text in (RAW[:500], RAW[500:900]))
    assert store.facts("train") == SplitFacts(900, 900, words, 2)
    assert (store.vocabulary, store.unit, store.name, store.image) == (256, "byte", "text", None)
    assert store.tokenizer.decode(store.split("valid")) == RAW[900:950]
    assert json.loads(json.dumps(store.describe())) == {
        "name": "text",
        "fingerprint": store.fingerprint,
        "tokenizer": {"name": "bytes", "unit": "byte", "vocabulary": 256},
        "vocabulary": 256,
        "unit": "byte",
        "splits": UNITS,
        "stamps": {},
        "source": {"place": "here", "bytes": 1000},
        "folder": str(recipe.folder(tmp_path)),
    }
    with pytest.raises(UserError, match=r"no split 'vald': one of train, valid, test .did you mean 'valid'"):
        store.split("vald")
    assert verified(tmp_path, recipe).fingerprint == store.fingerprint
    assert [path.name for path in tmp_path.iterdir()] == [store.folder.name]
    assert sorted(os.listdir(store.folder)) == [
        *(".verified", "store.json"),
        *(f"{split}.{kind}" for split in ("test", "train", "valid") for kind in ("bin", "docs")),
    ]


def test_images_have_no_index_and_their_size_is_known(tmp_path):
    pixels = RAW[:96]
    splits: dict[str, list[Part]] = {"train": [Given((pixels[:48], pixels[48:]))], "test": [Given((pixels[:48],))]}
    plain = recipe_of({})
    image = replace(plain.source, image=(4, 4), name="images", parts=lambda: splits, stamps={"variant": "own"})
    recipe = replace(plain, source=image)
    build_store(tmp_path, recipe)
    store = verified(tmp_path, recipe)
    assert (store.unit, store.image, store.stamps) == ("dim", (4, 4), {"variant": "own"})
    assert store.documents("train").tolist() == [0, 48, 96] and store.facts("train") == SplitFacts(96, 96, 0, 2)
    assert sorted(os.listdir(store.folder)) == [".verified", "store.json", "test.bin", "train.bin"]
    with pytest.raises(UserError, match="images has no split 'valid': one of train, test"):
        store.split("valid")
    unstamped = replace(recipe, source=replace(image, stamps={}))
    build_store(tmp_path, unstamped)
    assert opened(tmp_path, unstamped).fingerprint != store.fingerprint


def test_the_key_follows_the_source_and_the_fingerprint_the_content(tmp_path, recipe):
    elsewhere, changed = cut(RAW, identity="two"), cut(RAW[::-1], identity="three")
    for each in (recipe, elsewhere, changed):
        build_store(tmp_path, each)
    first, second, third = (opened(tmp_path, each) for each in (recipe, elsewhere, changed))
    assert len({store.folder for store in (first, second, third)}) == 3
    assert first.fingerprint == second.fingerprint != third.fingerprint
    assert (first.folder / "train.bin").read_bytes() == (second.folder / "train.bin").read_bytes()
    words = cut(RAW, tokenizer="words")
    assert words.folder(tmp_path) != recipe.folder(tmp_path)
    assert words.options == "data=text data.path=book.txt data.tokenizer=words"


def test_documents_tell_one_store_from_another(tmp_path, recipe):
    whole = recipe_of({name: [Given((RAW[at : at + UNITS[name]],))] for name, at in
                       (("train", 0), ("valid", 900), ("test", 950))}, UNITS, identity="whole")  # fmt: skip
    for each in (recipe, whole):
        build_store(tmp_path, each)
    assert opened(tmp_path, recipe).fingerprint != opened(tmp_path, whole).fingerprint


def damage_size(folder: Path) -> None:
    os.truncate(folder / "valid.bin", 49)


def damage_missing(folder: Path) -> None:
    (folder / "test.bin").unlink()


def damage_index(folder: Path) -> None:
    (folder / "train.docs").unlink()


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
    path.write_text(path.read_text().replace('"format": 2', '"format": 0'))


def damage_tokenizer(folder: Path) -> None:
    path = folder / "store.json"
    record = json.loads(path.read_text())
    record["tokenizer"]["name"] = "runes"
    record["fingerprint"] = fingerprint(record)
    record["sum"] = record_sum(record)
    path.write_text(json.dumps(record))


def damage_a_count(folder: Path) -> None:
    path = folder / "store.json"
    record = json.loads(path.read_text())
    record["splits"]["valid"]["words"] += 1
    path.write_text(json.dumps(record))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_size, r"valid\.bin: damaged: expected 50 bytes, found 49"),
        (damage_missing, r"test\.bin: damaged: expected 50 bytes, found No such file"),
        (damage_index, r"train\.docs: damaged: expected 24 bytes, found No such file"),
        (damage_no_record, r"store\.json: damaged: expected the record of the store, found No such file"),
        (
            damage_half_record,
            r"store\.json: damaged: expected the record of the store, found 100 bytes that are not one",
        ),
        (damage_other_json, r"store\.json: damaged: .*found 6 bytes that are not one"),
        (damage_edited_record, r"store\.json: damaged: expected fingerprint [0-9a-f]{64}, found [0-9a-f]{64}"),
        (damage_format, r"store\.json: damaged: expected format 2, found 0"),
        (damage_tokenizer, "expected a tokenizer bytes, words or sentencepiece, found 'runes'"),
        (damage_a_count, "a record with sha256 [0-9a-f]{64}, found [0-9a-f]{64}"),
    ],
)
def test_damage_is_seen_when_the_store_is_opened(tmp_path, recipe, damage, message):
    build_store(tmp_path, recipe)
    damage(recipe.folder(tmp_path))
    with pytest.raises(DamagedStore, match=message) as error:
        opened(tmp_path, recipe)
    assert str(error.value).endswith("to rebuild the store: rtx data prepare data=text data.path=book.txt")
    assert "\n" not in str(error.value)
    build_store(tmp_path, recipe)
    verified(tmp_path, recipe)


def test_a_flipped_bit_is_named_by_file_and_block(tmp_path, recipe, monkeypatch):
    monkeypatch.setattr("rtx.data.checksums.BLOCK", 256)
    monkeypatch.setattr("rtx.data.checksums.Sums.__init__.__defaults__", (256,))
    monkeypatch.setattr("rtx.data.build.BLOCK", 256)
    build_store(tmp_path, recipe)
    path = recipe.folder(tmp_path) / "train.bin"
    raw = bytearray(path.read_bytes())
    raw[800] ^= 4
    path.write_bytes(raw)
    opened(tmp_path, recipe)
    with pytest.raises(
        DamagedStore,
        match=r"train\.bin: damaged: expected crc32 [0-9a-f]{8} in block 3 of train\.bin, found [0-9a-f]{8};",
    ):
        verified(tmp_path, recipe)
    raw[800] ^= 4
    path.write_bytes(raw)
    starts = recipe.folder(tmp_path) / "train.docs"
    starts.write_bytes(b"\x01" + starts.read_bytes()[1:])
    with pytest.raises(DamagedStore, match=r"block 0 of train\.docs"):
        verified(tmp_path, recipe)


def test_a_store_that_was_read_in_full_is_known_until_it_is_touched_or_copied(tmp_path, recipe):
    build_store(tmp_path, recipe)
    folder = recipe.folder(tmp_path)
    assert is_verified(folder)
    shutil.copytree(folder, tmp_path / "copy")
    assert not is_verified(tmp_path / "copy")
    verify_store(tmp_path / "copy", "")
    assert is_verified(tmp_path / "copy")
    os.rename(folder, tmp_path / "moved")
    assert is_verified(tmp_path / "moved")
    (tmp_path / "moved" / "train.bin").touch()
    assert not is_verified(tmp_path / "moved")
    (tmp_path / "copy" / ".verified").write_text("[")
    assert not is_verified(tmp_path / "copy")


@pytest.mark.parametrize("raw", [RAW[:-1], RAW + b"m"])
def test_a_source_of_another_length_is_not_taken(tmp_path, raw):
    with pytest.raises(UserError, match="the source changed while it was read: expected 50 units of split test"):
        build_store(tmp_path, cut(raw))
    assert list(tmp_path.iterdir()) == []


def test_a_split_without_a_unit_is_refused(tmp_path):
    with pytest.raises(UserError, match="expected at least one unit in split valid, found none"):
        build_store(tmp_path, recipe_of({"train": [Given((b"a",))], "valid": [Given((b"",))]}))
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_the_system_cuts_off_leaves_nothing(tmp_path, recipe):
    build_store(tmp_path, recipe)
    before = {path.name: path.read_bytes() for path in recipe.folder(tmp_path).iterdir()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, hard))  # the kernel refuses what goes beyond, as a full disk does
    try:
        with pytest.raises(RunFailed, match="no space left to write"):
            build_store(tmp_path, recipe)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == [recipe.folder(tmp_path).name]
    assert {path.name: path.read_bytes() for path in recipe.folder(tmp_path).iterdir()} == before


def test_a_disk_without_room_is_told_before_writing(tmp_path, recipe, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10_000, 9001, 999))  # type: ignore
    with pytest.raises(RunFailed, match="1,000 bytes are needed and 999 are free"):
        build_store(tmp_path, recipe)
    assert list(tmp_path.iterdir()) == []
