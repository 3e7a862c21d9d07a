"""enwik8, Wikitext-103, PG-19 and users' text: the same bytes from every form of files."""

import json
import os
import re
import socket
import subprocess
import sys
import zipfile
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import datasets
import huggingface_hub
import numpy as np
import pytest

from rtx.data import hub, images, origins, text
from rtx.data.sets import SPLITS
from rtx.data.store import TokenStore
from rtx.errors import RunFailed
from tests.helpers.made_sets import (
    TEXTS,
    opened,
    prose,
    publish_enwik8,
    publish_wikitext,
    refused,
    remote,
    wikitext,
    write_table,
)

CONTENT = prose(1_000)[:4_000]
COUNTS = {"train": 5, "valid": 1, "test": 2}
HUB_NAMES = {"train": "train", "valid": "validation", "test": "test"}
BOOKS = {
    "train": [prose(300, seed) for seed in range(5)],
    "valid": [prose(90)],
    "test": [prose(80), prose(20)],
}


def split_texts(store: TokenStore) -> dict[str, bytes]:
    return {split: store.tokenizer.decode(store.split(split)) for split in SPLITS}


def documents(store: TokenStore, split: str) -> list[bytes]:
    starts = np.load(store.folder / f"{split}.starts.npy").tolist()
    tokens = store.split(split)
    return [store.tokenizer.decode(tokens[a:b]) for a, b in pairwise(starts)]


def test_a_file_a_folder_and_a_glob_are_read_in_order(tmp_path, root):
    place = tmp_path / "texts"
    for name in ("b/2.txt", "b.txt", "a.txt", ".hidden", ".git/x", "b/1.md"):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(name.encode() * 30)
    (place / "link").symlink_to(place / "b")
    for path, names in (
        (place, "a.txt b/1.md b/2.txt b.txt"),
        (f"{place}/*.txt", "a.txt b.txt"),
        (place / "a.txt", "a.txt"),
    ):
        expected = b"".join(name.encode() * 30 for name in names.split())
        assert b"".join(split_texts(opened(root, "text", path)).values()) == expected
    found = split_texts(opened(place / "stores", "text", place))
    assert split_texts(opened(place / "stores", "text", place)) == found, (
        "the folder of the stores is no text"
    )


def test_three_files_of_a_folder_are_its_splits(tmp_path, root):
    given = {"train": b"training text " * 9, "valid": b"ab", "test": b"of the test"}
    (tmp_path / "other.txt").write_bytes(b"not read")
    for count, (split, content) in enumerate(given.items(), 1):
        (tmp_path / f"{split}.txt").write_bytes(content)
        if count == 2:
            refused(
                root,
                "text",
                tmp_path,
                r"found train\.txt and valid\.txt alone; splits of your own are train",
            )
    assert split_texts(opened(root, "text", tmp_path)) == given
    assert (
        len(split_texts(opened(root, "text", tmp_path / "*.txt"))["train"])
        > len(given["train"]) + 5
    )
    (tmp_path / "valid.txt").write_bytes(b"a")
    refused(root, "text", tmp_path, "at least 2 bytes in split")


def test_what_is_no_text_is_refused(tmp_path, root, monkeypatch):
    (tmp_path / "book.txt").write_bytes(b"x" * 10)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")
        for path, message in {
            "bok.txt": r"data\.path=bok\.txt: expected a file, a folder or .*found none "
            r"\(did you mean 'book\.txt'",
            "empty": r"data\.path=empty: expected a f.*, found none$",
            "*.md": r"data\.path=\*\.md: expected a file, a folder or a glob that matches files, "
            "found none",
            "book.txt": r"book\.txt: expected at least 2 bytes in split valid, found 0; "
            "give more text",
            "socket": r"socket: expected a regular file or a folder, found ",
        }.items():
            refused(root, "text", path, message)


def test_the_library_has_no_tests_in_it():
    paths = text.library_files()
    assert all(path.suffix == ".py" and path.is_file() for path in paths)
    assert not [path for path in paths if {"test", "tests", "site-packages"} & set(path.parts[:-1])]
    assert sum(path.stat().st_size for path in paths) > 8_000_000


