"""What lowers the peak memory of training: each switch on its own, by the run's own record of its
largest size.

Run `python benchmarks/peak.py`; it writes `benchmarks/results/peak-cpu.json`. Every row is `rtx
train` in processes of its own; what the imports alone take is measured the same way and told apart.
Two models: one whose activations and logits outweigh all else, and one whose weights do (for
hardware=fsdp, two processes against hardware=ddp with two).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from ending import end_with_children
from machine import code, machine

STEPS_TAKEN = 3
"""Steps after which the peak is read: by then the optimizer has its state."""

WORDS = 20_000
"""Different words of the text: as many logits at each position."""

STEPS = (
    *("data=text", "data.tokenizer=words", "data.processes=1", "optimizer=adamw", "logger=jsonl"),
    *("optimizer.warmup=1", "trainer.log_every=1", "hardware.threads=1"),
)
LONG = (
    *(
        "hardware=cpu",
        "data.length=2048",
        "model.layers=4",
        "model.hidden=256",
        "model.heads=4",
        "model.window=256",
    ),
    *("model.ffn_hidden=2048", "routing.window=256", "trainer.batch_size=1"),
)
HEAVY = (
    *("data.length=256", "model.layers=8", "model.hidden=512", "model.heads=8", "model.window=64"),
    *("model.ffn_hidden=2048", "routing.window=64", "trainer.batch_size=2", "hardware.devices=2"),
)
AT_ONCE = "import rtx.model.likelihood as room; room.MAX_LOGITS = 1 << 62; "
"""Takes away the parts that the loss is always worked out in where logits are many."""

ROWS: dict[str, tuple[str, tuple[str, ...]]] = {
    "long: loss at once": (AT_ONCE, LONG),
    "long: loss in parts (always so)": ("", LONG),
    "long: model.ffn_parts=8": ("", (*LONG, "model.ffn_parts=8")),
    "long: model.recompute=true": ("", (*LONG, "model.recompute=true")),
    "long: model.recompute=true model.ffn_parts=8": (
        "",
        (*LONG, "model.recompute=true", "model.ffn_parts=8"),
    ),
    "heavy: hardware=ddp, 2 processes": ("", ("hardware=ddp", *HEAVY)),
    "heavy: hardware=fsdp, 2 processes": ("", ("hardware=fsdp", *HEAVY)),
}


def peak(scratch: Path, name: str, before: str, overrides: tuple[str, ...]) -> int:
    """Train a few steps, and return the largest resident size of the first process so far."""
    run = scratch / name.translate(str.maketrans(" :=,()", "------"))
    command = f"{before}import sys; from rtx.cli.main import main; sys.exit(main())"
    script = scratch / "train.py"  # a file, which processes that Lightning starts are run from, too
    script.write_text(command.replace("; ", "\n"))
    environment = os.environ | {
        "RTX_RUN": str(run),
        "RTX_DATA": str(scratch / "data"),
        "OMP_NUM_THREADS": "1",
    }
    words = ["train", f"data.path={scratch / 'words.txt'}", *STEPS, *overrides]
    with subprocess.Popen(
        [sys.executable, script, *words], env=environment, stdout=subprocess.DEVNULL
    ) as process:
        while len(rows := taken(run / "metrics.jsonl")) < STEPS_TAKEN:
            if process.poll() is not None:
                raise SystemExit(f"{name}: ended with {process.returncode}")
            time.sleep(0.2)
        process.kill()
    return rows[STEPS_TAKEN - 1]["train/memory_bytes"]


def taken(metrics: Path) -> list[dict[str, Any]]:
    """Return the rows of the steps that a run has told of."""
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return [row for row in map(json.loads, lines) if "train/bits" in row]


def imports() -> int:
    """Return the largest resident size of a process that has imported what a run imports."""
    command = (
        "import rtx.commands.train; from rtx.progress import peak_memory; print(peak_memory())"
    )
    return int(
        subprocess.run(
            [sys.executable, "-c", command], capture_output=True, check=True, text=True
        ).stdout
    )


def main() -> None:
    """Measure, print and write."""
    end_with_children()
    alone = imports()
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        draws = np.random.default_rng(0).integers(0, WORDS, 400_000)
        text = " ".join(f"w{number}" for number in [*range(WORDS), *draws])
        Path(scratch, "words.txt").write_text(text)
        for name, (before, overrides) in ROWS.items():
            above = peak(Path(scratch), name, before, overrides) - alone
            row: dict[str, Any] = {
                "what": name,
                "overrides": [*overrides],
                "bytes_above_imports": above,
            }
            results.append({**row, "machine": machine("cpu", 1), "versions": code()})
            print(f"{above / 2**20:8,.0f} MiB  {name}", flush=True)
    path = Path(__file__).parent / "results" / "peak-cpu.json"
    path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
