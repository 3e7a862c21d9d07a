"""Train models beside full attention on one GPU, a few minutes at a time.

`python benchmarks/campaign.py --text FILE` goes through a list of runs in order of worth
(`campaign()`). Each is an ordinary `rtx train` in a folder of its own, below --work. When --minutes
are over, the run that is training saves and stops; the next call goes on with it.

The records of each run, without weights, are copied to OUT/records. A later call skips the runs
that are done there or in --records. `rtx report OUT/records/*.jsonl` compares the rows.

On a fresh machine, without --work of earlier calls, a run that was not done begins anew. A run for
which the rest of --minutes does not suffice is not begun.

--dry trains tiny models for some steps on a CPU. Packages: see gpu.py.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from ending import end_with_children
from gpu_sections.runs import Place, kill, start
from gpu_sections.whole_steps import Variant

from rtx.runs.study import read_study

HERE = Path(__file__).resolve().parent
RECORDS = HERE.parent / "docs" / "results" / "records" / "long_text_gpu"
KEEP = HERE.parent / "docs" / "results" / "keep.py"
ROWS = ("full", "causal", "probed", "local")
SEEDS = range(5)
OTHER_SECONDS = 75.0
"""Of a run beside its training: start, compilation, validations, closing score."""
STOP_SECONDS = 40.0
"""In which a run has to save and stop when the time is up."""
DRY_STEPS = 6


class Planned(NamedTuple):
    """A run of the list."""

    variant: Variant
    seed: int
    minutes: float  # of training

    @property
    def name(self) -> str:
        return f"{self.variant.base}-{self.variant.length}-{self.variant.heads}-seed{self.seed}"

    def words(self, text: str, dry: bool) -> list[str]:
        """Return the overrides of `rtx train` on a file of text."""
        words = self.variant.words("cpu" if dry else "gpu")
        words.remove("data.path=.")  # of models that are built without data
        words += [f"data.path={text}", f"seed={self.seed}", "logger=jsonl"]
        words.append(f"name={self.variant.base}-{self.variant.length}")
        words.append(f"model.name={self.variant.heads}")
        # A constant rate: the loss at any second is that of a run of this length.
        words += ["optimizer=adamw", "optimizer.lr=1e-3"]
        words += ["optimizer.schedule=constant", "optimizer.warmup=100"]
        if dry:
            words += [f"trainer.steps={DRY_STEPS}", "trainer.val_every=3", "trainer.log_every=1"]
            return [*words, "trainer.val_windows=2", "trainer.final_windows=2"]
        words += [f"trainer.max_minutes={self.minutes:g}", "trainer.steps=1000000"]
        words += ["trainer.val_every=50", "trainer.val_windows=8"]
        return [*words, "trainer.final_windows=32"]


def campaign(dry: bool) -> list[Planned]:
    """Return all runs, those that say most first."""
    if dry:
        return [Planned(Variant("2x128", heads, 64, 2, dropout=False), 0, 1.0) for heads in ROWS]
    planned = [Planned(Variant("12x512", heads, 8192), 0, 2.0) for heads in ROWS]
    for seed in SEEDS[1:]:
        planned += [Planned(Variant("12x512", heads, 8192), seed, 2.0) for heads in ROWS]
    for seed in SEEDS:
        planned += [Planned(Variant("12x512", heads, 32_768), seed, 3.0) for heads in ROWS]
    for seed in SEEDS:
        planned += [Planned(Variant("12x1024", heads, 8192), seed, 3.0) for heads in ROWS]
    return planned


def arguments() -> argparse.Namespace:
    """Return the words of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    out = HERE.parent / "outputs" / "campaign"
    work = Path(tempfile.gettempdir()) / "rtx-campaign"
    parser.add_argument("--minutes", type=float, default=9.0, help="when to end")
    parser.add_argument("--text", type=Path, help="file to train on, 20 MB or more")
    parser.add_argument("--out", type=Path, default=out, help="folder of records")
    parser.add_argument("--records", type=Path, default=RECORDS, help="records of earlier calls")
    parser.add_argument("--work", type=Path, default=work, help="folder of runs and checkpoints")
    parser.add_argument("--dry", action="store_true", help="tiny models on a CPU")
    args = parser.parse_args()
    if args.text is None and not args.dry:
        parser.error("--text=FILE is missing: what the models are to be trained on")
    if args.text is not None and not args.text.is_file():
        parser.error(f"--text={args.text}: there is no such file")
    return args


def is_done(planned: Planned, folders: list[Path]) -> bool:
    """Tell whether one of the folders has the records of the finished run."""
    return any(recorded_state(folder, planned.name) == "done" for folder in folders)


