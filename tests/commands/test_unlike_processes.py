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


@pytest.fixture(scope="module")
def six(workshop: Workshop) -> Path:
    """A run of six steps."""
    return workshop.train("six", "trainer.steps=6", "optimizer.schedule=constant")


def test_other_data_and_another_configuration_end_both(workshop: Workshop) -> None:
    text, other = (workshop.folder / "book.txt").read_bytes(), workshop.folder / "other.txt"
    other.write_bytes(text[:1000] + b"c" + text[1001:])
    run, begun = workshop.folder / "unlike", ("train", *SIZES, *DDP)
    changed = (f"data.path={other}", "optimizer.lr=0.1", "hardware.workers=1")
    said = both(workshop, run, (*begun, workshop.text), (*begun, *changed))
    (line,) = [line for line in said.splitlines() if line.startswith("rtx:")]
    assert "do not begin alike: with process 1 (on " in line
    assert "optimizer.lr is 0.1, not 0.0" in line and "the data's fingerprint is " in line
    assert "data.path" not in line and "workers" not in line and "checkpoint's step" not in line
    assert (read_status(run) or {})["state"] == "failed"


def test_a_stale_copy_of_a_run_ends_both(workshop: Workshop, six: Path) -> None:
    run, stale = (Path(shutil.copytree(six, workshop.folder / name)) for name in ("fresh", "stale"))
    shutil.copy(stale / "checkpoints" / "previous.ckpt", stale / "checkpoints" / "last.ckpt")
    more = (*DDP, "trainer.steps=9")
    text = both(workshop, run, ("resume", str(run), *more), ("resume", str(stale), *more))
    assert "the checkpoint's step is 3, not 6" in text
    assert (read_status(run) or {})["state"] == "done"  # nothing was lost, or done


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
