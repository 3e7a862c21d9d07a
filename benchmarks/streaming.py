"""Time streaming on a CPU: generation per token, early and late in a stream, and scoring in streaming mode.

Run `python benchmarks/streaming.py`; it writes `benchmarks/results/streaming-cpu.json` and prints the same rows. The
model is 4 layers of width 160 with untrained weights: the cost of a step does not depend on what was learned, but for
the cluster sizes of causal selection, which are those of random directions here.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import numpy as np
import torch

from rtx.checks import resolve
from rtx.config import Config, DataConfig, ModelConfig, RoutingConfig
from rtx.data.windows import windows
from rtx.model.decoding import Decoder
from rtx.model.transformer import Transformer
from rtx.training.evaluate import score_windows
from rtx.training.hardware import keep_freed_memory

PATTERNS = ("local", "routing_causal", "routing_topk", "random", "full")
TARGET_BYTES = 5_000_000


def make_model(pattern: str, length: int, window: int) -> Transformer:
    """Return a model whose upper two layers have 2 heads of the pattern; full: all heads."""
    routed = 0 if pattern in ("local", "full") else 2
    config = Config(
        data=DataConfig(length=length),
        routing=RoutingConfig(
            selection=pattern.removeprefix("routing_") if routed else "causal",
            heads=routed,
            layers=routed,
            window=window,
        ),
        model=ModelConfig(
            layers=4,
            heads=4,
            hidden=160,
            base="full" if pattern == "full" else "local",
            window=window,
            positions="rotary",
            ffn_hidden=640,
        ),
    )
    torch.manual_seed(0)
    return Transformer(resolve(config), 256).eval()


def token_times(model: Transformer, positions: int) -> list[float]:
    """Return milliseconds of each step of one stream."""
    decoder, times = Decoder(model), []
    tokens = torch.randint(0, 256, (positions, 1), generator=torch.Generator().manual_seed(0))
    for position in range(positions):
        start = time.perf_counter()
        decoder.step(tokens[position - 1] if position else None)
        times.append(1e3 * (time.perf_counter() - start))
    return times


def scoring_rate(model: Transformer, length: int, units: int) -> float:
    """Return units scored in a second, in streaming mode."""
    tokens = np.random.default_rng(0).integers(0, 256, units).astype(np.uint8)
    score_windows(model, tokens, windows(units, length)[:1], streaming=True)
    start = time.perf_counter()
    score_windows(model, tokens, windows(units, length), streaming=True)
    return units / (time.perf_counter() - start)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"positions": 12_000, "length": 512, "window": 128, "units": 262_144, "threads": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_freed_memory()
    tenth = args.positions // 10
    rows = []
    print(f"{'pattern':<16}{'ms/token early':>16}{'late':>8}{'late/early':>12}{'bytes/s':>10}{'5 MB, minutes':>15}")
    for pattern in PATTERNS:
        model = make_model(pattern, args.length, args.window)
        with torch.no_grad():
            times = token_times(model, args.positions)
            rate = scoring_rate(model, args.length, args.units)
        early, late = (statistics.median(part) for part in (times[tenth : 2 * tenth], times[-tenth:]))
        minutes = TARGET_BYTES / rate / 60
        print(f"{pattern:<16}{early:>16.3f}{late:>8.3f}{late / early:>12.2f}{rate:>10,.0f}{minutes:>15.1f}")
        rows.append(
            {
                "what": "streaming",
                "pattern": pattern,
                "N": args.length,
                "W": args.window,
                "C": -(-args.length // args.window),
                "backend": "torch",
                "positions": {"early": [tenth, 2 * tenth], "late": [args.positions - tenth, args.positions]},
                "ms": {"early": round(early, 4), "late": round(late, 4)},
                "ratio": round(late / early, 3),
                "units_per_second": round(rate),
                "minutes_for_5_million_bytes": round(minutes, 2),
                "machine": f"{platform.machine()}, {args.threads} threads",
                "versions": {"torch": torch.__version__},
            }
        )
    path = Path(__file__).parent / "results" / "streaming-cpu.json"
    path.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
