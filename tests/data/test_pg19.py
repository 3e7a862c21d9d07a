from __future__ import annotations

import csv
import hashlib
import pickle
from pathlib import Path

import pyarrow as pa
import pytest
from corpora import REAL, cut, prose, read, write_books
from pyarrow import parquet

from rtx.config import DataConfig
from rtx.data import pg19
from rtx.data.parquet import text_rows
from rtx.data.pg19 import FilesPart, unix_newlines
from rtx.data.pg19 import source as pg19_source
from rtx.errors import RunFailed, UserError

BOOKS = {
    split: [prose(300, 10 * k + n) for n in range(count)]
    for k, (split, count) in enumerate({"train": 7, "valid": 2, "test": 3}.items())
}
PUBLISHED = {split: len(books) for split, books in BOOKS.items()}
RAW = REAL / "pg19/raw"
SUMS = REAL / "pg19/gcs_checksums.tsv"


def on_hub(folder: Path, books: dict[str, list[bytes]] = BOOKS) -> Path:
    for split, texts in books.items():
        name = {"valid": "validation"}.get(split, split)
        pieces = [texts[:4], texts[4:]] if split == "train" else [texts]
        for number, piece in enumerate(pieces):
            write_books(folder / f"{name}-{number:05d}-of-{len(pieces):05d}.parquet", piece)
    return folder


def as_published(folder: Path, books: dict[str, list[bytes]] = BOOKS) -> Path:
    for split, texts in books.items():
        place = folder / {"valid": "validation"}.get(split, split)
        place.mkdir(parents=True)
        for number, text in enumerate(texts):
            (place / f"{100 + number}.txt").write_bytes(text.replace(b"\n", b"\r\n"))
    return folder


def made(path: Path | None, root: Path, said: list[str] | None = None):
    data = DataConfig(name="pg19", path=None if path is None else str(path), tokenizer="sentencepiece")
    return pg19_source(data, root, (said if said is not None else []).append, PUBLISHED)


@pytest.mark.parametrize(
    "make", [on_hub, lambda place: on_hub(place / "data").parent, as_published], ids=["parquet", "data", "text"]
)
def test_every_local_form_gives_the_same_books(tmp_path, make, said, monkeypatch):
    monkeypatch.setattr(pg19, "PART", 4000)
    source = made(make(tmp_path / "it"), tmp_path, said)
    assert source.stamps == {"books": PUBLISHED, "complete": True}
    splits = source.parts()
    assert list(splits) == ["train", "valid", "test"] and len(splits["train"]) >= 3
    for split, parts in splits.items():
        assert read(pickle.loads(pickle.dumps(parts))) == BOOKS[split]
        assert all(part.size > 0 for part in parts)
    assert said == []


def test_fewer_books_are_taken_and_stamped(tmp_path, said):
    place = on_hub(tmp_path / "it")
    (place / "train-00001-of-00002.parquet").unlink()
    source = made(place, tmp_path, said)
    assert source.stamps == {"books": {"train": 4, "valid": 2, "test": 3}, "complete": False}
    assert len(read(source.parts()["train"])) == 4
    assert "4 train, 2 valid, 3 test books, of 7 train, 2 valid, 3 test books: results are not comparable" in said[0]
    assert "1 files are not there, the first train-00001-of-00002.parquet" in said[1]


def test_an_empty_book_is_named_and_left_out(tmp_path, said):
    books = {**BOOKS, "train": [*BOOKS["train"][:5], b"", BOOKS["train"][6]]}
    kept = [text for text in books["train"] if text]
    assert read(made(on_hub(tmp_path / "hub", books), tmp_path, said).parts()["train"]) == kept
    assert said == [f"{tmp_path / 'hub/train-00001-of-00002.parquet'}: row 1 is an empty book; left out"]
    said.clear()
    assert read(made(as_published(tmp_path / "text", books), tmp_path, said).parts()["train"]) == kept
    assert said == [f"{tmp_path / 'text/train/105.txt'}: is an empty book; left out"]


def test_a_changed_book_is_another_source(tmp_path):
    place = as_published(tmp_path / "it")
    before = made(place, tmp_path).identity
    assert made(place, tmp_path).identity == before
    (place / "test/100.txt").write_bytes(b"Another.\r\n")
    assert made(place, tmp_path).identity != before


@pytest.mark.parametrize("make", [on_hub, as_published])
def test_a_missing_split_is_named(tmp_path, make):
    place = make(tmp_path / "it", {"train": BOOKS["train"], "test": BOOKS["test"]})
    with pytest.raises(UserError, match=r"missing split: valid; expected parquet .*; found only train and test"):
        made(place, tmp_path)


