"""`rtx resume` of a run of two processes: whoever starts them, both go on to the bits of the run never stopped."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from small_runs import SIZES, Workshop, difference

from rtx.training.status import read_status

TWO = ("hardware=ddp", "hardware.devices=2", "hardware.threads=1", "trainer.micro_batch_size=1")
STEADY = ("optimizer.schedule=constant", "trainer.checkpoint_every=4", "trainer.val_every=4")
LAUNCHERS = {
    "lightning": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
}


def start(workshop: Workshop, launcher: str, run: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start a command on two processes."""
    command = [*LAUNCHERS[launcher], "-m", "rtx", *arguments]
    environment = {**os.environ, **workshop.environment(run)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def train(workshop: Workshop, run: Path, steps: int) -> subprocess.Popen[str]:
    """Start a run on two processes."""
    return start(workshop, "lightning", run, "train", workshop.text, *SIZES, *TWO, *STEADY, f"trainer.steps={steps}")


def said(process: subprocess.Popen[str]) -> str:
    """Wait for the end of a command that goes well, and return what it said."""
    text = process.communicate()[0]
    assert process.returncode == 0, text
    return text


@pytest.fixture(scope="module")
def trained(workshop: Workshop) -> dict[int, Path]:
    """Runs of 4 and of 8 steps."""
    runs = {steps: workshop.folder / f"of{steps}" for steps in (4, 8)}
    for process in [train(workshop, run, steps) for steps, run in runs.items()]:
        said(process)
    return runs


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_processes_resume_to_the_same_bits(workshop: Workshop, trained: dict[int, Path], launcher: str) -> None:
    run = Path(shutil.copytree(trained[4], workshop.folder / launcher))
    text = said(start(workshop, launcher, run, "resume", str(run), "trainer.steps=8"))
    assert text.count(f"resuming {run} (done) from step 4") == 1
    assert (read_status(run) or {})["step"] == 8
    # The weights, the optimizer and the random streams of both ranks; only the rows of the score after step 4 are more.
    assert difference(run, trained[8]).startswith("metrics")
    if launcher == "torchrun":
        again = said(start(workshop, launcher, run, "resume", str(run)))
        assert again.count("is done: 8 steps") == 1
