"""Kill real runs at random moments and count what is lost.

    python -m tests.campaigns.faults --kills 100
    python -m tests.campaigns.faults --minutes 600 --seed 1

Each run is `rtx train` in its own process, over data that it prepares first. SIGKILL ends it at a
moment drawn from MOMENTS (anywhere, while data are prepared, as the run begins, between steps, in a
validation, while a checkpoint is written). The same command or `rtx resume` continues it, and it is
killed again, up to `--each` times. Then it runs to its end, and its last and best checkpoints
(weights, optimizer, centroids, random streams) and all its rows are compared bit for bit with those
of an undisturbed run. After each kill the campaign checks that every checkpoint that was written is
still there and whole.

It needs the test tools (pip install -e '.[dev]') and writes `benchmarks/results/faults-cpu.json`. A
run that lost or damaged a checkpoint, does not resume, or ends with other bits is left as it is
with its data, a line names it, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import platform
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from benchmarks.ending import end_with_children
from benchmarks.machine import code, machine
from rtx.runs.status import read_status
from tests.helpers.disturbances import damaged_bytes, newest_step
from tests.helpers.small_runs import (
    SMALL_RUN,
    Process,
    Workshop,
    difference,
    read_metrics,
    steps_logged,
)

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = dict(word.split("=") for word in SMALL_RUN)
SAVE_EVERY = int(OPTIONS["trainer.checkpoint_every"])
VAL_EVERY = int(OPTIONS["trainer.val_every"])
DEFAULT_KILLS = 100


@dataclass(frozen=True)
class Kill:
    """What a SIGKILL interrupted, and what it left."""

    moment: str
    """The moment that was waited for."""
    interrupted: str
    """What the process was doing."""
    in_resume: bool
    """Whether it ended a resume rather than the first process of the run."""
    row: int
    """Last step with a row."""
    saved: int
    """Step of the newest whole checkpoint; 0: there is none."""
    damaged: int
    """Bytes in checkpoints that are not whole."""

    @property
    def lost(self) -> bool:
        """Whether a checkpoint is missing: a row is written after the checkpoints before it."""
        return self.saved < (self.row - 1) // SAVE_EVERY * SAVE_EVERY


class Ordeal:
    """A run that is killed and continued."""

    def __init__(self, workshop: Workshop, name: str, *overrides: str) -> None:
        self.workshop = workshop
        self.run = workshop.folder / name
        self.words = (workshop.text, *SMALL_RUN, *overrides)
        self.rows_before = 0

    def proceed(self) -> Process:
        """Start as a user would: train again where the kill left no run, else resume."""
        self.rows_before = self.rows_written
        if self.has_begun:
            return self.workshop.spawn(self.run, "resume", str(self.run))
        return self.workshop.spawn(self.run, "train", *self.words)

    def kill(self, moment: str, draw: random.Random, seconds: float) -> Kill | None:
        """Start a process and kill it at a moment of MOMENTS, or a little later.

        Return None where it ended by itself before that. `seconds` is the time of a whole run, for
        the moment `anywhere`.
        """
        in_resume = self.has_begun
        process = self.proceed()
        is_reached, latest = MOMENTS[moment]
        delay = draw.uniform(0, seconds if moment == "anywhere" else latest)
        if process.shows(lambda run: is_reached(self, process), pause=0.002):
            end = time.monotonic() + delay
            while process.alive and time.monotonic() < end:
                time.sleep(0.001)
        process.send(signal.SIGKILL)
        code = process.wait()
        assert code in (0, -signal.SIGKILL), process.kill_and_report(f"ended with {code}")
        if code == 0:
            return None
        return Kill(
            moment=moment,
            interrupted=self.interrupted(process),
            in_resume=in_resume,
            row=steps_logged(self.run),
            saved=newest_step(self.run),
            damaged=damaged_bytes(self.run),
        )

    def interrupted(self, process: Process) -> str:
        """Return what a killed process was doing, as far as its files show."""
        if preparing(self, process):
            return "data preparation"
        if not begun(self, process):
            return "start-up"
        if any((self.run / "checkpoints").glob(".*.writing")):
            return "a checkpoint write"
        if self.rows_written == self.rows_before:
            return "building and loading"
        if validating(self, process):
            return "a validation"
        return "a step"

    def finish(self) -> int:
        """Let the run end, and return the exit code."""
        return self.proceed().wait()

    @property
    def has_begun(self) -> bool:
        """Whether there is a run to resume."""
        return (self.run / "config.yaml").exists()

    @property
    def rows_written(self) -> int:
        """Bytes of rows so far."""
        path = self.run / "metrics.jsonl"
        return path.stat().st_size if path.exists() else 0


def anywhere(ordeal: Ordeal, process: Process) -> bool:
    return True


def preparing(ordeal: Ordeal, process: Process) -> bool:
    """Return whether data are being prepared."""
    return any(ordeal.workshop.data.glob(".*.lock"))


def begun(ordeal: Ordeal, process: Process) -> bool:
    """Return whether this process is the one that the run's status names."""
    status = read_status(ordeal.run)
    return status is not None and status.pid == process.number


