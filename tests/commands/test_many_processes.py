"""Two processes on one CPU: the steps of one, one run folder whoever starts them, one end for both,
and the same bits
where they are stopped or one of them is lost.
"""

import dataclasses
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch
from lightning.fabric.plugins.environments.lightning import find_free_network_port

from rtx.commands.train import run_other_rank
from rtx.errors import UserError
from rtx.settings.schema import Config
from rtx.training import distributed
from rtx.training.checkpoint import read_checkpoint
from rtx.training.hardware import resolve_hardware
from tests.helpers.small_runs import (
    SMALL_RUN,
    Process,
    Workshop,
    after,
    children,
    difference,
    final,
    read_metrics,
    status_of,
)

TWO = ("hardware.devices=2", "hardware.threads=1", "trainer.micro_batch_size=1")
"""Two processes on this machine, which take the four sequences of a step in two passes."""
EXACT = ("model.dropout=0", "model.attention_dropout=0", "model.ffn_dropout=0")
MOST = {"fp64": 1e-9, "fp32": 1e-6}
"""Largest relative difference allowed after the steps of a run."""
STEADY = (
    "optimizer.schedule=constant",
    "trainer.checkpoint_every=4",
    "trainer.val_every=4",
    "trainer.steps=24",
)


def start(workshop: Workshop, launcher: str, run: Path, *arguments: str) -> list[Process]:
    """Start a command on two processes, the first in front; what they say goes to a file beside the
    run.

    Who starts them is `rtx` (the first starts the other) or `torchrun`, each as a user would; or
    they are forked with their imports behind them, and find the variables that Slurm sets (`srun`).
    """
    if launcher == "srun":
        return [workshop.fork(run, *arguments, inside=HELD, **place) for place in slurm()]
    torchrun = (
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        f"--master-port={find_free_network_port()}",
    )
    return [workshop.spawn(run, *arguments, starter=torchrun if launcher == "torchrun" else ())]


