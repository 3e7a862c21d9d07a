"""What checkpoints cost: train as `rtx train` does, and time every one that is written beside the
steps between them.

Run `python benchmarks/checkpoints.py [overrides]`; it adds a row to
`benchmarks/results/checkpoints-cpu.json`. Few steps will do with a small trainer.checkpoint_every:
the share is worked out for the default one.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from machine import code, machine

from rtx.cli.main import main as rtx
from rtx.settings.compose import compose
from rtx.settings.schema import TrainerConfig
from rtx.training.callbacks.checkpoints import Checkpoints


def timed(seconds: list[float]) -> None:
    """Let every checkpoint of a fit leave its seconds."""
    save = Checkpoints.save

    def watched(last: Checkpoints, *arguments: Any) -> None:
        began = time.perf_counter()
        save(last, *arguments)
        seconds.append(time.perf_counter() - began)

    Checkpoints.save = watched  # type: ignore[method-assign]


def main() -> None:
    """Train, measure, print and write."""
    overrides = sys.argv[1:]
    config = compose(overrides)
    every = TrainerConfig().checkpoint_every
    seconds: list[float] = []
    timed(seconds)
    with tempfile.TemporaryDirectory() as scratch:
        os.environ |= {"RTX_RUN": f"{scratch}/run", "RTX_DATA": f"{scratch}/data"}
        if rtx(["train", "logger=jsonl", *overrides]) != 0:
            raise SystemExit(1)
        rows = [
            json.loads(line)
            for line in Path(scratch, "run", "metrics.jsonl").read_text().splitlines()
        ]
        size = Path(scratch, "run", "checkpoints", "last.ckpt").stat().st_size
    paces = [row["train/tokens_per_second"] for row in rows if "train/bits" in row]
    step = config.trainer.batch_size * config.data.length / statistics.median(paces)
    result = {
        "what": "checkpoints",
        "overrides": overrides,
        "written": len(seconds),
        "bytes": size,
        "ms": round(1e3 * statistics.median(seconds), 1),
        "worst_ms": round(1e3 * max(seconds), 1),
        "step_ms": round(1e3 * step, 1),
        "every": every,
        "share": round(statistics.median(seconds) / (every * step), 6),
        "machine": machine("cpu", torch.get_num_threads()),
        "versions": code(),
    }
    print(json.dumps(result, indent=1))
    path = Path(__file__).parent / "results" / "checkpoints-cpu.json"
    kept = (
        [row for row in json.loads(path.read_text()) if row["overrides"] != overrides]
        if path.exists()
        else []
    )
    path.write_text(json.dumps([*kept, result], indent=1) + "\n")


if __name__ == "__main__":
    main()
