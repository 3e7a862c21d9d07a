"""Files are the old one or the new one, never half of either."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import BinaryIO

import pytest

from rtx.disk import is_full, remove_leftovers, replace_file, write_beside, write_json


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")

    def fill_the_disk(file: BinaryIO) -> None:
        file.write(b"half of the n")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space") as caught:
        replace_file(path, fill_the_disk)
    assert is_full(caught.value)
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["a"]


def test_a_file_is_replaced(tmp_path: Path) -> None:
    for content in ({"a": 1}, {"b": "ü"}):
        write_json(tmp_path / "a.json", content)
    assert (tmp_path / "a.json").read_text() == '{\n  "b": "ü"\n}\n'
    assert names(tmp_path) == ["a.json"]


def test_leftovers_of_killed_writers_go_and_other_files_stay(tmp_path: Path) -> None:
    write_beside(tmp_path / "last.ckpt", lambda file: file.write(b"cut"))
    (tmp_path / ".hidden").touch()
    (tmp_path / "last.ckpt").touch()
    remove_leftovers(tmp_path)
    assert names(tmp_path) == [".hidden", "last.ckpt"]