def slurm() -> list[dict[str, str]]:
    """Return the variables that srun sets for each of two processes."""
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(find_free_network_port()),
        "SLURM_STEP_ID": "0",
        "SLURM_NODEID": "0",
    }
    shared |= {"SLURM_NTASKS": "2", "SLURM_NNODES": "1"}
    return [{**shared, "SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in "01"]


def ended(processes: list[Process], code: int = 0) -> str:
    """Wait for processes that all end with this code, and return what they said."""
    for process in processes:
        assert process.wait() == code, process.log.read_text()
    return processes[0].log.read_text()


def worst(one: Path, other: Path) -> float:
    """Return the largest relative difference between the weights and buffers of two runs."""
    a, b = (read_checkpoint(run / "checkpoints" / "last.ckpt")["model"] for run in (one, other))
    assert a.keys() == b.keys()
    pairs = [(a[name].double(), b[name].double()) for name in a]
    return max(float((x - y).abs().max() / x.abs().max().clamp_min(1e-9)) for x, y in pairs)


def train(
    workshop: Workshop, hardware: str, launcher: str, run: Path, *words: str
) -> list[Process]:
    overrides = (f"hardware={hardware}", *TWO, *STEADY, *words)
    return start(workshop, launcher, run, "train", workshop.text, *SMALL_RUN, *overrides)


ODD = (
    "model.hidden=18",
    "model.heads=3",
    "model.ffn_hidden=13",
    "routing.heads=2",
    "model.span_ramp=4",
)
KINDS = {
    "plain": (),
    "tied": (
        *(
            *ODD[:4],
            "model.tie_embeddings=true",
            "model.ffn=geglu",
            "model.positions=axial",
            "model.axes=8x4",
        ),
        *("model.base=lsh", "model.norm=post", "optimizer=adam", "optimizer.weight_decay=0.1"),
    ),
    "recomputed": (
        *ODD[:4],
        "model.positions=shaw",
        "model.recompute=true",
        "model.ffn_parts=3",
        "model.embedding=7",
    ),
    "spans": (*ODD, "model.base=adaptive_span", "model.positions=none", "model.span_cost=0.1"),
}
"""Models of whose parameters two processes hold parts of unequal sizes."""
HELD = """
from rtx.training import distributed, module
def shard(model, mesh):
    distributed.shard(model, mesh)
    held = sum(each.to_local().numel() for each in model.parameters())
    whole = sum(each.numel() for each in model.parameters())
    print(f"holds {held / whole}\\n", end="")
module.shard = shard
"""
"""Tells what share of the parameters a process holds."""


def joined(workshop: Workshop, kind: str, precision: str) -> Path:
    """Return a run of one process with the whole batch."""
    words = (*STEADY, *EXACT, *KINDS[kind], f"hardware.precision={precision}", "trainer.steps=8")
    return workshop.train(f"one-{kind}-{precision}", *words)


@pytest.mark.parametrize(
    ("hardware", "precision", "kind"),
    [("ddp", "fp32", "plain"), *(("fsdp", "fp64", kind) for kind in [*KINDS][1:])],
)
def test_two_processes_take_the_steps_of_one_and_resume_on_one(
    workshop: Workshop, hardware: str, precision: str, kind: str
) -> None:
    two = workshop.folder / f"{hardware}-{kind}"
    one = joined(workshop, kind, precision)
    most = MOST[precision]
    exact = f"hardware.precision={precision}"
    said = ended(
        train(workshop, hardware, "srun", two, *EXACT, *KINDS[kind], exact, "trainer.steps=4")
    )
    shares = [float(share) for share in re.findall(r"holds ([\d.]+)", said)]
    assert hardware == "ddp" or (sum(shares) == pytest.approx(1) and max(shares) < 0.6)
    bits = {
        row["step"]: row["valid/bits"]
        for row in read_metrics(one / "metrics.jsonl")
        if row["kind"] == "valid"
    }
    assert abs(final(two)["bits"] - bits[4]) < most  # each is of the whole split
    changed = (
        "hardware=cpu",
        exact,
        "hardware.threads=1",
        "trainer.micro_batch_size=4",
        "trainer.steps=8",
    )
    moved = "devices 2 -> 1"
    if hardware == "fsdp":
        moved += ", sharded True -> False"
    assert f"no longer exact: {moved}\n" in workshop.command("resume", str(two), *changed)
    assert worst(two, one) < most
    rows = (
        [row for row in read_metrics(run / "metrics.jsonl") if row["kind"] == "train"]
        for run in (two, one)
    )
    for row, other in zip(*rows, strict=True):
        assert row.keys() == other.keys() and row["train/grad_norm"] == pytest.approx(
            other["train/grad_norm"], rel=most
        )


def test_a_run_of_one_process_goes_on_shared_out_among_two(workshop: Workshop) -> None:
    whole_batch = (
        "trainer.micro_batch_size=4",
        "hardware.precision=fp64",
    )  # more than a process has of two
    run = workshop.train("lengthened", *STEADY, *EXACT, *whole_batch, "trainer.steps=4")
    devices = (
        "hardware=fsdp",
        "hardware.devices=2",
        "hardware.threads=1",
        "hardware.precision=fp64",
    )
    text = ended(start(workshop, "rtx", run, "resume", str(run), *devices, "trainer.steps=8"))
    assert "devices 1 -> 2, sharded False -> True" in text
    assert "LOCAL_RANK" not in text, "the second process starts none of its own"
    assert worst(run, joined(workshop, "plain", "fp64")) < MOST["fp64"]


def test_torchrun_shares_a_folder_and_a_signal_to_the_first_stops_all(workshop: Workshop) -> None:
    run = workshop.folder / "torchrun"
    long = ("trainer.steps=1000000", "trainer.val_every=1000000")
    (process,) = train(workshop, "ddp", "torchrun", run, *long)
    process.until(after(2))
    pid = status_of(run).pid
    assert pid is not None
    os.kill(pid, signal.SIGTERM)
    process.wait()
    status = status_of(run)
    assert status.state == "preempted", process.log.read_text()
    checkpoint = read_checkpoint(run / "checkpoints" / "last.ckpt")
    assert checkpoint["step"] == status.step
    first, second = checkpoint["callbacks"]["RankStates"]["ranks"]
    assert not torch.equal(
        first["rng"]["torch"], second["rng"]["torch"]
    )  # each rank drops units of its own


@pytest.fixture(scope="module")
def whole(workshop: Workshop) -> dict[str, Path]:
    runs = {hardware: workshop.folder / f"whole-{hardware}" for hardware in ("ddp", "fsdp")}
    for hardware, run in runs.items():
        ended(train(workshop, hardware, "srun", run))
    return runs


def kill_second(processes: list[Process], launcher: str) -> None:
    """Kill the second process of a run, as its launcher has started it."""
    number = children(processes[0].number)[0] if launcher == "rtx" else processes[1].number
    os.kill(number, signal.SIGKILL)


def check_use(workshop: Workshop, run: Path) -> None:
    """Check that a run and its export have the same score, and can be sampled."""
    workshop.command("export", str(run), "checkpoint=last")
    bits = final(run)["bits"]
    for folder in (run, run / "export"):
        said = workshop.command("eval", str(folder), "checkpoint=last")
        scores = re.findall(r"([\d.]+) bits/byte", said)
        assert float(scores[0]) == pytest.approx(bits, abs=1e-5)
        assert workshop.command("sample", str(folder), "length=20", "checkpoint=last")


@pytest.mark.parametrize(
    ("hardware", "number", "launcher"),
    [("ddp", signal.SIGUSR2, "rtx"), ("fsdp", signal.SIGUSR1, "srun")],
)
def test_a_run_that_is_stopped_and_then_loses_a_process_comes_to_the_same_bits(
    workshop: Workshop, whole: dict[str, Path], hardware: str, number: signal.Signals, launcher: str
) -> None:
    run = workshop.folder / f"stopped-{hardware}"
    processes = train(workshop, hardware, launcher, run)
    processes[0].until(after(2))
    processes[0].send(number)
    text = ended(processes, 143)
    assert f"stopped by {number.name} at step" in text
    assert "LOCAL_RANK" not in text
    status = status_of(run)
    assert status.state == "preempted"
    assert status.step < 24
    processes = start(workshop, launcher, run, "resume", str(run))
    processes[0].until(after(status.step + 2))
    kill_second(processes, launcher)
    text = ended(processes[:1], 1)
    assert "rtx: another process of the run is gone; the last good checkpoint is" in text
    assert status_of(run).state == "failed"
    assert [process.wait() for process in processes[1:]] == [-signal.SIGKILL] * len(processes[1:])
    text = ended(start(workshop, "srun", run, "resume", str(run)))
    assert text.count(f"resuming {run} (failed) from step") == 1, "one of the two speaks"
    # The weights, the optimizer, the random streams of both processes, and every row.
    assert difference(run, whole[hardware]) == ""
    assert ended(start(workshop, "srun", run, "resume", str(run))).count("is done: 24 steps") == 1
    check_use(workshop, run)


def test_other_data_another_configuration_and_a_stale_copy_end_both(workshop: Workshop) -> None:
    text = (workshop.folder / "book.txt").read_bytes()
    other = workshop.folder / "other.txt"
    other.write_bytes(text[:1000] + b"c" + text[1001:])
    six = workshop.train("six", "trainer.steps=6", "optimizer.schedule=constant")
    fresh, stale = (
        Path(shutil.copytree(six, workshop.folder / name)) for name in ("fresh", "stale")
    )
    shutil.copy(stale / "checkpoints" / "previous.ckpt", stale / "checkpoints" / "last.ckpt")
    ddp = ("hardware=ddp", *TWO, "optimizer.schedule=constant")
    begun = ("train", *SMALL_RUN, *ddp)
    resumed = (*ddp, "trainer.steps=9")
    for run, first, second, state in (
        (
            workshop.folder / "data",
            (*begun, workshop.text),
            (*begun, f"data.path={other}"),
            "failed",
        ),
        (
            workshop.folder / "rate",
            (*begun, workshop.text),
            (*begun, workshop.text, "optimizer.lr=0.1"),
            "failed",
        ),
        (fresh, ("resume", str(fresh), *resumed), ("resume", str(stale), *resumed), "done"),
    ):
        each = zip((first, second), slurm(), strict=True)
        said = ended([workshop.fork(run, *words, **place) for words, place in each], 2)
        (line,) = [line for line in said.splitlines() if line.startswith("rtx:")]
        assert "different settings, data or folders: start them all with the same words" in line
        assert status_of(run).state == state  # of what was done, nothing is lost


def test_a_child_that_cannot_begin_tells_its_parent(capsys: pytest.CaptureFixture[str]) -> None:
    hardware = dataclasses.replace(resolve_hardware(Config()), rank=1, devices=2, distributed=True)
    refused = Mock(side_effect=UserError("no data"))
    with patch.multiple("rtx.commands.train", started_by_another=lambda: True, open_data=refused):
        assert (
            run_other_rank(Config(), hardware, Path(os.devnull), "") == 2
        )  # the parent looks at this code
    assert capsys.readouterr().err == "rtx: no data\n"


def test_a_child_that_ends_otherwise_than_by_leaving_is_told_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(distributed, "PATIENCE_SECONDS", 0.0)
    for command, told in (
        ("true", []),
        ("exit 3", ["ended with 3"]),
        ("kill -9 $$", ["was killed by SIGKILL"]),
    ):
        started = [subprocess.Popen(["sh", "-c", each]) for each in (command, "sleep 0.05")]
        lines: list[str] = []
        distributed.watch_ranks(started, lines.append)
        for child in started:
            child.wait()
        assert [line.partition(" the run ")[2] for line in lines] == told
