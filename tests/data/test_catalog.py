from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from rtx.config import DataConfig
from rtx.data import text as text_module
from rtx.data.catalog import check_image, data_root, make_recipe, open_files, prepare_files, verify_files
from rtx.data.store import SplitFacts, is_verified
from rtx.data.text import SHORTEST_TEXT
from rtx.errors import UserError


def text(path: Path | str, length: int = 64) -> DataConfig:
    return DataConfig(name="text", path=str(path), length=length)


def test_where_stores_lie(monkeypatch):
    monkeypatch.delenv("RTX_DATA", raising=False)
    assert data_root() == Path("data")
    monkeypatch.setenv("RTX_DATA", "~/stores")
    assert data_root() == Path.home() / "stores"


def test_a_text_is_prepared_once_and_cut_90_5_5(book, tmp_path, said):
    store = open_files(text(book), tmp_path / "stores", said.append)
    raw = book.read_bytes()
    assert store.split("train").tobytes() == raw[:4500]
    assert store.split("valid").tobytes() == raw[4500:4750]
    assert store.split("test").tobytes() == raw[4750:]
    assert len(said) == 1 and said[0].startswith(f"preparing data=text data.path={book}: 5,000 bytes (train 4,500, ")
    again = open_files(text(book), tmp_path / "stores", said.append)
    assert again.fingerprint == store.fingerprint and len(said) == 1
    assert os.listdir(tmp_path / "stores") == [store.folder.name]


def test_a_changed_source_gets_a_new_store(book, tmp_path, said):
    first = open_files(text(book), tmp_path / "stores", said.append)
    raw = book.read_bytes()
    book.write_bytes(b"x" + raw[1:])
    second = open_files(text(book), tmp_path / "stores", said.append)
    assert second.split("train")[0] == ord("x") and second.fingerprint != first.fingerprint
    book.write_bytes(raw)
    third = open_files(text(book), tmp_path / "stores", said.append)
    assert third.fingerprint == first.fingerprint and len(said) == 3
    copy = tmp_path / "copy.txt"
    copy.write_bytes(raw)
    assert open_files(text(copy), tmp_path / "elsewhere", said.append).fingerprint == first.fingerprint


