"""Run `rtx train` as a newcomer would and keep its figures: minutes, bits/byte and baselines, the loader's share.

Run `python benchmarks/newcomer.py`; it writes `benchmarks/results/newcomer-cpu.json`. The run itself is thrown away.
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

from rtx.evaluation.protocols import baselines


def last_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's metrics."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def main() -> None:
    """Train, measure, print and write."""
    end_with_children()
    with tempfile.TemporaryDirectory() as scratch:
        env = os.environ | {
            "RTX_OUTPUTS": f"{scratch}/outputs",
            "RTX_DATA": f"{scratch}/data",
            "WANDB_MODE": "offline",
        }
        start = time.monotonic()
        subprocess.run([sys.executable, "-m", "rtx", "train", *sys.argv[1:]], env=env, check=True)
        seconds = time.monotonic() - start
        run = next(Path(scratch, "outputs").glob("*/*/metrics.jsonl")).parent
        rows = last_rows(run / "metrics.jsonl")
        status = json.loads((run / "status.json").read_text())
        store = next(Path(scratch, "data").glob("*/store.json")).parent
        others = baselines(np.memmap(store / "valid.bin", dtype=np.uint8, mode="r"))
    shares = [row["train/data_share"] for row in rows if "train/data_share" in row]
    result = {
        "what": "rtx train",
        "overrides": sys.argv[1:],
        "minutes": round(seconds / 60, 2),
        "bits_per_byte": status["final"]["bits"],
        "units": status["final"]["units"],
        "baselines": others,
        "loader_share_median": statistics.median(shares),
        "loader_share_worst": max(shares),
        "python": platform.python_version(),
        "machine": machine("cpu", torch.get_num_threads()),
        "versions": code(),
    }
    print(json.dumps(result, indent=1))
    path = Path(__file__).parent / "results" / "newcomer-cpu.json"
    path.write_text(json.dumps([result], indent=1) + "\n")


if __name__ == "__main__":
    main()
