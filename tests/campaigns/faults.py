"""Kill real runs at random moments, for as long as told, and count what was lost.

    python -m tests.campaigns.faults --kills 100
    python -m tests.campaigns.faults --minutes 600 --seed 1

Each run is `rtx train` as a user starts it, over data of its own that it prepares first. SIGKILL ends it at a moment
drawn from `MOMENTS` (anywhere; while data are prepared; as the run begins; between steps;
in a validation; while a checkpoint is written), the same command or `rtx resume` goes on, and is killed again, up to
`--each` times; then it may end, and its last and best checkpoints (weights, optimizer, centroids, random streams) and
all its rows are compared with those of a run that was left alone, bit for bit. After each kill the checkpoints that had
been written are looked for, and whether they are whole.

It needs the tools of the tests (pip install -e '.[dev]') and writes `benchmarks/results/faults-cpu.json`. A run that
lost a checkpoint, or found one damaged, is left as the kill left it; it, and runs that do not resume or come to other
bits, are kept with their data, each named in a line, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import collections
import json
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
    SIZES,
    Process,
    Workshop,
    difference,
    read_metrics,
    steps_logged,
)

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = dict(word.split("=") for word in SIZES)
SAVE_EVERY, VAL_EVERY = int(OPTIONS["trainer.checkpoint_every"]), int(OPTIONS["trainer.val_every"])


@dataclass(frozen=True)
class Kill:
    """What a SIGKILL met, and what it left."""

    asked: str  # the moment that was waited for
    met: str  # what was under way
    resumed: bool  # it met a resume, not the first process of the run
    row: int  # last step with a row
    left: int  # step of the newest whole checkpoint; 0: there is none
    damaged: int  # bytes in checkpoints that are not whole

    @property
    def lost(self) -> bool:
        """Whether a checkpoint is gone: the row of a step is written after those of all steps before it."""
        return self.left < (self.row - 1) // SAVE_EVERY * SAVE_EVERY


class Ordeal:
    """A run that is killed again and again, and asked to go on each time.

    `begin` starts a process of a command: `workshop.begin`, or `workshop.fork` without its imports.
    """

    def __init__(
        self, workshop: Workshop, name: str, begin: Callable[..., Process], *overrides: str
    ) -> None:
        self.workshop, self.begin, self.run = workshop, begin, workshop.folder / name
        self.words, self.rows_before = (workshop.text, *SIZES, *overrides), 0

    def go_on(self) -> Process:
        """Start as a user would: train again where the kill left no run, else resume."""
        self.rows_before = self.rows_written
        words = ("resume", str(self.run)) if self.has_begun else ("train", *self.words)
        return self.begin(self.run, *words)

    def kill(self, moment: str, draw: random.Random, seconds: float) -> Kill | None:
        """Start it and kill it at a moment of `MOMENTS`, or a little later; None where it came to its end before.

        `seconds`: that the whole run takes, for the moment `anywhere`.
        """
        resumed = self.has_begun
        process = self.go_on()
        ready, later = MOMENTS[moment]
        wait = draw.uniform(0, seconds if moment == "anywhere" else later)
        if process.shows(lambda run: ready(self, process), pause=0.002):
            end = time.monotonic() + wait
            while process.alive and time.monotonic() < end:
                time.sleep(0.001)
        process.send(signal.SIGKILL)
        code = process.wait()
        assert code in (0, -signal.SIGKILL), process.said(f"ended with {code}")
        if code == 0:
            return None
        left = steps_logged(self.run), newest_step(self.run), damaged_bytes(self.run)
        return Kill(moment, self.under_way(process), resumed, *left)

    def under_way(self, process: Process) -> str:
        """Say what a process that was killed was at, by what it has left in the folders."""
        if preparing(self, process):
            return "data preparation"
        if not begun(self, process):
            return "start-up"
        if any((self.run / "checkpoints").glob(".*.writing")):
            return "a checkpoint write"
        if self.rows_written == self.rows_before:
            return "building and loading"
        return "a validation" if validating(self, process) else "a step"

    def finish(self) -> int:
        """Let it go on to its end, and return the exit code."""
        return self.go_on().wait()

    @property
    def has_begun(self) -> bool:
        """Whether there is a run to resume."""
        return (self.run / "config.yaml").exists()

    @property
    def rows_written(self) -> int:
        """Bytes of rows so far."""
        path = self.run / "metrics.jsonl"
        return path.stat().st_size if path.exists() else 0


def preparing(ordeal: Ordeal, process: Process) -> bool:
    return any(ordeal.workshop.data.glob(".*.lock"))


def begun(ordeal: Ordeal, process: Process) -> bool:
    """Whether this process has made the run its own."""
    status = read_status(ordeal.run)
    return status is not None and status.pid == process.number


def stepping(ordeal: Ordeal, process: Process) -> bool:
    return ordeal.rows_written > ordeal.rows_before


def validating(ordeal: Ordeal, process: Process) -> bool:
    """Whether a validation is under way: the last row is that of its step."""
    rows = read_metrics(ordeal.run / "metrics.jsonl") if stepping(ordeal, process) else []
    return bool(rows) and rows[-1]["kind"] == "train" and rows[-1]["step"] % VAL_EVERY == 0


def saving(run: Path) -> bool:
    """Whether a checkpoint is being written, after the first."""
    return (run / "checkpoints" / "last.ckpt").exists() and any(
        (run / "checkpoints").glob(".last*")
    )


MOMENTS: dict[str, tuple[Callable[[Ordeal, Process], bool], float]] = {
    "anywhere": (lambda ordeal, process: True, 0.0),
    "preparing": (preparing, 0.01),
    "begun": (begun, 1.0),
    "stepping": (stepping, 1.0),
    "validating": (validating, 0.003),
    "saving": (lambda ordeal, process: begun(ordeal, process) and saving(ordeal.run), 0.003),
}
"""What is waited for before a kill, and how many seconds it may come later."""


@dataclass
class Tally:
    """What has happened so far."""

    kills: list[Kill] = field(default_factory=list)
    runs: int = 0
    lossy: list[str] = field(default_factory=list)
    """Of the runs that lost a checkpoint, or had a damaged one, after which kill."""
    not_resumed: list[str] = field(default_factory=list)
    """Of the runs that did not come to their end, why."""
    differ: list[str] = field(default_factory=list)
    """Of the runs whose bits are others, the first thing that differs."""

    def line(self) -> str:
        """Return it in a line."""
        lost = sum(kill.lost for kill in self.kills)
        return (
            f"{len(self.kills)} kills of {self.runs} runs survived; {lost} checkpoints and "
            f"{sum(kill.damaged for kill in self.kills)} bytes of them lost; {len(self.not_resumed)} runs did not "
            f"resume; {len(self.differ)} runs with other bits"
        )

    def result(self) -> dict[str, Any]:
        """Return it as JSON values."""
        again = [kill.row - kill.left for kill in self.kills if kill.row]
        return {
            "kills": len(self.kills),
            "runs": self.runs,
            "checkpoints_lost": sum(kill.lost for kill in self.kills),
            "checkpoint_bytes_lost": sum(kill.damaged for kill in self.kills),
            "runs_with_losses": self.lossy,
            "runs_not_resumed": self.not_resumed,
            "runs_that_differ": self.differ,
            "killed_in": dict(collections.Counter(kill.met for kill in self.kills).most_common()),
            "killed_while_resuming": sum(kill.resumed for kill in self.kills),
            "steps_taken_again_median": statistics.median(again) if again else 0,
            "steps_taken_again_most": max(again, default=0),
            "checkpoint_every": SAVE_EVERY,
        }


def main() -> None:
    """Kill, compare, print and write."""
    options = read_options()
    end_with_children()
    folder = Path(tempfile.mkdtemp(prefix="rtx-faults-"))
    workshop, steps = Workshop(folder), f"trainer.steps={options.steps}"
    began = time.monotonic()
    alone = Ordeal(workshop, "alone", workshop.begin, steps)
    assert alone.finish() == 0, (folder / "alone.log").read_text()
    whole = time.monotonic() - began
    print(f"a run left alone takes {whole:.1f} s; all lies in {folder}", flush=True)
    tally, draw = Tally(), random.Random(options.seed)
    while len(tally.kills) < options.kills and time.monotonic() - began < 60 * options.minutes:
        torment(
            workshop,
            tally,
            draw,
            min(options.each, options.kills - len(tally.kills)),
            whole,
            steps,
            alone.run,
        )
        minutes = (time.monotonic() - began) / 60
        print(f"{minutes:6.1f} minutes: {tally.line()}", flush=True)
        result = describe(tally, minutes, whole)
        options.output.write_text(
            json.dumps([result], indent=1) + "\n"
        )  # so far, lest this one is stopped
    print(options.output.read_text())
    if tally.lossy or tally.not_resumed or tally.differ:
        sys.exit(1)
    shutil.rmtree(folder)


def read_options() -> argparse.Namespace:
    """Return what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--kills",
        type=int,
        default=10**9,
        help="stop after so many kills (unset: 100, or --minutes)",
    )
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="begin no further run after so long"
    )
    parser.add_argument("--each", type=int, default=6, help="most kills of one run")
    parser.add_argument("--steps", type=int, default=120, help="steps of a run")
    parser.add_argument("--seed", type=int, default=0, help="of the moments that are drawn")
    output = ROOT / "benchmarks" / "results" / "faults-cpu.json"
    parser.add_argument("--output", type=Path, default=output, help="where the result goes")
    options = parser.parse_args()
    if options.kills == 10**9 and options.minutes == float("inf"):
        options.kills = 100
    return options


