"""Does a head find what is out of a local head's reach? Associative recall, every pattern over
several seeds.

Run `python benchmarks/recall.py`; it runs `rtx train experiment=recall` for each pattern and seed,
one after the other, and writes `benchmarks/results/recall-<device>.json`: a row for each run with
the accuracy on the held-out answers every 100 steps. A run that is already in the file is not
repeated (`--anew` forgets it). Longer sequences, with the pairs out of the reach of a window of
256: `--length 2048 --window 256`, `--length 8192 --window 256`. Whatever stands behind `--` is set
on top: `python benchmarks/recall.py --patterns full -- optimizer.lr=0.001`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ending import end_with_children
from machine import code, machine
from omegaconf import OmegaConf

PATTERNS = {
    "routing_topk": (
        "routing=topk",
        "routing.decay=0.99",
        "routing.logit_scale=sqrt_d",
        "routing.attend_self=false",
    ),
    "routing_causal": ("routing=causal",),
    "blocks": ("routing=blocks", "routing.block=4"),
    **{name: (f"routing={name}",) for name in ("exact", "indexer", "random")},
    "full": ("model.base=full", "routing.heads=0"),
    "local": ("routing.heads=0",),
}
"""What each pattern changes of experiment=recall."""

KEY = ("pattern", "seed", "N", "W", "C", "steps", "overrides")
"""What tells one run of the file from another."""


def arguments() -> argparse.Namespace:
    """Return what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--patterns", nargs="+", choices=PATTERNS, default=list(PATTERNS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--window", type=int, default=16)
    parser.add_argument("--clusters", type=int, help="default: length / window")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--hardware", default="cpu", choices=("cpu", "gpu"))
    parser.add_argument(
        "--anew", action="store_true", help="forget the runs of these patterns that the file holds"
    )
    parser.add_argument("overrides", nargs="*", help="further keys for rtx train")
    args = parser.parse_args()
    args.clusters = args.clusters or math.ceil(args.length / args.window)
    return args


def command(args: argparse.Namespace, pattern: str, seed: int) -> list[str]:
    """Return the overrides of one run."""
    return [
        "experiment=recall",
        *PATTERNS[pattern],
        *(f"data.length={args.length}", f"model.window={args.window}"),
        f"routing.window={args.window}",
        *(
            []
            if pattern in ("blocks", "exact", "indexer")
            else [f"routing.clusters={args.clusters}"]
        ),
        *(f"trainer.steps={args.steps}", f"seed={seed}", "logger=jsonl"),
        *(
            f"hardware={args.hardware}",
            "hardware.precision=fp32",
            f"hardware.threads={args.threads}",
        ),
        *args.overrides,
    ]


def train(args: argparse.Namespace, pattern: str, seed: int) -> dict[str, Any]:
    """Train one run, throw it away, and return its row."""
    with tempfile.TemporaryDirectory() as scratch:
        env = os.environ | {"RTX_RUN": f"{scratch}/run", "RTX_DATA": f"{scratch}/data"}
        start = time.monotonic()
        subprocess.run(
            [sys.executable, "-m", "rtx", "train", *command(args, pattern, seed)],
            env=env,
            check=True,
        )
        seconds = time.monotonic() - start
        rows = [
            json.loads(line)
            for line in Path(scratch, "run", "metrics.jsonl").read_text().splitlines()
        ]
        config = OmegaConf.to_container(OmegaConf.load(Path(scratch, "run", "config.yaml")))
    assert isinstance(config, dict)
    scores = [row for row in rows if "valid/bits" in row]
    accuracy = {str(row["step"]): round(row["valid/accuracy"], 4) for row in scores}
    settings = {group: config[group] for group in ("data", "model", "routing", "optimizer")}
    return {
        "what": "recall",
        "pattern": pattern,
        "seed": seed,
        "N": args.length,
        "W": args.window,
        "C": args.clusters,
        "steps": args.steps,
        "batch_size": config["trainer"]["batch_size"],
        "accuracy": accuracy,
        "final": rows[-1]["valid/final_accuracy"],
        "steps_to_99": next((row["step"] for row in scores if row["valid/accuracy"] >= 0.99), None),
        "chance": 1 / config["data"]["values"],
        "answers": rows[-1]["valid/final_units"],
        "seconds": round(seconds, 1),
        "overrides": args.overrides,
        "settings": settings,
        "machine": machine(args.hardware, args.threads),
        "versions": code(),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Return a line for each run, with when it was measured."""
    lines = [
        f"{'pattern':<16}{'N':>6}{'W':>5}{'C':>4}{'seed':>6}"
        f"{'final':>9}{'steps to 99%':>14}{'seconds':>9}  measured"
    ]
    for row in rows:
        reached = row["steps_to_99"] or "-"
        sizes = f"{row['N']:>6}{row['W']:>5}{row['C']:>4}{row['seed']:>6}"
        lines.append(
            f"{row['pattern']:<16}{sizes}{row['final']:>9.2%}{reached:>14}{row['seconds']:>9}  "
            f"{row['measured']}"
        )
    return "\n".join(lines)


def main() -> None:
    """Train what the file does not hold yet, keeping it after every run, and print what was asked
    for.
    """
    args = arguments()
    end_with_children()
    path = Path(__file__).parent / "results" / f"recall-{args.hardware}.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    asked: list[dict[str, Any]] = []
    for seed in args.seeds:
        for pattern in args.patterns:
            key = [
                pattern,
                seed,
                args.length,
                args.window,
                args.clusters,
                args.steps,
                args.overrides,
            ]
            known = [row for row in rows if [row[name] for name in KEY] == key]
            if known and not args.anew:
                asked += [row | {"measured": "before"} for row in known]
                continue
            new = train(args, pattern, seed)
            rows = [*(row for row in rows if row not in known), new]
            asked.append(new | {"measured": "now"})
            path.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(asked))


if __name__ == "__main__":
    main()
