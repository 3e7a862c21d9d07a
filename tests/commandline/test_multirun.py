"""Sweeps: laid out and checked whole, one process per cell, and every end of a cell told.

A cell's process is a stand-in for `python -m rtx` that records how it was started and ends as the test wants; the last
test runs real ones.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from stand_ins import ROOT, run, stand_in, started

from rtx import cli
from rtx.compose import compose, config_hash


def test_every_cell_is_a_process_with_its_own_overrides_and_folder(
    tmp_path: Path, outputs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = stand_in(tmp_path, 'end(0, "done", final=dict(bits=2.5))')
    assert run(monkeypatch, script, "routing.heads=2,4", "seed=7", "routing.attend_self=true,false", "name=a b") == 0
    calls = started(tmp_path)
    assert [arguments[:3] for arguments, _ in calls] == [["-m", "rtx", "train"]] * 4
    assert calls[1][0][3:] == ["routing.heads=2", "seed=7", "routing.attend_self=false", "name='a b'"]
    for arguments, folder in calls:
        assert folder == str(outputs / "a b" / config_hash(compose(arguments[3:])))
    assert len({folder for _, folder in calls}) == 4
    shown = capsys.readouterr().out
    assert "4 cells, each a run of its own" in shown
    assert "cell 3 of 4: routing.heads=4 routing.attend_self=true\n" in shown
    assert "2     routing.heads=2 routing.attend_self=false  done   0     2.5000  out puts'/a b/" in shown


def test_nothing_starts_unless_every_cell_is_right(
    tmp_path: Path, outputs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = stand_in(tmp_path, 'end(0, "done")')
    assert run(monkeypatch, script, "routing.heads=2,9", "routing.window=64,600", "model.window=64") == 2
    error = capsys.readouterr().err
    assert error.splitlines() == [
        "rtx: cell 2 (routing.heads=2 routing.window=600): routing.window=600 must be at most data.length=256",
        "rtx: cell 3 (routing.heads=9 routing.window=64): routing.heads=9 must be at most model.heads=4",
    ]
    assert run(monkeypatch, script, "routing.heads=9") == 2
    assert "rtx: cell 1 (nothing swept): routing.heads=9 must be" in capsys.readouterr().err
    assert run(monkeypatch, script, "seed=1,1") == 2
    assert "cells 1 and 2 are the same run (seed=1)" in capsys.readouterr().err
    assert run(monkeypatch, script, "logger=jsonl,offline") == 2
    assert "cells 1 and 2 are the same run" in capsys.readouterr().err
    assert run(monkeypatch, script, "hydra.launcher.n_jobs=2", "seed=1,2") == 2
    error = capsys.readouterr().err
    assert "hydra.launcher.n_jobs" in error
    assert "Traceback" not in error
    assert "To append" not in error
    assert started(tmp_path) == []


def test_failures_do_not_stop_the_sweep(
    tmp_path: Path, outputs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    behaviour = """
if "seed=1" in sys.argv: end(1, "failed")
if "seed=2" in sys.argv: os.kill(os.getpid(), signal.SIGKILL)
end(0, "done")
"""
    script = stand_in(tmp_path, behaviour)
    assert run(monkeypatch, script, "seed=1,2,3") == 1
    first, reason, *others = capsys.readouterr().out.splitlines()[-4:]
    assert first.split()[:4] == ["1", "seed=1", "failed", "1"]
    assert reason == "      exit code 1"
    assert [row.split()[:4] for row in others] == [["2", "seed=2", "killed", "137"], ["3", "seed=3", "done", "0"]]


def test_a_sweep_run_again_skips_what_is_done_and_resumes_what_has_begun(
    tmp_path: Path, outputs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    behaviour = """
