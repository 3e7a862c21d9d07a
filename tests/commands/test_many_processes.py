"""Two processes on one CPU: the same steps as one, one run folder whoever starts them, and one end for both."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from small_runs import SIZES, Workshop, patiently, steps_logged

from rtx.training.checkpoints import read_checkpoint
from rtx.training.status import read_status

EXACT = (
    "optimizer.schedule=constant",
    "model.dropout=0",
    "model.attention_dropout=0",
    "model.ffn_dropout=0",
)
TWO = ("hardware=ddp", "hardware.devices=2", "hardware.threads=1", "trainer.micro_batch_size=1")


def started(workshop: Workshop, run: Path, command: list[str]) -> subprocess.Popen[bytes]:
    """Start a command in a process group of its own; what it says goes to a file beside the run."""
    with open(run.with_suffix(".log"), "wb") as log:
        environment = {**os.environ, **workshop.environment(run)}
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log, process_group=0)


def worst(one: Path, other: Path) -> float:
    """Return the largest relative difference between the weights and buffers of two runs."""
    a, b = (read_checkpoint(run / "checkpoints" / "last.ckpt")["model"] for run in (one, other))
    assert a.keys() == b.keys()
    pairs = [(a[name].double(), b[name].double()) for name in a]
    return max(float((x - y).abs().max() / x.abs().max().clamp_min(1e-9)) for x, y in pairs)


@pytest.mark.parametrize(("precision", "most"), [("fp64", 1e-9), ("fp32", 1e-6)])
def test_two_processes_take_the_steps_of_one_and_resume_on_one(workshop: Workshop, precision: str, most: float) -> None:
    two, exact = workshop.folder / f"two-{precision}", (*EXACT, f"hardware.precision={precision}")
    command = [sys.executable, "-m", "rtx", "train", workshop.text, *SIZES, *exact, *TWO, "trainer.steps=20"]
    process = started(workshop, two, command)
    one, longer = (
        workshop.train(f"one-{precision}", *exact, "trainer.steps=20"),
        workshop.train(f"longer-{precision}", *exact, "trainer.steps=24"),
    )
    assert process.wait(timeout=240) == 0, two.with_suffix(".log").read_text()
    assert worst(two, one) < most
    status = [(read_status(run) or {})["final"]["bits"] for run in (one, two)]
    assert abs(status[0] - status[1]) < most
    changed = ("hardware=cpu", f"hardware.precision={precision}", "hardware.threads=1")
    said = workshop.command("resume", str(two), *changed, "trainer.micro_batch_size=4", "trainer.steps=24")
    assert "no longer exact: devices 2 -> 1\n" in said
    assert worst(two, longer) < most


def test_torchrun_shares_a_folder_and_a_signal_to_the_first_stops_all(workshop: Workshop) -> None:
    run = workshop.folder / "torchrun"
    train = [
        "-m",
        "rtx",
        "train",
        workshop.text,
        *SIZES,
        *TWO,
        "hardware.precision=fp64",
        "trainer.steps=1000000",
        "trainer.val_every=1000000",
    ]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        f"--master-port={free_port()}",
        *train,
    ]
    process = started(workshop, run, command)
    for _ in patiently(lambda: run.with_suffix(".log").read_text(), pause=0.01):
        if steps_logged(run) >= 2:
            break
        assert process.poll() is None, run.with_suffix(".log").read_text()
    status = read_status(run) or {}
    os.kill(status["pid"], signal.SIGTERM)
    process.wait(timeout=120)
    status = read_status(run) or {}
    assert status["state"] == "preempted", run.with_suffix(".log").read_text()
    checkpoint = read_checkpoint(run / "checkpoints" / "last.ckpt")
    assert checkpoint["step"] == status["step"]
    first, second = checkpoint["ranks"]
    assert not torch.equal(first["rng"]["torch"], second["rng"]["torch"])  # each rank drops units of its own


def free_port() -> int:
    """Return a port that nobody listens on."""
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