def recorded_state(folder: Path, name: str) -> str:
    """Return the state of a run by its records in a folder; "" where there are none."""
    path = folder / f"{name}.jsonl"
    if not path.is_file():
        return ""
    for line in read_study(path, problems=[]):
        if line.status is not None:
            return line.status.state
    return ""


def state_of(run: Path) -> str:
    """Return the state that a run's folder records; "" where there is none."""
    try:
        return json.loads((run / "status.json").read_text())["state"]
    except (FileNotFoundError, json.JSONDecodeError, KeyError):
        return ""


def can_resume(run: Path) -> bool:
    """Tell whether a run was cut behind its first checkpoint."""
    return state_of(run) != "done" and (run / "checkpoints" / "last.ckpt").exists()


def train(planned: Planned, place: Place, end: float) -> str:
    """Begin a run, or go on with it, until it is done or the time is up; return its state."""
    run = place.folder / planned.name
    if state_of(run) == "done":  # and its records were not copied any more
        return "done"
    if can_resume(run):
        process = start(place, planned.name, "resume", str(run))
    else:
        shutil.rmtree(run, ignore_errors=True)
        process = start(place, planned.name, "train", *planned.words(place.text, place.dry))
    try:
        output, _ = process.communicate(timeout=max(0.0, end - time.time()))
        is_cut = False
    except subprocess.TimeoutExpired:
        output = stop(process)
        is_cut = True
    if process.returncode and not is_cut:
        print(output[-2000:])
    return state_of(run) or f"ended with {process.returncode} before it began"


def stop(process: subprocess.Popen[str]) -> str:
    """Let a run save and stop; kill one that does not; return what it printed.

    By SIGTERM: a process that a shell has started in the background ignores SIGINT.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        return process.communicate(timeout=STOP_SECONDS)[0]
    except subprocess.TimeoutExpired:
        kill(process)
        return "killed: it did not stop"


def keep(planned: Planned, place: Place, out: Path) -> None:
    """Copy the records of a run, without its weights."""
    run = str(place.folder / planned.name)
    records = out / "records"
    records.mkdir(parents=True, exist_ok=True)
    target = str(records / f"{planned.name}.jsonl")
    subprocess.run([sys.executable, str(KEEP), run, target], check=True)


def line_of(planned: Planned, state: str, run: Path) -> str:
    """Return a run's last validation as a line."""
    validations = [row for row in rows_of(run / "metrics.jsonl") if "valid/bits" in row]
    if not validations:
        return f"{planned.name:<36} {state}"
    last = validations[-1]
    return f"{planned.name:<36} {state:<12} step {last['step']:>7,}  {last['valid/bits']:.4f} bits"


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a run; the last one may be half written."""
    rows = []
    lines = path.read_text().splitlines() if path.exists() else []
    for line in lines:
        with contextlib.suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


def main() -> int:
    """Train what is not done until the time is up."""
    args = arguments()
    end_with_children()
    end = time.time() + 60 * args.minutes
    args.work.mkdir(parents=True, exist_ok=True)
    text = args.text or dry_text(args.work)
    place = Place(args.work.resolve(), str(text.resolve()), args.dry)
    folders = [args.out / "records", args.records]
    missing = [planned for planned in campaign(args.dry) if not is_done(planned, folders)]
    failed: list[str] = []
    while missing and is_time_for(missing[0], place, end):
        planned = missing[0]
        run = place.folder / planned.name
        state = train(planned, place, end - STOP_SECONDS)
        print(line_of(planned, state, run), flush=True)
        if run.exists():
            keep(planned, place, args.out)
        if state != "done" and time.time() >= end - STOP_SECONDS:
            break
        if state != "done":
            failed.append(planned.name)
        missing = missing[1:]
    not_done = [planned.name for planned in missing]
    print(f"not done: {', '.join(not_done) or 'nothing'}", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}", flush=True)
    return 1 if failed else 0


def is_time_for(planned: Planned, place: Place, end: float) -> bool:
    """Tell whether there is time for a run: all of it, or for one that was cut the next part."""
    needed = STOP_SECONDS
    if not place.dry and not can_resume(place.folder / planned.name):
        needed += 60 * planned.minutes + OTHER_SECONDS
    return time.time() + needed <= end


def dry_text(folder: Path) -> Path:
    """Return a small text of random words, written where it is missing."""
    path = folder / "words.txt"
    if path.exists():
        return path
    draw = random.Random(0)
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(2, 7))) for _ in range(500)]
    path.write_text(" ".join(draw.choices(words, k=20_000)))
    return path


if __name__ == "__main__":
    sys.exit(main())
