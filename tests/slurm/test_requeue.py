"""A real Slurm: a job whose time is nearly up saves, is put back into the queue and goes on; another one fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cluster import why_not
from slurm_jobs import JOBS, PATIENCE, SHALLOW, SMALL, environment, of_job, patiently, rtx, states

from rtx.training.checkpoint import read_checkpoint

__all__ = ["environment"]

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"no Slurm: {why_not()}")


def test_a_job_whose_time_is_up_comes_back_by_itself_and_one_that_fails_stays_away(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    # Of ten minutes submitit takes any moment for the end, so that this counts as one of the job's timeouts.
    words = ["train", "-m", *SMALL, *SHALLOW, *JOBS, "hydra.launcher.timeout_min=10", "optimizer.lr=1e-3,1e30"]
    root = tmp_path / "outputs" / "table"

    def stepping() -> list[Path]:
        """The runs past a checkpoint."""
        return [path.parent.parent for path in root.glob("*/checkpoints/last.ckpt")]

    command, pipe = [sys.executable, "-m", "rtx", *words], subprocess.PIPE
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True
    ) as sweep:
        patiently(lambda: stepping() or sweep.poll() is not None, "a job at work")
        (run,) = stepping()
        job = of_job(environment, run)
        # To the job's steps and not to its script, as Slurm does by itself for --signal=USR2@120.
        subprocess.run(["scancel", "--signal=USR2", job], env=environment, check=True)
        said, _ = sweep.communicate(timeout=PATIENCE)
    assert sweep.returncode == 1 and "Traceback" not in said, said
    ended = states(said)
    assert ended["done"] == [run.name] and len(ended["failed"]) == 1, said
    assert said.count("the loss is nan at learning rate") == 2, said  # as it ends, and in the table
    (log,) = (path.read_text() for path in root.glob(f".submitit/{job}/*_log.out"))
    assert "this job is timed-out" in log and "(19 remaining timeouts)" in log
    assert len((run / "resumes.jsonl").read_text().splitlines()) == 1
    assert (run / "output.log").read_text().count("stopped by SIGUSR2 at step") == 1

    whole = tmp_path / "whole"
    answer = rtx(tmp_path, {**environment, "RTX_RUN": str(whole)}, "train", *SMALL, *SHALLOW, "optimizer.lr=1e-3")
    assert answer.returncode == 0, answer.stdout + answer.stderr
    weights = [read_checkpoint(folder / "checkpoints" / "last.ckpt")["model"] for folder in (run, whole)]
    assert all(bool((weights[0][name] == weights[1][name]).all()) for name in weights[0] | weights[1])
