"""What is the future worth? The price of top-w's leak in bits per byte, over seeds, with random
members as control.

Run `python benchmarks/audit.py`. It trains small models on the Python standard library with `rtx
train`, for each selection and seed, lets `rtx audit` price the runs of a selection on the same
positions of the same windows, and writes `benchmarks/results/audit-<device>.json`: a row for each
run, and one for each selection with the means over its seeds and their standard errors. Differences
are those of `rtx audit`, in bits per byte: `leak_gives` is prefix rerun minus teacher-forced,
`competing_costs` streaming minus prefix rerun, `together` streaming minus teacher-forced. Runs are
kept in `--folder`, and a run that is done there is not trained again. Whatever stands behind `--`
is set on top of the configuration: `python benchmarks/audit.py --seeds 0 -- model.layers=2`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from ending import end_with_children
from machine import code, machine
from omegaconf import OmegaConf

from rtx.analysis.loss_by_position import DIFFERENCES, estimate
from rtx.runs.status import read_status

SELECTIONS = ("topk", "causal", "random")


def arguments() -> argparse.Namespace:
    """Return what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--selections", nargs="+", choices=SELECTIONS, default=list(SELECTIONS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--windows", type=int, default=64, help="windows that are priced")
    parser.add_argument(
        "--positions", type=int, default=32, help="positions scored in each of them"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--hardware", default="cpu", choices=("cpu", "gpu"))
    parser.add_argument("--folder", type=Path, default=Path("outputs/benchmark-audit"))
    parser.add_argument("overrides", nargs="*", help="further keys for rtx train")
    return parser.parse_args()


def train(args: argparse.Namespace, selection: str, seed: int) -> Path:
    """Train a run, unless it is done already, and return its folder."""
    run = args.folder / f"{selection}-{seed}"
    status = read_status(run)
    if status and status.state == "done":
        return run
    overrides = [
        *(
            "data=stdlib",
            "experiment=tiny",
            f"data.length={args.length}",
            f"routing={selection}",
            f"seed={seed}",
        ),
        *("routing.keys=shared", "routing.key_shift=0", "routing.rotary=true"),
        *(
            f"optimizer.steps={args.steps}",
            f"trainer.batch_size={args.batch_size}",
            "trainer.val_every=100",
        ),
        *(
            "logger=jsonl",
            f"hardware={args.hardware}",
            "hardware.precision=fp32",
            f"hardware.threads={args.threads}",
        ),
        *args.overrides,
    ]
    environment = os.environ | {"RTX_RUN": str(run)}
    subprocess.run([sys.executable, "-m", "rtx", "train", *overrides], env=environment, check=True)
    return run


def audit(args: argparse.Namespace, runs: list[Path]) -> list[dict[str, Any]]:
    """Price runs that differ by their seed alone, unless they are, and return what `rtx audit`
    writes beside each.
    """
    results = [run / "audit.json" for run in runs]
    if all(path.exists() for path in results):
        found = [json.loads(path.read_text()) for path in results]
        if all(is_wanted(result, args) for result in found):
            return found
    overrides = [
        *(f"windows={args.windows}", f"positions={args.positions}", "checkpoint=last"),
        *("prefixes=4", "sequences=1"),  # the price is what is asked for
    ]
    subprocess.run([sys.executable, "-m", "rtx", "audit", *map(str, runs), *overrides], check=True)
    return [json.loads(path.read_text()) for path in results]


def is_wanted(result: dict[str, Any], args: argparse.Namespace) -> bool:
    """Tell whether an audit was of as many windows and positions."""
    return (
        result["price"]["windows"] == args.windows
        and len(result["price"]["positions"][0]) == args.positions
    )


def rows_of(args: argparse.Namespace, selection: str, runs: list[Path]) -> list[dict[str, Any]]:
    """Return a row for each run of a selection, and behind them the row over its seeds."""
    results = audit(args, runs)
    config = OmegaConf.to_container(OmegaConf.load(runs[0] / "config.yaml"))
    assert isinstance(config, dict)
    common = {
        "pattern": "random" if selection == "random" else f"routing_{selection}",
        **{"N": args.length, "W": config["routing"]["window"], "C": config["routing"]["clusters"]},
        **{"steps": args.steps, "batch_size": args.batch_size},
        **{"windows": args.windows, "positions": args.positions, "overrides": args.overrides},
        "settings": {group: config[group] for group in ("data", "model", "routing", "optimizer")},
        "machine": machine(args.hardware, args.threads),
        "versions": code(),
    }
    rows = []
    for run, result in zip(runs, results, strict=True):
        status = read_status(run)
        assert status is not None and status.final is not None
        priced = {name: result["price"][name] for name in ("bits", *DIFFERENCES)}
        rows.append(
            {
                "what": "audit",
                "seed": result["seed"],
                "final_bits": status.final.bits,
                **priced,
                **common,
            }
        )
    if len(runs) > 1:
        means = {}
        for name in DIFFERENCES:
            bits, error = estimate(np.array([result["price"][name]["bits"] for result in results]))
            means[name] = {"bits": bits, "standard_error": error}
        seeds = [result["seed"] for result in results]
        rows.append({"what": "audit over seeds", "seeds": seeds, **means, **common})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Return a line for each run and each mean, in bits per byte; errors are over windows, and over
    seeds.
    """
    lines = [
        f"{'pattern':<16}{'seed':>6}{'split':>9}" + "".join(f"{name:>21}" for name in DIFFERENCES)
    ]
    for row in rows:
        single = row["what"] == "audit"
        head = f"{row['seed']:>6}{row['final_bits']:>9.4f}" if single else f"{'mean':>6}{'':>9}"
        error = "over_windows" if single else "standard_error"
        cells = (f"{row[name]['bits']:+.4f} ± {row[name][error]:.4f}" for name in DIFFERENCES)
        lines.append(f"{row['pattern']:<16}{head}" + "".join(f"{cell:>21}" for cell in cells))
    return "\n".join(lines)


def main() -> None:
    """Train, audit, write and print."""
    args = arguments()
    end_with_children()
    rows = []
    for selection in args.selections:
        rows += rows_of(args, selection, [train(args, selection, seed) for seed in args.seeds])
    path = Path(__file__).parent / "results" / f"audit-{args.hardware}.json"
    path.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
