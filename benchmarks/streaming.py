"""Time streaming on a CPU: generation per token, early and late in a stream, and scoring in
streaming mode.

A token's cost is taken at positions 1,000 to 11,000 and 50,000 to 60,000, in turn: five times a
stream that has taken in its prefix at once makes 400 steps. Beside it stands a fresh pass over
8,000 positions. A second table has the same of attention alone: 8 heads of size 64, W=256, C=32.

Run `python benchmarks/streaming.py`; it writes `benchmarks/results/streaming-cpu.json` and prints
the same rows. The model is 4 layers of width 160 with untrained weights: the cost of a step does
not depend on what was learned, but for the cluster sizes of causal selection, which are those of
random directions here.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import code, machine
from torch import Tensor

from rtx.attention import ROUTING_CLASSES, AdaptiveSpan, Centroids, Local, Lsh, Pattern, Random
from rtx.attention.reads import QueriesKeys
from rtx.data.windows import windows
from rtx.evaluation.scores import score_windows
from rtx.model.decoding import Decoder
from rtx.model.transformer import Transformer
from rtx.settings.rules import resolve
from rtx.settings.schema import Config, DataConfig, ModelConfig, RoutingConfig
from rtx.training.hardware import keep_freed_memory

PATTERNS = ("local", "routing_causal", "routing_topk", "random", "full")
TARGET_BYTES = 5_000_000
HEADING = f"{'pattern':<16}{'ms/token early':>15}{'late':>8}{'ratio':>7}{'fresh pass':>12}"


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


def attention_patterns() -> dict[str, Pattern]:
    """Return groups of 8 heads of size 64."""
    torch.manual_seed(0)
    patterns: dict[str, Pattern] = {"local": Local(window=256)}
    for selection, rate in (
        ("causal", 0.1),
        ("topk", 0.0),
    ):  # rates and updates are training's: nothing of a step's
        centroids = Centroids(8, 32, 64, window=256, length=8192, decay=0.999, threshold_rate=rate)
        patterns[f"routing_{selection}"] = ROUTING_CLASSES[selection](centroids)
    patterns["random"] = Random(8, 32, window=256, length=8192, seed=0)
    patterns["lsh"] = Lsh(8, 64, window=256, rounds=1, buckets=32, seed=0)
    patterns["adaptive_span"] = AdaptiveSpan(8, window=256)
    return patterns


def model_stream(model: Transformer, position: int) -> Callable[[], object]:
    """Return what makes the next step of a stream that has taken in `position` random units."""
    decoder = Decoder(model)
    generator = torch.Generator().manual_seed(position)
    decoder.prefill(torch.randint(0, 256, (1, position - 1), generator=generator))
    return lambda: decoder.step(torch.randint(0, 256, (1,), generator=generator))


def attention_stream(pattern: Pattern, position: int) -> Callable[[], object]:
    """Return what makes the next step of heads that have taken in `position` random vectors."""
    generator = torch.Generator().manual_seed(position)
    cache = pattern.start()
    count = itertools.count(position)

    def inputs(length: int, first: int) -> tuple[QueriesKeys, Tensor]:
        q, k, v = torch.randn(3, 1, 8, length, 64, generator=generator)
        return pattern.inputs(q, k if pattern.has_keys else None, None, first), v

    cache.prefill(*inputs(position, 0))

    def step() -> Tensor:
        at = next(count)
        return cache.decode(*inputs(1, at), at)

    return step


def token_times(
    stream_at: Callable[[int], Callable[[], object]], args: argparse.Namespace
) -> dict[str, list[float]]:
    """Return milliseconds of steps early and late in a stream, in turn, at places spread over each
    span.
    """
    times: dict[str, list[float]] = {"early": [], "late": []}
    for repeat in range(args.repeats):
        for when, first in (("early", args.early), ("late", args.late)):
            step = stream_at(first + repeat * args.span // args.repeats)
            times[when] += [timed(step) for _ in range(args.steps)]
    return times


def timed(run: Callable[[], object]) -> float:
    """Return milliseconds."""
    start = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - start)


def median_time(run: Callable[[], object]) -> float:
    """Return the median of five runs, in milliseconds."""
    return statistics.median(timed(run) for _ in range(5))


def scoring_rate(model: Transformer, length: int, units: int) -> float:
    """Return units scored in a second, in streaming mode."""
    tokens = np.random.default_rng(0).integers(0, 256, units).astype(np.uint8)
    score_windows(model, tokens, windows(units, length)[:1], streaming=True)
    start = time.perf_counter()
    score_windows(model, tokens, windows(units, length), streaming=True)
    return units / (time.perf_counter() - start)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = {"length": 512, "window": 128, "units": 262_144, "threads": 2}
    places = {
        "early": 1_000,
        "late": 50_000,
        "span": 10_000,
        "repeats": 5,
        "steps": 400,
        "fresh": 8_000,
    }
    for name, value in {**sizes, **places}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_freed_memory()
    rows = []
    print(HEADING + f"{'bytes/s':>10}{'5 MB, min':>11}")
    for pattern in PATTERNS:
        once = (
            {"repeats": 1, "steps": args.steps // 4} if pattern == "full" else {}
        )  # its steps read all before them
        rows.append(measure(pattern, argparse.Namespace(**vars(args) | once)))
    print(HEADING)
    for name, pattern in attention_patterns().items():
        rows.append(measure_attention(name, pattern.eval(), args))
    path = Path(__file__).parent / "results" / "streaming-cpu.json"
    path.write_text(json.dumps(rows, indent=1) + "\n")


@torch.no_grad()
def measure(pattern: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one pattern in a model, print its line and return its row."""
    model = make_model(pattern, args.length, args.window)
    times = token_times(lambda position: model_stream(model, position), args)
    tokens_BN = torch.randint(0, 256, (1, args.fresh), generator=torch.Generator().manual_seed(0))
    fresh = median_time(lambda: model(tokens_BN))
    rate = scoring_rate(model, args.length, args.units)
    minutes = TARGET_BYTES / rate / 60
    sizes = {
        "pattern": pattern,
        "N": args.length,
        "W": args.window,
        "C": -(-args.length // args.window),
    }
    scoring = {"units_per_second": round(rate), "minutes_for_5_million_bytes": round(minutes, 2)}
    row = {"what": "streaming", **sizes, **compare(times, fresh, args), **scoring}
    print(line(row) + f"{rate:>10,.0f}{minutes:>11.1f}", flush=True)
    return row


@torch.no_grad()
def measure_attention(name: str, pattern: Pattern, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one pattern alone, print its line and return its row."""
    q, k, v = (
        torch.randn(1, 8, args.fresh, 64, generator=torch.Generator().manual_seed(i))
        for i in range(3)
    )
    times = token_times(lambda position: attention_stream(pattern, position), args)
    fresh = median_time(lambda: pattern(q, k if pattern.has_keys else None, v))
    sizes = {"pattern": name, "N": 8192, "W": 256, "C": 32, "B": 1, "H": 8, "D": 64}
    row = {"what": "streaming attention", **sizes, **compare(times, fresh, args)}
    print(line(row), flush=True)
    return row


def compare(
    times: dict[str, list[float]], fresh: float, args: argparse.Namespace
) -> dict[str, Any]:
    """Return medians, their ratios, and where they were taken."""
    early, late = (statistics.median(times[when]) for when in ("early", "late"))
    return {
        "backend": "auto",
        "positions": {
            when: [first, first + args.span]
            for when, first in (("early", args.early), ("late", args.late))
        },
        "steps": args.steps * args.repeats,
        "ms": {"early": round(early, 4), "late": round(late, 4), "fresh_pass": round(fresh, 1)},
        "ratio": round(late / early, 3),
        "fresh_pass": {"position": args.fresh, "times_a_step": round(fresh / early, 1)},
        "machine": machine("cpu", args.threads),
        "versions": code(),
    }


def line(row: dict[str, Any]) -> str:
    """Return a row's line of the table."""
    early = row["ms"]["early"]
    late = row["ms"]["late"]
    times = row["fresh_pass"]["times_a_step"]
    return f"{row['pattern']:<16}{early:>15.3f}{late:>8.3f}{row['ratio']:>7.2f}{times:>11.0f}x"


if __name__ == "__main__":
    main()
