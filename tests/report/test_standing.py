"""How a sweep stands: read from records alone, told in lines that fit."""

from __future__ import annotations

import datetime
import json
import os
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from rtx.errors import UserError
from rtx.report.board import board
from rtx.report.standing import Standing, Sweep, is_over, read_standing, time_left
from rtx.training.run_folder import boot_id, utc_now

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
def root(tmp_path: Path) -> Path:
    """A sweep with a cell in every state."""
    root = tmp_path / "out"
    swept(root, "rtx train -m seed=1,2,3,4,5,6", *"123456", **HERE)
    cell(root, "1", rows=10, state="done", step=100, seconds=30.0, final={"bits": 4.25})
    cell(root, "2", rows=5, state="running", step=40)
    cell(root, "3", rows=2, state="running", pid=NOBODY)
    cell(root, "4", rows=3, state="failed", step=30, reason="out of memory: tried to allocate 2 GiB")
    cell(root, "5", rows=2, state="interrupted", step=20, reason="stopped by SIGINT")
    return root


def test_every_state_is_told(root: Path) -> None:
    (sweep,) = read_standing(root)
    assert sweep.at_work is True
    states = ["done", "running", "killed", "failed", "interrupted", "waiting"]
    assert [cell.state for cell in sweep.cells] == states
    done, running, killed, failed, _, waiting = sweep.cells
    assert (done.bits, done.step, done.whole) == (4.25, 100, 30.0)
    assert (running.bits, running.step, running.steps) == (4.5, 50, 100)
    assert running.left is not None
    assert 9 < running.left <= 10
    assert (killed.left, killed.reason, killed.bits) == (None, "", 4.8)
    assert failed.reason == "out of memory: tried to allocate 2 GiB"
    assert waiting == Standing("seed=6", "waiting")
    assert not is_over([sweep])


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
        assert read_standing(root)[0].cells[1].state == state
        path.write_text(json.dumps(status))
    assert not (root / "2" / "lock").exists()


def test_rows_that_share_a_cell_are_one_sweep(root: Path) -> None:
    swept(root, "rtx train -m seed=1,2,3,4,5,6,7", *"1234567", **HERE | {"pid": NOBODY})
    swept(root, "rtx train -m lr=2", "8")
    with open(root / "sweeps.jsonl", "a") as file:
        file.write("broken\n[1]\n")
    cell(root, "9", state="done", final={"bits": 3.0})
    (root / "9" / "config.yaml").touch()
    first, second, rest = read_standing(root)
    assert first.command == "rtx train -m seed=1,2,3,4,5,6,7"
    assert [cell.title for cell in first.cells] == [f"seed={n}" for n in range(1, 8)]
    assert first.at_work is True
    assert (second.at_work, len(second.cells)) == (None, 1)
    assert (rest.command, rest.cells[0].title) == ("", "9")


def test_half_written_records_are_passed_over(root: Path) -> None:
    (root / "1" / "status.json").write_text('{"state": "do')
    (root / "2" / "status.json").write_text('{"state": "running"}')
    (root / "4" / "metrics.jsonl").write_bytes(b"\xff\x00\n[]\n")
    (sweep,) = read_standing(root)
    assert [cell.state for cell in sweep.cells[:4]] == ["waiting", "waiting", "killed", "failed"]


def test_the_time_left_counts_what_waits() -> None:
    running = Standing("", "running", 50, 100, 1.0, left=10.0, whole=20.0)
    assert time_left([running]) == 10.0
    assert time_left([running, Standing("", "waiting"), Standing("", "waiting")]) == 50.0
    assert time_left([running, running, Standing("", "killed", 50, 100)]) == 15.0
    assert time_left([Standing("", "waiting")]) is None
    assert time_left([Standing("", "running")]) is None


@pytest.mark.parametrize("width", [40, 80, 132])
def test_lines_fit_the_terminal(root: Path, width: int) -> None:
    swept(root, "rtx train -m model.hidden=8 " + "trainer.steps=100 " * 9, "8")
    lines = board("outputs/out", read_standing(root), width, height=12)
    assert all(len(line) <= width for line in lines)
    assert len(lines) <= 12
    assert lines[-1].startswith("... and ")
    assert any("killed" in line for line in lines)
    whole = board("outputs/out", read_standing(root), 80)
    said = "outputs/out: 7 cells: 1 done, 1 running, 1 failed, 1 interrupted, 1 killed, 2 waiting; about "
    assert " ".join(line.strip() for line in whole[:2]).startswith(said)
    assert "    out of memory: tried to allocate 2 GiB" in whole
    (row,) = (line for line in whole if line.startswith("  seed=1 "))
    assert row.split() == ["seed=1", "done", "100/100", "4.2500"]


def test_a_sweep_that_nobody_works_on_says_how_it_goes_on() -> None:
    sweep = Sweep("rtx train -m seed=1,2", (Standing("seed=1", "killed", 3, 9), Standing("seed=2", "done")), False)
    lines = board("a", [sweep], 80)
    assert lines[-2:] == ["  nobody works on it; it goes on with:", "  rtx train -m seed=1,2"]
    over = Sweep("rtx train -m seed=1,2", (Standing("seed=1", "done"), Standing("seed=2", "failed")), False)
    assert is_over([over])
    assert "goes on" not in "".join(board("a", [over], 80))


def test_long_titles_lose_their_sections_then_their_end() -> None:
    title = "routing.window=512 routing.layers=2 routing.heads=2"
    sweep = Sweep("rtx train -m", (Standing(title, "waiting"),), True)
    assert board("a", [sweep], 90)[-1] == f"  {title}  waiting"
    assert board("a", [sweep], 66)[-1] == "  window=512 layers=2 heads=2  waiting"
    assert board("a", [sweep], 40)[-1].endswith("...  waiting")


def test_folders_without_a_sweep(tmp_path: Path, root: Path) -> None:
    for folder, said in (
        (tmp_path / "otu", "no such folder (did you mean 'out'?)"),
        (tmp_path, f"holds no sweep; there is one in {root}"),
        (root / "1", "holds no sweep"),
        (tmp_path / "no" / "no", "no such folder;"),
    ):
        with pytest.raises(UserError, match=re.escape(said)):
            read_standing(folder)
