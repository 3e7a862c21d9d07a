from __future__ import annotations

import functools
import hashlib
import http.server
import pickle
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rtx.config import DataConfig
from rtx.data import enwik8
from rtx.data.catalog import open_files, prepare_files
from rtx.data.download import download
from rtx.errors import UserError

TEXT = (b"<mediawiki>" + np.random.default_rng(0).integers(0, 64, 200_000, dtype=np.uint8).tobytes())[:100_000]
ENWIK6 = Path(__file__).parents[2] / "../shared/data/enwik8/enwik6"


def zipped(path: Path, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


@pytest.fixture
def small(monkeypatch, tmp_path) -> Path:
    """Put a benchmark of 100,000 bytes in the place of the real one; return its archive."""
    archive = zipped(tmp_path / "enwik8.zip", enwik8=TEXT)
    published = replace(
        enwik8.ARCHIVE, size=archive.stat().st_size, sha256=hashlib.sha256(archive.read_bytes()).hexdigest()
    )
    monkeypatch.setattr(enwik8, "ARCHIVE", published)
    monkeypatch.setattr(enwik8, "SIZE", len(TEXT))
    monkeypatch.setattr(enwik8, "SHA256", hashlib.sha256(TEXT).hexdigest())
    monkeypatch.setattr(enwik8, "SPLITS", {"train": 90_000, "valid": 5_000, "test": 5_000})
    return archive


def config(path: Path | None) -> DataConfig:
    return DataConfig(name="enwik8", path=None if path is None else str(path), length=512)


def test_the_splits_are_the_published_ones():
    assert enwik8.SPLITS == {"train": 90_000_000, "valid": 5_000_000, "test": 5_000_000}
    assert sum(enwik8.SPLITS.values()) == enwik8.SIZE


def test_every_local_form_gives_the_same_store(small, tmp_path, said):
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "enwik8").write_bytes(TEXT)
    stores = []
    for number, path in enumerate([small, small.parent, tmp_path / "raw" / "enwik8", tmp_path / "raw"]):
        store = open_files(config(path), tmp_path / str(number), said.append)
        assert store.split("train").tobytes() == TEXT[:90_000]
        assert store.split("valid").tobytes() == TEXT[90_000:95_000]
        assert store.split("test").tobytes() == TEXT[95_000:]
        stores.append(store)
    assert len({store.fingerprint for store in stores}) == len({store.folder.name for store in stores}) == 1


@pytest.mark.parametrize("zipped_copy", [True, False])
def test_newlines_are_dropped_behind_the_cut_and_that_is_stamped(small, tmp_path, said, zipped_copy):
    (tmp_path / "enwik8").write_bytes(TEXT)
    data = replace(config(small if zipped_copy else tmp_path / "enwik8"), newlines="drop")
    store = prepare_files(data, tmp_path / "stores", said.append)
    assert store.split("train").tobytes() == TEXT[:90_000].replace(b"\n", b"")
    assert store.split("valid").tobytes() == TEXT[90_000:95_000].replace(b"\n", b"")
    assert store.split("test").tobytes() == TEXT[95_000:].replace(b"\n", b"")
    assert store.stamps == {"newlines": "drop"} and store.describe()["stamps"] == {"newlines": "drop"}
    whole = prepare_files(replace(data, newlines="keep"), tmp_path / "stores", said.append)
    assert whole.stamps == {"newlines": "keep"} and whole.folder != store.folder
    assert said[0].startswith("preparing data=enwik8 data.path=") and " data.newlines=drop: " in said[0]


def test_another_process_inflates_the_archive_for_itself(small):
    parts = enwik8.checked_parts(str(small), False, Path("unused"), print)
    for split, part in ((name, part) for name, listed in parts.items() for part in listed):
        sent = pickle.dumps(part)
        assert len(sent) < 1000
        (document,) = pickle.loads(sent).documents()
        assert b"".join(document) == TEXT[part.start : part.stop], split
    small.touch()
    (document,) = parts["test"][0].documents()
    with pytest.raises(UserError, match=r"enwik8\.zip: changed while it was read; prepare it again"):
        b"".join(document)


def test_a_prepared_store_needs_no_source(small, tmp_path, said, monkeypatch):
    root = tmp_path / "stores"
    store = open_files(config(small), root, said.append)
    small.unlink()
    monkeypatch.setattr(enwik8, "download", lambda *arguments: pytest.fail("it went to the network"))
    assert open_files(config(None), root, said.append).fingerprint == store.fingerprint
    assert open_files(config(small), root, said.append).fingerprint == store.fingerprint
    assert prepare_files(config(None), root, said.append).fingerprint == store.fingerprint


