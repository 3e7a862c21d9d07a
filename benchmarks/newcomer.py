"""Run `rtx train` as a newcomer would, and record minutes, bits per byte and the loader's share.

`python benchmarks/newcomer.py` writes `benchmarks/results/newcomer-cpu.json`. Scores of zlib and xz
on the same text are recorded with it. The run itself is deleted. Words of the command line are
passed on to `rtx train`.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ending import end_with_children
from machine import code, machine

from rtx.evaluation.measures import baselines

RESULT = Path(__file__).parent / "results" / "newcomer-cpu.json"


def main() -> None:
    """Train, measure, print and write."""
    end_with_children()
    with tempfile.TemporaryDirectory() as scratch:
        result = train_and_measure(Path(scratch))
    print(json.dumps(result, indent=1))
    RESULT.write_text(json.dumps([result], indent=1) + "\n")


def train_and_measure(scratch: Path) -> dict[str, Any]:
    """Train with all files in `scratch`; return the row of results."""
    folders = {"RTX_OUTPUTS": str(scratch / "outputs"), "RTX_DATA": str(scratch / "data")}
    environment = {**os.environ, **folders, "WANDB_MODE": "offline"}
    command = [sys.executable, "-m", "rtx", "train", *sys.argv[1:]]
    began = time.monotonic()
    subprocess.run(command, env=environment, check=True)
    seconds = time.monotonic() - began
    run = next(scratch.glob("outputs/*/*/metrics.jsonl")).parent
    final = json.loads((run / "status.json").read_text())["final"]
    store = next(scratch.glob("data/*/store.json")).parent
    held_out = np.memmap(store / "valid.bin", dtype=np.uint8, mode="r")
    shares = loader_shares(run)
    return {
        "what": "rtx train",
        "overrides": sys.argv[1:],
        "minutes": round(seconds / 60, 2),
        "bits_per_byte": final["bits"],
        "units": final["units"],
        "baselines": baselines(held_out),
        "loader_share_median": statistics.median(shares),
        "loader_share_worst": max(shares),
        "python": platform.python_version(),
        "machine": machine("cpu", torch.get_num_threads()),
        "versions": code(),
    }


def loader_shares(run: Path) -> list[float]:
    """Return the share of time that each row of a run's metrics waited for data."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["train/data_share"] for row in rows if "train/data_share" in row]


if __name__ == "__main__":
    main()
