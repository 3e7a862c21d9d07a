"""Preparing, opening and checking stores, also after kills, on full disks and with damage."""

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
from huggingface_hub.errors import LocalEntryNotFoundError

from rtx.data import preparation, store
from rtx.data.catalog import listing, open_data, prepare_data, remove_store, verify_data
from rtx.data.sampler import ShuffledWindows
from rtx.data.store import DamagedStore, TokenStore, is_verified
from rtx.data.windows import Window, read_windows, tokens_and_documents
from rtx.errors import RunFailed, UserError
from rtx.settings.compose import compose_data
from rtx.settings.schema import Config, DataConfig
from tests.helpers.disturbances import damage
from tests.helpers.made_sets import SETS, prose, refused, write_table

TEXT = prose(3_000)


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_bytes(TEXT)
    (tmp_path / "text" / "b.txt").write_bytes(TEXT[::-1])
    return DataConfig(name="text", path=str(tmp_path / "text"), length=16)


def opened(data: DataConfig, root: Path, **changed: object) -> TokenStore:
    found = open_data(dataclasses.replace(data, **changed), root)  # type: ignore[arg-type]
    assert isinstance(found, TokenStore)
    return found


def starts(store: TokenStore, split: str) -> np.ndarray:
    return np.load(store.folder / f"{split}.starts.npy")


def test_splits_are_the_bytes_in_order_with_their_documents(data, root):
    found = opened(data, root)
    whole = TEXT + TEXT[::-1]
    train = len(whole) * 9 // 10
    valid = len(whole) * 95 // 100 - len(whole) * 9 // 10
    assert b"".join(found.split(name).tobytes() for name in ("train", "valid", "test")) == whole
    expected = {"units": train, "bytes": train, "words": len(whole[:train].split()), "documents": 2}
    assert expected.items() <= found.facts["train"].items()
    assert starts(found, "train").tolist() == [0, len(TEXT), train]
    with pytest.raises(
        UserError,
        match=r"text has no split 'tset': one of train, valid, test \(did you mean 'test'",
    ):
        found.split("tset")
    described = json.loads(json.dumps(found.describe()))
    assert described["splits"]["valid"] == valid and described["unit"] == "byte"


def test_the_key_follows_the_source_and_the_fingerprint_the_content(data, root, tmp_path):
    first = opened(data, root)
    file = tmp_path / "text" / "a.txt"
    os.utime(file, ns=(1, 1))
    touched = opened(data, root)
    assert touched.folder != first.folder and touched.fingerprint == first.fingerprint
    file.write_bytes(TEXT[:-1] + b"x")
    changed = opened(data, root)
    assert changed.folder != touched.folder and changed.fingerprint != first.fingerprint
    assert opened(data, root, tokenizer="words").fingerprint != changed.fingerprint