def stepping(ordeal: Ordeal, process: Process) -> bool:
    """Return whether this process has written rows."""
    return ordeal.rows_written > ordeal.rows_before


def validating(ordeal: Ordeal, process: Process) -> bool:
    """Return whether a validation is running: the last row is that of its training step."""
    if not stepping(ordeal, process):
        return False
    rows = read_metrics(ordeal.run / "metrics.jsonl")
    if not rows:
        return False
    return rows[-1]["kind"] == "train" and rows[-1]["step"] % VAL_EVERY == 0


def saving(ordeal: Ordeal, process: Process) -> bool:
    """Return whether a checkpoint other than the first is being written."""
    checkpoints = ordeal.run / "checkpoints"
    if not begun(ordeal, process) or not (checkpoints / "last.ckpt").exists():
        return False
    return any(checkpoints.glob(".last*"))


MOMENTS: dict[str, tuple[Callable[[Ordeal, Process], bool], float]] = {
    "anywhere": (anywhere, 0.0),
    "preparing": (preparing, 0.01),
    "begun": (begun, 1.0),
    "stepping": (stepping, 1.0),
    "validating": (validating, 0.003),
    "saving": (saving, 0.003),
}
"""What is waited for before a kill, and how many seconds later than that the kill may be."""


@dataclass
class Tally:
    """What has happened so far; the lists have a line for each run with a failure."""

    kills: list[Kill] = field(default_factory=list)
    runs: int = 0
    lossy: list[str] = field(default_factory=list)
    """Runs that lost or damaged a checkpoint, with the kill."""
    not_resumed: list[str] = field(default_factory=list)
    """Runs that did not come to their end, with the reason."""
    differ: list[str] = field(default_factory=list)
    """Runs with other bits, with the first difference."""

    @property
    def checkpoints_lost(self) -> int:
        return sum(kill.lost for kill in self.kills)

    @property
    def bytes_lost(self) -> int:
        return sum(kill.damaged for kill in self.kills)

    def line(self) -> str:
        """Return a line for the terminal."""
        return (
            f"{len(self.kills)} kills of {self.runs} runs survived; "
            f"{self.checkpoints_lost} checkpoints and {self.bytes_lost} bytes of them lost; "
            f"{len(self.not_resumed)} runs did not resume; "
            f"{len(self.differ)} runs with other bits"
        )

    def result(self) -> dict[str, Any]:
        """Return the figures as JSON values."""
        interrupted = collections.Counter(kill.interrupted for kill in self.kills)
        repeated = [kill.row - kill.saved for kill in self.kills if kill.row]
        return {
            "kills": len(self.kills),
            "runs": self.runs,
            "checkpoints_lost": self.checkpoints_lost,
            "checkpoint_bytes_lost": self.bytes_lost,
            "runs_with_losses": self.lossy,
            "runs_not_resumed": self.not_resumed,
            "runs_that_differ": self.differ,
            "killed_in": dict(interrupted.most_common()),
            "killed_while_resuming": sum(kill.in_resume for kill in self.kills),
            "steps_taken_again_median": statistics.median(repeated) if repeated else 0,
            "steps_taken_again_most": max(repeated, default=0),
            "checkpoint_every": SAVE_EVERY,
        }


