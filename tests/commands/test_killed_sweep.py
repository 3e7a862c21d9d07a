"""A sweep that is killed at random moments and asked again: the very table, and the very weights, of one left alone."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from small_runs import SIZES, Workshop, difference, patiently, steps_logged

from rtx.training.run_folder import read_status

ROOT = Path(__file__).resolve().parents[2]
STEPS = 40


def descendants(number: int) -> list[int]:
    """Return the processes that a process has started, those that they have, and so on."""
    children = Path(f"/proc/{number}/task/{number}/children")
    threads = Path(f"/proc/{number}/task").glob("*/children") if children.exists() else []
    found: list[int] = []
    for path in threads:
        with contextlib.suppress(OSError):
            for child in path.read_text().split():
                found += [int(child), *descendants(int(child))]
    return found


def kill_everything(process: subprocess.Popen[str]) -> None:
    """End a sweep, its cells and all that they started, at once and without a word."""
    for number in [process.pid, *descendants(process.pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    process.wait()


def test_three_kills_change_nothing(workshop: Workshop) -> None:
    overrides = [workshop.text, *SIZES, f"trainer.steps={STEPS}", "name=killed"]
    alone = [workshop.train(f"alone{seed}", *overrides[len(SIZES) + 1 :], f"seed={seed}") for seed in (1, 2)]
    command = [sys.executable, "-m", "rtx", "train", "-m", *overrides, "seed=1,2"]
    environment = {**os.environ, **workshop.environment(""), "PYTHONPATH": str(ROOT)}
    root = workshop.folder / "out" / "killed"

    def begin() -> subprocess.Popen[str]:
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)

    def steps() -> int:
        return sum(steps_logged(run) for run in root.glob("*/"))

    draw = random.Random(5)
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
    for row, run in zip(rows, alone, strict=True):
        status = read_status(run)
        assert status is not None
        assert row[-2] == f"{status['final']['bits']:.4f}"
        assert difference(run, root / Path(row[-1]).name) == ""