@pytest.mark.parametrize("tokenizer", ["words", "sentencepiece"])
def test_any_number_of_processes_makes_the_same_store(data, root, tokenizer, monkeypatch):
    monkeypatch.setattr(preparation, "PARALLEL_BYTES", 0)
    monkeypatch.setattr("rtx.data.text.PIECE", 1_000)  # rows are cut
    settings = {"tokenizer": tokenizer, "vocabulary": 400}
    one, three = (
        opened(data, root / str(number), processes=number, **settings) for number in (1, 3)
    )
    assert one.fingerprint == three.fingerprint
    text = (TEXT + TEXT[::-1])[: 2 * len(TEXT) * 9 // 10]
    assert three.split("train").tolist() == three.tokenizer.encode(text).tolist()
    assert starts(three, "train")[1] == len(three.tokenizer.encode(TEXT))


def test_rows_of_very_different_sizes(tmp_path, root):
    texts = [prose(5, 1), prose(20_000, 2), b"", prose(7, 3)]
    for split in ("train", "validation", "test"):
        write_table(tmp_path / f"{split}.parquet", 2, text=texts)
    found = opened(DataConfig(name="pg19", path=str(tmp_path), length=16), root)
    assert (
        found.split("valid").tobytes() == b"".join(texts) and found.facts["valid"]["documents"] == 3
    )
    assert np.diff(starts(found, "valid")).tolist() == [len(text) for text in texts if text]
    write_table(tmp_path / "test.parquet", 2, text=[b""])
    refused(root, "pg19", tmp_path, "expected at least one token in split test, found none")


@pytest.mark.parametrize(
    ("name", "spoil", "what"),
    [
        ("valid.bin", {"keep": 5}, r"expected [\d,]+ bytes, found 5"),
        ("train.bin", {"flip": 777}, "expected sha256 [0-9a-f]{64}, found"),
        ("train.starts.npy", {"flip": 8 * 130}, "expected sha256 [0-9a-f]{64}, found"),
        (
            "store.json",
            {"keep": 40},
            "expected a record of format 3 with its own sha256, found another",
        ),
        ("test.bin", None, "expected a file that can be read, found No such file"),
    ],
)
def test_damage_is_named_with_how_to_mend_it(data, root, said, name, spoil, what):
    path = opened(data, root).folder / name
    damage(path, **spoil) if spoil else path.unlink()
    with pytest.raises(
        DamagedStore,
        match=f"{name}: damaged: {what}.*; to rebuild the store: rtx data prepare data=t",
    ):
        opened(data, root)
    prepare_data(data, root, said.append)
    assert (
        said[0].startswith(f"{path}: damaged: ") and "; rebuilding the store: data=text " in said[0]
    )
    verify_data(data, root)


def test_a_store_that_was_read_in_full_is_known_until_it_is_touched_or_copied(
    data, root, monkeypatch, tmp_path
):
    folder = opened(data, root).folder
    assert is_verified(folder), "it was read back after it was written"
    assert not is_verified(Path(shutil.copytree(folder, tmp_path / "copy")))
    os.utime(folder / "train.bin", ns=(1, 1))
    assert not is_verified(folder)
    opened(data, root)
    assert is_verified(folder)
    monkeypatch.setattr(store, "sha256_of", lambda file: pytest.fail("it was read"))
    opened(data, root)
    with pytest.raises(pytest.fail.Exception, match="it was read"):
        opened(data, root, verify="always")
    os.utime(folder / "train.bin", ns=(1, 1))
    opened(data, root, verify="never")


def test_a_read_only_store_opens_and_is_read_in_full_once(data, root, monkeypatch, tmp_path):
    folder = opened(data, root).folder
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert not is_verified(folder)
    opened(data, root)
    monkeypatch.setattr(store, "sha256_of", lambda file: pytest.fail("it was read again"))
    opened(data, root)


KILLED = """
import os, signal, sys
from rtx.settings.schema import DataConfig
from rtx.data import preparation
from rtx.data.catalog import prepare_data
real, count, parent = preparation.encode_rows, int(sys.argv[3]), os.getpid()
def dying(*words, **options):
    global count
    count -= 1
    if not count:
        os.kill(parent, signal.SIGKILL)
    return real(*words, **options)
preparation.encode_rows, preparation.PARALLEL_BYTES = dying, 0
data = DataConfig(name="pg19", path=sys.argv[1], length=32, tokenizer="sentencepiece",
                  vocabulary=400, processes=int(sys.argv[4]))
prepare_data(data, __import__("pathlib").Path(sys.argv[2]))
"""


@pytest.mark.parametrize(("after", "processes"), [(3, 1), (1, 2)])
def test_a_killed_preparation_goes_on_and_makes_the_same_store(
    tmp_path, root, monkeypatch, after, processes
):
    with monkeypatch.context() as patch:
        data = compose_data([*SETS["pg19"](tmp_path, patch), f"data.processes={processes}"])
    words = [sys.executable, "-c", KILLED, str(tmp_path), str(root), str(after), str(processes)]
    run = subprocess.run(
        words, capture_output=True, timeout=600
    )  # its output ends when its processes have
    assert run.returncode == -signal.SIGKILL
    (work,) = root.glob(".pg19-*.work")
    assert any(
        "unfinished; the same rtx data prepare goes on with it" in line for line in listing(root)
    )
    kept = {
        path.name: path.stat().st_mtime_ns
        for path in (work / "sentencepiece.model", *work.glob("*.bin"))
    }
    os.utime(work, (0, 0))
    opened(
        DataConfig(name="text", path=str(Path(__file__)), length=16), root
    )  # another store leaves it alone
    assert len(kept) == after
    again = prepare_data(data, root)
    assert isinstance(again, TokenStore)
    assert {name: (again.folder / name).stat().st_mtime_ns for name in kept} == kept, (
        "what is finished is kept"
    )
    assert again.fingerprint == opened(data, tmp_path / "straight").fingerprint
    assert not list(root.glob(".*.work")) and not (again.folder / "cache").exists()


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
GONE = LocalEntryNotFoundError("503")


@pytest.mark.parametrize("error", [FULL, GONE], ids=["disk", "network"])
def test_an_error_half_way_leaves_nothing_that_looks_whole_and_all_that_is(
    data, root, monkeypatch, error
):
    real = preparation.replace_inside

    def failing(folder, name, write):
        if name.endswith("/test.bin"):
            raise error
        real(folder, name, write)

    with monkeypatch.context() as patch:
        patch.setattr(preparation, "replace_inside", failing)
        with pytest.raises(
            (RunFailed, LocalEntryNotFoundError),
            match=r"no space left .*; free some, or set RTX_|503",
        ):
            prepare_data(data, root)
    (work,) = root.glob(".text-*.work")
    assert not list(root.glob("text-*")) and {path.name for path in work.glob("*.bin")} == {
        "train.bin",
        "valid.bin",
    }
    prepare_data(data, root)


def test_a_source_that_changes_while_it_is_read_leaves_nothing(data, root, tmp_path):
    with pytest.raises(UserError, match=r"text: changed while it was read; prepare it again"):
        prepare_data(data, root, lambda line: (tmp_path / "text" / "a.txt").write_bytes(TEXT))
    assert not list(root.iterdir())


WAITS = "waiting for another process, which is preparing it"
MADE_LATE = f"""
import sys, time
from pathlib import Path
from rtx.data import preparation
sys.stdout.reconfigure(line_buffering=True)
write_store = preparation.write_store
def once_another_waits(*words):
    print("made")
    end = time.monotonic() + 600
    while {WAITS!r} not in Path(log).read_text() and time.monotonic() < end:
        time.sleep(0.01)
    return write_store(*words)
preparation.write_store = once_another_waits
"""
"""Runs in each forked process; all of them print to one log."""
NO_FLOCK = """
import errno, fcntl
def refuse(*words):
    raise OSError(errno.ENOSYS, "no flock")
fcntl.flock = refuse
"""


@pytest.mark.parametrize("lock", ["flock", "soft"])
def test_three_starts_at_once_make_one_store(data, root, workshop, lock):
    """The first makes it as soon as another one waits."""
    inside = MADE_LATE
    if lock == "soft":
        inside += NO_FLOCK
    words = ("data", "prepare", "data=text", f"data.path={data.path}", "data.length=16")
    starts = [
        workshop.fork(workshop.folder / lock, *words, inside=inside, RTX_DATA=str(root))
        for _ in range(3)
    ]
    codes = [start.wait() for start in starts]
    said = starts[0].log.read_text()
    assert codes == [0, 0, 0], said
    lines = said.splitlines()
    assert lines.count("made") == 1 and WAITS in said
    fingerprints = [line for line in lines if "fingerprint" in line]
    assert len(fingerprints) == 3 and len(set(fingerprints)) == 1


def test_stores_are_listed_and_removed_and_nothing_else_is(data, root, said):
    assert listing(root) == [f"{root}: no data yet"]
    folder = opened(data, root).folder
    (root / "downloads").mkdir()
    (root / "downloads" / "x.zip.part").write_bytes(b"12345")
    (root / "my-own").mkdir()
    part, store_line = listing(root)
    assert part.split()[1:] == ["downloads/x.zip.part", "unfinished"]
    assert store_line.split()[1:3] == [folder.name, "data=text"]
    assert part.index("unfinished") == store_line.index("data=text"), "columns line up"
    for name in ("my-own", "../text", "downloads/x.zip.part", folder.name[:-1]):
        with pytest.raises(UserError, match="no store of this name"):
            remove_store(root, name)
    (root / f".{folder.name}.work").mkdir()
    remove_store(root, folder.name, said.append)
    assert said[0].startswith(f"{folder}: removed, ") and len(said) == 2
    assert sorted(path.name for path in root.iterdir()) == ["downloads", "my-own"]


def test_a_store_that_may_not_be_removed_is_not_reported_as_removed(data, root, said, monkeypatch):
    folder = opened(data, root).folder

    def refuse(*_: object, **options: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))

    monkeypatch.setattr(shutil, "rmtree", refuse)
    with pytest.raises(UserError, match=f"{folder}: Permission denied"):
        remove_store(root, folder.name, said.append)
    assert said == [] and folder.is_dir()


