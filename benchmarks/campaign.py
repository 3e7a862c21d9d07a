"""Train models beside full attention on one GPU, a few minutes at a time: `python benchmarks/campaign.py --text FILE`.

A list of runs in order of worth (`campaign()`), each an ordinary `rtx train` in a folder of its own. The command
begins with the first run that is not done, and ends when --minutes are over: the run that is then training saves and
stops, and the next call goes on with it. A run that is done has its records, without weights, in OUT/records; a call
with the same --out, or with these records in --records, leaves it out. `rtx report OUT/records` compares the rows.

On a machine that was lent afresh the checkpoints in --work are gone: there a run that was not done begins anew, and one
for which the time that is left does not suffice is not begun.

--dry trains tiny models for some steps on a CPU. Packages: see gpu.py.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from ending import end_with_children
from gpu_sections.runs import Place, kill, start
from gpu_sections.whole_steps import Variant

HERE = Path(__file__).resolve().parent
RECORDS = HERE.parent / "docs" / "results" / "records" / "long_text_gpu"
KEEP = HERE.parent / "docs" / "results" / "keep.py"
ROWS = ("full", "causal", "probed", "local")
SEEDS = range(5)
AROUND = 75.0
"""Seconds that a run takes beside its training: start, compilation, validations, closing score."""
TO_STOP = 40.0
"""Seconds that a run has to save and stop when the time is up."""


class Planned(NamedTuple):
    """A run of the list."""

    variant: Variant
    seed: int
    minutes: float
    """Of training."""

    @property
    def name(self) -> str:
        return f"{self.variant.base}-{self.variant.length}-{self.variant.heads}-seed{self.seed}"

    def words(self, dry: bool) -> list[str]:
        """Return the words behind `rtx train`."""
        words = [*self.variant.words("cpu" if dry else "gpu"), f"seed={self.seed}", "logger=jsonl"]
        words += [f"name={self.variant.base}-{self.variant.length}", f"model.name={self.variant.heads}"]
        # A constant rate: the loss at any second is that of a run of this length.
        words += ["optimizer=adamw", "optimizer.lr=1e-3", "optimizer.schedule=constant", "optimizer.warmup=100"]
        if dry:
            return [
                *words,
                "trainer.steps=6",
                "trainer.val_every=3",
                "trainer.val_windows=2",
                "trainer.final_windows=2",
            ]
        words += [f"trainer.max_minutes={self.minutes:g}", "trainer.steps=1000000"]
        return [*words, "trainer.val_every=50", "trainer.val_windows=8", "trainer.final_windows=32"]


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0, help="when to end")
    parser.add_argument("--text", type=Path, help="file that models are trained on, 20 MB or more")
    parser.add_argument("--out", type=Path, default=HERE.parent / "outputs" / "campaign", help="folder of records")
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder of earlier calls' records")
    work_folder = Path(tempfile.gettempdir()) / "rtx-campaign"
    parser.add_argument("--work", type=Path, default=work_folder, help="folder of runs and their checkpoints")
    parser.add_argument("--dry", action="store_true", help="tiny models on a CPU")
    args = parser.parse_args()
    if args.text is None and not args.dry:
        parser.error("--text=FILE is missing: what the models are to be trained on")
    if args.text is not None and not args.text.is_file():
        parser.error(f"--text={args.text}: there is no such file")
    return args


def is_done(planned: Planned, folders: list[Path]) -> bool:
    """Tell whether one of the folders has the records of the finished run."""
    return any(state_of(folder / planned.name) == "done" for folder in folders)


def state_of(run: Path) -> str:
    """Return the state that a run's folder records; "" where there is none."""
    try:
        return json.loads((run / "status.json").read_text())["state"]
    except (FileNotFoundError, json.JSONDecodeError, KeyError):
        return ""


def train(planned: Planned, place: Place, end: float) -> str:
    """Begin a run, or go on with it, until it is through or the time is up; return its state."""
    if state_of(place.folder / planned.name):
        process = start(place, planned.name, "resume", str(place.folder / planned.name))
    else:
        process = start(place, planned.name, "train", *planned.words(place.dry))
    try:
        output, _ = process.communicate(timeout=max(1.0, end - time.time()))
    except subprocess.TimeoutExpired:
        output = stopped(process)
    state = state_of(place.folder / planned.name)
    if process.returncode and state != "interrupted":
        print(output[-2000:])
    return state or f"ended with {process.returncode} before it began"


def stopped(process: subprocess.Popen[str]) -> str:
    """Let a run save and stop, as Ctrl-C does; kill what does not; return what it printed."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
    try:
        return process.communicate(timeout=TO_STOP)[0]
    except subprocess.TimeoutExpired:
        kill(process)
        return "killed: it did not stop"


def keep(planned: Planned, place: Place, out: Path) -> None:
    """Copy the records of a run, without its weights."""
    run = place.folder / planned.name
    subprocess.run([sys.executable, str(KEEP), str(run), str(out / "records" / planned.name)], check=True)


def line_of(planned: Planned, state: str, run: Path) -> str:
    """Return a run's last validation as a line."""
    rows = []
    if (run / "metrics.jsonl").exists():
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    scored = [row for row in rows if row["kind"] == "valid"]
    if not scored:
        return f"{planned.name:<36} {state}"
    last = scored[-1]
    return f"{planned.name:<36} {state:<12} step {last['step']:>7,}  {last['val_bits']:.4f} bits"


def main() -> int:
    """Train what is not done until the time is up."""
    args = arguments()
    end_with_children()
    end = time.time() + 60 * args.minutes
    args.work.mkdir(parents=True, exist_ok=True)
    text = args.text or dry_text(args.work)
    place = Place(args.work.resolve(), str(text.resolve()), args.dry)
    missing = [one for one in campaign(args.dry) if not is_done(one, [args.out / "records", args.records])]
    failed = 0
    while missing:
        planned = missing[0]
        need = 0.0 if args.dry else 60 * planned.minutes + AROUND
        begun = state_of(place.folder / planned.name) == "interrupted"
        if time.time() + need + TO_STOP > end and not begun:
            break
        state = train(planned, place, end - TO_STOP)
        print(line_of(planned, state, place.folder / planned.name), flush=True)
        if (place.folder / planned.name).exists():
            keep(planned, place, args.out)
        if state == "interrupted":
            break
        failed += state != "done"
        missing = missing[1:]
    print(f"not reached: {', '.join(one.name for one in missing) or 'nothing'}", flush=True)
    return 1 if failed else 0


def dry_text(folder: Path) -> Path:
    """Write a small text of random words."""
    path = folder / "words.txt"
    draw = random.Random(0)
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(2, 7))) for _ in range(500)]
    path.write_text(" ".join(draw.choices(words, k=20_000)))
    return path


if __name__ == "__main__":
    sys.exit(main())
