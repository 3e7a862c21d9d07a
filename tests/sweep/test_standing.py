"""`rtx sweep`: what records say of a sweep, printed once where nobody watches, in place on a
terminal.
"""

import json
import os
import pty
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rtx.cli import main as cli
from rtx.runs.status import utc_now


def cell(root: Path, name: str, *, rows: int = 0, **status: Any) -> None:
    """Write the records of a cell; rows are ten steps and two seconds apart, the last is half
    written.
    """
    here = {"host": socket.gethostname(), "pid": os.getpid(), "heartbeat": utc_now()}
    (root / name).mkdir(parents=True, exist_ok=True)
    (root / name / "status.json").write_text(
        json.dumps({"step": 0, "steps": 100, **here, **status})
    )
    lines = [
        {"kind": "train", "step": 10 * k, "bits": 5 - k / 10, "seconds": 2.0 * k}
        for k in range(1, rows + 1)
    ]
    (root / name / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "tra'
    )


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A sweep with a cell in every state."""
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "outputs" / "grid"
    cell(root, "1", rows=10, state="done", step=100, final={"bits": 4.25})
    cell(root, "2", rows=5, state="running", step=40)
    cell(root, "3", rows=2, state="running", pid=2**22 + 1)  # more than the number of any process
    cell(
        root,
        "4",
        rows=3,
        state="failed",
        step=30,
        reason="out of memory: tried\x1b[31m to allocate 2 GiB",
    )
    cell(root, "5", rows=2, state="interrupted", step=20, reason="stopped by SIGINT")
    row = {"command": "rtx train -m seed=1,2", "cells": {name: f"seed={name}" for name in "123456"}}
    (root / "sweeps.jsonl").write_text(json.dumps(row) + "\n{broken\n")
    return root


def test_it_prints_once_where_the_output_is_no_terminal(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["sweep", "outputs/grid/"]) == 0
    shown = capsys.readouterr().out
    said = (
        "outputs/grid: 6 cells: 1 done, 1 waiting, 1 interrupted, 1 killed, 1 failed, 1 running; "
        "asked again "
    )
    assert " ".join(shown.split()).startswith(f"{said}it goes on: rtx train -m seed=1,2 ")
    rows = [line.split() for line in shown.splitlines() if line.startswith("seed=")]
    assert rows[0] == ["seed=2", "running", "50/100", "4.5000", "00:10"]  # those of interest first
    assert rows[-1] == ["seed=1", "done", "100/100", "4.2500"]
    assert [row[0] for row in rows] == [f"seed={number}" for number in (2, 4, 3, 5, 6, 1)]
    assert [row[1] for row in rows[1:-1]] == ["failed", "killed", "interrupted", "waiting"]
    assert "out of memory: tried" in shown and "\x1b" not in shown
    assert all(len(line) <= 80 for line in shown.splitlines())


def test_at_80_columns_a_cell_is_a_line_and_the_best_comes_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    root = tmp_path / "grid"
    for at in range(4):
        final = {"bits": 4.0 - at, "windows": 16 if at else None}
        cell(root, str(at), state="done", step=100_000, steps=100_000, final=final)
    titles = {
        str(at): f"routing.heads={at} routing.layers=12 routing.window=1024 seed=0"
        for at in range(4)
    }
    (root / "sweeps.jsonl").write_text(
        json.dumps({"command": "rtx train -m", "cells": titles}) + "\n"
    )
    assert cli.main(["sweep", str(root)]) == 0
    *_, head, first, _, _, last, marks = capsys.readouterr().out.splitlines()
    assert head.split() == ["cell", "state", "step", "bits", "left"] and len(first) <= 80
    assert (
        first.split()[:5] == ["heads=3", "layers=12", "window=1024", "seed=0", "done"]
        and "~1.0000" in first
    )
    assert (
        last.split()[-1] == "4.0000"
        and marks == "~ before bits: of a sample of the validation windows"
    )


def test_without_a_folder_it_names_the_sweeps_that_exist(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "rtx: rtx sweep needs the sweep's folder: rtx sweep outputs/<name>; "
    assert cli.main(["sweep"]) == 2 and capsys.readouterr().err == f"{said}here are outputs/grid\n"
    monkeypatch.setenv("RTX_OUTPUTS", str(root / "none"))
    assert cli.main(["sweep"]) == 2 and capsys.readouterr().err == f"{said}there is none here\n"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (0, 0)])
def test_on_a_terminal_it_watches_until_it_is_left_or_the_sweep_is_over(
    root: Path, number: int, code: int
) -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "90", "LINES": "24"}
    seen = ""
    sent = False
    program = (
        "import sys; from rtx.cli import main as cli; cli.handle_signals([]); code = "
        "cli.main(sys.argv[1:]); "
    )
    program += "print('torch' in sys.modules); sys.exit(code)"
    words = [sys.executable, "-c", program, "sweep", str(root)]
    with subprocess.Popen(
        words, stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    ) as process:
        os.close(theirs)
        try:
            while read := os.read(ours, 4096).decode():
                seen += read
                if not sent and "Ctrl-C leaves; the sweep goes on" in seen:
                    sent = True
                    if number:
                        process.send_signal(number)
                    for name in "23456" if not number else "":
                        cell(root, name, state="failed", reason="NaN")
        except OSError:  # its side of the terminal is closed
            os.close(ours)
    assert process.returncode == code
    watched, _, after = seen.partition("\x1b[?1049l")
    assert watched.startswith("\x1b[?1049h") and "Traceback" not in after
    assert ("1 done" in after) == (code != 143) and ("5 failed" in after) == (code == 0)
    assert after.rstrip().endswith("False")  # without torch
