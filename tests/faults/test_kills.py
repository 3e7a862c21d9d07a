"""SIGKILL of runs at chosen calls, and of sweeps by the clock; and two commands at once where there
is room for one:
a run goes on to the bits of the one left alone.
"""

import os
import random
import re
import signal
import time
from pathlib import Path

import pytest

from rtx.runs.status import run_state
from tests.helpers.disturbances import damaged_bytes, newest_step
from tests.helpers.small_runs import (
    SMALL_RUN,
    Process,
    Workshop,
    after,
    children,
    difference,
    final,
    steps_logged,
)

CALLS = {
    "os.fsync": 1,  # while data are prepared
    "rtx.commands.train.build_model": 1,
    "rtx.training.module.after_step": 4,
    "rtx.training.module.score_batch": 2,
    "rtx.training.checkpoint.struct.pack": 2,  # the file is written, but for its checksum
    "rtx.disk.os.fsync": 6,  # the second checkpoint has its name
}
"""What the processes of a run die in, one after the other: a function, and which of its calls."""

DYING = """
import itertools, pkgutil, signal
owner, name = pkgutil.resolve_name({owner!r}), {name!r}
real, calls = getattr(owner, name), itertools.count(1)
def dying(*arguments, **options):
    if next(calls) == {call}:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*arguments, **options)
setattr(owner, name, dying)
"""


STEPS = "trainer.steps=14"


@pytest.fixture(scope="module")
def alone(workshop: Workshop) -> Path:
    """A run that is left alone."""
    return workshop.train("alone", STEPS)


def test_one_run_is_killed_at_every_kind_of_moment(workshop: Workshop, alone: Path) -> None:
    run = workshop.folder / "killed"
    saved = 0
    for place, call in CALLS.items():
        owner, _, name = place.rpartition(".")
        command = (
            ("resume", str(run))
            if (run / "config.yaml").exists()
            else ("train", workshop.text, *SMALL_RUN, STEPS)
        )
        process = workshop.fork(
            run, *command, inside=DYING.format(owner=owner, name=name, call=call)
        )
        assert process.wait() == -signal.SIGKILL, process.kill_and_report(
            f"has not died in {place}"
        )
        assert newest_step(run) >= saved and not damaged_bytes(run), place
        saved = newest_step(run)
    assert saved > 6
    workshop.command("resume", str(run))
    assert difference(run, alone) == ""


def kill_sweep(sweep: Process) -> None:
    """Kill a sweep and its cells at once, without a word."""
    sweep.send(signal.SIGSTOP)
    # Stopped, it starts no further cell.
    os.waitpid(sweep.number, os.WUNTRACED)
    for number in (*children(sweep.number), sweep.number):
        os.kill(number, signal.SIGKILL)
    assert sweep.wait() == -signal.SIGKILL


def wait_until_none_runs(root: Path) -> None:
    """Wait until no run of a folder has a process: one that is killed is gone a moment later."""
    while any(run_state(run) == "running" for run in root.glob("*/")):
        time.sleep(0.02)


def test_three_kills_change_nothing(workshop: Workshop) -> None:
    """The first kill comes perhaps before a cell has begun."""
    words = ("trainer.steps=40", "name=killed")
    draw = random.Random(5)
    root = workshop.folder / "out" / "killed"
    alone = [workshop.train(f"alone{seed}", *words, f"seed={seed}") for seed in (1, 2)]
    command = ("train", "-m", workshop.text, *SMALL_RUN, *words, "seed=1,2")
    for target in (0, draw.randint(2, 30), draw.randint(42, 70)):
        sweep = workshop.spawn(root, *command, RTX_RUN="")
        assert sweep.shows(
            lambda _, target=target: sum(map(steps_logged, root.glob("*/"))) >= target, pause=0.02
        )
        if not target:
            # In the imports of the first cell; the sweep has far to go.
            time.sleep(draw.uniform(0.5, 3.0))
        kill_sweep(sweep)
        wait_until_none_runs(root)
    sweep = workshop.spawn(root, *command, RTX_RUN="")
    assert sweep.wait() == 0, sweep.log.read_text()
    closing = sweep.log.read_text().rpartition("\ncell ")[2]
    rows = sorted(line.split() for line in closing.splitlines() if line.startswith("seed="))
    assert [row[:2] for row in rows] == [["seed=1", "done"], ["seed=2", "done"]]
    assert (root / "curves.png").read_bytes()[:4] == b"\x89PNG", "a plot is saved beside the cells"
    for row, run in zip(rows, alone, strict=True):
        assert row[-2] == f"{final(run)['bits']:.4f}"
        assert difference(run, root / Path(row[-1]).name) == ""
    # As each is looked at, and in the table.
    assert workshop.command(*command).count("done before") == 4


def test_two_runs_in_one_folder(workshop: Workshop, alone: Path) -> None:
    run = workshop.folder / "shared"
    processes = [workshop.fork(run, "train", workshop.text, *SMALL_RUN, STEPS) for _ in range(2)]
    codes = [process.wait() for process in processes]
    said = processes[0].log.read_text()
    assert sorted(codes) == [0, 2], said
    refusals = (
        f"rtx: {run} is in use by .*; wait for it, or stop it first|rtx: RTX_RUN={run} holds a run "
        "already; "
    )
    assert len(re.findall(refusals, said)) == 1, said
    assert difference(run, alone) == ""


def test_a_run_keeps_its_data_and_one_resume_of_three_goes_on_with_it(
    workshop: Workshop, alone: Path
) -> None:
    process = workshop.start("resumed", STEPS)
    process.until(after(2))
    assert ": removed, " in workshop.command(
        "data", "remove", next(workshop.data.glob("text-*")).name
    )
    assert process.kill_when(after(4), signal.SIGTERM) == 143
    processes = [workshop.fork(process.run, "resume", str(process.run)) for _ in range(3)]
    codes = [process.wait() for process in processes]
    assert sorted(codes) == [0, 2, 2], process.log.read_text()
    assert difference(process.run, alone) == ""
