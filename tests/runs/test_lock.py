"""The lock of a run's folder: one process works there, whatever becomes of the file."""

import datetime
import errno
import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rtx.errors import UserError
from rtx.runs.folder import LOCK
from rtx.runs.lock import working_in
from rtx.runs.status import run_state, utc_now

SLEEPER = [sys.executable, "-c", "import time; print('ready', flush=True); time.sleep(600)"]


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[str]]:
    """A process that lives as that of a run would."""
    with subprocess.Popen(SLEEPER, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline()
        yield process
        process.kill()


def begin(folder: Path, process: int, heartbeat: str) -> None:
    """Write the status of a run that a process of this machine trains."""
    folder.mkdir(exist_ok=True)
    status = {"state": "running", "pid": process, "host": socket.gethostname()}
    (folder / "status.json").write_text(json.dumps({**status, "heartbeat": heartbeat}))


def test_a_run_whose_lock_was_removed_keeps_a_second_process_out(
    tmp_path: Path, sleeper: subprocess.Popen[str]
) -> None:
    begin(tmp_path, sleeper.pid, utc_now())
    for make_again in (False, True):
        if make_again:
            (tmp_path / LOCK).touch()
        in_use = f"is in use by process {sleeper.pid} on "
        with pytest.raises(UserError, match=in_use), working_in(tmp_path):
            pass
        assert (tmp_path / LOCK).exists() == make_again
    sleeper.kill()
    # Its parent has not read its exit code.
    end = time.monotonic() + 60
    while run_state(tmp_path) != "killed":
        assert time.monotonic() < end
    with working_in(tmp_path):
        pass


def test_a_process_that_began_later_has_the_number_of_a_run_by_chance(
    tmp_path: Path, sleeper: subprocess.Popen[str]
) -> None:
    before = datetime.datetime.now(datetime.UTC) - datetime.timedelta(minutes=1)
    begin(tmp_path, sleeper.pid, before.isoformat())
    assert run_state(tmp_path) == "killed"
    with working_in(tmp_path) as status:
        status.begin()
        assert run_state(tmp_path) == "running"


def test_a_file_system_without_locks_is_decided_by_the_status(
    tmp_path: Path, sleeper: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", without_locks)
    begin(tmp_path, sleeper.pid, utc_now())
    with pytest.raises(UserError, match="is in use by process"), working_in(tmp_path):
        pass
    (tmp_path / "status.json").unlink()
    with working_in(tmp_path):
        pass


def test_a_lock_that_is_remade_while_it_is_taken_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fcntl.lockf
    inodes = []

    def remaking(file: object, operation: int) -> None:
        inodes.append((tmp_path / LOCK).stat().st_ino)
        real(file, operation)  # type: ignore[arg-type]
        if len(inodes) == 1:
            (tmp_path / LOCK).rename(tmp_path / "before")
            (tmp_path / LOCK).touch()

    monkeypatch.setattr(fcntl, "lockf", remaking)
    with working_in(tmp_path):
        first, second = inodes
        assert first != second == (tmp_path / LOCK).stat().st_ino


def test_a_run_whose_heartbeat_cannot_start_has_failed_and_can_be_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="new thread"), working_in(tmp_path / "run"):
        pytest.fail("it cannot begin")
    assert run_state(tmp_path / "run") == "failed"
    monkeypatch.undo()
    with working_in(tmp_path / "run"):
        assert run_state(tmp_path / "run") == "failed"
    assert run_state(tmp_path / "run") == "done"
