"""A real Slurm: one run on the two tasks of an srun, and a sweep of which one job is cancelled."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import why_not
from slurm_jobs import JOBS, PATIENCE, SHALLOW, SMALL, environment, of_job, patiently, rtx, states
from small_runs import counted_rows

from rtx.training.checkpoint import read_checkpoint
from rtx.training.run_folder import read_status

__all__ = ["environment"]

SRUN = ("srun", "--ntasks=2", "--cpus-per-task=1", sys.executable, "-m", "rtx")
TWO = ("hardware=ddp", "hardware.devices=2", "trainer.micro_batch_size=1")

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"no Slurm: {why_not()}")


def test_a_run_on_two_tasks_is_stopped_and_goes_on(tmp_path: Path, environment: dict[str, str]) -> None:
    words = ("train", *SMALL, *SHALLOW, *TWO, "trainer.steps=100")
    whole = tmp_path / "whole"
    answer = rtx(tmp_path, {**environment, "RTX_RUN": str(whole)}, *words)
    assert answer.returncode == 0, answer.stdout + answer.stderr

    def stepping() -> list[Path]:
        """The run under way, past a checkpoint."""
        return [path.parent.parent for path in (tmp_path / "outputs").glob("table/*/checkpoints/last.ckpt")]

    pipe = subprocess.PIPE
    with subprocess.Popen(
        [*SRUN, *words], cwd=tmp_path, env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True
    ) as tasks:
        patiently(lambda: stepping() or tasks.poll() is not None, "a checkpoint")
        (run,) = stepping()
        number = subprocess.run(
            ["squeue", "--me", "--noheader", "--format=%i"], env=environment, capture_output=True, text=True
        ).stdout.strip()
        subprocess.run(["scancel", "--signal=TERM", number], env=environment, check=True)
        said, _ = tasks.communicate(timeout=PATIENCE)
    assert tasks.returncode == 143, said
    assert said.count("stopped by SIGTERM at step") == 1 and "Traceback" not in said
    status = read_status(run) or {}
    assert status["state"] == "preempted" and 10 <= status["step"] < 100
    again = subprocess.run([*SRUN, "resume", str(run)], env=environment, capture_output=True, text=True)
    assert again.returncode == 0, again.stdout + again.stderr
    assert again.stdout.count(f"resuming {run} (preempted) from step {status['step']}") == 1
    weights = [read_checkpoint(folder / "checkpoints" / "last.ckpt")["model"] for folder in (run, whole)]
    assert all(bool((weights[0][name] == weights[1][name]).all()) for name in weights[0] | weights[1])
    assert len(counted_rows(run)) == len(counted_rows(whole))


def test_a_job_that_is_cancelled_saves_and_the_others_go_on(tmp_path: Path, environment: dict[str, str]) -> None:
    words = ["train", "-m", *SMALL, *SHALLOW, *JOBS, "seed=1,2"]
    root = tmp_path / "outputs" / "table"

    def stepping() -> list[Path]:
        """The runs past a checkpoint."""
        return [path.parent.parent for path in root.glob("*/checkpoints/last.ckpt")]

    command = [sys.executable, "-m", "rtx", *words]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True
    ) as sweep:
        patiently(lambda: stepping() or sweep.poll() is not None, "a job at work")
        run = stepping()[0]
        subprocess.run(["scancel", of_job(environment, run)], env=environment, check=True)
        said, _ = sweep.communicate(timeout=PATIENCE)
    assert sweep.returncode == 1 and "Traceback" not in said, said
    ended = states(said)
    assert ended["preempted"] == [run.name] and len(ended["done"]) == 1, said
    status = json.loads((run / "status.json").read_text())
    assert read_checkpoint(run / "checkpoints" / "last.ckpt")["step"] == status["step"]
    again = rtx(tmp_path, environment, *words)
    assert again.returncode == 0 and len(states(again.stdout)["done"]) == 2, again.stdout + again.stderr
