"""Kill real runs at random moments, for as long as told, and count what was lost.

    python benchmarks/faults.py --kills 100
    python benchmarks/faults.py --minutes 600 --seed 1

Each run is `rtx train` as a user starts it, over data of its own that it prepares first. SIGKILL ends it at a moment
drawn from those of `tests/faults/disturbances.py` (anywhere; while data are prepared; as the run begins; between steps;
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
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from machine import code, machine

ROOT = Path(__file__).resolve().parents[1]
sys.path.extend([str(ROOT / "tests" / room) for room in ("faults", "commands")])

import pytest  # noqa: E402
from disturbances import MOMENTS, SAVE_EVERY, Kill, Ordeal  # noqa: E402
from small_runs import Workshop, difference  # noqa: E402


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
    folder = Path(tempfile.mkdtemp(prefix="rtx-faults-"))
    workshop, steps = Workshop(folder), f"trainer.steps={options.steps}"
    began = time.monotonic()
    alone = Ordeal(workshop, "alone", workshop.begin, steps)
    assert alone.finish() == 0, (folder / "alone.log").read_text()
    whole = time.monotonic() - began
    print(f"a run left alone takes {whole:.1f} s; all lies in {folder}", flush=True)
    tally, draw = Tally(), random.Random(options.seed)
    while len(tally.kills) < options.kills and time.monotonic() - began < 60 * options.minutes:
        torment(workshop, tally, draw, min(options.each, options.kills - len(tally.kills)), whole, steps, alone.run)
        minutes = (time.monotonic() - began) / 60
        print(f"{minutes:6.1f} minutes: {tally.line()}", flush=True)
        result = describe(tally, minutes, whole)
        options.output.write_text(json.dumps([result], indent=1) + "\n")  # so far, lest this one is stopped
    print(options.output.read_text())
    if tally.lossy or tally.not_resumed or tally.differ:
        sys.exit(1)
    shutil.rmtree(folder)


def read_options() -> argparse.Namespace:
    """Return what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10**9, help="stop after so many kills (unset: 100, or --minutes)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no further run after so long")
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
    row |= {"command": " ".join(["python benchmarks/faults.py", *sys.argv[1:]]), **tally.result()}
    row |= {"minutes": round(minutes, 1), "seconds_of_a_run": round(whole, 1)}
    return row | {"python": platform.python_version(), "machine": machine("cpu", 1), "versions": code()}


def torment(
    workshop: Workshop, tally: Tally, draw: random.Random, kills: int, seconds: float, steps: str, alone: Path
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
