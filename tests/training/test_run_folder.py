"""status.json and the lock: who works in a run folder, and who only seems to."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rtx.errors import RunFailed, UserError
from rtx.training import run_folder as room
from rtx.training.run_folder import Status, new_run_folder, read_status, record_start, run_state, utc_now, working_in
from rtx.training.signals import INTERRUPTED, PREEMPTED, Stopped

HOLD = """
import sys, time
from pathlib import Path
from rtx.training.run_folder import working_in
with working_in(Path(sys.argv[1])) as status:
    print("working", flush=True)
    time.sleep(60)
"""


def written(folder: Path, **fields: Any) -> None:
    """Write the status of some other process."""
    status = {"state": "running", "pid": 1, "host": socket.gethostname(), "step": 3}
    (folder / "status.json").write_text(json.dumps(status | {"heartbeat": "2020-01-01T00:00:00.000Z"} | fields))


def test_a_killed_run_is_not_taken_for_a_running_one(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == b"working\n"
    assert run_state(tmp_path) == "running"
    refusal = f"in use by process {process.pid} on {socket.gethostname()}"
    with pytest.raises(UserError, match=refusal), working_in(tmp_path):
        pass
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (read_status(tmp_path) or {})["state"] == "running"
    assert run_state(tmp_path) == "killed"
    with working_in(tmp_path):
        assert run_state(tmp_path) == "running"
    assert run_state(tmp_path) == "done"


@pytest.mark.parametrize(
    ("beat", "state"), [("2020-01-01T00:00:00.000Z", "killed"), ("2999-01-01T00:00:00.000Z", "killed"), ("", "running")]
)
def test_on_another_machine_the_heartbeat_tells(tmp_path: Path, beat: str, state: str) -> None:
    written(tmp_path, host="elsewhere", heartbeat=beat or utc_now())
    assert run_state(tmp_path) == state
    if state == "running":
        with pytest.raises(UserError, match="in use by process 1 on elsewhere"), working_in(tmp_path):
            pass


def test_the_status_says_how_the_work_ended(tmp_path: Path) -> None:
    ends = {"interrupted": Stopped(INTERRUPTED, "why"), "preempted": Stopped(PREEMPTED, "why")}
    for state, error in (*ends.items(), ("failed", RunFailed("why")), ("failed", ValueError("why"))):
        with pytest.raises(type(error)), working_in(tmp_path):
            raise error
        status = read_status(tmp_path) or {}
        assert (status["state"], status["reason"], status["pid"]) == (state, "why", os.getpid())
    written(tmp_path, state="done", step=7)
    with pytest.raises(UserError), working_in(tmp_path):  # a refused resume leaves the status of before
        raise UserError("other data")
    assert (read_status(tmp_path) or {})["state"] == "done"


def test_a_full_disk_is_told_in_one_line_and_the_status_still_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(RunFailed, match="is full"), working_in(tmp_path):
        monkeypatch.setattr(room, "write_json", full)
        full()
    assert (read_status(tmp_path) or {})["state"] == "failed"


def test_the_heartbeat_beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "BEAT_SECONDS", 0.01)
    status = Status(tmp_path)
    status.update(step=12)  # reaches the disk with the next beat
    end = time.monotonic() + 60
    while (read_status(tmp_path) or {})["step"] != 12:
        assert time.monotonic() < end
    status.end("done")
    assert (read_status(tmp_path) or {})["state"] == "done"


def test_run_folders_are_unique_and_obey_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RTX_RUN", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RTX_OUTPUTS", "~/runs")
    first, second = new_run_folder("mine"), new_run_folder("mine")
    assert first != second and first.parent == second.parent == tmp_path / "runs" / "mine"
    monkeypatch.setenv("RTX_RUN", "~/cell")
    assert new_run_folder("mine") == tmp_path / "cell" == new_run_folder("mine")
    (tmp_path / "cell" / "checkpoints").mkdir(parents=True)
    (tmp_path / "cell" / "checkpoints" / "last.ckpt").touch()
    with pytest.raises(UserError, match="holds checkpoints"):
        new_run_folder("mine")


@pytest.mark.parametrize("name", ["lock", "resumes.jsonl"])
def test_a_link_in_place_of_a_file_of_the_run_is_not_followed(tmp_path: Path, name: str) -> None:
    folder, foreign = tmp_path / "run", tmp_path / "foreign"
    folder.mkdir()
    foreign.write_bytes(b"a line of somebody else, without its end")
    (folder / name).symlink_to(foreign)
    with pytest.raises((UserError, RunFailed)), working_in(folder):
        record_start(folder, {"hardware": {}}, {}, anew=True)
    assert foreign.read_bytes() == b"a line of somebody else, without its end"


def test_what_of_a_machine_may_change_the_bits_is_told(tmp_path: Path) -> None:
    began = {"accelerator": "cpu", "precision": "fp32", "devices": 1, "nodes": 1, "sharded": False}
    assert record_start(tmp_path, {"hardware": began}, None, anew=True) == []
    assert record_start(tmp_path, {"hardware": began}, {}, anew=False) == []
    now = {"hardware": {**began, "precision": "bf16", "devices": 2}}
    told = record_start(tmp_path, now, {"trainer.steps": (1, 2)}, anew=False)
    assert told == ["precision fp32 -> bf16", "devices 1 -> 2"]
    rows = [json.loads(line)["changed"] for line in (tmp_path / "resumes.jsonl").read_text().splitlines()]
    assert rows == [{}, {"trainer.steps": [1, 2]}]
