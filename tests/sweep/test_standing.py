"""`rtx sweep`: what records say of a sweep, printed once where nobody watches, in place on a terminal."""

from __future__ import annotations

import datetime
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rtx import cli
from rtx.sweep.standing import Standing, read_standing, time_left
from rtx.training.run_folder import boot_id, utc_now

ROOT = Path(__file__).resolve().parents[2]
HERE = {"host": socket.gethostname(), "boot_id": boot_id(), "pid": os.getpid()}
NOBODY = 2**22 + 1
"""More than the number of any process."""


def cell(root: Path, name: str, *, rows: int = 0, **status: Any) -> None:
    """Write the records of a cell; rows are ten steps and two seconds apart."""
    (root / name).mkdir(parents=True)
    fields = {"reason": None, "step": 0, "steps": 100, "final": None, "heartbeat": utc_now(), **HERE} | status
    (root / name / "status.json").write_text(json.dumps(fields))
    lines = [
        {"kind": "train", "step": 10 * k, "bits": 5 - k / 10, "seconds": 2.0 * k, "time": utc_now()}
        for k in range(1, rows + 1)
    ]
    (root / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "tra')


def swept(root: Path, command: str, *names: str, **process: Any) -> None:
    """Append a row to sweeps.jsonl."""
    root.mkdir(parents=True, exist_ok=True)
    row = {"time": utc_now(), "command": command, "cells": {name: f"seed={name}" for name in names}, **process}
    with open(root / "sweeps.jsonl", "a") as file:
        file.write(json.dumps(row) + "\n")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A sweep with a cell in every state."""
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "outputs" / "grid"
    swept(root, "rtx train -m seed=1,2,3,4,5,6", *"123456", **HERE)
    cell(root, "1", rows=10, state="done", step=100, seconds=30.0, final={"bits": 4.25})
    cell(root, "2", rows=5, state="running", step=40)
    cell(root, "3", rows=2, state="running", pid=NOBODY)
    cell(root, "4", rows=3, state="failed", step=30, reason="out of memory: tried\x1b[31m to allocate 2 GiB")
    cell(root, "5", rows=2, state="interrupted", step=20, reason="stopped by SIGINT")
    return root


def test_it_prints_once_where_the_output_is_no_terminal(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sweep", "outputs/grid/"]) == 0
    shown = capsys.readouterr().out
    header, _, first, *rest = shown.splitlines()
    said = "outputs/grid: 6 cells: 1 done, 1 running, 1 failed, 1 killed, 1 interrupted, 1 waiting; about "
    assert " ".join(shown.split()).startswith(said) and header
    rows = {line.split()[0]: line.split()[1:] for line in (first, *rest) if line.startswith("seed=")}
    assert rows["seed=1"] == ["done", "100/100", "4.2500"]
    assert rows["seed=2"][:3] == ["running", "50/100", "4.5000"] and rows["seed=2"][3] in ("0:09", "0:10")
    assert [rows[f"seed={n}"][0] for n in range(3, 7)] == ["killed", "failed", "interrupted", "waiting"]
    assert "out of memory: tried" in shown and "\x1b" not in shown
    assert "nobody works on it" not in shown
    assert all(len(line) <= 80 for line in shown.splitlines())
    assert cli.main(["sweep", str(root), "once=true"]) == 0
    assert capsys.readouterr().out.splitlines()[2] == shown.splitlines()[2]


def test_a_sweep_that_nobody_works_on_says_how_it_goes_on(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "2" / "status.json").unlink()
    assert read_standing(root)[1] == ""  # its process lives
    for line in ("broken\n", "[1]\n", json.dumps({"command": "rtx other", "cells": {"1": "seed=1"}}) + "\n"):
        with open(root / "sweeps.jsonl", "a") as file:
            file.write(line)
    text = (root / "sweeps.jsonl").read_text()
    (root / "sweeps.jsonl").write_text(text.replace(f'"pid": {os.getpid()}', f'"pid": {NOBODY}', 1))
    cells, command = read_standing(root)
    assert command == "" and len(cells) == 6  # of the other row nobody can tell
    swept(root, "rtx train -m seed=7", "7", **HERE | {"pid": NOBODY})
    lines = [line for line in (root / "sweeps.jsonl").read_text().splitlines() if "rtx other" not in line]
    (root / "sweeps.jsonl").write_text("\n".join(lines))
    assert cli.main(["sweep", str(root)]) == 0
    tail = capsys.readouterr().out.splitlines()[-2:]
    assert tail == ["nobody works on it; it goes on with:", "  rtx train -m seed=7"]


def test_a_heartbeat_tells_of_runs_on_other_machines_and_boots(root: Path) -> None:
    path = root / "2" / "status.json"
    now = datetime.datetime.now(datetime.UTC)
    for changes, state in (
        ({"host": "elsewhere"}, "running"),
        ({"host": "elsewhere", "heartbeat": (now - datetime.timedelta(minutes=5)).isoformat()}, "killed"),
        ({"boot_id": "another"}, "killed"),
        ({"heartbeat": (now - datetime.timedelta(minutes=5)).isoformat()}, "killed"),  # the number is another's by now
    ):
        status = json.loads(path.read_text())
        path.write_text(json.dumps(status | changes))
        assert read_standing(root)[0][1].state == state
        path.write_text(json.dumps(status))
    assert not (root / "2" / "lock").exists()


def test_runs_of_no_sweep_are_shown_and_half_written_records_passed_over(root: Path) -> None:
    (root / "1" / "status.json").write_text('{"state": "do')
    (root / "2" / "status.json").write_text('{"state": "running"}')
    (root / "4" / "metrics.jsonl").write_bytes(b"\xff\x00\n[]\n")
    cell(root, "9", state="done", final={"bits": 3.0})
    cells = read_standing(root)[0]
    assert [each.state for each in cells[:4]] == ["waiting", "waiting", "killed", "failed"]
    assert (cells[-1].title, cells[-1].bits) == ("9", 3.0)


def test_the_time_left_counts_what_waits() -> None:
    running = Standing("", "running", 50, 100, 1.0, left=10.0, whole=20.0)
    assert time_left([running]) == 10.0
    assert time_left([running, Standing("", "waiting"), Standing("", "waiting")]) == 50.0
    assert time_left([running, running, Standing("", "killed", 50, 100)]) == 15.0
    assert time_left([Standing("", "waiting")]) is None
    assert time_left([Standing("", "running")]) is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "rtx sweep needs the run's folder first; usage: rtx sweep <run> [key=value ...]"),
        (["outputs/grid", "outputs/grid"], "rtx sweep takes 1 run, not also"),
        (["outputs/grids"], "no such folder (did you mean 'grid'?)"),
        (["outputs"], "holds no sweep; there is one in outputs/grid"),
        (["outputs/grid/6"], "no such folder;"),
        (["outputs/grid", "onse=true"], "unknown key 'onse' (did you mean 'once'?)"),
        (["outputs/grid", "once=maybe"], "must be true or false"),
        (["outputs/grid", "data=text"], "rtx sweep does not read data"),
    ],
)
def test_mistakes(root: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    assert cli.main(["sweep", *words]) == 2
    assert said in capsys.readouterr().err


def test_it_reads_records_without_torch(root: Path) -> None:
    code = f"import sys; from rtx import cli; cli.main(['sweep', {str(root)!r}]); print('torch' in sys.modules)"
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert answer.stdout.splitlines()[-1] == "False"


class Terminal:
    """rtx on a terminal of its own."""

    def __init__(self, *words: str) -> None:
        self.ours, theirs = pty.openpty()
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "90", "LINES": "24"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rtx", *words], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
        )
        os.close(theirs)
        self.seen = ""

    def until(self, text: str) -> None:
        """Read until a text has come."""
        end = time.monotonic() + 60
        while text not in self.seen:
            assert time.monotonic() < end, self.seen
            self.seen += os.read(self.ours, 4096).decode()

    def wait(self) -> int:
        """Read to the end, and return the exit code."""
        while True:
            try:
                self.seen += os.read(self.ours, 4096).decode()
            except OSError:
                os.close(self.ours)
                return self.process.wait(timeout=60)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_on_a_terminal_it_watches_until_it_is_left(root: Path, number: int, code: int) -> None:
    terminal = Terminal("sweep", str(root))
    terminal.until("Ctrl-C leaves; the sweep goes on")
    terminal.process.send_signal(number)
    assert terminal.wait() == code
    watched, _, after = terminal.seen.partition("\x1b[?1049l")
    assert watched.startswith("\x1b[?1049h")
    assert watched.index("seed=2") < watched.index("seed=4") < watched.index("seed=1")  # those of interest first
    assert "Traceback" not in after
    assert ("1 done, 1 running" in after) == (code == 130)


def test_it_leaves_by_itself_when_the_sweep_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    swept(tmp_path / "grid", "rtx train -m seed=1,2", "1", "2")
    cell(tmp_path / "grid", "1", state="done", final={"bits": 4.25})
    terminal = Terminal("sweep", "grid")
    terminal.until("1 waiting")
    cell(tmp_path / "grid", "2", state="failed", reason="NaN")
    assert terminal.wait() == 0
    assert "1 done, 1 failed" in terminal.seen.partition("\x1b[?1049l")[2]
