from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
import subprocess
import threading
import time

import pytest

from rtx.data import disk
from rtx.data.disk import disk_errors, install, locked, need_space, remove_leftovers, temporary_sibling
from rtx.errors import RunFailed, UserError


@pytest.mark.parametrize(
    ("code", "kind", "message"),
    [
        (errno.ENOSPC, RunFailed, "no space left to write; free some, or set RTX_DATA"),
        (errno.EDQUOT, RunFailed, "no space left"),
        (errno.EROFS, UserError, "cannot be written .Read-only file system.; set RTX_DATA"),
        (errno.EACCES, UserError, "cannot be written"),
        (errno.EIO, UserError, "Input/output error"),
    ],
)
def test_what_a_disk_refuses_is_one_line(tmp_path, code, kind, message):
    with pytest.raises(kind, match=message) as error, disk_errors(tmp_path):
        raise OSError(code, os.strerror(code))
    assert str(error.value).startswith(str(tmp_path)) and "\n" not in str(error.value)


def test_space_is_asked_for_before_writing(tmp_path):
    need_space(tmp_path, 10)
    with pytest.raises(RunFailed, match=r"bytes are needed and .* are free"):
        need_space(tmp_path, shutil.disk_usage(tmp_path).total + 1)


def test_one_holder_at_a_time(tmp_path, said):
    inside, most = 0, 0

    def work():
        nonlocal inside, most
        with locked(tmp_path / "lock", "the store", said.append):
            inside += 1
            most = max(most, inside)
            time.sleep(0.05)
            inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1 and not (tmp_path / "lock").exists()


def test_who_waits_is_told_for_whom(tmp_path, said):
    def wait():
        with locked(tmp_path / "lock", "the store", said.append):
            pass

    thread = threading.Thread(target=wait)
    with locked(tmp_path / "lock", "the store", said.append):
        thread.start()
        while not said:
            assert thread.is_alive()
            time.sleep(0.01)
    thread.join()
    assert said == [f"the store: waiting for process {os.getpid()} on {socket.gethostname()}, which is preparing it"]


def test_a_lock_that_is_never_given_up_ends_in_a_message(tmp_path, said):
    with (
        locked(tmp_path / "lock", "the store", said.append),
        pytest.raises(RunFailed, match="has held this lock for 0 s"),
        locked(tmp_path / "lock", "the store", said.append, timeout=0.01),
    ):
        pass


def test_a_file_system_without_locks_is_no_obstacle(tmp_path, said, monkeypatch):
    def refuse(handle, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with locked(tmp_path / "lock", "the store", said.append):
        assert (tmp_path / "lock").exists()
    assert not (tmp_path / "lock").exists()


def test_leftovers_of_the_dead_go_and_those_of_the_living_stay(tmp_path, monkeypatch):
    child = subprocess.Popen(["true"])
    child.wait()
    host = socket.gethostname()
    ours = tmp_path / "text-0123"
    stay = [
        f".text-9999.new.tmp-{host}-{os.getpid()}",  # of another store, by this process
        f".text-0123.new.tmp-{host}-{os.getppid()}",
        ".text-0123.new.tmp-far-away-17",
        "text-0123",
        "notes.tmp-x-1",
    ]
    go = [f".text-0123.new.tmp-{host}-{child.pid}", temporary_sibling(ours).name, ".text-7.old.tmp-far-18"]
    for name in stay + go:
        (tmp_path / name).mkdir()
    long_ago = time.time() - 2 * disk.DAY
    os.utime(tmp_path / go[-1], (long_ago, long_ago))
    remove_leftovers(tmp_path, ours)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(stay)


def test_a_finished_folder_takes_the_place_of_another(tmp_path):
    for name, text in (("new", "good"), ("place", "bad")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(text)
    install(tmp_path / "new", tmp_path / "place")
    assert [path.name for path in tmp_path.iterdir()] == ["place"]
    assert (tmp_path / "place" / "file").read_text() == "good"
