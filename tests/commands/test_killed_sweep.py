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

from small_runs import ROOT, SIZES, Workshop, difference, patiently, steps_logged

from rtx.training.run_folder import read_status

STEPS = 40


def kill_everything(process: subprocess.Popen[str]) -> None:
    """End a sweep, and all that it has started in its session, at once and without a word."""
    process.kill()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[3]) == process.pid:
                os.kill(int(path.parent.name), signal.SIGKILL)
    process.wait()


def test_three_kills_change_nothing(workshop: Workshop) -> None:
    overrides = [workshop.text, *SIZES, f"trainer.steps={STEPS}", "name=killed"]
    alone = [workshop.train(f"alone{seed}", *overrides[len(SIZES) + 1 :], f"seed={seed}") for seed in (1, 2)]
    command = [sys.executable, "-m", "rtx", "train", "-m", *overrides, "seed=1,2"]
    environment = {**os.environ, **workshop.environment(""), "PYTHONPATH": str(ROOT)}
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
        assert row[-2] == f"{(read_status(run) or {})['final']['bits']:.4f}"
        assert difference(run, root / Path(row[-1]).name) == ""
    assert workshop.command(*command[3:]).count("done before") == 4  # as each is looked at, and in the table
