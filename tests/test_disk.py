"""The door to all files: what it follows, what it refuses, and what it never waits for."""

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rtx import disk
from rtx.disk import (
    LinkRefused,
    append,
    is_file_inside,
    make_folder,
    names_inside,
    open_inside,
    read_inside,
    read_named,
    remove_file,
    remove_leftovers,
    remove_tree,
    rename_inside,
    replace_inside,
    status_inside,
    write_inside,
    write_json,
)

OPERATIONS: dict[str, Callable[[Path, str], object]] = {
    "read": read_inside,
    "append": lambda folder, name: append(folder, name, b"ours"),
    "read and write": lambda folder, name: open_inside(folder, name, "r+").close(),
    "append and read": lambda folder, name: open_inside(folder, name, "a+").close(),
    "ask": status_inside,
    "ask for a file": is_file_inside,
}
"""What refuses a link in place of a file."""
IN_FOLDERS: dict[str, Callable[[Path, str], object]] = {
    **OPERATIONS,
    "create": lambda folder, name: open_inside(folder, f"{name}.new", "x").close(),
    "replace": lambda folder, name: write_inside(folder, name, b"ours"),
    "write JSON": lambda folder, name: write_json(folder, name, {}),
    "rename": lambda folder, name: rename_inside(folder, name, "other"),
    "remove a file": remove_file,
    "remove a tree": remove_tree,
    "make a folder": lambda folder, name: make_folder(folder, f"{name}.folder"),
}
"""What refuses a link in place of the folder of a file."""
KINDS = {
    "FIFO": os.mkfifo,
    "folder": os.mkdir,
    "device": lambda path: os.mknod(path, 0o20666, os.makedev(1, 3)),
    "socket": lambda path: make_socket(path),
}


def make_socket(path: Path) -> None:
    """Make a socket; the path of one must be short."""
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """A folder of somebody else, in which nothing may change."""
    folder = tmp_path / "victim"
    folder.mkdir()
    (folder / "file").write_text("theirs")
    yield folder
    assert [path.name for path in folder.iterdir()] == ["file"]
    assert (folder / "file").read_text() == "theirs"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "folder").mkdir()
    return tmp_path / "folder"


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_link_in_place_of_a_file_is_refused(folder: Path, victim: Path, operation: str) -> None:
    link = folder / "file"
    for target in (victim / "file", victim / "nothing"):
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        with pytest.raises(LinkRefused, match=f"{link}: is a link, and rtx follows none below"):
            OPERATIONS[operation](folder, "file")


@pytest.mark.parametrize("operation", IN_FOLDERS)
def test_a_link_in_place_of_a_folder_is_refused(folder: Path, victim: Path, operation: str) -> None:
    for link in (folder / "inner", folder / "deep" / "inner"):
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(victim)
        name = f"{link.relative_to(folder)}/file"
        with pytest.raises(LinkRefused, match=f"{link}: is a link, and rtx follows none below"):
            IN_FOLDERS[operation](folder, name)


def test_a_folder_that_the_user_names_may_be_a_link(folder: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(folder)
    write_inside(link, "file", b"ours")
    assert make_folder(link, "a/b") == link / "a" / "b" and (folder / "a" / "b").is_dir()
    write_json(link, "a/b/file", {"ours": 1})
    assert read_inside(link, "file") == b"ours"
    assert names_inside(link) == ["a", "file"]
    assert names_inside(link, "a/b", "f*") == ["file"] == names_inside(folder, "a/b")
    (folder / "named").symlink_to("file")
    assert read_named(folder / "named") == b"ours"


def test_a_link_is_replaced_or_removed_without_what_it_leads_to(folder: Path, victim: Path) -> None:
    link = folder / "file"
    link.symlink_to(victim / "file")
    write_inside(folder, "file", b"ours")
    assert not link.is_symlink() and link.read_bytes() == b"ours"
    link.unlink()
    link.symlink_to(victim / "file")
    remove_file(folder, "file")
    assert not link.is_symlink()
    link.symlink_to(victim)
    with pytest.raises(LinkRefused):
        remove_tree(folder, "file")
    link.unlink()
    (folder / "tree").mkdir()
    (folder / "tree" / "link").symlink_to(victim)
    remove_tree(folder, "tree")
    assert not [*folder.iterdir()]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_regular_file_is_neither_waited_for_nor_read(
    folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    try:
        KINDS[kind](folder / "file")
    except PermissionError:
        pytest.skip("no devices may be made here")
    assert not is_file_inside(folder, "file")
    for operation in ("read", "append", "append and read", "read and write"):
        with pytest.raises(OSError, match=r"Not a regular file|Is a directory") as caught:
            OPERATIONS[operation](folder, "file")
        assert caught.value.filename == str(folder / "file")
    with pytest.raises(OSError, match=r"Not a regular file|Is a directory"):
        read_named(folder / "file")


@pytest.mark.parametrize("name", ["../victim/file", "/etc/passwd", "a/../../victim/file", "a\0b"])
def test_no_name_leads_out_of_its_folder(folder: Path, victim: Path, name: str) -> None:
    for operation in IN_FOLDERS.values():
        with pytest.raises(OSError, match="Not the name of a file below its folder"):
            operation(folder, name)


@pytest.mark.parametrize("name", ["", "."])
def test_a_folder_is_no_file_of_itself(folder: Path, name: str) -> None:
    for operation in OPERATIONS.values():
        with pytest.raises(IsADirectoryError):
            operation(folder, name)


def test_a_file_that_is_too_large_is_named_with_its_limit(folder: Path) -> None:
    with open(folder / "file", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError, match="1,099,511,627,776 bytes, more than the 1,024 that it may"):
        read_inside(folder, "file", 1024)
    with pytest.raises(OSError, match="more than the"):
        read_named(folder / "file")


def test_an_error_leaves_the_file_as_it_was_and_nothing_beside_it(folder: Path) -> None:
    write_inside(folder, "file", b"before")
    for error in (ValueError, KeyboardInterrupt):

        def failing(file: object, error: type[BaseException] = error) -> None:
            raise error

        with pytest.raises(error):
            replace_inside(folder, "file", failing)
        assert names_inside(folder) == ["file"] and read_inside(folder, "file") == b"before"


def test_a_file_keeps_its_former_name_where_it_is_told_so(folder: Path) -> None:
    for content in (b"first", b"second", b"third"):
        replace_inside(
            folder, "last", lambda file, content=content: file.write(content), former="previous"
        )
    assert read_inside(folder, "last") == b"third"
    assert read_inside(folder, "previous") == b"second"
    (folder / f".last.1{disk.MARK}").write_text("of a killed process")
    remove_leftovers(folder)
    assert names_inside(folder) == ["last", "previous"]


def test_what_is_missing_is_no_error_where_none_is_needed(folder: Path) -> None:
    for name in ("nothing", "no/thing"):
        assert status_inside(folder, name) is None and not is_file_inside(folder, name)
        assert names_inside(folder, name) == []
        remove_file(folder, name)
        remove_tree(folder, name)
        with pytest.raises(FileNotFoundError):
            read_inside(folder, name)
    assert not is_file_inside(folder / "nothing", "file")
