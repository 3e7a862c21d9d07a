"""Times that a roofline predicts for a GPU, for all goals: `python benchmarks/gpu.py --predict`.

Nothing runs on a GPU. Peaks, shares of them and bandwidth are those of `rtx plan`
(`rtx/analysis/rates.json`). The constants below are of attention alone, forward and backward,
8 heads of 64 units in bfloat16. Full attention by torch has the times that were measured on an H100
(`benchmarks/results/attention-gpu.json`), at other lengths those of its products.
"""

from __future__ import annotations

import json
from pathlib import Path

from rtx.analysis.cost import cost
from rtx.analysis.speed import expected_step, meter, rates
from rtx.attention.pairs import triangle, window_pairs

from .goals import Rows, goals
from .journal import Found
from .whole_steps import VOCABULARY, Variant, composed

HEADS = 8
SIZE = 64
WINDOW = 256
MEASURED = Path(__file__).resolve().parents[1] / "results" / "attention-gpu.json"
FLASH_PRODUCTS = 7
"""Products of the size of queries times keys in torch's attention: 2 forward, 5 backward."""
OUR_PRODUCTS = 9
"""The same in our kernels: 2 forward, and 7 backward, as they compute logits twice."""
PASSES_OF_ROWS = 18
"""How often a tensor `[H, N, D]` is read or written, gathers and sums over lists included."""
KERNEL_SECONDS = 3e-6
"""The least time of a kernel in a CUDA graph, with the gap to the next."""
KERNELS = {"local": 10, "causal": 15, "topk": 15}
"""Kernels of attention: the operations that torch starts on tensors without data, and the kernels
inside our operators."""
SELECTION_KERNELS = {"causal": 27, "topk": 70}
"""Kernels of the selection and its statistics, counted in the same way."""
SELECTION_PRODUCTS = {"causal": 1, "topk": 2}
"""How often scores of centroids are computed, in float32; by topk once more for statistics."""
PASSES_OF_SCORES = {"causal": 0, "topk": 4}
"""How often all scores `[H, C, N]` are read or written, 4 bytes each."""
LENGTHS = (4096, 8192, 65_536)
STEPS = (
    ("6x512", 8192, 1),
    ("6x512", 32_768, 1),
    ("6x512", 65_536, 1),
    ("rt12", 8192, 2),
    ("rt24", 8192, 1),
)
"""Base, length and sequences a step of the models whose steps are in goals."""


def predicted() -> list[Found]:
    """Return each goal with the predicted number; None where the goal is of something else."""
    rows = {**attention_rows(), **step_rows()}
    predictions: list[Found] = []
    for goal in goals():
        value = goal.measure(rows)
        sign = "<=" if goal.at_most else ">="
        target = f"{sign} {goal.target:g}"
        rounded = None if value is None else round(value, 2)
        predictions.append({"goal": goal.name, "target": target, "predicted": rounded})
    return predictions


def attention_rows() -> Rows:
    """Return the expected milliseconds of attention alone."""
    rows: Rows = {}
    for N in LENGTHS:
        rows[f"alone/sdpa/{N}"] = {"graph_ms": full_ms(N)}
        for kind in ("local", "causal", "topk"):
            rows[f"alone/{kind}/{N}"] = {"graph_ms": pattern_ms(kind, N)}
    return rows


def full_ms(N: int) -> float:
    """Return the milliseconds of full attention by torch."""
    for row in json.loads(MEASURED.read_text()):
        if row["what"] == "forward+backward" and row["pattern"] == "sdpa" and row["N"] == N:
            return row["ms"]
    return 1e3 * products_seconds(triangle(N), FLASH_PRODUCTS)


def pattern_ms(kind: str, N: int) -> float:
    """Return the milliseconds of a pattern's forward and backward pass, its selection included."""
    if kind == "local":
        seconds = products_seconds(window_pairs(N, WINDOW), FLASH_PRODUCTS)
    else:  # N / W lists of W members
        seconds = products_seconds(N / WINDOW * triangle(WINDOW), OUR_PRODUCTS)
    bytes_of_rows = PASSES_OF_ROWS * HEADS * N * SIZE * 2
    seconds += bytes_of_rows / rates()["roofline"]["bytes_per_second"]
    seconds += KERNELS[kind] * KERNEL_SECONDS
    return 1e3 * seconds + selection_ms(kind, N)


def selection_ms(kind: str, N: int) -> float:
    """Return the milliseconds of a selection: scores of centroids, and what is chosen by them."""
    roofline = rates()["roofline"]
    scores = HEADS * N * (N // WINDOW)
    peak = rates()["peaks"]["devices"][roofline["device"]]["fp32"]
    operations = SELECTION_PRODUCTS.get(kind, 0) * 2 * SIZE * scores
    moved = PASSES_OF_SCORES.get(kind, 0) * 4 * scores
    seconds = operations / (roofline["product_share"] * peak) + moved / roofline["bytes_per_second"]
    return 1e3 * (seconds + SELECTION_KERNELS.get(kind, 0) * KERNEL_SECONDS)


def products_seconds(pairs: float, products: int) -> float:
    """Return the seconds of some products for `pairs` of a query and a key in each head."""
    roofline = rates()["roofline"]
    peak = rates()["peaks"]["devices"][roofline["device"]]["bf16"]
    operations = HEADS * pairs * 2 * SIZE * products
    return operations / (roofline["attention_share"] * peak)


def step_rows() -> Rows:
    """Return the expected milliseconds and shares of the peak of whole steps.

    Steps of all kinds have the same.
    """
    rows: Rows = {}
    for base, N, batch in STEPS:
        for heads in ("full", "causal"):
            variant = Variant(base, heads, N, batch)
            for how in ("eager", "compiled", "graphs", "recorded"):
                rows[f"steps/{variant.key}/{how}"] = step_row(variant)
    return rows


def step_row(variant: Variant) -> Found:
    """Return the expected milliseconds and share of the peak of a model's step."""
    config = composed(variant, dry=False)
    total = cost(config, VOCABULARY)
    expected = expected_step(config, total, variant.batch, VOCABULARY, world=1)
    assert expected is not None, "bfloat16 has a peak"
    units_per_second = variant.batch * variant.length / expected.step
    share = meter(config, total, rates()["roofline"]["device"], "bf16").share(units_per_second)
    return {"ms": 1e3 * expected.step, "mfu": share}