class Campaign:
    """Runs that are killed one after the other, beside an undisturbed one."""

    def __init__(self, folder: Path, seed: int, steps: int) -> None:
        self.workshop = Workshop(folder)
        self.draw = random.Random(seed)
        self.steps = f"trainer.steps={steps}"
        self.tally = Tally()
        began = time.monotonic()
        undisturbed = Ordeal(self.workshop, "alone", self.steps)
        assert undisturbed.finish() == 0, (folder / "alone.log").read_text()
        self.undisturbed = undisturbed.run
        self.seconds = time.monotonic() - began
        """What a whole run takes."""

    def torment(self, kills: int) -> None:
        """Kill one run up to `kills` times, let it end, and compare it with the undisturbed one."""
        self.tally.runs += 1
        name = f"run{self.tally.runs}"
        self.workshop.data = self.workshop.folder / f"{name}-data"
        ordeal = Ordeal(self.workshop, name, self.steps)
        try:
            for _ in range(self.draw.randint(1, kills)):
                kill = self.kill_once(ordeal)
                if kill is None:
                    break
                self.tally.kills.append(kill)
                if kill.lost or kill.damaged:
                    self.leave(ordeal, self.tally.lossy, kill)
                    return
            code = ordeal.finish()
            assert code == 0, f"ended with {code}"
        except (AssertionError, pytest.fail.Exception) as error:
            self.leave(ordeal, self.tally.not_resumed, error)
            return
        other = difference(ordeal.run, self.undisturbed)
        if other:
            self.leave(ordeal, self.tally.differ, other)
            return
        shutil.rmtree(ordeal.run)
        shutil.rmtree(self.workshop.data)

    def kill_once(self, ordeal: Ordeal) -> Kill | None:
        """Kill a run at a random moment that it may still reach."""
        moments = list(MOMENTS)
        if ordeal.has_begun:
            moments.remove("preparing")
        return ordeal.kill(self.draw.choice(moments), self.draw, self.seconds)

    def leave(self, ordeal: Ordeal, failures: list[str], failure: object) -> None:
        """Record a failure, and leave the run and its data for people to look at."""
        line = f"{ordeal.run.name}: {failure}"
        failures.append(line)
        print(f"{line}; left in {ordeal.run} and {self.workshop.data}", flush=True)

    def result(self, minutes: float) -> dict[str, Any]:
        """Return the row of results."""
        return {
            "what": "SIGKILL at random moments of rtx train and rtx resume",
            "command": " ".join(["python -m tests.campaigns.faults", *sys.argv[1:]]),
            **self.tally.result(),
            "minutes": round(minutes, 1),
            "seconds_of_a_run": round(self.seconds, 1),
            "python": platform.python_version(),
            "machine": machine("cpu", 1),
            "versions": code(),
        }


def main() -> None:
    """Kill, compare, print and write; the results so far are written after every run."""
    options = read_options()
    end_with_children()
    folder = Path(tempfile.mkdtemp(prefix="rtx-faults-"))
    began = time.monotonic()
    campaign = Campaign(folder, options.seed, options.steps)
    tally = campaign.tally
    print(f"an undisturbed run takes {campaign.seconds:.1f} s; files are in {folder}", flush=True)
    minutes = 0.0
    while len(tally.kills) < options.kills and minutes < options.minutes:
        campaign.torment(min(options.each, options.kills - len(tally.kills)))
        minutes = (time.monotonic() - began) / 60
        print(f"{minutes:6.1f} minutes: {tally.line()}", flush=True)
        options.output.write_text(json.dumps([campaign.result(minutes)], indent=1) + "\n")
    print(options.output.read_text())
    if tally.lossy or tally.not_resumed or tally.differ:
        sys.exit(1)
    shutil.rmtree(folder)


def read_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, help="number of kills (default: 100, or --minutes)")
    parser.add_argument("--minutes", type=float, help="no further run is started after this time")
    parser.add_argument("--each", type=int, default=6, help="most kills of one run")
    parser.add_argument("--steps", type=int, default=120, help="steps of a run")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments")
    output = ROOT / "benchmarks" / "results" / "faults-cpu.json"
    parser.add_argument("--output", type=Path, default=output, help="file for the result")
    options = parser.parse_args()
    if options.kills is None:
        options.kills = DEFAULT_KILLS if options.minutes is None else math.inf
    if options.minutes is None:
        options.minutes = math.inf
    return options


if __name__ == "__main__":
    main()
