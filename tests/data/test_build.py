from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from made_sources import Given, recipe_of

from rtx.config import DataConfig
from rtx.data import build
from rtx.data.build import affordable, build_store, smallest_type, work_folder
from rtx.data.disk import locked
from rtx.data.recipe import Recipe
from rtx.data.source import Source
from rtx.data.store import open_store, verify_store
from rtx.errors import RunFailed, UserError

WORDS = b"alpha  beta\ngamma\t\x0bdelta \r\nepsilon"


def texts(seed: int, count: int, size: int) -> tuple[bytes, ...]:
    draw = np.random.default_rng(seed)
    return tuple(bytes(draw.choice(list(WORDS), int(draw.integers(1, size)))) for _ in range(count))


def book(mark: Path | None = None, fault: str = "", at: int = 2, **options: object) -> Recipe:
    """Seven parts of three documents to train on, one part each to hold out; one of the seven may fail."""
    train = [Given(texts(i, 3, 5000), 100 + i, fault if i == at else "", mark) for i in range(7)]
    splits = {"train": train, "valid": [Given(texts(8, 1, 900), mark=mark)]}
    return recipe_of(splits | {"test": [Given(texts(9, 2, 900), mark=mark)]}, **options)  # type: ignore


@pytest.fixture(autouse=True)
def several(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let several processes pay from the first byte on."""
    monkeypatch.setattr(build, "PAYS", {"byte": 0})


def content(folder: Path) -> dict[str, bytes]:
    """The bytes of a store's files, without what tells when and where it was made."""
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".verified"}
    record = json.loads(files["store.json"])
    del record["made"]
    return files | {"store.json": json.dumps(record).encode()}


@pytest.fixture
def plain(tmp_path: Path) -> dict[str, bytes]:
    """What one process makes of the book."""
    recipe = book(processes=1)
    (tmp_path / "plain").mkdir()
    build_store(tmp_path / "plain", recipe)
    return content(recipe.folder(tmp_path / "plain"))


def test_any_number_of_processes_makes_the_same_bytes(tmp_path, plain):
    recipe = book(processes=4)
    build_store(tmp_path, recipe)
    assert content(recipe.folder(tmp_path)) == plain
    store = verify_store(recipe.folder(tmp_path), "")
    parts = [part.texts for part in dict(recipe.source.parts())["train"]]  # type: ignore
    documents = [text for part in parts for text in part]
    assert store.split("train").tobytes() == b"".join(documents)
    assert store.documents("train").tolist() == np.cumsum([0, *map(len, documents)]).tolist()
    facts = store.facts("train")
    assert facts.words == sum(len(text.split()) for text in documents)
    assert (facts.bytes, facts.documents) == (sum(map(len, documents)), 21)


PREPARE = """
import sys
from pathlib import Path
sys.path.insert(0, "tests/data")
import test_build
from rtx.data import build
build.PAYS = {"byte": 0}
root, processes, fault, at = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
if fault == "join":
    plain = build.join_parts
    def slow(places, records, images):
        import time
        if len(places) > 1:
            plain(places[:at], records[:at], images)
            (root / "mark").write_text("xxx")
            time.sleep(60)
    build.join_parts, fault = slow, ""
recipe = test_build.book(root / "mark" if fault else None, fault, at, processes=processes)
build.build_store(root, recipe)
"""


def preparing(root: Path, processes: int, fault: str, at: int = 6) -> subprocess.Popen[bytes]:
    """Start a preparation in a process of its own; returns when it is in the middle."""
    root.mkdir(exist_ok=True)
    folder = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, "-c", PREPARE, str(root), str(processes), fault, str(at)]
    process = subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.DEVNULL)
    limit = time.monotonic() + 60
    want = at + 1 if fault == "sleep" else 3
    while not (root / "mark").exists() or len((root / "mark").read_text()) < want:
        assert process.poll() is None and time.monotonic() < limit
        time.sleep(0.02)
    time.sleep(0.5)
    return process


def children(process: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="no list of child processes")
@pytest.mark.parametrize(("processes", "fault"), [(1, "sleep"), (2, "sleep"), (1, "join")])
def test_a_killed_preparation_is_continued_to_the_same_bytes(tmp_path, plain, said, processes, fault):
    root = tmp_path / "killed"
    process = preparing(root, processes, fault, at=4)
    others = children(process.pid)
    assert len(others) == (0 if processes == 1 else 2)
    process.send_signal(signal.SIGKILL)
    process.wait()
    recipe = book(root / "mark", processes=processes)
    left = work_folder(recipe.folder(root))
    assert left.exists() and not recipe.folder(root).exists()
    done = len(list(left.glob("parts/*.json")))
    assert done == 9 if fault == "join" else 3 <= done < 9
    joined = len(list(left.glob("parts/train-*.bin")))
    assert fault != "join" or joined == 3, "four of seven parts stand in their place already"
    (root / "mark").unlink()
    build_store(root, recipe, said.append)
    assert content(recipe.folder(root)) == plain
    again = len((root / "mark").read_text()) if (root / "mark").exists() else 0
    assert again == 9 - done, "only what was not finished is made again"
    assert said[0] == f"going on where an earlier preparation ended: {done} of 9 parts done"
    wait_for_the_end(others)
    assert not left.exists()


def wait_for_the_end(processes: list[int]) -> None:
    for _ in range(100):
        if not any(Path(f"/proc/{process}").exists() for process in processes):
            return
        time.sleep(0.1)
    pytest.fail("a process outlived the one that started it")


