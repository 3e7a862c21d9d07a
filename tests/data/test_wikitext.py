from __future__ import annotations

import hashlib
import http.server
import pickle
import zipfile
from pathlib import Path

import pyarrow as pa
import pytest
from corpora import REAL, articles, cut, read, wikitext_facts, write_rows
from huggingface_hub import constants
from pyarrow import parquet

from rtx.config import DataConfig
from rtx.data import wikitext
from rtx.data.articles import FileText, ParquetText, article_ranges, split_articles
from rtx.data.download import Remote
from rtx.data.wikitext import PUBLISHED
from rtx.data.wikitext import source as wikitext_source
from rtx.errors import RunFailed, UserError

TEXTS = {"train": articles(40, 1), "valid": articles(6, 2), "test": articles(7, 3)}
VALID = REAL / "wikitext-103/wiki.valid.tokens"
ROWS = REAL / "wikitext-103/wikitext-103-v1/validation-00000-of-00001.parquet"


MADE = {split: wikitext_facts(text, split != "train") for split, text in TEXTS.items()}


def extracted(folder: Path, texts: dict[str, bytes] = TEXTS) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for split, text in texts.items():
        (folder / f"wiki.{split}.tokens").write_bytes(text)
    return folder


def zipped(path: Path, texts: dict[str, bytes] = TEXTS, prefix: str = "wikitext-103/") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for split, text in texts.items():
            archive.writestr(f"{prefix}wiki.{split}.tokens", text)
    return path


def rows_of(text: bytes) -> list[bytes]:
    return [b"" if line == b" " else line + b"\n" for line in text.split(b"\n")[:-1]]


