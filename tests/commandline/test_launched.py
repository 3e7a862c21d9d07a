"""Cells as jobs: submitit's, on this machine for real; what Slurm is asked for; and how jobs are told of signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from stand_ins import ROOT

from rtx import cli
from rtx.commandline.children import Children
from rtx.commandline.launched import Signals, Told, numbers_in, own_signals
from rtx.compose import compose, config_hash
from rtx.training.run_folder import read_status

SMALL = (
    *("data=text", "data.path=book.txt", "data.length=32", "model.layers=1", "model.hidden=16", "model.heads=2"),
    *("model.ffn_hidden=16", "model.window=16", "routing.layers=1", "routing.window=16", "routing.heads=1"),
    *("trainer.steps=2", "trainer.batch_size=2", "hardware.threads=1", "logger=jsonl"),
)


@pytest.fixture
def book(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder of the test's own, with a text."""
    (tmp_path / "book.txt").write_bytes(bytes(range(32, 127)) * 100)
    monkeypatch.chdir(tmp_path)
    for name, value in (("PYTHONPATH", str(ROOT)), ("RTX_DATA", "data"), ("RTX_OUTPUTS", "outputs")):
        monkeypatch.setenv(name, value)
    return tmp_path


def test_jobs_on_this_machine_and_one_that_fails(book: Path) -> None:
    words = [*SMALL, "sweep.cells='seed=1; seed=2 data.path=none.txt'", "hardware=submitit_local", "sweep.parallel=2"]
    command = [sys.executable, "-m", "rtx", "train", "-m", *words]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert answer.returncode == 1, answer.stderr
    assert "Traceback" not in answer.stderr
    done, failed, *reason = answer.stdout.partition("\ncell  overrides")[2].splitlines()[1:]
    assert done.split()[:5] == ["1", "data.path=book.txt", "seed=1", "done", "0"]
    assert failed.split()[:5] == ["2", "data.path=none.txt", "seed=2", "failed", "2"]
    assert reason[0].strip().startswith("data.path=")
    folder = Path(done.split()[-1])
    assert "done after 2 steps" in (folder / "output.log").read_text()
    status = read_status(folder)
    assert status is not None
    assert done.split()[5] == f"{status['final']['bits']:.4f}"
    assert not list(Path("outputs/rtx").glob(".signals*"))


def test_what_slurm_is_asked_for(
    book: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (book / "bin").mkdir()
    for name, does in (("sbatch", 'cp "$1" asked.sh; echo "the queue is closed" >&2; exit 1'), ("srun", "exit 1")):
        (book / "bin" / name).write_text(f"#!/bin/sh\n{does}\n")
        (book / "bin" / name).chmod(0o755)
    words = ["train", "-m", *SMALL, "seed=1,2", "hardware=slurm", "hydra.launcher.partition=long"]
    monkeypatch.setenv("PATH", f"{book / 'bin'}:{os.environ['PATH']}")
    assert cli.main([*words, "hydra.launcher.timeout_min=90", "name=queued"]) == 1
    asked = (book / "asked.sh").read_text()
    for line in (
        *("--partition=long", "--time=90", "--mem=32GB", "--gpus-per-node=1", "--cpus-per-task=8", "--nodes=1"),
        *("--ntasks-per-node=1", "--signal=USR2@120", "--job-name=queued", "--open-mode=append"),
    ):
        assert f"#SBATCH {line}\n" in asked
    assert f"{sys.executable} -u -m submitit.core._submit" in asked
    shown = capsys.readouterr().out
    assert shown.count("the queue is closed") >= 2
    assert "2     seed=2     failed" in shown


def test_a_machine_without_slurm(
    book: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(book))
    for words, said in (
        (["hardware=slurm", "seed=1,2"], "this machine is no part of a Slurm cluster: there is no srun"),
        (["hardware=slurm,cpu"], "slurm makes jobs of all cells, or of none"),
        (["hardware=submitit_local", "hydra.launcher.tasks_per_node=2"], "hydra.launcher.tasks_per_node=2: must be 1"),
        (["hardware=slurm", "hydra.launcher.partion=x"], "Key 'partion' not in 'SlurmQueueConf'"),
    ):
        assert cli.main(["train", "-m", *words]) == 2
        assert said in capsys.readouterr().err
    assert not (book / "outputs").exists()
    assert cli.main(["train", "hardware=slurm"]) == 2
    assert "hardware=slurm: makes jobs of the cells of a sweep; add -m" in capsys.readouterr().err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["train", "-m", "hardware=slurm"]) == 2
    assert "hardware=slurm: needs hydra-submitit-launcher and submitit; pip install" in capsys.readouterr().err


def test_a_job_is_the_same_cell_as_a_process_here(book: Path) -> None:
    assert config_hash(compose([*SMALL, "hardware=slurm"])) == config_hash(compose([*SMALL]))


def test_signals_reach_a_job_through_the_file_whenever_it_begins(tmp_path: Path) -> None:
    signals = Signals(tmp_path)
    assert numbers_in(signals.path) == []
    early, cell = Told(signals.path, Children()), subprocess.Popen(["sleep", "60"], process_group=0)
    early.children.processes.add(cell)
    signals.tell(signal.SIGTERM)
    assert cell.wait(timeout=30) == -signal.SIGTERM
    early.over.set()
    late = Told(signals.path, Children())
    late.over.set()
    assert early.children.stopped_by == late.children.stopped_by == signal.SIGTERM


def test_a_cell_saves_before_submitit_puts_its_job_back_into_the_queue(tmp_path: Path) -> None:
    numbers = (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    former = {number: signal.getsignal(number) for number in numbers}
    saving = "trap 'sleep 0.3; touch saved; exit 143' USR2; touch ready; for i in $(seq 500); do sleep 0.01; done"
    found: list[bool] = []
    signal.signal(signal.SIGUSR2, lambda *_: found.append((tmp_path / "saved").exists()))  # what submitit sets
    try:
        children = Children()
        with own_signals(children, threading.Event()), ThreadPoolExecutor(1) as pool:
            cell = pool.submit(children.run, ["sh", "-c", f"cd {tmp_path}; {saving}"], {}, None)
            until = time.monotonic() + 30
            while not (tmp_path / "ready").exists():
                assert time.monotonic() < until and not cell.done()
                time.sleep(0.01)
            signal.raise_signal(signal.SIGUSR2)
            assert found == [True]
            assert cell.result().code == 143
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def test_a_second_ctrl_c_leaves_what_waits_in_a_queue(tmp_path: Path) -> None:
    script = (
        "import signal, sys, time; from pathlib import Path; from rtx.commandline import launched\n"
        "launched.GRACE_SECONDS = 0.1\n"
        "signals = launched.Signals(Path(sys.argv[1]))\n"
        "signals.tell(signal.SIGINT); signals.tell(signal.SIGINT); time.sleep(60)"
    )
    began = time.monotonic()
    answer = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert answer.returncode == 130
    assert "Ctrl-C again leaves without those that still wait" in answer.stdout
    assert "jobs that still wait end as soon as they begin" in answer.stderr
    assert time.monotonic() - began < 50
    (path,) = tmp_path.iterdir()
    assert numbers_in(path) == [2, 2]
