from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rtx.config import DataConfig
from rtx.data import build
from rtx.data.catalog import make_recipe, open_files, prepare_files
from rtx.data.disk import locked
from rtx.data.inventory import inventory, listing, named_store, remove_store, shown_size
from rtx.errors import RunFailed, UserError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "stores"


def config(book: Path) -> DataConfig:
    return DataConfig(name="text", path=str(book), length=64)


def prepared(book: Path, root: Path) -> Path:
    """Prepare a store, and leave it closed; returns its folder."""
    return prepare_files(config(book), root, lambda line: None).folder


def test_everything_below_the_root_is_listed(book, root):
    folder = prepared(book, root)
    (root / ".text-0123456789ab.work" / "parts").mkdir(parents=True)
    (root / "downloads").mkdir()
    (root / "downloads" / "a.zip").write_bytes(b"x" * 1000)
    (root / "downloads" / "b.zip.part").write_bytes(b"x")
    (root / "README.md").write_text("")
    (root / "notes-0123").mkdir()
    found = {entry.name: (entry.size, entry.says) for entry in inventory(root)}
    assert list(found) == [folder.name, ".text-0123456789ab.work", "downloads/a.zip", "downloads/b.zip.part"]
    size, says = found[folder.name]
    assert size > 5000
    assert says == f"train 4,500, valid 250, test 250 bytes; complete; data=text data.path={book}"
    assert found[".text-0123456789ab.work"] == (0, "unfinished; the same rtx data prepare goes on with it")
    assert found["downloads/a.zip"] == (1000, "download")
    assert found["downloads/b.zip.part"][1].startswith("unfinished download")
    lines = listing(root)
    assert len(lines) == 5 and lines[0].startswith(f"{root}: ") and "  1.0 kB  20" in lines[3]
    (folder / "train.bin").touch()
    assert "complete, bytes not compared since" in listing(root)[1]
    os.truncate(folder / "train.bin", 7)
    assert "train.bin: damaged: expected 4,500 bytes, found 7" in listing(root)[1]
    assert listing(root / "none") == [f"{root / 'none'}: no data yet"]
    assert [shown_size(size) for size in (999, 36_445_475, 11_700_000_000)] == ["999 bytes", "36.4 MB", "11.7 GB"]


def test_a_store_is_removed_by_its_name_and_nothing_else_is(book, root, said, tmp_path):
    folder = prepared(book, root)
    outside = tmp_path / "text-0123456789ab"
    outside.mkdir()
    (root / "other").mkdir()
    for name in ("other", "../text-0123456789ab", "", ".", "downloads", str(outside), folder.name[:-1]):
        with pytest.raises(UserError, match=r"no store of this name in .*; rtx data list names them"):
            remove_store(root, named_store(root, name))
    for path in (root / "other", root):
        with pytest.raises(UserError, match="nothing to remove"):
            remove_store(root, path)
    (root / "text-0123456789ab").symlink_to(outside)
    with pytest.raises(UserError, match="is a link to a folder elsewhere; remove it yourself"):
        remove_store(root, named_store(root, "text-0123456789ab"))
    said.clear()
    remove_store(root, named_store(root, folder.name), said.append)
    assert len(said) == 1 and said[0].startswith(f"{folder}: removed, ") and said[0].endswith(" kB")
    assert sorted(path.name for path in root.iterdir()) == ["other", "text-0123456789ab"] and outside.is_dir()


def test_what_a_killed_preparation_left_is_removed_too(book, root, said):
    folder = make_recipe(config(book), root).folder(root)
    work = build.work_folder(folder)
    (work / "parts").mkdir(parents=True)
    remove_store(root, named_store(root, work.name), said.append)
    assert list(root.iterdir()) == [] and said == [f"{work}: removed, 0 bytes"]


def test_a_store_in_use_stays(book, root, said):
    store = prepare_files(config(book), root, said.append)
    folder = store.folder
    with pytest.raises(UserError, match="in use by another process; nothing was removed"):
        remove_store(root, folder, said.append)
    assert open_files(config(book), root).fingerprint == store.fingerprint
    del store
    code = (
        "import sys, time; from pathlib import Path; from rtx.data.store import open_store\n"
        "store = open_store(Path(sys.argv[1]), ''); print('open', flush=True); time.sleep(60)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", code, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None and process.stdout.readline() == "open\n"
        with pytest.raises(UserError, match="in use by another process; nothing was removed"):
            remove_store(root, folder, said.append)
        process.kill()
    remove_store(root, folder, said.append)
    assert list(root.iterdir()) == []


def test_a_store_that_is_being_prepared_stays(book, root, said):
    folder = prepared(book, root)
    with locked(root / f".{folder.name}.lock", "the store", said.append), pytest.raises(RunFailed, match="has held"):
        remove_store(root, folder, said.append)
    assert folder.is_dir()


def test_the_sheets_of_a_store_go_with_it(book, root, said):
    folder = prepared(book, root)
    for name in (f"{folder.name}-train.png", "text-0123456789ab-train.png"):
        (root / name).touch()
    remove_store(root, folder, said.append)
    assert [path.name for path in root.iterdir()] == ["text-0123456789ab-train.png"]