def describe(tally: Tally, minutes: float, whole: float) -> dict[str, Any]:
    """Return the row of results; `whole`: seconds that a run left alone takes."""
    row: dict[str, Any] = {"what": "SIGKILL at random moments of rtx train and rtx resume"}
    row |= {
        "command": " ".join(["python -m tests.campaigns.faults", *sys.argv[1:]]),
        **tally.result(),
    }
    row |= {"minutes": round(minutes, 1), "seconds_of_a_run": round(whole, 1)}
    return row | {
        "python": platform.python_version(),
        "machine": machine("cpu", 1),
        "versions": code(),
    }


def torment(
    workshop: Workshop,
    tally: Tally,
    draw: random.Random,
    kills: int,
    seconds: float,
    steps: str,
    alone: Path,
) -> None:
    """Kill one run up to so many times, let it end and compare it with the one left alone; keep what went wrong."""
    tally.runs += 1
    name = f"run{tally.runs}"
    workshop.data = workshop.folder / f"{name}-data"
    ordeal = Ordeal(workshop, name, workshop.begin, steps)

    def keep(kind: list[str], what: object) -> None:
        kind.append(f"{name}: {what}")
        print(f"{kind[-1]}; kept in {ordeal.run} and {workshop.data}", flush=True)

    try:
        for _ in range(draw.randint(1, kills)):
            possible = [m for m in MOMENTS if m != "preparing" or not ordeal.has_begun]
            kill = ordeal.kill(draw.choice(possible), draw, seconds)
            if kill is None:
                break
            tally.kills.append(kill)
            if kill.lost or kill.damaged:
                return keep(tally.lossy, kill)
        ended = ordeal.finish()
        assert ended == 0, f"ended with {ended}"
    except (AssertionError, pytest.fail.Exception) as error:
        return keep(tally.not_resumed, error)
    if found := difference(ordeal.run, alone):
        return keep(tally.differ, found)
    shutil.rmtree(ordeal.run)
    shutil.rmtree(workshop.data)


if __name__ == "__main__":
    main()
