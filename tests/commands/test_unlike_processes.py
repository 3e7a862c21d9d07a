"""Processes that others start: they begin alike, or all of them end with a line; nobody waits for one that has gone."""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from pathlib import Path

import pytest
from many import TWO, ended, free_port, said
from small_runs import SIZES, Process, Workshop

from rtx.commands.train import follow, nothing
from rtx.config import Config
from rtx.errors import UserError
from rtx.training.hardware import resolve_hardware
from rtx.training.status import read_status

DDP = ("hardware=ddp", *TWO, "optimizer.schedule=constant")
MACHINES = (*DDP, "hardware.devices=1", "hardware.nodes=2")
HASTE = "import rtx.training.meeting as m; m.COME_SECONDS = 2.0"


def two(workshop: Workshop, launcher: str, run: Path, *commands: tuple[str, ...], inside: str = "") -> list[Process]:
    """Start a command of its own on each of two processes."""
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    if launcher == "srun":
        variables |= {"SLURM_NTASKS": "2", "SLURM_NNODES": "1", "SLURM_STEP_ID": "0", "SLURM_NODEID": "0"}
    names = ("SLURM_PROCID", "SLURM_LOCALID") if launcher == "srun" else ("NODE_RANK",)
    return [
        workshop.fork(run, *command, inside=inside, **variables, **{name: str(rank) for name in names})
        for rank, command in enumerate(commands)
    ]


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
    begun = ("train", *SIZES, *MACHINES)
    processes = two(
        workshop, "machines", run, (*begun, workshop.text), (*begun, other, "optimizer.lr=0.1", "hardware.workers=1")
    )
    (line,) = [line for line in ended(run, processes, 2).splitlines() if line.startswith("rtx:")]
    assert "do not begin alike: process 1 (on " in line
    assert "optimizer.lr = 0.1, not 0.0" in line and "data of fingerprint" in line
    assert "data.path" not in line and "workers" not in line and "checkpoint of step" not in line
    assert (read_status(run) or {})["state"] == "failed"


def test_a_stale_copy_of_a_run_ends_both(workshop: Workshop, six: Path) -> None:
    stale, run = workshop.folder / "stale", workshop.folder / "fresh"
    shutil.copytree(six, run)
    shutil.copytree(six, stale)
    shutil.copy(stale / "checkpoints" / "previous.ckpt", stale / "checkpoints" / "last.ckpt")
    more = (*MACHINES, "trainer.steps=9")
    processes = two(workshop, "machines", run, ("resume", str(run), *more), ("resume", str(stale), *more))
    text = ended(run, processes, 2)
    assert "has a checkpoint of step 3, not 6 as the first one" in text
    assert (read_status(run) or {})["state"] == "done"  # nothing was lost, or done


@pytest.mark.parametrize("launcher", ["srun", "machines"])
def test_a_process_that_cannot_begin_ends_the_first_one(
    workshop: Workshop, six: Path, other: str, launcher: str
) -> None:
    run = workshop.folder / f"cannot-{launcher}"
    shutil.copytree(six, run)
    more = ("resume", str(run), *(DDP if launcher == "srun" else MACHINES), "trainer.steps=9")
    text = ended(run, two(workshop, launcher, run, more, (*more, other)), 2)
    told = [line for line in text.splitlines() if "are not those that the run began with" in line]
    assert sorted("process 1 (on " in line for line in told) == ([True] if launcher == "srun" else [False, True])
    assert (read_status(run) or {})["state"] == "done"


def test_a_first_process_that_cannot_begin_ends_the_others(workshop: Workshop, six: Path, other: str) -> None:
    run = workshop.folder / "first"
    shutil.copytree(six, run)
    more = ("resume", str(run), *MACHINES, "trainer.steps=9")
    first, second = two(workshop, "machines", run, (*more, other), more, inside=HASTE)
    assert "rtx: the data of " in ended(run, [first], 2)
    assert "rtx: the first process of the run " in ended(run, [second], 1)


def test_nobody_waits_long_for_one_that_never_comes(workshop: Workshop) -> None:
    for rank in "01":
        run = workshop.folder / f"alone-{rank}"
        begun = time.monotonic()
        process = workshop.fork(
            *(run, "train", workshop.text, *SIZES, *MACHINES),
            **{"inside": HASTE, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NODE_RANK": rank},
        )
        assert process.wait() == 1, said(run)
        assert time.monotonic() - begun < 30
        missing = "process 1 of 2" if rank == "0" else "the first process of the run"
        assert f"rtx: {missing} is not here after 2 s (MASTER_ADDR=127.0.0.1 MASTER_PORT=" in said(run)


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

    replaced = {"started_by_another": lambda: True, "go_with_parent": nothing, "ignore_signals": nothing}
    for name, instead in {**replaced, "open_data": refuse}.items():
        monkeypatch.setattr(f"rtx.commands.train.{name}", instead)
    hardware = dataclasses.replace(resolve_hardware(Config()), rank=1, devices=2, distributed=True)
    assert follow(Config(), hardware, Path(os.devnull), None) == 2  # the parent looks at this code
    assert capsys.readouterr().err == "rtx: no data\n"
