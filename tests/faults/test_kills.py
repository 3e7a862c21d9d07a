"""SIGKILL of runs at chosen calls, and of sweeps by the clock; and two commands at once where there is room for one:
a run goes on to the bits of the one left alone.
"""

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from disturbances import damaged_bytes, newest_step
from small_runs import SIZES, Workshop, after, difference, final, patiently, steps_logged

from rtx.training.run_folder import run_state

CALLS = {
    "os.fsync": 1,  # while data are prepared
    "rtx.commands.train.build_model": 1,
    "rtx.training.module.after_step": 17,
    "rtx.training.module.score_batch": 2,
    "rtx.training.checkpoint.struct.pack": 2,  # the file is written, but for its checksum
    "rtx.training.checkpoint.sync_folder": 2,
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


@pytest.fixture(scope="module")
def thirty(workshop: Workshop) -> Path:
    return workshop.train("thirty", "trainer.steps=30")


def test_one_run_is_killed_at_every_kind_of_moment(workshop: Workshop) -> None:
    words, run, saved = ("trainer.steps=40",), workshop.folder / "killed", 0
    for place, call in CALLS.items():
        owner, _, name = place.rpartition(".")
        begun = (run / "config.yaml").exists()
        command = ("resume", str(run)) if begun else ("train", workshop.text, *SIZES, *words)
        process = workshop.fork(run, *command, inside=DYING.format(owner=owner, name=name, call=call))
        assert process.wait() == -signal.SIGKILL, process.said(f"has not died in {place}")
        assert newest_step(run) >= saved and not damaged_bytes(run), place
        saved = newest_step(run)
    assert saved > 17
    workshop.command("resume", str(run))
    assert difference(run, workshop.train("alone", *words)) == ""


STEPS = 40


def alive(session: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, *rest = path.read_text().rpartition(")")[2].split()
            found += [int(path.parent.name)] if int(rest[2]) == session and state not in "ZX" else []
    return found


def kill_everything(process: subprocess.Popen[str]) -> None:
    """End a sweep, and all that it has started in its session, at once and without a word; wait until they are gone."""
    for _ in patiently(lambda: f"{alive(process.pid)} live on", pause=0.01):
        if not (left := alive(process.pid)):
            break
        for number in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
    process.wait()


def test_three_kills_change_nothing(workshop: Workshop) -> None:
    overrides = [workshop.text, *SIZES, f"trainer.steps={STEPS}", "name=killed"]
    alone = [workshop.train(f"alone{seed}", *overrides[len(SIZES) + 1 :], f"seed={seed}") for seed in (1, 2)]
    command = [sys.executable, "-m", "rtx", "train", "-m", *overrides, "seed=1,2"]
    environment = {**os.environ, **workshop.environment("")}
    root, draw = workshop.folder / "out" / "killed", random.Random(5)

    def begin() -> subprocess.Popen[str]:
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)

    def steps() -> int:
        return sum(steps_logged(run) for run in root.glob("*/"))

    with begin() as process:
        time.sleep(draw.uniform(0.5, 3.0))  # perhaps before a cell has begun
        kill_everything(process)
    for target in (draw.randint(2, STEPS - 10), draw.randint(STEPS + 2, 2 * STEPS - 10)):
        with begin() as process:
            for _ in patiently(lambda: f"the sweep has logged {steps()} steps", pause=0.02):
                if steps() >= target or process.poll() is not None:
                    break
            assert process.poll() is None
            kill_everything(process)
    with begin() as process:
        shown, _ = process.communicate(timeout=400)
    assert process.returncode == 0, shown
    rows = [line.split() for line in shown.splitlines()[-2:]]
    assert [row[:2] for row in rows] == [["1", "seed=1"], ["2", "seed=2"]]
    assert (root / "curves.png").read_bytes()[:4] == b"\x89PNG", "a plot is saved beside the cells"
    for row, run in zip(rows, alone, strict=True):
        assert row[-2] == f"{final(run)['bits']:.4f}"
        assert difference(run, root / Path(row[-1]).name) == ""
    assert workshop.command(*command[3:]).count("done before") == 4  # as each is looked at, and in the table


def test_two_runs_in_one_folder(workshop: Workshop, thirty: Path) -> None:
    for attempt in range(2):
        run = workshop.folder / f"shared{attempt}"
        processes = [workshop.fork(run, "train", workshop.text, *SIZES, "trainer.steps=30") for _ in range(2)]
        codes = [process.wait() for process in processes]
        said = processes[0].log.read_text()
        assert sorted(codes) == [0, 2], said
        refusals = (
            f"rtx: {run} is in use by .*; wait for it, or stop it first",
            f"rtx: RTX_RUN={run} holds a run already; ",
        )
        assert sum(len(re.findall(refusal, said)) for refusal in refusals) == 1, said
        assert difference(run, thirty) == ""


def test_two_resumes_of_one_run(workshop: Workshop, thirty: Path) -> None:
    process = workshop.start("resumed", "trainer.steps=30")
    process.kill_when(after(10))
    processes = [workshop.fork(process.run, "resume", str(process.run)) for _ in range(3)]
    codes = [process.wait() for process in processes]
    assert sorted(codes) == [0, 2, 2], process.log.read_text()
    assert difference(process.run, thirty) == ""


def test_a_run_keeps_its_data(workshop: Workshop) -> None:
    process = workshop.start("reading", "trainer.steps=100000", "trainer.val_every=100000")
    process.until(after(2))
    assert ": removed, " in workshop.command("data", "remove", next((workshop.folder / "data").glob("text-*")).name)
    assert process.kill_when(after(2), signal.SIGTERM) == 143
    assert run_state(process.run) == "preempted"
