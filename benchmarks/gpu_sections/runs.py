"""Section `runs`: the program as users start it: train, resume, eval, sample, ddp and fsdp.

Runs are processes of their own, in folders below that of the rows.
"""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from . import text_store
from .journal import Found, Row

ROOT = Path(__file__).resolve().parents[2]
SHORT_STEPS = 48
"""Steps of the runs that are compared."""
KILLED_AT = 16
"""The step of the checkpoint behind which one of them is killed."""
TOLERANCE = 1e-3
"""Largest difference of losses of a resumed run, in bits."""
LIMIT = 150
"""Seconds that one command may take."""


class Place(NamedTuple):
    """Where runs lie, and how large they are."""

    folder: Path
    text: str
    dry: bool

    @property
    def hardware(self) -> str:
        return "hardware=cpu" if self.dry else "hardware=gpu"

    def sizes(self) -> list[str]:
        """Return the overrides of every run: the default model, longer and on a GPU larger."""
        words = ["data=text", f"data.path={self.text}", "logger=jsonl", "trainer.val_windows=4"]
        words += ["trainer.final_windows=4", "trainer.log_every=1"]
        if not self.dry:
            return [
                *words,
                "model.hidden=512",
                "model.heads=8",
                "model.ffn_hidden=2048",
                "data.length=2048",
            ]
        words += [
            "data.length=64",
            "model.layers=1",
            "model.window=16",
            "routing.layers=1",
            "routing.window=16",
        ]
        return [*words, "trainer.batch_size=2", "hardware.threads=1"]


def rows(dry: bool, folder: Path, text: str | None) -> list[Row]:
    """Return the rows of this section; those that read the run of the first come behind it."""
    path = Path(text).resolve() if text else folder / "text.txt"
    place = Place(folder / ("runs-dry" if dry else "runs"), str(path), dry)
    found = {
        "train": train,
        "eval-parallel": functools.partial(evaluate, mode="parallel"),
        "eval-streaming": functools.partial(evaluate, mode="streaming"),
        "sample": sample,
        "resume": resume,
        "fsdp": functools.partial(spread, name="fsdp"),
        "ddp": functools.partial(spread, name="ddp"),
    }
    needs_cuda = {"fsdp"}
    return [
        Row(f"runs/{name}", functools.partial(run, place), name in needs_cuda)
        for name, run in found.items()
    ]


def prepare(place: Place) -> None:
    """Write the text that runs are trained on, unless there is one, and its store."""
    place.folder.mkdir(parents=True, exist_ok=True)
    path = Path(place.text)
    if not path.exists():
        draw = random.Random(0)
        words = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(2, 7))) for _ in range(500)]
        count = 20_000 if place.dry else 400_000
        path.write_text(" ".join(draw.choices(words, k=count)))
    text_store.prepare(path, place.folder / "data")


