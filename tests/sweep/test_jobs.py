"""Cells as jobs: submitit's, on this machine for real; what Slurm is asked for, and when a job of its is over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from stand_ins import ROOT, SMALL, begin, patiently, stand_in, table

from rtx import cli
from rtx.compose import compose, config_hash
from rtx.training.run_folder import read_status

LOCAL = ("hardware=submitit_local", "sweep.parallel=2")


@pytest.fixture
def book(outputs: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a test, with a text."""
    Path("book.txt").write_bytes(bytes(range(32, 127)) * 100)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("RTX_DATA", "data")
    return Path.cwd()


def program(folder: Path, name: str, does: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a program of this name onto the PATH."""
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin" / name).write_text(f"#!/bin/sh\n{does}\n")
    (folder / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:/usr/bin:/bin")


def test_jobs_on_this_machine_and_one_that_fails(book: Path, outputs: Path) -> None:
    (book / "rtx.py").write_text("open('attacked', 'w')")  # none of ours
    words = [*SMALL, *LOCAL, "optimizer.lr=1e-3,1e30"]
    command = [sys.executable, "-P", "-m", "rtx", "train", "-m", *words]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert answer.returncode == 1 and "Traceback" not in answer.stderr, answer.stderr
    done, failed, *reason = table(answer.stdout)
    assert done[:4] == ["1", "optimizer.lr=1e-3", "done", "0"]
    assert failed[:4] == ["2", "optimizer.lr=1e30", "failed", "1"] and reason
    (folder,) = outputs.glob(f"rtx/{Path(done[-1]).name}")
    assert "done after 2 steps" in (folder / "output.log").read_text()
    assert done[4] == f"{(read_status(folder) or {})['final']['bits']:.4f}"
    assert not (book / "attacked").exists()


def test_ctrl_c_lets_a_job_save_and_begins_no_other(book: Path, outputs: Path) -> None:
    words = [*SMALL, "trainer.steps=1000000", "trainer.log_every=1", "hardware=submitit_local", "seed=1,2"]
    with begin(Path(sys.executable), *words) as sweep:
        patiently(lambda: any(path.stat().st_size for path in outputs.glob("rtx/*/metrics.jsonl")), sweep)
        os.killpg(sweep.pid, signal.SIGINT)
        shown, _ = sweep.communicate(timeout=60)
    assert sweep.returncode == 130
    rows = table(shown)
    assert [row[2:4] for row in rows] == [["preempted", "143"], ["not", "started"]]
    assert (outputs / "rtx" / Path(rows[0][-1]).name / "checkpoints" / "last.ckpt").exists()


def test_what_slurm_is_asked_for(
    book: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program(book, "sbatch", 'cp "$1" asked.sh; echo "the queue is closed" >&2; exit 1', monkeypatch)
    program(book, "srun", "exit 1", monkeypatch)
    words = ["train", "-m", *SMALL, "seed=1,2", "hardware=slurm", "hydra.launcher.partition=long"]
    assert cli.main([*words, "hydra.launcher.timeout_min=90", "name=queued"]) == 1
    asked = (book / "asked.sh").read_text()
    for line in (
        *("--partition=long", "--time=90", "--mem=32GB", "--gpus-per-node=1", "--cpus-per-task=8", "--nodes=1"),
        *("--ntasks-per-node=1", "--signal=USR2@120", "--job-name=queued", "--open-mode=append"),
    ):
        assert f"#SBATCH {line}\n" in asked
    shown = capsys.readouterr().out
    assert shown.count("the queue is closed") >= 2
    assert "2     seed=2     failed" in shown


def test_a_job_is_over_when_the_queue_no_longer_has_it(
    book: Path, outputs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here both are killed before they leave a word; `sacct` would know nothing of it."""
    monkeypatch.setattr("rtx.sweep.jobs.RESULT_SECONDS", 0.5)
    program(book, "srun", "exit 1", monkeypatch)
    program(book, "sbatch", f'echo x >> {book}/jobs; echo "Submitted batch job $(wc -l < {book}/jobs)"', monkeypatch)
    looks = f"echo x >> {book}/looks; [ $(wc -l < {book}/looks) -lt 3 ] && seq $(wc -l < {book}/jobs); exit 0"
    program(book, "squeue", looks, monkeypatch)
    monkeypatch.setattr("rtx.sweep.jobs.QUEUE_SECONDS", 0.1)
    assert cli.main(["train", "-m", *SMALL, "seed=1,2", "hardware=slurm"]) == 1
    rows = table(capsys.readouterr().out)
    assert [row[2] for row in rows if "seed=" in " ".join(row[1:2])] == ["killed", "killed"]
    assert " ".join(rows[1]) == "its job ended: it left no word"
    assert not list(outputs.glob("rtx/*/status.json"))  # both go on when they are asked for again


def test_a_machine_without_slurm(
    book: Path, outputs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(book))
    for words, said in (
        (["hardware=slurm", "seed=1,2"], "this machine is no part of a Slurm cluster: there is no srun"),
        (["hardware=submitit_local", "hydra.launcher.tasks_per_node=2"], "hydra.launcher.tasks_per_node=2: must be 1"),
        (["hardware=slurm", "hydra.launcher.partion=x"], "Key 'partion' not in 'Slurm"),
    ):
        assert cli.main(["train", "-m", *words]) == 2
        assert said in capsys.readouterr().err
    assert not outputs.exists()
    assert cli.main(["train", "hardware=slurm"]) == 2
    assert "hardware=slurm: makes jobs of the cells of a sweep" in capsys.readouterr().err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["train", "-m", "hardware=slurm"]) == 2
    assert "hardware=slurm: needs hydra-submitit-launcher and submitit; pip install" in capsys.readouterr().err


def test_a_job_is_the_same_cell_as_a_process_here() -> None:
    assert config_hash(compose([*SMALL, "hardware=slurm"])) == config_hash(compose([*SMALL]))


def test_a_cell_saves_before_submitit_puts_its_job_back_into_the_queue(tmp_path: Path) -> None:
    """submitit calls `checkpoint` in the handler of a signal, which interrupts the call."""
    cell = """
signal.signal(signal.SIGUSR2, lambda *_: None)
(folder / "ready").touch()
signal.pause()
time.sleep(0.3)
(folder / "saved").touch()
os._exit(143)
"""
    script, run = stand_in(tmp_path, cell), tmp_path / "run"
    code = (
        "import signal, sys; from pathlib import Path; from rtx.sweep.jobs import Attempt\n"
        f"sys.executable, run = {str(script)!r}, Path({str(run)!r})\n"
        "attempt = Attempt(['seed=1'], {}, run)\n"
        "def checkpoint(*_):\n"
        "    again = attempt.checkpoint()\n"
        "    assert (run / 'saved').exists() and again.function.words == ['seed=1']\n"
        "    raise SystemExit(7)\n"
        "signal.signal(signal.SIGUSR2, checkpoint)\n"
        "attempt()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True) as job:
        patiently(lambda: (run / "ready").exists(), job)
        time.sleep(0.2)
        job.send_signal(signal.SIGUSR2)
        assert job.wait(timeout=60) == 7