def test_sequences_and_windows_have_the_documents_of_their_units(data, root):
    apart = dataclasses.replace(data, documents=True)
    found = opened(apart, root)
    units = found.split("train")
    begins = found.document_starts("train", apart)
    assert begins is not None and begins.tolist() == [0, len(TEXT)]
    assert found.document_starts("train", data) is None
    # The store is the same whether documents are kept apart or not.
    assert opened(data, root).folder == found.folder
    config = Config(data=apart)
    sampler = found.training_sampler(config)
    assert isinstance(sampler, ShuffledWindows)
    plain = found.training_sampler(dataclasses.replace(config, data=data))
    crossing = 0
    for number in range(2 * len(units) // data.length):
        tokens, first = sampler.sequence(number)
        assert np.array_equal(tokens, plain.sequence(number))
        begin = len(TEXT) - sampler.start(number)
        expected = np.zeros(data.length, int)
        if 0 < begin < data.length:
            expected[begin:] = begin
            crossing += 1
        assert np.array_equal(first, expected)
    assert crossing
    window = Window(len(TEXT) - 5, len(TEXT) + 11, len(TEXT))
    batch, skipped_B = read_windows(units, [window], begins)
    tokens_BN, first_BN = tokens_and_documents(batch)
    assert np.array_equal(tokens_BN[0], units[window.start : window.stop])
    assert first_BN is not None and first_BN.tolist() == [[0] * 5 + [5] * 11]
    assert skipped_B.tolist() == [5]


def test_documents_are_refused_where_there_are_none_or_they_are_damaged(data, root):
    apart = dataclasses.replace(data, documents=True)
    found = opened(apart, root)
    np.save(found.folder / "valid.starts.npy", np.array([0, 3]))
    with pytest.raises(DamagedStore, match=r"valid.starts.npy: damaged: expected ascending starts"):
        found.document_starts("valid", apart)
    (found.folder / "valid.starts.npy").unlink()
    with pytest.raises(DamagedStore, match=r"valid.starts.npy: damaged"):
        found.document_starts("valid", apart)
    images = dataclasses.replace(found, image=(2, 2))
    with pytest.raises(UserError, match=r"data.documents=true: data=text has no documents"):
        images.document_starts("train", apart)