def test_the_archive_is_fetched_checked_and_kept(small, tmp_path, said, monkeypatch):
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(small.parent))
    monkeypatch.setattr(http.server.SimpleHTTPRequestHandler, "log_message", lambda *arguments: None)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        address = f"http://127.0.0.1:{server.server_port}/enwik8.zip"
        monkeypatch.setattr(enwik8, "ARCHIVE", replace(enwik8.ARCHIVE, url=address))
        monkeypatch.setattr(enwik8, "download", functools.partial(download, schemes=("http",), pause=0))
        root = tmp_path / "stores"
        store = open_files(config(None), root, said.append)
        server.shutdown()
        thread.join()
    assert store.split("test").tobytes() == TEXT[95_000:]
    assert (root / "downloads" / "enwik8.zip").read_bytes() == small.read_bytes()
    assert sorted(path.name for path in root.iterdir()) == ["downloads", store.folder.name]


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"../enwik8": TEXT}, r"expected one member, enwik8, found \.\./enwik8"),
        ({"enwik8": TEXT, "b": b"", "c": b"", "d": b""}, r"expected one member, enwik8, found enwik8, b, c, \.\.\."),
        ({}, "expected one member, enwik8, found none"),
        ({"enwik8": TEXT[:-1]}, "expected 100,000 bytes in enwik8, found 99,999"),
        (
            {"enwik8": TEXT[:-1] + b"\x00"},
            r"not enwik-8: expected 100,000 bytes with sha256 .*, found 100,000 bytes with",
        ),
    ],
)
def test_an_archive_of_something_else_is_refused(small, tmp_path, said, members, message):
    path = zipped(tmp_path / "other.zip", **members)
    root = tmp_path / "stores"
    with pytest.raises(UserError, match=message) as error:
        open_files(config(path), root, said.append)
    assert "\n" not in str(error.value) and str(error.value).startswith(str(path))
    assert list(root.iterdir()) == []


def truncated(raw: bytes) -> bytes:
    return raw[:-100]


def altered(raw: bytes) -> bytes:
    middle = len(raw) // 2
    return raw[:middle] + bytes(byte ^ 255 for byte in raw[middle : middle + 50]) + raw[middle + 50 :]


def lying(raw: bytes) -> bytes:
    """The same archive of one byte less, which says in both its headers that it has all of them."""
    return raw.replace((99_999).to_bytes(4, "little"), (100_000).to_bytes(4, "little"))


def encrypted(raw: bytes) -> bytes:
    at = raw.rindex(b"PK\x01\x02") + 8
    return raw[:at] + bytes([raw[at] | 1]) + raw[at + 1 :]


@pytest.mark.parametrize(
    ("content", "spoil", "message"),
    [
        (TEXT, truncated, "expected a whole zip archive, found .* bytes that are not one"),
        (TEXT, altered, "expected a whole zip archive, found"),
        (TEXT[:-1], lying, "expected a whole zip archive|not enwik-8"),
        (TEXT, encrypted, "expected a plain archive, found an encrypted one"),
        (TEXT, lambda raw: b"<html>moved</html>", r"found a web page .HTML. of 18 bytes"),
        (TEXT, lambda raw: b"", "not enwik-8: expected 100,000 bytes .* found 0 bytes"),
    ],
)
def test_a_spoilt_archive_is_refused(small, tmp_path, said, content, spoil, message):
    path = zipped(tmp_path / "spoilt.zip", enwik8=content)
    path.write_bytes(spoil(path.read_bytes()))
    root = tmp_path / "stores"
    with pytest.raises(UserError, match=message) as error:
        open_files(config(path), root, said.append)
    assert "\n" not in str(error.value) and str(error.value).startswith(str(path))
    assert not root.exists() or list(root.iterdir()) == []


def test_the_first_million_bytes_are_refused_by_size_and_hash(tmp_path, said):
    path = tmp_path / "enwik6"
    path.write_bytes(b"w" * 1_000_000)
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    message = f"expected 100,000,000 bytes with sha256 {enwik8.SHA256}, found 1,000,000 bytes with sha256 {found}"
    with pytest.raises(UserError, match=message) as error:
        open_files(config(path), tmp_path / "stores", said.append)
    assert str(error.value).endswith(f"to train on this file: data=text data.path={path}")
    assert not (tmp_path / "stores").exists()


@pytest.mark.skipif(not ENWIK6.exists(), reason="the first 1,000,000 bytes of the real enwik-8 are not here")
def test_the_real_first_million_bytes_are_refused_as_enwik8_and_taken_as_text(tmp_path, said):
    digest = "369b688978f649681136198fb96db14c1616756260c55fb4b65e9bc049552cad"
    with pytest.raises(UserError, match=f"found 1,000,000 bytes with sha256 {digest}"):
        open_files(config(ENWIK6), tmp_path, said.append)
    store = open_files(DataConfig(name="text", path=str(ENWIK6), length=512), tmp_path, said.append)
    assert {name: len(tokens) for name, tokens in store.splits.items()} == {
        "train": 900_000,
        "valid": 50_000,
        "test": 50_000,
    }


def test_a_path_with_nothing_there_says_what_is_wanted(small, tmp_path, said):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"expected a folder with enwik8 or enwik8\.zip, found neither"):
        open_files(config(tmp_path / "empty"), tmp_path / "stores", said.append)
    with pytest.raises(UserError, match=r"expected enwik8\.zip, the file enwik8 or a folder with one, found none"):
        open_files(config(tmp_path / "nowhere"), tmp_path / "stores", said.append)