@pytest.mark.parametrize("fault", ["sleep", "join"])
def test_a_part_that_was_spoilt_in_between_is_made_again(tmp_path, plain, fault):
    root = tmp_path / "killed"
    process = preparing(root, 1, fault, at=4)
    process.kill()
    process.wait()
    recipe = book(processes=1)
    left = work_folder(recipe.folder(root))
    spoilt = left / ("train.bin" if fault == "join" else "parts/train-00001.bin")
    raw = bytearray(spoilt.read_bytes())
    raw[-1] ^= 1
    spoilt.write_bytes(raw)
    build_store(root, recipe)
    assert content(recipe.folder(root)) == plain


def test_one_that_was_killed_after_its_last_byte_only_gets_its_name(tmp_path, plain, monkeypatch):
    recipe = book()
    with monkeypatch.context() as patch:
        patch.setattr(build, "install", interrupt)
        with pytest.raises(KeyboardInterrupt):
            build_store(tmp_path, recipe)
    monkeypatch.setattr(build, "_fill", None)
    build_store(tmp_path, recipe)
    assert content(recipe.folder(tmp_path)) == plain


def interrupt(*arguments: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="no list of child processes")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_processes(tmp_path, number):
    process = preparing(tmp_path / "stopped", 2, "sleep")
    others = children(process.pid)
    process.send_signal(number)
    process.wait(timeout=10)
    wait_for_the_end(others)


@pytest.mark.parametrize("processes", [1, 3])
@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        ("user", UserError, "^a.txt: no text$"),
        ("full", RunFailed, "no space left to write; free some"),
    ],
)
def test_a_wrong_source_and_a_full_disk_leave_nothing(tmp_path, processes, fault, kind, message):
    with pytest.raises(kind, match=message):
        build_store(tmp_path, book(fault=fault, processes=processes))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("fault", "message"), [("die", "was killed by signal 9; if memory ran out"), ("failed", "^the server is gone$")]
)
def test_what_may_pass_leaves_what_is_finished(tmp_path, plain, said, fault, message):
    with pytest.raises(RunFailed, match=message):
        build_store(tmp_path, book(fault=fault, at=6, processes=2))
    assert [path.suffix for path in tmp_path.iterdir() if path.name != "plain"] == [".work"]
    recipe = book(processes=2)
    build_store(tmp_path, recipe, said.append)
    assert content(recipe.folder(tmp_path)) == plain
    assert said[0].startswith("going on where an earlier preparation ended: ")
    (tmp_path / "first").mkdir()
    with pytest.raises(RunFailed, match=message):
        build_store(tmp_path / "first", book(fault=fault, at=0, processes=2))
    left = {path.suffix for path in (tmp_path / "first").iterdir()}
    assert left <= {".work"}


def test_old_unfinished_preparations_go_and_young_ones_and_those_under_way_stay(tmp_path):
    for name, age in (("old", 2), ("young", 0)):
        folder = tmp_path / f".text-{name}.work" / "parts"
        folder.mkdir(parents=True)
        (folder / "train-00000.json").write_text("{}")
        long_ago = time.time() - age * 24 * 3600
        for path in (folder / "train-00000.json", folder, folder.parent):
            os.utime(path, (long_ago, long_ago))
    with locked(tmp_path / ".text-old.lock", "its preparation", print):  # and the clock has jumped
        build_store(tmp_path, book())
    assert (tmp_path / ".text-old.work").exists()
    shutil.rmtree(book().folder(tmp_path))
    build_store(tmp_path, book())
    assert not (tmp_path / ".text-old.work").exists() and (tmp_path / ".text-young.work").exists()


def test_ids_take_as_few_bytes_as_they_can():
    assert [smallest_type(size) for size in (2, 256, 257, 65_536, 65_537)] == [
        *("uint8", "uint8", "uint16", "uint16", "uint32")
    ]


class Wide:
    """Ids of bytes, times 300: they need four bytes each."""

    name, unit, vocabulary = "wide", "mark", 256 * 300

    def encode(self, document):
        for chunk in document:
            yield np.frombuffer(chunk, dtype=np.uint8).astype(np.uint32) * 300

    def decode(self, ids):
        return (np.asarray(ids) // 300).astype(np.uint8).tobytes()

    def describe(self):
        return {"name": self.name, "unit": self.unit, "vocabulary": self.vocabulary}


def test_wide_ids_are_kept_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "tokenizer_for", lambda *arguments: Wide())
    monkeypatch.setattr("rtx.data.store.load_tokenizer", lambda *arguments: Wide())
    recipe = book(processes=1)
    build_store(tmp_path, recipe)
    store = open_store(recipe.folder(tmp_path), "")
    assert store.split("train").dtype == np.uint32 and store.split("train").max() > 1 << 15
    documents = [text for part in dict(recipe.source.parts())["train"] for text in part.texts]  # type: ignore
    starts = store.documents("train")
    assert [store.tokenizer.decode(store.split("train")[a:b]) for a, b in pairwise(starts)] == documents


@pytest.mark.parametrize(
    ("asked", "memory", "expected"), [(None, 0, 4), (None, 5 << 27, 2), (None, 1 << 40, 1), (3, 1 << 40, 3)]
)
def test_parts_that_take_much_memory_are_read_by_fewer_processes(monkeypatch, asked, memory, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    source = Source("made", "data=made", [], {}, dict)
    parts: list[Any] = [SimpleNamespace(memory=memory), SimpleNamespace()]
    assert affordable(Recipe(source, DataConfig(processes=asked)), parts) == expected