def test_the_zip_the_file_and_the_folder_give_the_same_bytes(tmp_path, root, monkeypatch):
    publish_enwik8(tmp_path / "enwik8.zip", CONTENT, monkeypatch)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "enwik8").write_bytes(CONTENT)
    fingerprints = set()
    for number, place in enumerate(
        (tmp_path / "enwik8.zip", tmp_path, tmp_path / "out", tmp_path / "out" / "enwik8")
    ):
        store = opened(root / str(number), "enwik8", place)
        assert split_texts(store) == {
            "train": CONTENT[:3600],
            "valid": CONTENT[3600:3800],
            "test": CONTENT[3800:],
        }
        fingerprints.add(store.fingerprint)
        assert store.stamps == {"newlines": "keep"} and store.facts["train"]["documents"] == 1
    dropped = opened(root, "enwik8", tmp_path, newlines="drop")
    assert (
        split_texts(dropped)["train"] == CONTENT[:3600].replace(b"\n", b"")
        and dropped.stamps["newlines"] == "drop"
    )
    (tmp_path / "enwik8.zip").unlink()
    without_source = opened(root / "0", "enwik8", None)
    assert {without_source.fingerprint} == fingerprints, "a store that is there needs no source"
    (tmp_path / "out" / "enwik8").write_bytes(CONTENT[1:])
    root = tmp_path / "others"
    refused(
        root,
        "enwik8",
        tmp_path / "out",
        r"enwik8: expected enwik8 .* of 4,000 bytes .*, found 3,999 bytes",
    )
    (tmp_path / "notes.txt").touch()
    for path in ("nowhere", tmp_path / "notes.txt"):
        refused(
            root, "enwik8", path, rf"data\.path={path}: expected enwik8\.zip or enwik8, found none"
        )


@pytest.mark.parametrize(
    ("name", "file"), [("enwik8", "enwik8.zip"), ("wikitext103", "wikitext-103-v1.zip")]
)
def test_no_other_archive_is_ever_opened(tmp_path, root, monkeypatch, name, file):
    publish_enwik8(tmp_path / file, CONTENT, monkeypatch)
    monkeypatch.setattr(text, "WIKITEXT", remote(tmp_path / file))
    monkeypatch.setattr(zipfile, "ZipFile", lambda *_: pytest.fail("it was opened"))
    whole = (tmp_path / file).read_bytes()
    message = rf"{file}: expected {file} .* with sha256 .*, found [\d,]+ bytes with sha256"
    for content in (whole + b"\0", whole[::-1], b"<!DOCTYPE html><html>gone</html>", b""):
        (tmp_path / file).write_bytes(content)
        refused(root, name, tmp_path / file, message)


def zipped(folder: Path) -> Path:
    with zipfile.ZipFile(folder / "wikitext-103-v1.zip", "w", zipfile.ZIP_DEFLATED) as file:
        for split, content in TEXTS.items():
            file.writestr(f"wikitext-103/wiki.{split}.tokens", content)
    return folder


def on_hub(folder: Path) -> Path:
    for split, content in TEXTS.items():
        rows = [b"" if line == b" " else line + b"\n" for line in content.split(b"\n")[:-1]]
        shards = [rows[:40], rows[40:]] if split == "train" else [rows]
        for number, shard in enumerate(shards):
            name = f"{HUB_NAMES[split]}-{number:05d}-of-{len(shards):05d}.parquet"
            write_table(folder / "wikitext-103-v1" / name, 30, text=shard)
    return folder


@pytest.mark.parametrize("make", [wikitext, zipped, on_hub])
def test_every_form_of_wikitext_gives_the_same_text(tmp_path, root, monkeypatch, make):
    place = make(tmp_path)
    publish_wikitext(monkeypatch)
    if make is zipped:
        monkeypatch.setattr(text, "WIKITEXT", remote(tmp_path / "wikitext-103-v1.zip"))
    store = opened(root, "wikitext103", place)
    assert split_texts(store) == TEXTS and store.facts["valid"]["words"] == len(
        TEXTS["valid"].split()
    )


