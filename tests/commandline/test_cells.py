"""What becomes of a cell: run, left, tried again; why it failed; several side by side; and in use elsewhere."""

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

from rtx.compose import compose, config_hash, load_run_config, to_yaml
from rtx.training.run_folder import read_status, run_state

FAILING = """
tries = len(list(folder.glob("try*")))
(folder / f"try{tries}").touch()
if "seed=1" in sys.argv or "resume" in sys.argv:
    if tries: end(0, "done", final=dict(bits=1.5))
    if (folder / "begun").exists() or "seed=1" in sys.argv: end(1, "failed", reason="the loss is NaN at step 3", step=3)
end(0, "done")
"""


def test_a_failed_cell_is_run_again_only_where_that_is_asked_for(
    tmp_path: Path, outputs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = stand_in(tmp_path, FAILING)
    assert run(monkeypatch, script, "seed=1,2") == 1
    assert "      the loss is NaN at step 3\n2     seed=2     done" in capsys.readouterr().out
    assert run(monkeypatch, script, "seed=1,2") == 1
    again = capsys.readouterr().out
    assert "failed before: the loss is NaN at step 3; sweep.retry=true runs it again" in again
    assert again.splitlines()[-3].split()[:4] == ["1", "seed=1", "failed", "before"]
    assert len(started(tmp_path)) == 2
    assert run(monkeypatch, script, "seed=1,2", "sweep.retry=true") == 0
    told = capsys.readouterr().out
    assert "it failed before (the loss is NaN at step 3); no checkpoint is left of its 3 steps; it begins anew" in told
    calls = started(tmp_path)
    assert len(calls) == 3
    assert calls[2] == (["-m", "rtx", "train", "seed=1"], calls[0][1])


def test_a_failed_cell_with_a_checkpoint_goes_on_from_it(
    tmp_path: Path, outputs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    behaviour = """
if "resume" in sys.argv: end(0, "done")
(folder / "checkpoints").mkdir()
(folder / "checkpoints" / "last.ckpt").touch()
end(1, "failed", reason="the disk is full")
"""
    script = stand_in(tmp_path, behaviour)
    assert run(monkeypatch, script, "seed=1") == 1
    assert run(monkeypatch, script, "seed=1", "sweep.retry=true") == 0
    calls = started(tmp_path)
    assert calls[1][0] == ["-m", "rtx", "resume", calls[0][1]]
    assert "it failed before (the disk is full); it goes on from its checkpoint" in capsys.readouterr().out


def test_what_a_cell_cannot_write_itself_the_sweep_records(
    tmp_path: Path, outputs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    behaviour = """
if "seed=1" in sys.argv: os.kill(os.getpid(), signal.SIGSEGV)
if "seed=2" in sys.argv:
    print("rtx: hardware=gpu, but torch finds no GPU", file=sys.stderr, flush=True)
    os._exit(2)
if "seed=3" in sys.argv: raise ValueError("of ours")
"""
    script = stand_in(tmp_path, behaviour)
    assert run(monkeypatch, script, "seed=1,2,3") == 1
    shown = capsys.readouterr().out
    reasons = ["ended by SIGSEGV", "hardware=gpu, but torch finds no GPU", "ValueError: of ours"]
    assert [line.strip() for line in shown.splitlines()[-5::2]] == reasons
    for reason, (_, folder) in zip(reasons, started(tmp_path), strict=True):
        status = read_status(Path(folder))
        assert status is not None
        assert (status["state"], status["reason"]) == ("failed", reason)
        assert run_state(Path(folder)) == "failed"
        assert config_hash(load_run_config(folder)) == Path(folder).name


def test_a_kill_by_the_system_is_out_of_memory_and_any_other_goes_on(
    tmp_path: Path, outputs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = stand_in(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")
    assert run(monkeypatch, script, "seed=1") == 1
    assert capsys.readouterr().out.splitlines()[-1].split()[3:5] == ["killed", "137"]
    counts = iter([7, 8])
    monkeypatch.setattr("rtx.commandline.cells.system_kills", lambda: next(counts))
    assert run(monkeypatch, script, "seed=1") == 1
    row, reason = capsys.readouterr().out.splitlines()[-2:]
    assert row.split()[3:5] == ["failed", "137"]
    assert reason.strip() == "out of memory: the system killed it"
    assert run(monkeypatch, script, "seed=1") == 1
    assert len(started(tmp_path)) == 2


@pytest.mark.parametrize(
    ("number", "word"),
    [
        (signal.SIGINT, "interrupted"),
        *((number, "preempted") for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)),
    ],
)
def test_a_signal_before_a_cell_has_handlers_is_no_failure(
    tmp_path: Path,
    outputs: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
    word: str,
) -> None:
    behaviour = f"""
signal.signal({number:d}, signal.SIG_DFL)
if len(list(folder.glob("try*"))) == 1: end(0, "done", final=dict(bits=1.5))
(folder / "try").touch()
os.kill(os.getpid(), {number:d})
"""
    script = stand_in(tmp_path, behaviour)
    assert run(monkeypatch, script, "seed=1") == 1
    assert capsys.readouterr().out.splitlines()[-1].split()[3:5] == [word, str(128 + number)]
    assert run(monkeypatch, script, "seed=1") == 0
    assert "done" in capsys.readouterr().out.splitlines()[-1]


def test_a_cell_that_failed_before_a_signal_came_stays_failed(
    tmp_path: Path, outputs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = stand_in(tmp_path, 'end(143, "failed", reason="the loss is NaN at step 3")')
    assert run(monkeypatch, script, "seed=1") == 1
    row, reason = capsys.readouterr().out.splitlines()[-2:]
    assert row.split()[3:5] == ["failed", "143"] and reason.strip() == "the loss is NaN at step 3"


def test_a_cell_whose_configuration_was_changed_is_told_and_left_alone(
    tmp_path: Path, outputs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = stand_in(tmp_path, 'end(0, "done")')
    folder = outputs / "rtx" / config_hash(compose(["seed=1"]))
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(compose(["seed=1", "trainer.steps=7", "logger=jsonl"])))
    assert run(monkeypatch, script, "seed=1,2") == 1
    shown = capsys.readouterr().out
    assert f"{folder} is no longer the run of this cell: " in shown
    assert f"cell: trainer.steps {compose([]).trainer.steps} -> 7; move it away" in shown
    assert "1     seed=1     changed  2" in shown
    (folder / "config.yaml").write_text("trainer: [")
    assert run(monkeypatch, script, "seed=1,2") == 1
    assert f"{folder}/config.yaml: not valid YAML" in capsys.readouterr().out
    assert [arguments[3] for arguments, _ in started(tmp_path)] == ["seed=2"]


def test_the_same_command_with_other_cells_is_told(
    tmp_path: Path, outputs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = stand_in(tmp_path, 'end(0, "done")')
    assert run(monkeypatch, script, "seed=1") == 0
    assert run(monkeypatch, script, "seed=1") == 0
    assert "note:" not in capsys.readouterr().out
    path = outputs / "rtx" / "sweeps.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text(json.dumps(rows[0] | {"cells": {"0" * 12: "seed=1"}}) + "\nbroken")
    path.write_text(path.read_text() + "\n")
    assert run(monkeypatch, script, "seed=1") == 0
    assert "this command meant 1 other cell: conf/ or rtx has changed since" in capsys.readouterr().out


def test_several_run_side_by_side_with_their_share_of_the_machine(
    tmp_path: Path, outputs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    behaviour = """
print("said by", os.environ["OMP_NUM_THREADS"], os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
print("to stderr", file=sys.stderr, flush=True)
(folder / "here").touch()
until = time.time() + 30
while len(list(folder.parent.glob("*/here"))) < 2 and time.time() < until: time.sleep(0.01)
end(0 if time.time() < until else 1, "done")
"""
    script = stand_in(tmp_path, behaviour)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    monkeypatch.setattr("rtx.commandline.pool.cores", lambda: 4)
    assert run(monkeypatch, script, "seed=1,2,3", "sweep.parallel=2") == 0
    shown = capsys.readouterr().out
    assert "each cell prints into output.log in its folder; to watch: rtx sweep " in shown
    assert "cell 3 of 3: seed=3: done\n" in shown
    assert "said by" not in shown
    logs = [(Path(folder) / "output.log").read_text() for _, folder in started(tmp_path)]
    assert {line for log in logs for line in log.splitlines()} == {"said by 2 3", "said by 2 5", "to stderr"}


def test_a_cell_that_goes_on_has_the_threads_it_began_with(
    tmp_path: Path, outputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = stand_in(tmp_path, '(folder / "threads").write_text(os.environ["OMP_NUM_THREADS"]); end(0, "done")')
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    folder = outputs / "rtx" / config_hash(compose(["seed=1"]))
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints" / "last.ckpt").touch()
    (folder / "environment.json").write_text('{"threads": 3}')
    assert run(monkeypatch, script, "seed=1") == 0
    assert (folder / "threads").read_text() == "3"


def test_a_cell_in_use_is_waited_for_behind_the_others(
    tmp_path: Path, outputs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = stand_in(tmp_path, '(folder.parent / "other").touch(); end(0, "done")')
    folder = outputs / "rtx" / config_hash(compose(["seed=1"]))
    folder.mkdir(parents=True)
    wait = (
        "import sys, time, pathlib; from rtx.training.run_folder import working_in\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "with working_in(folder):\n"
        "    while not (folder.parent / 'other').exists(): time.sleep(0.01)\n"
        "    time.sleep(0.5)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", wait, str(folder)], env={**os.environ, "PYTHONPATH": str(ROOT)}
    ) as one:
        until = time.monotonic() + 60
        while not (folder / "status.json").exists():
            assert time.monotonic() < until and one.poll() is None
            time.sleep(0.01)
        assert run(monkeypatch, script, "seed=1,2") == 0
    shown = capsys.readouterr().out
    assert f"cell 1: {folder} is in use by process {one.pid} on " in shown
    assert "; the others go first, then it is waited for" in shown
    assert shown.index("done before: ") > shown.index("cell 2 of 2")
    assert [arguments[3] for arguments, _ in started(tmp_path)] == ["seed=2"]
    assert "1     seed=1     done before  0" in shown


def test_a_cell_that_loses_a_race_for_its_folder_is_tried_again(
    tmp_path: Path, outputs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    behaviour = """
import socket
from rtx.training.run_folder import utc_now
from rtx.training.run_folder import boot_id
mine = dict(pid=os.getppid(), host=socket.gethostname(), boot_id=boot_id(), heartbeat=utc_now())
if not list(folder.glob("lost")):
    (folder / "lost").touch()
    end(2, "running", **mine)
end(0, "done")
"""
    script = stand_in(tmp_path, behaviour)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    looks = iter([True, True])
    monkeypatch.setattr("rtx.commandline.cells.seems_running", lambda *_: next(looks, False))
    assert run(monkeypatch, script, "seed=1") == 0
    assert "is in use by process" in capsys.readouterr().out
    assert len(started(tmp_path)) == 2


def test_a_second_interrupt_is_passed_on_and_a_third_kills(tmp_path: Path, outputs: Path) -> None:
    behaviour = """
signal.signal(signal.SIGINT, lambda *_: open(folder / "seen", "a").write("x"))
(folder / "ready").touch()
while True: time.sleep(0.01)
"""
    script = stand_in(tmp_path, behaviour)
    code_line = f"import sys; from rtx import cli; sys.executable = {str(script)!r}; cli.entry()"
    with subprocess.Popen(
        [sys.executable, "-c", code_line, "train", "-m", "seed=1,2,3", "sweep.parallel=2"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        patience = time.monotonic() + 60

        def until(seen: int) -> None:
            while (
                [path.stat().st_size for path in outputs.glob("rtx/*/seen")] != [seen] * 2
                if seen
                else (len(list(outputs.glob("rtx/*/ready"))) < 2)
            ):
                assert time.monotonic() < patience and process.poll() is None
                time.sleep(0.02)

        until(0)
        for count in (1, 2):
            os.killpg(process.pid, signal.SIGINT)
            until(count)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=60) == 130
    assert len(started(tmp_path)) == 2


def test_a_cell_that_another_process_finished_first_is_done_and_its_status_stands(
    tmp_path: Path, outputs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = stand_in(tmp_path, 'end(2, "done", final=dict(bits=1.5), pid=os.getppid())')
    assert run(monkeypatch, script, "seed=1") == 0
    assert "was run by another process meanwhile; the others go first" in capsys.readouterr().out
    ((_, folder),) = started(tmp_path)
    assert run_state(Path(folder)) == "done"
