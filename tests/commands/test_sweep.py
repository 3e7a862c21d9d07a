"""`rtx sweep`: once where nobody watches, in place on a terminal, and away at Ctrl-C."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rtx import cli

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A sweep of two cells, one of which waits."""
    root = tmp_path / "outputs" / "grid"
    (root / "x").mkdir(parents=True)
    row = {"time": "", "command": "rtx train -m seed=1,2", "cells": {"x": "seed=1", "y": "seed=2"}}
    (root / "sweeps.jsonl").write_text(json.dumps(row) + "\n")
    (root / "x" / "status.json").write_text('{"state": "done", "step": 5, "steps": 5, "final": {"bits": 2.5}}')
    monkeypatch.chdir(tmp_path)
    return root


def test_it_prints_once_where_the_output_is_no_terminal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sweep", "outputs/grid/"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("outputs/grid: 2 cells: 1 done, 1 waiting\n")
    assert "\x1b" not in shown
    assert cli.main(["sweep", str(folder), "once=true"]) == 0
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "rtx sweep needs the run's folder first; usage: rtx sweep <folder> [once=true]"),
        (["outputs/grid", "outputs/grid"], "rtx sweep takes 1 run, not also"),
        (["outputs/grids"], "no such folder (did you mean 'grid'?)"),
        (["outputs/grid", "onse=true"], "unknown key 'onse' (did you mean 'once'?)"),
        (["outputs/grid", "once=maybe"], "must be true or false"),
        (["outputs/grid", "data=text"], "rtx sweep does not read data"),
    ],
)
def test_mistakes(folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    assert cli.main(["sweep", *words]) == 2
    assert said in capsys.readouterr().err


def test_it_reads_records_without_torch(folder: Path) -> None:
    code = f"import sys; from rtx import cli; cli.main(['sweep', {str(folder)!r}]); print('torch' in sys.modules)"
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert answer.stdout.splitlines()[-1] == "False"


class Terminal:
    """rtx on a terminal of its own."""

    def __init__(self, *words: str) -> None:
        self.ours, theirs = pty.openpty()
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
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
            try:
                self.seen += os.read(self.ours, 4096).decode()
            except OSError:  # it has ended
                assert text in self.seen, self.seen

    def wait(self) -> int:
        """Read to the end, and return the exit code."""
        while True:
            try:
                self.seen += os.read(self.ours, 4096).decode()
            except OSError:
                os.close(self.ours)
                return self.process.wait(timeout=60)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_on_a_terminal_it_watches_until_it_is_left(folder: Path, number: int, code: int) -> None:
    terminal = Terminal("sweep", str(folder))
    terminal.until("Ctrl-C leaves; the sweep goes on")
    terminal.process.send_signal(number)
    assert terminal.wait() == code
    watched, _, after = terminal.seen.partition("\x1b[?25h\x1b[?1049l")
    assert watched.startswith("\x1b[?1049h\x1b[?25l\x1b[H")
    assert "Traceback" not in after
    assert ("1 done, 1 waiting" in after) == (code == 130)


def test_it_leaves_by_itself_when_the_sweep_is_over(folder: Path) -> None:
    terminal = Terminal("sweep", str(folder))
    terminal.until("1 waiting")
    (folder / "y").mkdir()
    (folder / "y" / "status.json").write_text('{"state": "failed", "reason": "NaN"}')
    assert terminal.wait() == 0
    assert "1 done, 1 failed" in terminal.seen.partition("\x1b[?1049l")[2]
