"""Preparing, opening and checking stores: what is written, what a kill, a full disk or damage leave, who waits."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from disturbances import damage
from made_sets import SETS, prose, write_table

from rtx.compose import compose_data
from rtx.config import DataConfig
from rtx.data import build, store
from rtx.data.catalog import listing, named_store, open_data, options_of, prepare_data, remove_store, verify_data
from rtx.data.store import DamagedStore, TokenStore, is_verified
from rtx.errors import RunFailed, UserError

TEXT = prose(3_000)


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    """A text of one's own."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_bytes(TEXT)
    (tmp_path / "text" / "b.txt").write_bytes(TEXT[::-1])
    return DataConfig(name="text", path=str(tmp_path / "text"), length=16)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "stores"


def opened(data: DataConfig, root: Path) -> TokenStore:
    found = open_data(data, root, quiet)
    assert isinstance(found, TokenStore)
    return found


def quiet(line: str) -> None:
    """Say nothing."""


def test_splits_are_the_bytes_in_order_with_their_documents(data, root):
    found = opened(data, root)
    total = 2 * len(TEXT)
    whole = TEXT + TEXT[::-1]
    assert b"".join(found.split(name).tobytes() for name in ("train", "valid", "test")) == whole
    assert [len(found.split(name)) for name in ("train", "valid")] == [
        total * 9 // 10,
        total * 95 // 100 - total * 9 // 10,
    ]
    assert found.documents("train").tolist() == [0, len(TEXT), total * 9 // 10]
    assert found.facts("train").words == len(whole[: total * 9 // 10].split()) and found.facts("train").documents == 2
    with pytest.raises(UserError, match=r"text has no split 'tset': one of train, valid, test \(did you mean 'test'"):
        found.split("tset")
    described = json.loads(json.dumps(found.describe()))
    assert described["splits"]["train"] == total * 9 // 10 and described["unit"] == "byte"


def test_the_key_follows_the_source_and_the_fingerprint_the_content(data, root, tmp_path):
    first = opened(data, root)
    file = tmp_path / "text" / "a.txt"
    os.utime(file, ns=(1, 1))
    touched = opened(data, root)
    assert touched.folder != first.folder and touched.fingerprint == first.fingerprint
    file.write_bytes(TEXT[:-1] + b"x")
    changed = opened(data, root)
    assert changed.folder != touched.folder and changed.fingerprint != first.fingerprint
    assert opened(dataclasses.replace(data, tokenizer="words"), root).fingerprint != changed.fingerprint


@pytest.mark.parametrize("tokenizer", ["words", "sentencepiece"])
def test_any_number_of_processes_makes_the_same_store(data, root, tokenizer, monkeypatch):
    """And rows that are cut; the processes are forked."""
    monkeypatch.setattr(build, "PAYS_OTHERWISE", 0)
    monkeypatch.setattr("rtx.data.text.PIECE", 1_000)
    monkeypatch.setattr("rtx.data.text.CHUNK", 700)
    stores = [
        opened(
            dataclasses.replace(data, tokenizer=tokenizer, vocabulary=400, processes=processes), root / str(processes)
        )
        for processes in (1, 3)
    ]
    assert stores[0].fingerprint == stores[1].fingerprint
    text = (TEXT + TEXT[::-1])[: 2 * len(TEXT) * 9 // 10]
    assert stores[1].split("train").tolist() == stores[1].tokenizer.encode(text).tolist()
    assert stores[1].documents("train")[1] == len(stores[1].tokenizer.encode(TEXT))


def test_damage_is_named_with_how_to_mend_it(data, root, said):
    folder = opened(data, root).folder
    for name, spoil, what in (
        ("valid.bin", {"keep": 5}, r"expected [\d,]+ bytes, found 5"),
        ("train.bin", {"flip": 777}, "expected sha256 [0-9a-f]{64}, found"),
        ("train.starts.npy", {"flip": 8 * 130}, "expected sha256 [0-9a-f]{64}, found"),
        ("store.json", {"keep": 40}, "expected the record of the store, found something else"),
    ):
        whole = (folder / name).read_bytes()
        damage(folder / name, **spoil)
        with pytest.raises(
            DamagedStore, match=f"{name}: damaged: {what}.*; to rebuild the store: rtx data prepare data=text"
        ):
            opened(data, root)
        (folder / name).write_bytes(whole)
    (folder / "test.bin").unlink()
    with pytest.raises(DamagedStore, match=r"test\.bin: damaged: expected a file that can be read, found No such file"):
        verify_data(data, root)
    prepare_data(data, root, said.append)
    assert any("test.bin: damaged: " in line and line.endswith("; rebuilding the store") for line in said)
    verify_data(data, root, quiet)


def test_a_store_that_was_read_in_full_is_known_until_it_is_touched_or_copied(data, root, monkeypatch, tmp_path):
    folder = opened(data, root).folder
    assert is_verified(folder), "it was read back after it was written"
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    assert not is_verified(copy)
    os.utime(folder / "train.bin", ns=(1, 1))
    assert not is_verified(folder)
    opened(data, root)
    assert is_verified(folder)
    monkeypatch.setattr(store, "file_sha256", lambda path: pytest.fail("it was read"))
    opened(data, root)
    with pytest.raises(pytest.fail.Exception, match="it was read"):
        opened(dataclasses.replace(data, verify="always"), root)
    os.utime(folder / "train.bin", ns=(1, 1))
    opened(dataclasses.replace(data, verify="never"), root)


def test_a_read_only_store_opens_and_is_read_in_full_once(data, root, monkeypatch, tmp_path):
    folder = opened(data, root).folder
    (folder / ".verified").unlink()
    (folder / ".verified").mkdir()  # a note cannot be written here
    folder.with_name(f".{folder.name}.lock").mkdir()  # nor can a lock
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    opened(data, root)
    monkeypatch.setattr(store, "file_sha256", lambda path: pytest.fail("it was read again"))
    opened(data, root)


KILLED = """
import os, signal, sys
from rtx.config import DataConfig
from rtx.data import build
from rtx.data.catalog import prepare_data
real, count = build.Encoder.__call__, int(sys.argv[3])
parent = os.getpid()
def dying(encoder, table):
    global count
    count -= 1
    if not count:
        os.kill(parent, signal.SIGKILL)
    return real(encoder, table)
build.Encoder.__call__ = dying
build.PAYS_OTHERWISE = 0
prepare_data(DataConfig(name="pg19", path=sys.argv[1], length=32, tokenizer="sentencepiece", vocabulary=400,
                        processes=int(sys.argv[4])), __import__("pathlib").Path(sys.argv[2]))
"""


@pytest.mark.parametrize(("after", "processes"), [(1, 1), (3, 1), (1, 2)])
def test_a_killed_preparation_goes_on_and_makes_the_same_store(tmp_path, root, monkeypatch, after, processes):
    with monkeypatch.context() as patch:
        data = compose_data([*SETS["pg19"](tmp_path, patch), f"data.processes={processes}"])
    straight = opened(data, tmp_path / "straight")
    words = [sys.executable, "-c", KILLED, str(tmp_path), str(root), str(after), str(processes)]
    run = subprocess.run(words, capture_output=True, timeout=60)  # its output ends when its processes have
    assert run.returncode == -signal.SIGKILL
    (work,) = root.glob(".pg19-*.work")
    assert [line for line in listing(root) if "unfinished; the same rtx data prepare goes on with it" in line]
    learned = (work / "sentencepiece.model").stat().st_mtime_ns
    finished = {path.name: path.stat().st_mtime_ns for path in work.glob("*.bin")}
    assert len(finished) == after - 1
    again = prepare_data(data, root, quiet)
    assert isinstance(again, TokenStore)
    for name, when in finished.items():
        assert (again.folder / name).stat().st_mtime_ns == when, "a finished split is kept"
    assert (again.folder / "sentencepiece.model").stat().st_mtime_ns == learned
    assert again.fingerprint == straight.fingerprint
    assert (
        not list(root.glob(".*.work"))
        and not list(again.folder.glob("*.arrow"))
        and not (again.folder / "cache").exists()
    )


def test_an_error_of_the_network_after_a_kill_loses_nothing(tmp_path, root, monkeypatch):
    """Errors of the hub's client are OSErrors, too."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    data = compose_data(SETS["pg19"](tmp_path, monkeypatch))
    real = build.write_split

    def failing(work, split, *rest):
        if split == "test":
            raise LocalEntryNotFoundError("503")
        return real(work, split, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(build, "write_split", failing)
        with pytest.raises(LocalEntryNotFoundError):
            prepare_data(data, root, quiet)
    (work,) = root.glob(".pg19-*.work")
    assert {path.name for path in work.glob("*.bin")} == {"train.bin", "valid.bin"}
    prepare_data(data, root, quiet)


def test_a_full_disk_leaves_nothing_that_looks_whole(data, root, monkeypatch):
    real = build.replace_file

    def full(path, write):
        if path.name == "valid.bin":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(path, write)

    with monkeypatch.context() as patch:
        patch.setattr(build, "replace_file", full)
        with pytest.raises(RunFailed, match="no space left to write; free some, or set RTX_DATA"):
            prepare_data(data, root, quiet)
    assert not list(root.glob("text-*"))
    prepare_data(data, root, quiet)


def test_a_source_that_changes_while_it_is_read_leaves_nothing(data, root, monkeypatch, tmp_path):
    real = build.write_split

    def changing(work, split, *rest):
        (tmp_path / "text" / "a.txt").write_bytes(TEXT)
        return real(work, split, *rest)

    monkeypatch.setattr(build, "write_split", changing)
    with pytest.raises(UserError, match=r"a\.txt: changed while it was read; prepare it again"):
        prepare_data(data, root, quiet)
    assert not [path for path in root.iterdir() if path.suffix != ".lock"]


STARTED = """
import sys, time, pathlib
from rtx.config import DataConfig
from rtx.data import build
from rtx.data.catalog import prepare_data
if sys.argv[3] == "soft":
    import errno, fcntl
    def none(*arguments): raise OSError(errno.ENOSYS, "no flock")
    fcntl.flock = none
real = build.fill
build.fill = lambda *words: (print("made", flush=True), time.sleep(0.5), real(*words))
print(prepare_data(DataConfig(name="text", path=sys.argv[1], length=16), pathlib.Path(sys.argv[2])).fingerprint)
"""


@pytest.mark.parametrize("lock", ["flock", "soft"])
def test_three_starts_at_once_make_one_store(data, root, lock):
    """Also where the file system has no flock."""
    words = [sys.executable, "-W", "ignore", "-c", STARTED, data.path, str(root), lock]
    runs = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = [run.communicate(timeout=60)[0].splitlines() for run in runs]
    assert [run.returncode for run in runs] == [0, 0, 0]
    assert len({lines[-1] for lines in said}) == 1
    assert sum(lines.count("made") for lines in said) == 1
    assert any("waiting for another process, which is preparing it" in line for lines in said for line in lines)


def test_options_name_a_store_and_no_more():
    said = {
        "data=stdlib": [],
        "data=wikitext103": ["data=wikitext103", "data.processes=2"],
        "data=pg19 data.path='a b'": ["data=pg19", "data.path='a b'"],
        "data=cifar10 data.size=8 data.held_out=7 data.length=192": ["data=cifar10", "data.held_out=7", "data.size=8"],
        "data=imagenet64 data.path=x": ["data=imagenet64", "data.path=x"],
        "data=hub data.path=a/b data.column=c": ["data=hub", "data.path=a/b", "data.column=c"],
    }
    for options, words in said.items():
        assert options_of(compose_data(words)) == options


def test_stores_are_listed_and_removed_and_nothing_else_is(data, root, said, tmp_path):
    assert listing(root) == [f"{root}: no data yet"]
    folder = opened(data, root).folder
    (root / "downloads").mkdir()
    (root / "downloads" / "x.zip.part").write_bytes(b"12345")
    (root / "mine").mkdir()
    page = "\n".join(listing(root))
    assert f"  {folder.name}  " in page and "complete; data=text data.path=" in page and "unfinished download" in page
    for name in ("mine", "../text", "downloads/x.zip.part", folder.name[:-1]):
        with pytest.raises(UserError, match="no store of this name"):
            named_store(root, name)
    remove_store(root, named_store(root, folder.name), said.append)
    assert said[0].startswith(f"{folder}: removed, ") and not folder.exists()
    with pytest.raises(UserError, match="nothing to remove: no such store"):
        remove_store(root, folder)
    work = build.work_folder(folder)
    work.mkdir()
    remove_store(root, named_store(root, work.name), said.append)
    assert sorted(path.name for path in root.iterdir() if path.suffix != ".lock") == ["downloads", "mine"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"length": 10**6},
            r"expected at least one sequence of data\.length=1000000 .*; give more text or data\.length=",
        ),
        ({"path": "nowhere"}, r"data\.path=nowhere: expected a file, a folder or a glob"),
    ],
)
def test_too_little_text_or_none_is_told_before_anything_is_written(data, root, change, message):
    with pytest.raises(UserError, match=message):
        opened(dataclasses.replace(data, **change), root)
    assert not root.exists()


def test_a_parquet_source_of_one_long_column_is_read_in_bounded_pieces(tmp_path, root):
    """Rows of very different sizes make batches of their own; ids are those of the rows."""
    texts = [prose(5, 1), prose(20_000, 2), b"", prose(7, 3)]
    for split in ("train", "validation", "test"):
        write_table(tmp_path / f"{split}.parquet", 2, text=texts)
    found = opened(DataConfig(name="pg19", path=str(tmp_path), length=16), root)
    assert found.split("valid").tobytes() == b"".join(texts) and found.facts("valid").documents == 3
    assert np.diff(found.documents("valid")).tolist() == [len(text) for text in texts if text]
    assert found.stamps == {"books": {"train": 4, "valid": 4, "test": 4}, "complete": False}