def on_hub(folder: Path, texts: dict[str, bytes] = TEXTS) -> Path:
    for split, text in texts.items():
        rows = rows_of(text)
        name = {"valid": "validation"}.get(split, split)
        pieces = [rows[: len(rows) // 2], rows[len(rows) // 2 :]] if split == "train" else [rows]
        for number, piece in enumerate(pieces):
            write_rows(folder / f"{name}-{number:05d}-of-{len(pieces):05d}.parquet", piece, group=20)
    return folder


def remote(path: Path) -> Remote:
    raw = path.read_bytes()
    return Remote(f"https://example.org/{path.name}", len(raw), hashlib.sha256(raw).hexdigest())


def made(path: Path | None, root: Path, archive: Remote | None = None, fetch: str = "hub"):
    data = DataConfig(name="wikitext103", path=None if path is None else str(path), tokenizer="words", fetch=fetch)
    return wikitext_source(data, root, print, MADE, archive or Remote("https://x/wikitext-103-v1.zip", 1, ""))


@pytest.mark.parametrize(
    "make",
    [
        lambda place: extracted(place),
        lambda place: extracted(place / "wikitext-103").parent,
        lambda place: zipped(place / "wikitext-103-v1.zip"),
        lambda place: zipped(place / "wikitext-103-v1.zip").parent,
        lambda place: zipped(place / "again.zip", prefix=""),
        lambda place: on_hub(place),
        lambda place: on_hub(place / "wikitext-103-v1").parent,
    ],
)
def test_every_local_form_gives_the_same_articles(tmp_path, make):
    splits = made(make(tmp_path / "it"), tmp_path).parts()
    assert list(splits) == ["train", "valid", "test"]
    for split, parts in splits.items():
        documents = read(pickle.loads(pickle.dumps(parts)))
        assert b"".join(documents) == TEXTS[split]
        assert len(documents) == TEXTS[split].count(b" = Article ")
        assert sum(part.size for part in parts) == len(TEXTS[split])
        assert all(text.lstrip(b" \n").startswith(b"= Article") for text in documents)


def test_parts_of_an_extracted_file_end_with_articles_and_change_nothing(tmp_path, monkeypatch):
    extracted(tmp_path / "it")
    whole = read(made(tmp_path / "it", tmp_path).parts()["train"])
    monkeypatch.setattr(wikitext, "PART", 1000)
    parts = made(tmp_path / "it", tmp_path).parts()["train"]
    assert len(parts) > 5 and read(parts) == whole


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_articles_do_not_know_the_chunks(size):
    text = articles(5) + b" \n = No title\n \n = Not ended" + b" \n = Article one = \n"
    chunks = cut(text, size)
    found = [b"".join(document) for document in split_articles(iter(chunks))]
    assert found == [b"".join(document) for document in split_articles(iter([text]))]
    assert b"".join(found) == text and len(found) == 5


def test_the_archive_is_told_by_its_size_and_checked_by_its_sha256(tmp_path):
    path = zipped(tmp_path / "wikitext-103-v1.zip")
    published = remote(path)
    assert made(path, tmp_path, published).identity == made(None, tmp_path, published, "archive").identity
    assert b"".join(read(made(path, tmp_path, published).parts()["valid"])) == TEXTS["valid"]
    path.write_bytes(path.read_bytes()[:-30] + bytes(30))
    with pytest.raises(UserError, match=r"expected the published archive with sha256 .*, found"):
        made(path, tmp_path, published).parts()


def test_the_archive_is_fetched(tmp_path, monkeypatch):
    path = zipped(tmp_path / "there/wikitext-103-v1.zip")
    asked: list[Remote] = []
    monkeypatch.setattr(wikitext, "download", lambda remote, folder, report: asked.append(remote) or path)
    splits = made(None, tmp_path, remote(path), "archive").parts()
    assert asked == [remote(path)] and b"".join(read(splits["test"])) == TEXTS["test"]


def test_the_hub_is_asked_where_nothing_else_is_said(tmp_path, monkeypatch):
    place = on_hub(tmp_path / "there" / "wikitext-103-v1").parent
    monkeypatch.setattr(wikitext, "hub_files", lambda repository, patterns, report: place)
    source = made(None, tmp_path)
    assert source.options == "data=wikitext103" and source.identity[0] == "hub"
    assert b"".join(read(source.parts()["train"])) == TEXTS["train"]


def test_nothing_is_read_or_fetched_before_parts_are_asked_for(tmp_path, monkeypatch):
    for fetch in ("hub", "archive"):
        assert made(None, tmp_path, fetch=fetch).name == "wikitext103"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("split", ["train", "valid", "test"])
@pytest.mark.parametrize("change", [lambda text: text[:-300], lambda text: text + b" more \n", lambda text: b""])
def test_another_text_is_refused_under_this_name(tmp_path, split, change):
    extracted(tmp_path / "it", {**TEXTS, split: change(TEXTS[split])})
    with pytest.raises(
        UserError, match=f"split {split} is not that of Wikitext-103: expected .*; found .*data=text"
    ) as error:
        made(tmp_path / "it", tmp_path).parts()
    assert "\n" not in str(error.value)


def test_the_same_counts_with_other_words_are_refused_by_their_hash(tmp_path):
    extracted(tmp_path / "it", {**TEXTS, "valid": TEXTS["valid"].replace(b"Article 0", b"Article 9")})
    with pytest.raises(UserError, match=r"split valid is not that of Wikitext-103: expected .* md5"):
        made(tmp_path / "it", tmp_path).parts()


def test_a_missing_split_is_named(tmp_path):
    place = extracted(tmp_path / "it", {"valid": TEXTS["valid"]})
    with pytest.raises(UserError, match="missing split: train and test; expected in"):
        made(place, tmp_path)
    on_hub(tmp_path / "hub", {"train": TEXTS["train"], "test": TEXTS["test"]})
    with pytest.raises(UserError, match="missing split: valid; expected in"):
        made(tmp_path / "hub", tmp_path)
    with pytest.raises(UserError, match=r"missing split valid: expected one member wiki\.valid\.tokens, found .*train"):
        made(zipped(tmp_path / "a.zip", {"train": TEXTS["train"]}), tmp_path).parts()


def test_a_missing_shard_is_named(tmp_path):
    place = on_hub(tmp_path / "hub")
    (place / "train-00001-of-00002.parquet").unlink()
    with pytest.raises(UserError, match=r"expected train-00001-of-00002\.parquet beside train-00000-of-00002\.parquet"):
        made(place, tmp_path)


def test_nothing_there_and_something_else_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"expected wikitext-103-v1\.zip, wiki.*; found none of them"):
        made(tmp_path / "nowhere", tmp_path)
    (tmp_path / "wiki.valid.tokens").write_bytes(b" a \n")
    with pytest.raises(UserError, match=r"expected a folder or wikitext-103-v1\.zip, found another file"):
        made(tmp_path / "wiki.valid.tokens", tmp_path)


@pytest.mark.parametrize("content", [b"<html>moved</html>", b"", b"PK\x03\x04 half"])
def test_an_archive_that_is_none_is_refused(tmp_path, content):
    (tmp_path / "wikitext-103-v1.zip").write_bytes(content)
    with pytest.raises(UserError, match=r"expected a whole archive|expected a whole zip") as error:
        made(tmp_path / "wikitext-103-v1.zip", tmp_path).parts()
    assert "\n" not in str(error.value)


def test_a_member_that_escapes_is_refused(tmp_path):
    path = zipped(tmp_path / "wikitext-103-v1.zip", prefix="../")
    with pytest.raises(UserError, match=r"\.\./wiki\.train\.tokens"):
        made(path, tmp_path).parts()


def test_other_columns_are_refused(tmp_path):
    place = on_hub(tmp_path / "hub")
    parquet.write_table(pa.table({"words": ["a"]}), place / "train-00000-of-00002.parquet")
    with pytest.raises(UserError, match="expected columns text; found words, without text"):
        made(place, tmp_path).parts()


def test_the_published_counts_fit_those_of_the_hub():
    for split, num_bytes in [("train", 545_141_915), ("valid", 1_154_751), ("test", 1_295_575)]:
        assert PUBLISHED[split].text + 4 * PUBLISHED[split].lines == num_bytes  # Arrow: 4 bytes of offset a row
    assert (PUBLISHED["valid"].words, PUBLISHED["test"].words) == (217_646, 245_569)


@pytest.mark.skipif(not VALID.exists(), reason="the real wiki.valid.tokens is not here")
def test_the_real_validation_split_is_the_published_one_in_both_forms():
    plain, rows = FileText(VALID), ParquetText((ROWS,))
    text = b"".join(plain.chunks())
    assert b"".join(rows.chunks()) == text
    assert hashlib.sha256(text).hexdigest() == "9aee9f52d6e77de6c7751fc5e7c44287db3ec0eaf15477098acc6b93c1c4250b"
    for form in (plain, rows):
        assert wikitext._check(form, "valid", "data=wikitext103", PUBLISHED["valid"]) == 1_142_309


@pytest.mark.skipif(not VALID.exists(), reason="the real wiki.valid.tokens is not here")
def test_the_real_validation_split_has_sixty_articles_in_parts_of_any_size():
    documents = [b"".join(document) for document in split_articles(FileText(VALID).chunks())]
    assert len(documents) == 60
    pieces = article_ranges(VALID, 100_000)
    apart = [b"".join(document) for piece in pieces for document in split_articles(piece.chunks())]
    assert len(pieces) > 8 and apart == documents


@pytest.mark.skipif(not VALID.exists(), reason="the real wiki.valid.tokens is not here")
def test_the_real_folder_lacks_two_splits(tmp_path):
    with pytest.raises(UserError, match="missing split: train and test"):
        wikitext_source(DataConfig(name="wikitext103", path=str(VALID.parent)), tmp_path, print)


def test_without_a_network_the_hub_is_given_up_at_once(tmp_path, monkeypatch):
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        port = server.server_port
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(RunFailed, match=r"hf://datasets/Salesforce/wikitext: cannot be fetched: .*data\.path="):
        made(None, tmp_path).parts()
