"""Links, pipes and devices that somebody else has laid out in a folder of data.

Nothing behind them is touched, and nobody waits for them.
"""

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rtx.data.download import download
from rtx.errors import UserError
from tests.helpers.bad_servers import CONTENT, serving, whole
from tests.helpers.disturbances import asked, deadline
from tests.helpers.small_runs import SMALL_RUN, Workshop

REFUSED = "is a link, and rtx follows none below"


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A folder of the user with everything that a preparation would delete in its own."""
    for name in ("cache/train/kept", "cache/tmp1", "cache/train.arrow", "kept"):
        (tmp_path / "victim" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "victim" / name).write_text("mine")
    return tmp_path / "victim"


def content(folder: Path) -> dict[str, bytes]:
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


@pytest.fixture
def words(workshop: Workshop) -> list[str]:
    return ["data=text", workshop.text, "data.length=32"]


@pytest.fixture
def store(workshop: Workshop, words: list[str]) -> Iterator[Path]:
    """A whole store, and nothing beside it, before and after a test."""
    shutil.rmtree(workshop.data, ignore_errors=True)
    assert asked(workshop, "data", "prepare", *words)[0] == 0
    (store,) = workshop.data.glob("text-*")
    yield store
    shutil.rmtree(workshop.data)


def test_a_link_in_place_of_the_note_of_a_store_is_not_followed(
    workshop: Workshop, store: Path, words: list[str], tmp_path: Path
) -> None:
    foreign = tmp_path / "bashrc"
    foreign.write_text("mine")
    note = store / ".verified"
    train = ["train", workshop.text, *SMALL_RUN, "trainer.steps=1"]
    for command in (["data", "verify", *words], train):
        note.unlink()
        note.symlink_to(foreign)
        assert asked(workshop, *command, run=tmp_path / "run")[0] == 0
        assert foreign.read_text() == "mine"
        assert not note.is_symlink() and note.read_text().startswith('{"store.json": ')


def test_nobody_waits_for_a_pipe_in_place_of_the_note_of_a_store(
    workshop: Workshop, store: Path, words: list[str], tmp_path: Path
) -> None:
    note = store / ".verified"
    train = ["train", workshop.text, *SMALL_RUN, "trainer.steps=1"]
    for command in (["data", "verify", *words], train):
        note.unlink()
        os.mkfifo(note)
        assert asked(workshop, *command, run=tmp_path / "run")[0] == 0
        assert note.is_file()


@pytest.mark.parametrize("place", ["", "cache"])
def test_a_link_in_place_of_the_work_folder_is_refused(
    workshop: Workshop, store: Path, words: list[str], victim: Path, place: str
) -> None:
    before = content(victim)
    shutil.rmtree(store)
    link = store.with_name(f".{store.name}.work") / place
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(victim / place)
    code, said = asked(workshop, "data", "prepare", *words)
    assert code == 2 and f"rtx: {link}: {REFUSED} {workshop.data}; " in said
    assert content(victim) == before and link.is_symlink() and not store.exists()
    code, said = asked(workshop, "train", workshop.text, *SMALL_RUN, run=victim.parent / "run")
    assert code == 2 and REFUSED in said and content(victim) == before


def test_a_store_behind_a_link_is_read_but_neither_rebuilt_nor_removed(
    workshop: Workshop, store: Path, words: list[str], tmp_path: Path
) -> None:
    disk = Path(shutil.move(store, tmp_path / "large disk"))
    store.symlink_to(disk)
    for action in ("prepare", "verify", "info"):
        assert asked(workshop, "data", action, *words)[0] == 0, action
    assert store.is_symlink()
    (disk / "store.json").write_text("{}")
    before = content(disk)
    for command in (["data", "prepare", *words], ["data", "remove", store.name]):
        code, said = asked(workshop, *command)
        assert code == 2 and f"rtx: {store}: {REFUSED} {workshop.data}; " in said
        assert content(disk) == before and store.is_symlink()


def test_a_link_that_leads_nowhere_is_no_store(
    workshop: Workshop,
    store: Path,
    words: list[str],
) -> None:
    shutil.rmtree(store)
    store.symlink_to(store.with_name("nowhere"))
    for command in (["data", "prepare", *words], ["data", "remove", store.name]):
        code, said = asked(workshop, *command)
        assert code == 2 and f"rtx: {store}: {REFUSED} {workshop.data}; " in said
    assert not store.exists()


def test_a_link_in_place_of_the_lock_of_a_store_is_refused(
    workshop: Workshop, store: Path, words: list[str], tmp_path: Path
) -> None:
    foreign = tmp_path / "foreign"
    foreign.write_text("mine")
    lock = store.with_name(f".{store.name}.lock")
    lock.symlink_to(foreign)
    for command in (["data", "prepare", *words], ["data", "remove", store.name]):
        code, said = asked(workshop, *command)
        assert code == 2 and f"rtx: {lock}: {REFUSED} {workshop.data}; " in said
    assert foreign.read_text() == "mine" and lock.is_symlink()


def test_what_is_no_lock_of_a_store_is_told(
    workshop: Workshop, store: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = store.with_name(f".{store.name}.lock")
    for make in (os.mkfifo, os.mkdir):
        make(lock)
        code, said = asked(workshop, "data", "prepare", *words)
        assert code == 2 and f"rtx: {lock}: is no regular file; remove it, then again\n" in said
        lock.rename(lock.with_suffix(f".{make.__name__}"))

    def without_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", without_locks)
    code, said = asked(workshop, "data", "prepare", *words)
    assert code == 2 and "; set RTX_DATA to a folder on a disk with locks\n" in said


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("name", ["train.starts.npy", "valid.bin"])
@pytest.mark.parametrize("make", [os.mkfifo, endless], ids=["pipe", "device"])
def test_a_pipe_or_a_device_in_place_of_a_file_of_a_store_is_damage(
    workshop: Workshop, store: Path, words: list[str], name: str, make: Callable[[Path], None]
) -> None:
    (store / name).unlink()
    make(store / name)
    code, said = asked(workshop, "data", "verify", *words)
    assert code == 2 and f"{store / name}: damaged: expected " in said
    actual = "a link" if make is endless else "Not a regular file"
    assert f"found {actual}; to rebuild the store: " in said
    assert asked(workshop, "data", "prepare", *words)[0] == 0
    assert asked(workshop, "data", "verify", *words)[0] == 0


@pytest.mark.parametrize("name", ["tokenizer.json", "cache/train.json"])
def test_nobody_waits_for_a_pipe_in_a_work_folder(
    workshop: Workshop,
    store: Path,
    words: list[str],
    name: str,
) -> None:
    learned = [*words, "data.tokenizer=words"]
    assert asked(workshop, "data", "prepare", *learned)[0] == 0
    (other,) = set(workshop.data.glob("text-*")) - {store}
    shutil.rmtree(other)
    pipe = other.with_name(f".{other.name}.work") / name
    pipe.parent.mkdir(parents=True)
    os.mkfifo(pipe)
    assert asked(workshop, "data", "prepare", *learned)[0] == 0
    assert asked(workshop, "data", "verify", *learned)[0] == 0


@pytest.mark.parametrize("kind", ["link", "link to nothing", "pipe", "folder"])
def test_what_is_no_partial_download_is_neither_emptied_nor_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("no_proxy", "*")
    foreign = tmp_path / "foreign"
    part = tmp_path / "downloads" / "file.zip.part"
    part.parent.mkdir()
    if kind == "pipe":
        os.mkfifo(part)
    elif kind == "folder":
        part.mkdir()
    else:
        part.symlink_to(foreign)
    if kind == "link":
        foreign.write_text("mine")
    with serving() as server:
        server.answers = [whole]
        told = r"file.zip.part: is (a link, and rtx follows none|no regular file; remove it)"
        with deadline(), pytest.raises(UserError, match=told):
            download(server.remote, part.parent, print)
    assert not foreign.exists() or foreign.read_text() == "mine"
    assert foreign.exists() == (kind == "link")


def test_downloads_behind_a_link_are_taken_but_none_is_written_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "*")
    disk = tmp_path / "disk"
    folder = tmp_path / "downloads"
    disk.mkdir()
    folder.symlink_to(disk)
    with serving() as server:
        server.answers = [whole]
        with pytest.raises(UserError, match=f"{folder}: {REFUSED}"):
            download(server.remote, folder, print)
        assert not [*disk.iterdir()]
        (disk / "file.zip").write_bytes(CONTENT)
        assert download(server.remote, folder, print).read_bytes() == CONTENT


def test_a_data_folder_that_is_a_link_to_nothing_is_told(
    workshop: Workshop, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workshop, "data", tmp_path / "link")
    workshop.data.symlink_to(tmp_path / "nowhere")
    code, said = asked(workshop, "data", "prepare", *words)
    assert code == 2 and f"RTX_DATA={workshop.data}: is not a folder" in said
