"""Two processes on one CPU: the same steps as one, one run folder whoever starts them, and one end for both."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from many import TWO, ended, said, start
from small_runs import SIZES, Workshop, steps_logged

from rtx.training.checkpoint import read_checkpoint
from rtx.training.run_folder import read_status

EXACT = ("optimizer.schedule=constant", "model.dropout=0", "model.attention_dropout=0", "model.ffn_dropout=0")
MOST = {"fp64": 1e-9, "fp32": 1e-6}
"""Largest relative difference allowed after 20 steps."""


def worst(one: Path, other: Path) -> float:
    """Return the largest relative difference between the weights and buffers of two runs."""
    a, b = (read_checkpoint(run / "checkpoints" / "last.ckpt")["model"] for run in (one, other))
    assert a.keys() == b.keys()
    pairs = [(a[name].double(), b[name].double()) for name in a]
    return max(float((x - y).abs().max() / x.abs().max().clamp_min(1e-9)) for x, y in pairs)


@pytest.fixture(scope="module")
def joined(workshop: Workshop) -> dict[tuple[str, int], Path]:
    """Runs of one process with the whole batch, by precision and number of steps."""
    kinds = [(precision, steps) for precision in MOST for steps in (20, 24)]
    words = {kind: (f"hardware.precision={kind[0]}", f"trainer.steps={kind[1]}") for kind in kinds}
    return {kind: workshop.train(f"one-{kind}", *EXACT, *words[kind]) for kind in kinds}


@pytest.mark.parametrize(("hardware", "precision"), [("ddp", "fp32"), ("fsdp", "fp64")])
def test_two_processes_take_the_steps_of_one_and_resume_on_one(
    workshop: Workshop, joined: dict[tuple[str, int], Path], hardware: str, precision: str
) -> None:
    two, exact = workshop.folder / f"{hardware}-{precision}", (*EXACT, f"hardware.precision={precision}")
    overrides = (f"hardware={hardware}", *TWO, *exact, "trainer.steps=20")
    ended(two, start(workshop, "srun", two, "train", workshop.text, *SIZES, *overrides))
    assert worst(two, joined[precision, 20]) < MOST[precision]
    status = [(read_status(run) or {})["final"]["bits"] for run in (two, joined[precision, 20])]
    assert abs(status[0] - status[1]) < MOST[precision]
    changed = ("hardware=cpu", f"hardware.precision={precision}", "hardware.threads=1")
    resumed = workshop.command("resume", str(two), *changed, "trainer.micro_batch_size=4", "trainer.steps=24")
    moved = "devices 2 -> 1"
    moved += ", sharded True -> False" if hardware == "fsdp" else ""
    assert f"no longer exact: {moved}\n" in resumed
    assert worst(two, joined[precision, 24]) < MOST[precision]


def test_a_run_of_one_process_goes_on_shared_out_among_two(
    workshop: Workshop, joined: dict[tuple[str, int], Path]
) -> None:
    whole_batch = "trainer.micro_batch_size=4"  # more than a process has of two
    run = workshop.train("lengthened", *EXACT, "hardware.precision=fp64", "trainer.steps=20", whole_batch)
    devices = ("hardware=fsdp", "hardware.devices=2", "hardware.threads=1", "hardware.precision=fp64")
    text = ended(run, start(workshop, "rtx", run, "resume", str(run), *devices, "trainer.steps=24"))
    assert "devices 1 -> 2, sharded False -> True" in text
    assert "LOCAL_RANK" not in text, "the second process starts none of its own"
    assert worst(run, joined["fp64", 24]) < MOST["fp64"]


def test_torchrun_shares_a_folder_and_a_signal_to_the_first_stops_all(workshop: Workshop) -> None:
    run = workshop.folder / "torchrun"
    overrides = ("hardware=ddp", *TWO, "hardware.precision=fp64", "trainer.steps=1000000")
    (process,) = start(
        workshop, "torchrun", run, "train", workshop.text, *SIZES, *overrides, "trainer.val_every=1000000"
    )
    process.until(lambda run: steps_logged(run) >= 2)
    status = read_status(run) or {}
    os.kill(status["pid"], signal.SIGTERM)
    process.wait()
    status = read_status(run) or {}
    assert status["state"] == "preempted", said(run)
    checkpoint = read_checkpoint(run / "checkpoints" / "last.ckpt")
    assert checkpoint["step"] == status["step"]
    first, second = checkpoint["callbacks"]["Watch"]["ranks"]
    assert not torch.equal(first["rng"]["torch"], second["rng"]["torch"])  # each rank drops units of its own