if "resume" in sys.argv or "seed=1" in sys.argv: end(0, "done")
(folder / "checkpoints").mkdir()
(folder / "checkpoints" / "last.ckpt").touch()
end(143, "preempted")
"""
    script = stand_in(tmp_path, behaviour)
    assert run(monkeypatch, script, "seed=1,2") == 1
    assert "preempted" in capsys.readouterr().out
    assert run(monkeypatch, script, "seed=1,2") == 0
    calls = started(tmp_path)
    assert len(calls) == 3
    assert calls[2][0] == ["-m", "rtx", "resume", calls[1][1]]
    assert "done before" in capsys.readouterr().out


def test_a_folder_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("RTX_OUTPUTS", str(tmp_path / "file"))
    assert run(monkeypatch, stand_in(tmp_path, 'end(0, "done")'), "seed=1,2") == 2
    error = capsys.readouterr().err
    assert "set RTX_OUTPUTS to a folder that you can write" in error
    assert "Traceback" not in error


def test_a_row_cut_short_does_not_swallow_the_next_sweeps(
    tmp_path: Path, outputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = stand_in(tmp_path, 'end(0, "done")')
    (outputs / "torn").mkdir(parents=True)
    (outputs / "torn" / "sweeps.jsonl").write_text('{"time": "20')
    for _ in range(2):
        assert run(monkeypatch, script, "seed=1,2", "name=torn") == 0
    torn, *rows = (outputs / "torn" / "sweeps.jsonl").read_text().splitlines()
    assert torn == '{"time": "20' and [len(json.loads(row)["cells"]) for row in rows] == [2, 2]


def test_a_cell_whose_output_cannot_be_written_leaves_the_others_running(
    tmp_path: Path, outputs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = stand_in(tmp_path, 'end(0, "done")')
    (outputs / "a" / config_hash(compose(["seed=1"])) / "output.log").mkdir(parents=True)
    assert run(monkeypatch, script, "seed=1,2,3", "name=a", "sweep.parallel=2") == 1
    said = capsys.readouterr()
    assert "Traceback" not in said.err and "Is a directory" in said.out
    assert [line.split()[2] for line in said.out.splitlines() if "  seed=" in line][-3:] == ["failed", "done", "done"]


def test_torchrun_does_not_start_a_sweep_in_every_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert cli.main(["train", "-m", "seed=1,2"]) == 2
    assert "run it without torchrun" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 143)])
def test_a_signal_reaches_the_current_cell_once_and_ends_the_sweep_after_it(
    tmp_path: Path, outputs: Path, number: int, code: int
) -> None:
    behaviour = f"""
seen = []
signal.signal({int(number)}, lambda *_: seen.append(1))
(folder / "ready").touch()
while not seen: time.sleep(0.01)
time.sleep(0.2)
end({code}, "interrupted", seen=len(seen))
"""
    script = stand_in(tmp_path, behaviour)
    code_line = f"import sys; from rtx import cli; sys.executable = {str(script)!r}; cli.entry()"
    process = subprocess.Popen(
        [sys.executable, "-c", code_line, "train", "-m", "seed=1,2,3"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    with process, process.stdout:
        deadline = time.monotonic() + 60
        while not (ready := list(outputs.glob("rtx/*/ready"))):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.02)
        os.killpg(process.pid, number)
        shown = process.stdout.read()
        assert process.wait(timeout=60) == code
    assert json.loads((ready[0].parent / "status.json").read_text())["seen"] == 1
    states = [line.split()[2:5] for line in shown.splitlines()[-3:]]
    assert states[0][:2] == ["interrupted", str(code)]
    assert [state[:2] for state in states[1:]] == [["not", "started"]] * 2


def test_real_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("RTX_DATA", str(tmp_path / "data"))
    monkeypatch.delenv("RTX_OUTPUTS", raising=False)
    (tmp_path / "book.txt").write_bytes(bytes(range(32, 127)) * 100)
    small = ["model.layers=2", "model.hidden=16", "model.heads=2", "model.ffn_hidden=16", "model.window=16"]
    small += ["data.length=32", "routing.layers=1", "routing.window=16", "routing.heads=1"]
    short = ["trainer.steps=2", "trainer.batch_size=2", "hardware=cpu", "hardware.threads=1", "logger=jsonl"]
    arguments = ["data=text", "data.path=book.txt", *small, *short]
    assert cli.main(["train", "-m", "seed=1,2", *arguments]) == 0
    folders = sorted((tmp_path / "outputs" / "rtx").glob("*/config.yaml"))
    assert len(folders) == 2
    assert "1     seed=1     done   0" in capfd.readouterr().out
    assert cli.main(["train", "-m", "seed=1,2", *arguments]) == 0
    assert "1     seed=1     done before  0" in capfd.readouterr().out
    (tmp_path / "book.txt").write_bytes(bytes(range(126, 31, -1)) * 100)
    assert cli.main(["train", "-m", "seed=1,2", *arguments]) == 1
    said = capfd.readouterr().out
    assert f"{folders[0].parent} was done with other data than are there now" in said
    assert "1     seed=1     other data  2" in said
    assert not (tmp_path / "multirun").exists()