@pytest.mark.parametrize(
    ("split", "old", "new"),
    [
        ("train", b"Article 3 ", b"Article 3"),
        ("valid", b"Article", b"Brticle"),
        ("test", b"\n", b"\n one line \n"),
    ],
)
def test_another_text_is_refused_under_this_name(tmp_path, root, monkeypatch, split, old, new):
    publish_wikitext(monkeypatch)
    path = wikitext(tmp_path) / f"wiki.{split}.tokens"
    path.write_bytes(path.read_bytes().replace(old, new, 1))
    message = f"split {split} is not that of Wikitext-103: expected .*; found .*data=text"
    refused(root, "wikitext103", tmp_path, message)


def test_what_is_missing_of_wikitext_is_named(tmp_path, root):
    for path in (tmp_path, "nowhere"):
        refused(
            root,
            "wikitext103",
            path,
            r"expected wiki\.train\.tokens and .* or wikitext-103-v1\.zip or parquet",
        )
    shard = on_hub(tmp_path) / "wikitext-103-v1" / "train-00001-of-00002.parquet"
    shard.write_bytes(shard.read_bytes()[:-9])
    refused(root, "wikitext103", tmp_path, r"train-00001.*: expected a whole parquet file, found ")


def tables(folder: Path) -> Path:
    for split, books in BOOKS.items():
        name = f"{HUB_NAMES[split]}-00000-of-00001.parquet"
        write_table(folder / "data" / name, 2, text=books, url=[""] * len(books))
    return folder


def files(folder: Path) -> Path:
    for split, books in BOOKS.items():
        (folder / HUB_NAMES[split]).mkdir(parents=True)
        for number, book in enumerate(books):
            (folder / HUB_NAMES[split] / f"{number}.txt").write_bytes(book.replace(b"\n", b"\r\n"))
    return folder


@pytest.mark.parametrize("make", [tables, files])
def test_every_form_of_pg19_gives_the_same_books(tmp_path, root, monkeypatch, make):
    monkeypatch.setattr(text, "PG19_BOOKS", COUNTS)
    store = opened(root, "pg19", make(tmp_path))
    assert {split: documents(store, split) for split in SPLITS} == BOOKS
    assert store.stamps == {"books": COUNTS, "complete": True}


def test_fewer_books_are_taken_and_stamped_and_a_missing_split_is_named(tmp_path, root):
    place = files(tmp_path)
    (place / "train" / "empty.txt").touch()
    store = opened(root, "pg19", place)
    assert store.stamps == {"books": {**COUNTS, "train": 6}, "complete": False}
    assert store.facts["train"]["documents"] == 5
    (place / "validation" / "0.txt").unlink()
    for path in (place, tmp_path / "nowhere"):
        refused(
            root,
            "pg19",
            path,
            r"data\.path=.*: expected train/\*\.txt and validation/.* or parquet files",
        )
    for name in HUB_NAMES.values():
        write_table(tmp_path / "other" / f"{name}.parquet", title=["x"])
    refused(
        root, "pg19", tmp_path / "other", r"train\.parquet: expected a column text; found title"
    )


def test_the_hub_is_read_at_a_pinned_commit_which_stands_in_the_record_and_once(
    tmp_path, root, monkeypatch
):
    asked = []
    copied = []
    real = text.table_rows
    monkeypatch.setattr(
        origins, "hub_files", lambda *words: asked.append(words) or tables(tmp_path / words[2])
    )
    monkeypatch.setattr(
        text,
        "table_rows",
        lambda paths, *rest: copied.append(paths[0].name[:5]) or real(paths, *rest),
    )
    monkeypatch.setattr(text, "PG19_BOOKS", {**COUNTS, "test": 3})
    refused(root, "pg19", None, "expected 3 books of split test, found 2")
    monkeypatch.setattr(text, "PG19_BOOKS", COUNTS)
    copied.clear()
    store = opened(root, "pg19", None, tokenizer="sentencepiece", vocabulary=350)
    assert copied == ["train", "valid", "test-"], "no parquet file is decoded twice"
    assert (
        {words[2] for words in asked}
        == {store.describe()["source"]["revision"]}
        == {text.PG19_HUB[1]}
    )
    assert all(
        re.fullmatch("[0-9a-f]{40}", hub[1])
        for hub in (text.PG19_HUB, text.WIKITEXT_HUB, images.CIFAR10_HUB)
    )


LINES = [f"line {number} of some text" for number in range(100)]


