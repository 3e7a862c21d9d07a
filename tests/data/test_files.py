from __future__ import annotations

import os
import socket
import sys
import sysconfig
from pathlib import Path

import pytest

from rtx.data.files import library_files, read_files, text_files
from rtx.errors import UserError


def write(root: Path, *names: str) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"<{name}>")


def names(root: Path, path: str, leave_out: Path | None = None) -> list[str]:
    return [file.path.relative_to(root.resolve()).as_posix() for file in text_files(path, leave_out or root / "data")]


def test_the_library_leaves_out_tests_and_installed_packages(tmp_path, monkeypatch):
    kept = ["a.py", "json/__init__.py", "json/decoder.py", "json_.py", "test.py", "idlelib/idle_test/t.py"]
    dropped = ["test/a.py", "lib2to3/tests/a.py", "site-packages/x/a.py", "dist-packages/a.py", "a/test/b/c.py"]
    other = ["a.txt", "__pycache__/a.pyc", "lib-dynload/_bz2.so", ".hidden.py"]
    write(tmp_path, *kept, *dropped, *other)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    found = [file.path.relative_to(tmp_path).as_posix() for file in library_files()]
    assert found == ["a.py", "idlelib/idle_test/t.py", "json/__init__.py", "json/decoder.py", "json_.py", "test.py"]


def test_an_interpreter_without_its_library_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(UserError, match=r"has no \*\.py files here; use data=text"):
        library_files()


def test_this_interpreter_has_a_library_of_the_expected_size():
    total = sum(file.size for file in library_files())
    assert total == 12_602_225 if sys.version_info[:3] == (3, 11, 7) else 8_000_000 < total < 20_000_000


def test_a_path_is_a_file_a_folder_or_a_glob(tmp_path, monkeypatch):
    write(tmp_path, "b.txt", "a/z.md", "a/b/c.txt", "a-b.txt", ".git/x", "a/.x", "data/store/train.bin", "book [1].txt")
    assert names(tmp_path, str(tmp_path / "b.txt")) == ["b.txt"]
    assert names(tmp_path, str(tmp_path)) == ["a/b/c.txt", "a/z.md", "a-b.txt", "b.txt", "book [1].txt"]
    assert names(tmp_path, str(tmp_path / "**/*.txt")) == ["a/b/c.txt", "a-b.txt", "b.txt", "book [1].txt"]
    assert names(tmp_path, str(tmp_path / "*")) == ["a-b.txt", "b.txt", "book [1].txt"]
    assert names(tmp_path, str(tmp_path / "book [1].txt")) == ["book [1].txt"]
    monkeypatch.chdir(tmp_path)
    assert names(tmp_path, ".") == names(tmp_path, str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert names(tmp_path, "~/b.txt") == ["b.txt"]


def test_a_link_to_a_folder_above_does_not_loop(tmp_path):
    write(tmp_path, "a/x.txt")
    (tmp_path / "a/up").symlink_to(tmp_path)
    (tmp_path / "a/gone").symlink_to(tmp_path / "nowhere")
    assert names(tmp_path, str(tmp_path)) == ["a/x.txt"]


def test_what_is_missing_gets_one_line_with_the_nearest_name(tmp_path):
    write(tmp_path, "book.txt", "empty/.hidden")
    for path, message in [
        (
            tmp_path / "bok.txt",
            "expected a file, a folder or a glob that matches files, found none .did you mean 'book",
        ),
        (tmp_path / "*.md", "expected a file, a folder or a glob that matches files, found none"),
        (tmp_path / "empty", "expected a folder with at least one file that is not hidden, found none"),
        ("", "expected a file, a folder or a glob"),
        (tmp_path / "no/such/place.txt", "found none"),
        (tmp_path / "book.txt/deeper", "found none"),
        ("/dev/null", "/dev/null: expected a regular file or a folder, found something else"),
    ]:
        with pytest.raises(UserError, match=message) as error:
            text_files(str(path), tmp_path / "data")
        assert "\n" not in str(error.value)


def test_an_unreadable_file_or_folder_is_named(tmp_path, monkeypatch):
    write(tmp_path, "a/x.txt", "a/b/y.txt")
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: Path(path).name != "y.txt")
        with pytest.raises(UserError, match=r"y\.txt: cannot be read: permission denied"):
            text_files(str(tmp_path), tmp_path / "data")
    scandir = os.scandir

    def refuse(path):
        if str(path).endswith("/b"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(UserError, match=r"a/b: cannot be read: Permission denied"):
        text_files(str(tmp_path), tmp_path / "data")


def test_a_socket_is_no_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a socket's path must be short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("talk")
        with pytest.raises(UserError, match="found something else"):
            text_files("talk", tmp_path / "data")


def test_bytes_come_in_order_and_a_change_in_between_is_seen(tmp_path):
    write(tmp_path, "1.txt", "2.txt", "3.txt")
    (tmp_path / "2.txt").write_bytes(b"")
    files = text_files(str(tmp_path), tmp_path / "data")
    assert list(read_files(files)) == [b"<1.txt>", b"<3.txt>"]
    (tmp_path / "3.txt").write_bytes(b"longer than before")
    with pytest.raises(UserError, match=r"3\.txt: changed while it was read: expected 7 bytes, found 18"):
        list(read_files(files))
    (tmp_path / "3.txt").unlink()
    with pytest.raises(UserError, match=r"3\.txt: cannot be read: No such file"):
        list(read_files(files))


def test_an_empty_folder_is_not_its_own_suggestion(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"at least one file that is not hidden, found none$"):
        text_files(str(tmp_path / "empty"), tmp_path / "stores")
