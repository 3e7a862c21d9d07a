"""Processes that others start begin alike, or all of them end with a line."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

import pytest
from many import TWO, ended, free_port
from small_runs import SIZES, Process, Workshop

from rtx.commands.train import follow
from rtx.config import Config
from rtx.errors import UserError
from rtx.training.hardware import resolve_hardware
from rtx.training.run_folder import read_status

DDP = ("hardware=ddp", *TWO, "optimizer.schedule=constant")


def two(workshop: Workshop, run: Path, *commands: tuple[str, ...]) -> list[Process]:
    """Start a command of its own on each of two processes, as srun would."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "SLURM_STEP_ID": "0", "SLURM_NODEID": "0"}
    place |= {"SLURM_NTASKS": "2", "SLURM_NNODES": "1"}
    ranks = [{name: str(rank) for name in ("SLURM_PROCID", "SLURM_LOCALID")} for rank in range(2)]
    return [workshop.fork(run, *words, **place, **rank) for words, rank in zip(commands, ranks, strict=True)]


@pytest.fixture(scope="module")
def other(workshop: Workshop) -> str:
    """Other data, as a second machine may have them in the place of the first one's."""
    text = (workshop.folder / "book.txt").read_bytes()
    (workshop.folder / "other.txt").write_bytes(text[:1000] + b"c" + text[1001:])
    return f"data.path={workshop.folder / 'other.txt'}"


@pytest.fixture(scope="module")
def six(workshop: Workshop) -> Path:
    """A run of six steps."""
    return workshop.train("six", "trainer.steps=6", "optimizer.schedule=constant")


def test_other_data_and_another_configuration_end_both(workshop: Workshop, other: str) -> None:
    run = workshop.folder / "unlike"
    begun = ("train", *SIZES, *DDP)
    processes = two(workshop, run, (*begun, workshop.text), (*begun, other, "optimizer.lr=0.1", "hardware.workers=1"))
    (line,) = [line for line in ended(run, processes, 2).splitlines() if line.startswith("rtx:")]
    assert "do not begin alike: with process 1 (on " in line
    assert "optimizer.lr is 0.1, not 0.0" in line and "the data's fingerprint is " in line
    assert "data.path" not in line and "workers" not in line and "checkpoint's step" not in line
    assert (read_status(run) or {})["state"] == "failed"


def test_a_stale_copy_of_a_run_ends_both(workshop: Workshop, six: Path) -> None:
    stale, run = workshop.folder / "stale", workshop.folder / "fresh"
    shutil.copytree(six, run)
    shutil.copytree(six, stale)
    shutil.copy(stale / "checkpoints" / "previous.ckpt", stale / "checkpoints" / "last.ckpt")
    more = (*DDP, "trainer.steps=9")
    processes = two(workshop, run, ("resume", str(run), *more), ("resume", str(stale), *more))
    text = ended(run, processes, 2)
    assert "the checkpoint's step is 3, not 6" in text
    assert (read_status(run) or {})["state"] == "done"  # nothing was lost, or done


def test_a_leftover_variable_is_named(workshop: Workshop, six: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("NODE_RANK", "1"), ("NODE_RANK", "x"), ("LOCAL_RANK", "1")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            for command in (("train", workshop.text, *SIZES), ("resume", str(six))):
                assert f"rtx: {name}={value}: " in workshop.command(*command, code=2, run=workshop.folder / "leftover")
    assert not (workshop.folder / "leftover").exists()


def test_a_child_that_cannot_begin_tells_its_parent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise UserError("no data")

    for name, instead in {"started_by_another": lambda: True, "open_data": refuse}.items():
        monkeypatch.setattr(f"rtx.commands.train.{name}", instead)
    hardware = dataclasses.replace(resolve_hardware(Config()), rank=1, devices=2, distributed=True)
    assert follow(Config(), hardware, Path(os.devnull), None) == 2  # the parent looks at this code
    assert capsys.readouterr().err == "rtx: no data\n"
