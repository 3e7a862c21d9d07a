"""Runs of two processes that are stopped, or lose one of the two: they go on to the bits of the run never stopped."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from many import TWO, children, ended, start
from small_runs import SIZES, Process, Workshop, difference, steps_logged

from rtx.training.run_folder import read_status

STEADY = ("optimizer.schedule=constant", "trainer.checkpoint_every=4", "trainer.val_every=4")


def train(workshop: Workshop, hardware: str, launcher: str, run: Path) -> list[Process]:
    """Start a run on two processes."""
    own = (f"hardware={hardware}", *TWO, *STEADY, "trainer.steps=24")
    return start(workshop, launcher, run, "train", workshop.text, *SIZES, *own)


@pytest.fixture(scope="module")
def whole(workshop: Workshop) -> dict[str, Path]:
    """Runs of 24 steps that nothing disturbs."""
    runs = {hardware: workshop.folder / f"whole-{hardware}" for hardware in ("ddp", "fsdp")}
    for hardware, run in runs.items():
        ended(run, train(workshop, hardware, "srun", run))
    return runs


@pytest.mark.parametrize(
    ("hardware", "number", "launcher"),
    [("ddp", signal.SIGUSR2, "rtx"), ("fsdp", signal.SIGUSR1, "srun")],
    ids=["ddp", "fsdp"],
)
def test_a_run_that_is_stopped_and_then_loses_a_process_comes_to_the_same_bits(
    workshop: Workshop, whole: dict[str, Path], hardware: str, number: signal.Signals, launcher: str
) -> None:
    run = workshop.folder / f"stopped-{hardware}"
    processes = train(workshop, hardware, launcher, run)
    processes[0].until(lambda run: steps_logged(run) >= 2)
    processes[0].send(number)
    text = ended(run, processes, 143)
    assert f"stopped by {number.name} at step" in text and "LOCAL_RANK" not in text
    status = read_status(run) or {}
    assert status["state"] == "preempted" and status["step"] < 24
    processes = start(workshop, launcher, run, "resume", str(run))
    processes[0].until(lambda run: steps_logged(run) >= status["step"] + 2)
    os.kill(processes[1].number if launcher == "srun" else children(processes[0].number)[0], signal.SIGKILL)
    text = ended(run, processes[:1], 1)
    assert "rtx: another process of the run is gone; the last good checkpoint is" in text
    assert (read_status(run) or {})["state"] == "failed"
    assert [process.wait() for process in processes[1:]] == [-signal.SIGKILL] * len(processes[1:])
    text = ended(run, start(workshop, "srun", run, "resume", str(run)))
    assert text.count(f"resuming {run} (failed) from step") == 1, "one of the two speaks"
    # The weights, the optimizer, the random streams of both processes, and every row.
    assert difference(run, whole[hardware]) == ""


def test_a_run_that_is_done_is_said_to_be_by_one_process(workshop: Workshop, whole: dict[str, Path]) -> None:
    run = whole["ddp"]
    text = ended(run, start(workshop, "srun", run, "resume", str(run)))
    assert text.count("is done: 24 steps") == 1


def test_what_was_shared_out_is_scored_sampled_and_exported_as_any_run(
    workshop: Workshop, whole: dict[str, Path], tmp_path: Path
) -> None:
    run = whole["fsdp"]
    final = (read_status(run) or {})["final"]["bits"]
    for where in (run, tmp_path / "export"):
        assert f"{final:.4f}" in workshop.command("eval", str(where), "checkpoint=last")
        assert workshop.command("sample", str(where), "length=20", "checkpoint=last")
        if where == run:
            workshop.command("export", str(run), "checkpoint=last", f"output={tmp_path / 'export'}")
