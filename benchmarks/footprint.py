"""Measure the peak memory of real training steps, beside what `rtx plan` predicts for the same words.

Run `python benchmarks/footprint.py`; it writes `benchmarks/results/footprint-<device>.json` and prints the same rows.
Each row is a process of its own that imports what `rtx train` imports, and then takes a few steps with the same Trainer
and module: forward, backward, clipping, optimizer, centroids. On a CPU its peak is the largest resident size of the
process less what it was after the imports; on a GPU it is what torch's allocator held at the most (as `rtx train`
says). Bytes are those of Python's standard library, read from disk; other units are drawn at random.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

DROPOUT = ("model.dropout=0.1", "model.attention_dropout=0.1", "model.ffn_dropout=0.1")
NO_ROUTING = ("routing.heads=0", "routing.layers=0")
SMALL = (
    *("model=tiny", "model.layers=4", "model.hidden=256", "model.heads=4", "model.ffn_hidden=1024", "model.window=256"),
    *("routing.heads=2", "routing.layers=4", "routing.window=256", "data.length=4096", "trainer.batch_size=4"),
)
PAPER = (
    *("model=rt12", "model.layers=4", "model.hidden=256", "model.heads=4", "model.ffn_hidden=768", "routing.layers=4"),
    *("routing.heads=2", "routing=topk", "trainer.batch_size=2"),
)
IMAGES = (
    *(
        "data=cifar10",
        "model=rt12-cifar10",
        "routing=topk",
        "model.hidden=256",
        "model.heads=4",
        "model.ffn_hidden=512",
    ),
    *("routing.heads=2", "trainer.batch_size=16"),
)
ROWS: dict[str, tuple[str, ...]] = {
    "local, rotary": (*SMALL, *NO_ROUTING),
    "full, rotary": (*SMALL, *NO_ROUTING, "model.base=full"),
    "causal routing, rotary": SMALL,
    "top-w routing, Shaw, GEGLU, dropout": PAPER,
    "the same, 3 layers, recomputed, batch of 4": (
        *(*PAPER, "model.layers=3", "routing.layers=3", "model.recompute=true", "trainer.batch_size=4"),
    ),
    "98,000 subwords, Adafactor": (
        *("data=pg19", "model=rt22", "model.layers=1", "routing.layers=1", "model.hidden=640", "model.ffn_hidden=1280"),
        *("routing=topk", "data.length=1024", "trainer.batch_size=1", "optimizer=adafactor"),
    ),
    "the same, Adam": (
        *("data=pg19", "model=rt22", "model.layers=1", "routing.layers=1", "model.hidden=640", "model.ffn_hidden=1280"),
        *("routing=topk", "data.length=1024", "trainer.batch_size=1", "optimizer=adam"),
    ),
    "images, 2 micro-batches of 8, dropout": (
        *(*IMAGES, "model.layers=4", "routing.layers=2", "trainer.micro_batch_size=8"),
    ),
    "images, 20 layers, one at a time": (
        *(*IMAGES, "model.layers=20", "routing.layers=20", "trainer.batch_size=2", "trainer.micro_batch_size=1"),
    ),
    "local and full heads, bfloat16, dropout": (
        *(*SMALL, *NO_ROUTING, "model.base=local+full", "data.length=2048", "hardware.precision=bf16", *DROPOUT),
        *("trainer.batch_size=12",),
    ),
}
"""What is measured: overrides of `rtx train`."""


def sequences(vocabulary: int, length: int) -> Callable[[int, int], np.ndarray]:
    """Return what makes training sequences: bytes of the standard library, or where units are no bytes random ids."""
    from rtx.data.files import library_files

    text = np.frombuffer(b"".join(file.path.read_bytes() for file in library_files()[:200]), dtype=np.uint8)

    def make(seed: int, number: int) -> np.ndarray:
        generator = np.random.default_rng((seed, number))
        if vocabulary != 256:
            return generator.integers(0, vocabulary, length)
        first = int(generator.integers(0, len(text) - length))
        return text[first : first + length]

    return make


class Door:
    """Asks the process of a row for a few steps, and keeps its answer; as the pipe of `rtx bench steps` does."""

    def __init__(self, steps: int) -> None:
        self.left = [steps]
        self.answer: Any = None

    def recv(self) -> int:
        """Ask for the steps, once."""
        if not self.left:
            raise EOFError
        return self.left.pop()

    def send(self, answer: Any) -> None:
        """Take the answer."""
        self.answer = answer


def measure(overrides: list[str], steps: int) -> dict[str, Any]:
    """Take the steps in this process; returns the peak, what the imports alone took, and the prediction, in bytes."""
    import rtx.commands.train
    from rtx.analysis.cost import cost
    from rtx.analysis.footprint import footprint
    from rtx.commands.plan import vocabulary
    from rtx.compose import compose
    from rtx.training.hardware import resolve_hardware
    from rtx.training.stepping import Work, take_turns

    assert rtx.commands.train
    imports = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    config = compose(overrides)
    hardware = resolve_hardware(config)
    units = vocabulary(config.data)
    parts = footprint(config, cost(config, units), hardware.micro_batch_size, units)
    door = Door(steps)
    with contextlib.suppress(EOFError):
        take_turns(door, Work(config, units, None, sequences(units, config.data.length)))  # type: ignore[arg-type]
    gpu = hardware.accelerator == "gpu"
    return {
        "N": config.data.length,
        "parameters": door.answer.parameters,
        "device": "gpu" if gpu else "cpu",
        "threads": door.answer.threads,
        "imports_bytes": imports,
        "peak_bytes": door.answer.peak_bytes - (0 if gpu else imports),
        "planned_bytes": round(sum(parts.values())),
        "planned": {name: round(size) for name, size in parts.items()},
        "step_ms": round(door.answer.milliseconds),
    }


def row(name: str, overrides: tuple[str, ...], steps: int) -> dict[str, Any]:
    """Measure one row in a process of its own."""
    from machine import code, machine

    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}  # as rtx sets it
    command = [sys.executable, __file__, "--steps", str(steps), "--one", json.dumps(overrides)]
    answer = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True).stdout
    found = json.loads(answer.splitlines()[-1])
    return {
        "what": "peak memory of training steps",
        "pattern": name,
        "overrides": " ".join(overrides),
        **found,
        "ratio": round(found["planned_bytes"] / found["peak_bytes"], 3),
        "machine": machine(found["device"], found["threads"]),
        "versions": code(),
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--only", default="", help="rows whose name holds this text; nothing is written")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(json.loads(args.one), args.steps)))
        return
    print(f"{'row':<46}{'peak GiB':>10}{'planned':>10}{'ratio':>8}")
    results = []
    for name, overrides in ROWS.items():
        if args.only not in name:
            continue
        results.append(row(name, overrides, args.steps))
        peak, planned = (results[-1][key] / 2**30 for key in ("peak_bytes", "planned_bytes"))
        print(f"{name:<46}{peak:>10.2f}{planned:>10.2f}{results[-1]['ratio']:>8.2f}", flush=True)
    if not args.only:
        path = Path(__file__).parent / "results" / f"footprint-{results[0]['device']}.json"
        path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
