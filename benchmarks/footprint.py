"""Measure the peak memory of real training steps, beside what `rtx plan` predicts for the same
words.

Run `python benchmarks/footprint.py`; it writes `benchmarks/results/footprint-<device>.json` and
prints the same rows. Each row is a process of its own that imports what `rtx train` imports, and
then takes a few steps as `steps.py` does: forward, backward, clipping, optimizer, centroids. On a
CPU its peak is the largest resident size of the process less what it was after the imports; on a
GPU it is what torch's allocator held at the most (as `rtx train` says). Bytes are those of Python's
standard library, read from disk; other units are drawn at random.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from ending import end_with_children

DROPOUT = ("model.dropout=0.1", "model.attention_dropout=0.1", "model.ffn_dropout=0.1")
NO_ROUTING = ("routing.heads=0", "routing.layers=0")
SIZES = (
    *("model=tiny", "model.layers=4", "model.hidden=256", "model.heads=4", "model.ffn_hidden=1024"),
    *("model.window=256", "data.length=4096", "trainer.batch_size=4"),
)
SMALL = (*SIZES, "routing=causal", "routing.heads=2", "routing.layers=4", "routing.window=256")
PAPER = (
    *(
        "model=rt12",
        "model.layers=4",
        "model.hidden=256",
        "model.heads=4",
        "model.ffn_hidden=768",
        "routing.layers=4",
    ),
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
    "local, rotary": (*SIZES, *NO_ROUTING),
    "full, rotary": (*SIZES, *NO_ROUTING, "model.base=full"),
    "causal routing, rotary": SMALL,
    "top-w routing, Shaw, GEGLU, dropout": PAPER,
    "the same, 3 layers, recomputed, batch of 4": (
        *(
            *PAPER,
            "model.layers=3",
            "routing.layers=3",
            "model.recompute=true",
            "trainer.batch_size=4",
        ),
    ),
    "98,000 subwords, Adafactor": (
        *(
            "data=pg19",
            "model=rt22",
            "model.layers=1",
            "routing.layers=1",
            "model.hidden=640",
            "model.ffn_hidden=1280",
        ),
        *("routing=topk", "data.length=1024", "trainer.batch_size=1", "optimizer=adafactor"),
    ),
    "the same, Adam": (
        *(
            "data=pg19",
            "model=rt22",
            "model.layers=1",
            "routing.layers=1",
            "model.hidden=640",
            "model.ffn_hidden=1280",
        ),
        *("routing=topk", "data.length=1024", "trainer.batch_size=1", "optimizer=adam"),
    ),
    "images, 2 micro-batches of 8, dropout": (
        *(*IMAGES, "model.layers=4", "routing.layers=2", "trainer.micro_batch_size=8"),
    ),
    "images, 20 layers, one at a time": (
        *(
            *IMAGES,
            "model.layers=20",
            "routing.layers=20",
            "trainer.batch_size=2",
            "trainer.micro_batch_size=1",
        ),
    ),
    "local and full heads, bfloat16, dropout": (
        *(
            *SIZES,
            *NO_ROUTING,
            "model.base=local+full",
            "data.length=2048",
            "hardware.precision=bf16",
            *DROPOUT,
        ),
        *("trainer.batch_size=12",),
    ),
}
"""What is measured: overrides of `rtx train`."""


def drawn_store(vocabulary: int) -> Any:
    """Return data to train on: bytes of the standard library, or where units are no bytes ids drawn
    at random.
    """
    from rtx.data.text import library_files

    text = np.frombuffer(
        b"".join(path.read_bytes() for path in library_files()[:200]), dtype=np.uint8
    )
    if vocabulary != 256:
        text = np.random.default_rng(0).integers(0, vocabulary, 1 << 20)
    return SimpleNamespace(vocabulary=vocabulary, answers=None, image=None, split=lambda name: text)


def measure(overrides: list[str], steps: int) -> dict[str, Any]:
    """Take the steps in this process; returns the peak, what the imports alone took, and the
    prediction, in bytes.
    """
    import torch
    from steps import training_step

    import rtx.commands.train
    from rtx.analysis.cost import cost
    from rtx.analysis.footprint import footprint
    from rtx.data.catalog import vocabulary_size
    from rtx.progress import peak_memory
    from rtx.settings.compose import compose
    from rtx.training.hardware import resolve_hardware
    from rtx.training.inference import prepare_device

    assert rtx.commands.train
    imports = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    config = compose(overrides)
    units = vocabulary_size(config.data)
    device = prepare_device(config)
    total = cost(config, units)
    parts = footprint(config, total, resolve_hardware(config).micro_batch_size, units)
    step, _ = training_step(config, drawn_store(units), device)
    began = time.perf_counter()
    losses = [float(step()) for _ in range(steps)]
    assert all(np.isfinite(losses)), losses
    gpu = device.type == "cuda"
    return {
        "N": config.data.length,
        "parameters": total.parameters,
        "device": "gpu" if gpu else "cpu",
        "threads": torch.get_num_threads(),
        "imports_bytes": imports,
        "peak_bytes": peak_memory() - (0 if gpu else imports),
        "planned_bytes": round(sum(parts.values())),
        "planned": {name: round(size) for name, size in parts.items()},
        "step_ms": round(1e3 * (time.perf_counter() - began) / steps),
    }


def row(name: str, overrides: tuple[str, ...], steps: int) -> dict[str, Any]:
    """Measure one row in a process of its own."""
    from machine import code, machine

    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}  # as rtx sets it
    command = [sys.executable, __file__, "--steps", str(steps), "--one", json.dumps(overrides)]
    answer = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, check=True, text=True
    ).stdout
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument(
        "--only", default="", help="rows whose name holds this text; nothing is written"
    )
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(json.loads(args.one), args.steps)))
        return
    end_with_children()
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