def test_a_folder_that_holds_the_stores_is_read_without_them(book, tmp_path, said, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = open_files(text("."), Path("data"), said.append)
    assert open_files(text("."), Path("data"), said.append).folder == first.folder
    assert first.source == {"place": ".", "files": 1, "bytes": 5000}


def test_the_standard_library_is_the_default(tmp_path, said):
    store = open_files(DataConfig(), tmp_path, said.append)
    train, valid, test = (len(store.split(name)) for name in ("train", "valid", "test"))
    total = train + valid + test
    assert (train, train + valid) == (total * 90 // 100, total * 95 // 100)
    assert b"import" in store.tokenizer.decode(store.split("valid"))
    assert prepare_files(DataConfig(), tmp_path, said.append).fingerprint == store.fingerprint


def test_too_little_text_is_one_line(tmp_path, said):
    path = tmp_path / "short.txt"
    for size, length, message in [
        (0, 64, f"{path}: expected at least 31 bytes (cut 90/5/5), found 0 in 1 file; give more text"),
        (30, 2, f"{path}: expected at least 31 bytes (cut 90/5/5), found 30 in 1 file; give more text"),
        (
            1000,
            1024,
            f"{path}: expected at least one sequence of data.length=1024 bytes in the training split, found 900; "
            "give more text or data.length=900",
        ),
    ]:
        path.write_bytes(b"x" * size)
        for call in (open_files, prepare_files, verify_files):
            with pytest.raises(UserError, match=re.escape(message)):
                call(text(path, length), tmp_path / "stores", said.append)
    open_files(text(path, 900), tmp_path / "stores", said.append)
    assert not said[1:]


def test_no_split_is_shorter_than_two_bytes(tmp_path):
    path = tmp_path / "short.txt"
    for size in range(SHORTEST_TEXT, 200):
        path.write_bytes(b"x" * size)
        splits = make_recipe(text(path, 2), tmp_path / "stores").source.units or {}
        assert min(splits.values()) >= 2 and sum(splits.values()) == size


def test_an_unknown_name_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"data=enwik9: must be one of stdlib, text, enwik8, .* .did you mean 'enwik8'"):
        open_files(DataConfig(name="enwik9"), tmp_path)


def test_verify_names_the_damage_and_prepare_mends_it(book, tmp_path, said):
    root = tmp_path / "stores"
    with pytest.raises(UserError, match=r"not prepared; to prepare it: rtx data prepare data=text data\.path="):
        verify_files(text(book), root, said.append)
    store = prepare_files(text(book), root, said.append)
    assert verify_files(text(book), root, said.append).fingerprint == store.fingerprint
    assert said[-1] == f"{store.folder}: every byte as recorded; fingerprint {store.fingerprint}"
    path = store.folder / "valid.bin"
    for damage in (lambda: os.truncate(path, 249), path.unlink, lambda: path.write_bytes(b"x" * 250)):
        damage()
        with pytest.raises(
            UserError, match=r"valid\.bin: damaged: expected .*; to rebuild the store: rtx data prepare"
        ):
            verify_files(text(book), root, said.append)
        assert prepare_files(text(book), root, said.append).fingerprint == store.fingerprint
        assert any(line.endswith("; rebuilding the store") for line in said)
        verify_files(text(book), root, said.append)
    lines = len(said)
    os.truncate(path, 249)
    with pytest.raises(UserError, match=r"valid\.bin: damaged: expected 250 bytes, found 249; to rebuild"):
        open_files(text(book), root, said.append)
    assert len(said) == lines


def test_bytes_are_compared_once_always_or_never(book, tmp_path, said):
    root = tmp_path / "stores"
    store = prepare_files(text(book), root, said.append)
    path = store.folder / "train.bin"
    raw, times = path.read_bytes(), path.stat()
    path.write_bytes(bytes([raw[0] ^ 1]) + raw[1:])
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # as damage on a disk: nothing tells that it was written
    open_files(text(book), root)
    open_files(replace(text(book), verify="never"), root)
    damaged = r"train\.bin: damaged: expected crc32 [0-9a-f]{8} in block 0 of train\.bin"
    with pytest.raises(UserError, match=damaged):
        open_files(replace(text(book), verify="always"), root)
    path.touch()
    open_files(replace(text(book), verify="never"), root)
    for _ in range(2):
        with pytest.raises(UserError, match=damaged):
            open_files(text(book), root)
    path.write_bytes(raw)
    open_files(text(book), root)
    assert is_verified(store.folder)


def test_files_are_documents_and_one_at_a_border_is_two(tmp_path, said, monkeypatch):
    folder = tmp_path / "books"
    folder.mkdir()
    texts = [b"one two\n" * 100, b"", b"three " * 50, b"x" * 900]
    for number, content in enumerate(texts):
        (folder / f"{number}.txt").write_bytes(content)
    monkeypatch.setattr(text_module, "PART", 500)
    store = prepare_files(text(folder), tmp_path / "stores", said.append)
    assert store.documents("train").tolist() == [0, 800, 1100, 1800]
    assert store.documents("valid").tolist() == [0, 100] and store.documents("test").tolist() == [0, 100]
    assert store.facts("train") == SplitFacts(1800, 1800, 200 + 50 + 1, 3)
    parts = make_recipe(text(folder), tmp_path / "stores").source.parts()
    assert {name: [part.size for part in listed] for name, listed in parts.items()} == {
        "train": [800, 1000],
        "valid": [100],
        "test": [100],
    }
    monkeypatch.setattr(text_module, "PART", 1 << 26)
    (tmp_path / "again").mkdir()
    assert prepare_files(text(folder), tmp_path / "again", said.append).fingerprint == store.fingerprint


def test_images_fix_the_length(book, tmp_path):
    with pytest.raises(UserError, match=r"data.length=64: expected 3072 for images of 32 x 32 x 3.*data.length=3072$"):
        check_image((32, 32), text(book))
    check_image((32, 32), text(book, 3072))


def test_the_advice_is_a_command_that_can_be_pasted(tmp_path):
    path = tmp_path / "my book's.txt"
    path.write_bytes(b"x" * 1000)
    advice = make_recipe(text(path), tmp_path).options
    words = subprocess.run(["sh", "-c", f"printf '%s\n' {advice}"], capture_output=True, text=True, check=True)
    assert words.stdout.splitlines() == ["data=text", f"data.path={path}"]


@pytest.mark.skipif(os.geteuid() == 0 and not Path("/sys/kernel").exists(), reason="root, and no folder closed to it")
def test_a_root_that_cannot_be_written_is_named(book, tmp_path, said):
    closed = tmp_path / "closed"
    if os.geteuid() == 0:  # root may write anywhere but in the kernel's own file systems
        closed = Path("/sys")
    else:
        closed.mkdir(mode=0o500)
    for root in (closed, closed / "stores"):
        with pytest.raises(UserError, match=r"cannot be written .*; set RTX_DATA to a folder that you may write"):
            open_files(text(book), root, said.append)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"File exists|Not a directory"):
        open_files(text(book), tmp_path / "file", said.append)