def test_other_files_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"expected a folder with parquet files .*; found nothing there"):
        made(tmp_path / "nowhere", tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"expected a folder with parquet files .*; found a file"):
        made(tmp_path / "file", tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"expected a folder with parquet files .*; found neither"):
        made(tmp_path / "empty", tmp_path)
    place = on_hub(tmp_path / "it")
    parquet.write_table(pa.table({"text": ["a"]}), place / "test-00000-of-00001.parquet")
    with pytest.raises(UserError, match="expected columns short_book_title, publication_date, url, text; found text"):
        made(place, tmp_path)
    (place / "test-00000-of-00001.parquet").write_bytes(b"<html>")
    with pytest.raises(UserError, match=r"expected a whole parquet file, found a web page .HTML. of 6 bytes"):
        made(place, tmp_path)


def test_a_book_that_goes_while_it_is_read_is_said(tmp_path):
    splits = made(place := as_published(tmp_path / "it"), tmp_path).parts()
    (place / "train/103.txt").write_bytes(b"")
    with pytest.raises(UserError, match=r"103\.txt: changed while it was read"):
        read(splits["train"])
    (place / "train/103.txt").unlink()
    with pytest.raises(UserError, match=r"103\.txt: cannot be read: No such file"):
        read(splits["train"])


def test_the_hub_must_have_all_books(tmp_path, monkeypatch):
    place = on_hub(tmp_path / "it/data").parent
    monkeypatch.setattr(pg19, "hub_files", lambda repository, patterns, report: place)
    source = made(None, tmp_path)
    assert source.stamps["complete"] and source.identity == ["hub", "emozilla/pg19"]
    assert read(source.parts()["valid"]) == BOOKS["valid"]
    (place / "data/train-00000-of-00002.parquet").unlink()
    with pytest.raises(UserError, match=r"expected 7 train, .* books; found 3 train, .*; fetch it again"):
        made(None, tmp_path).parts()


def test_without_a_network_it_is_said_at_once(tmp_path, monkeypatch):
    def refuse(repository, patterns, report):
        raise RunFailed(f"{repository}: no network")

    monkeypatch.setattr(pg19, "hub_files", refuse)
    source = made(None, tmp_path)
    with pytest.raises(RunFailed, match="emozilla/pg19: no network"):
        source.parts()


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_newlines_do_not_know_the_chunks(size):
    text = b"\r\na\r\r\nb\n\rc\r\n\r\nd\r"
    assert b"".join(unix_newlines(iter(cut(text, size)))) == b"\na\n\nb\n\nc\n\nd\n"
    assert all(unix_newlines(iter(cut(b"\r\r\r", size))))


@pytest.mark.skipif(not RAW.exists(), reason="the real books are not here")
@pytest.mark.parametrize("split", ["train", "test"])
def test_the_real_books_are_the_published_ones_and_those_of_the_hub(split):
    with open(SUMS, newline="") as file:
        sums = {(row["split"], row["book_id"]): row["sha256"] for row in csv.DictReader(file, delimiter="\t")}
    shard = REAL / f"pg19/{split}-00000-of-00001.parquet"
    urls = parquet.read_table(shard, columns=["url"])["url"].to_pylist()
    on_the_hub = dict(zip([url.rpartition("/")[2] for url in urls], text_rows(shard, "text"), strict=True))
    compared = 0
    for path in sorted((RAW / split).iterdir()):
        raw = path.read_bytes()
        assert hashlib.sha256(raw).hexdigest() == sums[split, path.stem]
        [text] = read([FilesPart(str(path.parent), (path.name,), len(raw))])
        assert b"\r" not in text and len(text) == len(raw) - raw.count(b"\r\n")
        assert on_the_hub[path.stem] == text
        compared += 1
    assert compared == {"train": 3, "test": 2}[split]


@pytest.mark.skipif(not SUMS.exists(), reason="the list of published books is not here")
def test_the_published_list_has_as_many_books_and_one_that_is_empty():
    with open(SUMS, newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    names = {"train": "train", "validation": "valid", "test": "test"}
    counts = dict.fromkeys(names.values(), 0)
    for row in rows:
        counts[names[row["split"]]] += 1
    assert counts == pg19.DOCUMENTS["pg19"]
    assert [(row["split"], row["book_id"]) for row in rows if row["bytes"] == "0"] == [("train", "90")]
