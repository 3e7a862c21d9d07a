"""Processes that others start begin alike, or all of them end with a line."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

import pytest
from many import TWO, ended, slurm
from small_runs import SIZES, Workshop

from rtx.commands.train import follow
from rtx.config import Config
from rtx.errors import UserError
from rtx.training.hardware import resolve_hardware
from rtx.training.run_folder import read_status

DDP = ("hardware=ddp", *TWO, "optimizer.schedule=constant")


def both(workshop: Workshop, run: Path, *commands: tuple[str, ...]) -> str:
    """Run a command of its own on each of two processes, as srun would; both refuse, and this is what they say."""
    processes = [workshop.fork(run, *words, **place) for words, place in zip(commands, slurm(), strict=True)]
    return ended(run, processes, 2)


def test_other_data_another_configuration_and_a_stale_copy_end_both(workshop: Workshop) -> None:
    text, other = (workshop.folder / "book.txt").read_bytes(), workshop.folder / "other.txt"
    other.write_bytes(text[:1000] + b"c" + text[1001:])
    six = workshop.train("six", "trainer.steps=6", "optimizer.schedule=constant")
    fresh, stale = (Path(shutil.copytree(six, workshop.folder / name)) for name in ("fresh", "stale"))
    shutil.copy(stale / "checkpoints" / "previous.ckpt", stale / "checkpoints" / "last.ckpt")
    begun, resumed = ("train", *SIZES, *DDP), (*DDP, "trainer.steps=9")
    for run, first, second, state in (
        (workshop.folder / "data", (*begun, workshop.text), (*begun, f"data.path={other}"), "failed"),
        (workshop.folder / "rate", (*begun, workshop.text), (*begun, workshop.text, "optimizer.lr=0.1"), "failed"),
        (fresh, ("resume", str(fresh), *resumed), ("resume", str(stale), *resumed), "done"),
    ):
        said = both(workshop, run, first, second)
        (line,) = [line for line in said.splitlines() if line.startswith("rtx:")]
        assert "do not begin alike: start them all with the same words, on the same data" in line
        assert (read_status(run) or {})["state"] == state  # of what was done, nothing is lost


def test_a_child_that_cannot_begin_tells_its_parent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise UserError("no data")

    for name, instead in {"started_by_another": lambda: True, "open_data": refuse}.items():
        monkeypatch.setattr(f"rtx.commands.train.{name}", instead)
    hardware = dataclasses.replace(resolve_hardware(Config()), rank=1, devices=2, distributed=True)
    assert follow(Config(), hardware, Path(os.devnull), "") == 2  # the parent looks at this code
    assert capsys.readouterr().err == "rtx: no data\n"