def rtx(place: Place, run: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command of rtx to its end, in a run's folder; RuntimeError where it fails."""
    process = start(place, run, *words)
    try:
        said, _ = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        kill(process)
        raise
    if process.returncode:
        raise RuntimeError(f"rtx {words[0]} ended with {process.returncode}: {said[-400:]}")
    return subprocess.CompletedProcess(process.args, 0, said)


def start(place: Place, run: str, *words: str) -> subprocess.Popen[str]:
    """Start a command of rtx in a group of processes of its own."""
    prepare(place)
    folders = {"RTX_DATA": str(place.folder / "data"), "RTX_OUTPUTS": str(place.folder / "outputs")}
    known = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # Packages may lie where only this variable says.
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    known |= folders | {"RTX_RUN": str(place.folder / run), "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "rtx", *words]
    options = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "text": True,
        "errors": "replace",
    }
    return subprocess.Popen(command, cwd=place.folder, env=known, start_new_session=True, **options)


def kill(process: subprocess.Popen[str]) -> None:
    """Kill a command that this section has started, with its own children."""
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def train(place: Place) -> Found:
    """Train for a minute."""
    shutil.rmtree(place.folder / "minute", ignore_errors=True)
    limit = ["trainer.steps=3"] if place.dry else ["trainer.max_minutes=1", "trainer.val_every=100"]
    rtx(place, "minute", "train", *place.sizes(), place.hardware, *limit)
    rows = losses(place, "minute")
    last = rows[-1]
    names = ("step", "bits", "tokens_per_second", "mfu", "memory_bytes", "data_share")
    found = {name: last.get(name) for name in names} | {"trained_seconds": last["seconds"]}
    return found | {"first_bits": rows[0]["bits"], "pass": last["bits"] < rows[0]["bits"]}


def train_if_missing(place: Place) -> None:
    """Train the run that others read, where its row is of another machine."""
    if not (place.folder / "minute" / "status.json").exists():
        train(place)


def losses(place: Place, run: str) -> list[Found]:
    """Return the rows of training steps of a run, their names without `train/`."""
    lines = (place.folder / run / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "train/bits" in row]
    return [{name.removeprefix("train/"): row[name] for name in row} for row in rows]


def evaluate(place: Place, mode: str) -> Found:
    """Score the run in a mode."""
    train_if_missing(place)
    limit = 2 if place.dry else 4
    began = time.monotonic()
    done = rtx(
        place,
        "eval",
        "eval",
        str(place.folder / "minute"),
        f"mode={mode}",
        f"limit={limit}",
        place.hardware,
    )
    return {
        "said": said_last(done),
        "wall_seconds": round(time.monotonic() - began, 1),
    }


def sample(place: Place) -> Found:
    """Sample from the run."""
    train_if_missing(place)
    began = time.monotonic()
    length = 16 if place.dry else 500
    done = rtx(
        place, "sample", "sample", str(place.folder / "minute"), f"length={length}", place.hardware
    )
    return {
        "said": said_last(done),
        "wall_seconds": round(time.monotonic() - began, 1),
    }


def said_last(done: subprocess.CompletedProcess[str]) -> str:
    """Return the end of what a command has printed."""
    return " ".join(done.stdout.split())[-300:]


def resume(place: Place) -> Found:
    """Compare a run that is killed and resumed with one that is not."""
    for run in ("whole", "killed"):
        shutil.rmtree(place.folder / run, ignore_errors=True)
    words = [
        *place.sizes(),
        place.hardware,
        f"trainer.steps={SHORT_STEPS}",
        f"trainer.checkpoint_every={KILLED_AT}",
    ]
    words += [
        "hardware.deterministic=true",
        "hardware.compile=false",
        f"trainer.val_every={SHORT_STEPS}",
    ]
    rtx(place, "whole", "train", *words)
    at = train_until_killed(place, words)
    rtx(place, "killed", "resume", str(place.folder / "killed"))
    whole, other = (
        {row["step"]: row["bits"] for row in losses(place, run)} for run in ("whole", "killed")
    )
    worst = max(abs(whole[step] - other[step]) for step in whole)
    same = whole == other
    return {
        "killed_at": at,
        "steps": len(whole),
        "worst_bits": worst,
        "same_bits": same,
        "pass": worst <= TOLERANCE,
    }


def train_until_killed(place: Place, words: list[str]) -> int:
    """Train until a step behind a checkpoint, kill the run, and return its last step."""
    process = start(place, "killed", "train", *words)
    metrics = place.folder / "killed" / "metrics.jsonl"
    step = 0
    began = time.monotonic()
    while step <= KILLED_AT and process.poll() is None and time.monotonic() - began < LIMIT:
        time.sleep(0.02)
        step = metrics.read_text().count('"train/bits"') if metrics.exists() else 0
    kill(process)
    if not KILLED_AT < step < SHORT_STEPS:
        raise RuntimeError(
            f"the run was at step {step} of {SHORT_STEPS} when it was killed: nothing to resume"
        )
    return step


def spread(place: Place, name: str) -> Found:
    """Train some steps by one process of a strategy for many."""
    shutil.rmtree(place.folder / name, ignore_errors=True)
    steps = 3 if place.dry else 20
    words = [f"hardware={name}", "hardware.devices=1", f"trainer.steps={steps}"]
    rtx(place, name, "train", *place.sizes(), *words)
    rows = losses(place, name)
    return {name: rows[-1][name] for name in ("bits", "tokens_per_second")}