def test_a_prepared_store_opens_where_nothing_can_be_written(book, tmp_path, said, monkeypatch):
    store = open_files(text(book), tmp_path / "stores", said.append)

    def refuse(*arguments, **options):
        raise PermissionError(13, "Permission denied")

    for name in ("mkdir", "rename", "unlink"):
        monkeypatch.setattr(os, name, refuse)
    assert open_files(text(book), tmp_path / "stores", said.append).fingerprint == store.fingerprint


PREPARE = """
import sys, time
from pathlib import Path
from rtx.config import DataConfig
from rtx.data import catalog, text
plain = text.read_range
def slow(*asked):
    for chunk in plain(*asked):
        yield chunk[:20]
        (Path(sys.argv[2]).parent / f"begun-{sys.argv[3]}").touch()
        time.sleep(float(sys.argv[4]))
        yield chunk[20:]
text.read_range = slow
store = catalog.open_files(DataConfig(name="text", path=sys.argv[1], length=64), Path(sys.argv[2]))
print(store.fingerprint)
"""


def preparing(book: Path, root: Path, name: str, seconds: float) -> subprocess.Popen[str]:
    """Start a process that prepares `book`, and takes its time in the middle of it."""
    command = [sys.executable, "-c", PREPARE, str(book), str(root), name, str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])


def wait_for(path: Path) -> None:
    for _ in range(600):
        if path.exists():
            return
        time.sleep(0.05)
    pytest.fail(f"{path} never came")


def test_processes_that_prepare_at_once_share_one_store(book, tmp_path):
    root = tmp_path / "stores"
    processes = [preparing(book, root, str(number), 0.3) for number in range(3)]
    outputs = [process.communicate(timeout=60)[0].splitlines() for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len({lines[-1] for lines in outputs}) == 1
    assert sum("preparing" in line for lines in outputs for line in lines if "waiting" not in line) == 1
    verify_files(text(book), root, lambda line: None)
    assert [path.name for path in root.iterdir()] == [make_recipe(text(book), root).folder(root).name]


def test_a_kill_in_the_middle_leaves_only_what_the_next_prepare_removes(book, tmp_path, said):
    root = tmp_path / "stores"
    process = preparing(book, root, "killed", 60)
    wait_for(tmp_path / "begun-killed")
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    left = sorted(path.name for path in root.iterdir())
    assert len(left) == 2 and left[0].endswith(".lock") and left[1].endswith(".work") and left[1].startswith(".text-")
    store = open_files(text(book), root, said.append)
    assert os.listdir(root) == [store.folder.name]
    verify_files(text(book), root, said.append)


def test_an_interrupt_leaves_nothing(book, tmp_path):
    root = tmp_path / "stores"
    process = preparing(book, root, "stopped", 60)
    wait_for(tmp_path / "begun-stopped")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode != 0 and os.listdir(root) == []
