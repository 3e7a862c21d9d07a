"""Compare grouped-query attention (GQA) with multi-head attention (MHA): step time, KV cache.

Run `python benchmarks/grouped.py`; it writes `benchmarks/results/grouped-cpu.json` and prints the
same rows. Each row compares two models all of whose heads have one attention pattern. MHA has a
key-value head for each query head, GQA has `--kv-heads` of them (Ainslie et al. 2023). It has:

- forward and backward of a batch, in milliseconds: the models of a row are timed in turn, so that
  a slow moment of the machine reaches both, and the ratio is the median over the turns;
- the bytes of the decoding cache of the whole model (keys, values, lists) after `--length` tokens.

Weights are untrained, so clusters have the sizes that random directions give them.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from machine import code, machine
from torch import Tensor

from rtx.model.decoding import Decoder
from rtx.model.transformer import Transformer
from rtx.settings.rules import resolve
from rtx.settings.schema import Config, DataConfig, ModelConfig, RoutingConfig
from rtx.training.hardware import keep_freed_memory

UNROUTED = ("full", "local")
"""Patterns of the base heads; the others are selections of routing heads."""
PATTERNS = (*UNROUTED, "causal", "topk", "nearest", "probed", "exact", "blocks")
VOCABULARY = 256
RESULT = Path(__file__).parent / "results" / "grouped-cpu.json"
HEADING = (
    f"{'pattern':<10}{'ms':>9}{'grouped':>9}{'ratio':>7}{'cache MB':>10}{'grouped':>9}{'ratio':>7}"
)


def make_model(pattern: str, kv_heads: int, args: argparse.Namespace) -> Transformer:
    """Return a model all of whose heads have a pattern."""
    is_routed = pattern not in UNROUTED
    routing = RoutingConfig(heads=0, layers=0)
    if is_routed:
        routing = RoutingConfig(
            selection=pattern,
            keys="separate",
            heads=args.heads,
            layers=args.layers,
            window=args.window,
        )
    model = ModelConfig(
        layers=args.layers,
        heads=args.heads,
        kv_heads=kv_heads,
        hidden=args.hidden,
        base="full" if pattern == "full" else "local",
        window=args.window,
        positions="rotary",
        ffn_hidden=4 * args.hidden,
    )
    config = Config(data=DataConfig(length=args.length), routing=routing, model=model)
    torch.manual_seed(0)
    return Transformer(resolve(config), VOCABULARY)


def random_tokens(batch: int, length: int) -> Tensor:
    """Return tokens, `[batch, length]`."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, VOCABULARY, (batch, length), generator=generator)


def milliseconds_of_step(model: Transformer, tokens_BN: Tensor) -> float:
    """Return the time of a forward and backward pass."""
    start = time.perf_counter()
    model.zero_grad()
    nats_BN, auxiliary = model.loss(tokens_BN)
    (nats_BN.mean() + auxiliary).backward()
    return 1e3 * (time.perf_counter() - start)


def timed_in_turn(models: list[Transformer], tokens_BN: Tensor, turns: int) -> list[list[float]]:
    """Return milliseconds of each model, one number for each turn after a warm-up turn."""
    times: list[list[float]] = [[] for _ in models]
    for turn in range(turns + 1):
        for model, times_of_model in zip(models, times, strict=True):
            milliseconds = milliseconds_of_step(model, tokens_BN)
            if turn > 0:
                times_of_model.append(milliseconds)
    return times


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors that a cache holds, at any depth."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))


def cache_bytes(model: Transformer, tokens_1N: Tensor) -> int:
    """Return the bytes of the decoding cache of a model after a prompt."""
    model.eval()
    decoder = Decoder(model)
    decoder.prefill(tokens_1N)
    # Tensors that share memory are counted once.
    storages: dict[int, int] = {}
    for stream in itertools.chain(*decoder.streams):
        for tensor in tensors_in(vars(stream.stream.cache)):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def measured(pattern: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the row of a pattern."""
    models = [make_model(pattern, kv_heads, args) for kv_heads in (args.heads, args.kv_heads)]
    tokens_BN = random_tokens(args.batch, args.length)
    mha_times, gqa_times = timed_in_turn(models, tokens_BN, args.turns)
    ratios = [gqa / mha for mha, gqa in zip(mha_times, gqa_times, strict=True)]
    mha_bytes, gqa_bytes = [cache_bytes(model, tokens_BN[:1]) for model in models]
    return {
        "pattern": pattern,
        "heads": args.heads,
        "kv_heads": args.kv_heads,
        "length": args.length,
        "window": args.window,
        "ms": mha_times,
        "ms_grouped": gqa_times,
        "step_ratio": statistics.median(ratios),
        "bytes": mha_bytes,
        "bytes_grouped": gqa_bytes,
    }


def line(row: dict[str, Any]) -> str:
    """Return a row of the printed table."""
    milliseconds = statistics.median(row["ms"])
    grouped = statistics.median(row["ms_grouped"])
    times = f"{milliseconds:>9.1f}{grouped:>9.1f}{row['step_ratio']:>7.2f}"
    mha_bytes = row["bytes"]
    gqa_bytes = row["bytes_grouped"]
    sizes = f"{mha_bytes / 1e6:>10.2f}{gqa_bytes / 1e6:>9.2f}{gqa_bytes / mha_bytes:>7.2f}"
    return f"{row['pattern']:<10}{times}{sizes}"


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    defaults = {
        "heads": 8,
        "kv_heads": 2,
        "layers": 2,
        "hidden": 512,
        "length": 2048,
        "window": 256,
        "batch": 1,
        "turns": 7,
        "threads": 1,
    }
    for name, value in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_freed_memory()
    print(HEADING)
    rows = []
    for pattern in PATTERNS:
        row = measured(pattern, args)
        rows.append(row)
        print(line(row), flush=True)
    record = {"machine": machine("cpu", args.threads), **code(), "rows": rows}
    RESULT.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