@pytest.mark.parametrize(
    ("splits", "counts"),
    [
        (("train",), (90, 5, 5)),
        (("train", "test"), (95, 5, 100)),
        (("train", "validation", "test"), (100, 100, 100)),
    ],
)
def test_splits_are_those_there_are_or_cut_from_train(tmp_path, root, splits, counts):
    for split in splits:
        write_table(tmp_path / "set" / f"{split}.parquet", said=LINES)
    store = opened(root, "hub", tmp_path / "set", column="said")
    lines = [
        store.split(split).tobytes().decode().splitlines() for split in ("train", "valid", "test")
    ]
    assert tuple(map(len, lines)) == counts and store.facts["train"]["documents"] == counts[0]
    assert lines[0] == LINES[: counts[0]] and lines[0][-1] != lines[1][0]


def test_the_commit_that_was_taken_stands_in_the_record_and_stays_through_a_preparation(
    tmp_path, root, monkeypatch
):
    asked: list[str | None] = []
    real = datasets.load_dataset_builder

    def load(path: str, name: str | None, revision: str | None, cache_dir: str) -> object:
        asked.append(revision)
        assert (path, name) == ("some/set", "small")
        return real(str(tmp_path / "set"), cache_dir=cache_dir)

    write_table(tmp_path / "set" / "train.parquet", text=LINES)
    monkeypatch.setattr(datasets, "load_dataset_builder", load)
    monkeypatch.setattr(
        huggingface_hub, "dataset_info", lambda name, revision: SimpleNamespace(sha="c" * 40)
    )
    monkeypatch.setattr(hub, "unreachable", lambda address: None)
    store = opened(root, "hub", "some/set", subset="small")
    assert asked == ["c" * 40] * 3, "every split is of one commit"
    assert store.describe()["source"]["revision"] == "c" * 40
    monkeypatch.setattr(
        datasets, "load_dataset_builder", lambda *_: pytest.fail("it was fetched again")
    )
    assert opened(root, "hub", "some/set", subset="small").fingerprint == store.fingerprint


@pytest.mark.parametrize(
    ("path", "column", "message"),
    [
        (
            "nothing",
            "text",
            "expected a folder, or owner/name of a data set of the hub, found neither",
        ),
        (
            "a/b/c",
            "text",
            "expected a folder, or owner/name of a data set of the hub, found neither",
        ),
        (
            "set",
            "txt",
            r"data\.column=txt: expected a column of text, found number \(int64\), text \(string\)",
        ),
        ("set", "number", r"data\.column=number: expected a column of text, found number"),
        ("lacking", "text", "expected a split train, found test"),
        ("script", "text", r"data\.path=script: cannot be loaded: "),
    ],
)
def test_what_is_no_text_of_the_hub_is_refused(tmp_path, root, monkeypatch, path, column, message):
    monkeypatch.chdir(tmp_path)
    for place in ("set/train", "lacking/test"):
        write_table(tmp_path / f"{place}.parquet", number=list(range(50)), text=LINES[:50])
    (tmp_path / "script").mkdir()
    (tmp_path / "script" / "script.py").write_text("raise SystemExit('it was run')")
    refused(root, "hub", path, message, column=column)


def test_without_a_network_it_is_one_line(root, monkeypatch):
    monkeypatch.setattr(hub, "unreachable", lambda address: "huggingface.co: no answer")
    with pytest.raises(
        RunFailed, match=r"hf://datasets/some/set: cannot be fetched: huggingface\.co: no answer; f"
    ):
        opened(root, "hub", "some/set")


def test_the_example_of_the_page_runs(tmp_path):
    page = (Path(__file__).resolve().parents[2] / "docs" / "datasets.md").read_text()
    (script,) = re.findall(
        r"^## Any text of the hub\n.*?^```sh\n(.*?)^```", page, re.DOTALL | re.MULTILINE
    )
    environment = {**os.environ, "RTX_DATA": str(tmp_path / "stores")}
    words = ["sh", "-ec", f'rtx() {{ {sys.executable} -m rtx "$@"; }}\n{script}']
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "stores").glob("*/store.json")
    record = json.loads(path.read_text())
    assert record["splits"]["valid"]["documents"] == 6 and record["source"]["column"] == "verse"
    assert (
        path.with_name("valid.bin")
        .read_bytes()
        .startswith(b"line 1 of validation, and a few words more\nline 2")
    )
