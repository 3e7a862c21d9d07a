"""A small valid call of every public function, to be changed and tried.

Shapes: B sequences, H heads, C clusters, N query and M key positions, D head size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rtx.attention import (
    adaptive_span,
    cross_routing,
    fixed,
    full,
    local,
    lsh,
    random,
    rotations,
    routing,
    strided,
)
from rtx.attention.kmeans import orthonormal

Arguments = dict[str, Any]
FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "full": full,
    "local": local,
    "strided": strided,
    "fixed": fixed,
    "adaptive_span": adaptive_span,
    "lsh, causal": lsh,
    "lsh, reformer": lsh,
    "random": random,
    "random, keys": random,
    "routing, topk": routing,
    "routing, causal": routing,
    "routing, nearest": routing,
    "routing, separate": routing,
    "routing, separate causal": routing,
    "routing, projected": routing,
    "routing, encoder": routing,
    "cross_routing": cross_routing,
}
STRICTLY_CAUSAL = [
    name
    for name in FUNCTIONS
    if name not in ("lsh, reformer", "cross_routing")
    and not name.endswith(("topk", "separate", "projected", "encoder"))
]


def arguments(
    name: str, B: int = 2, H: int = 3, N: int = 9, D: int = 4, dtype: torch.dtype = torch.float32
) -> Arguments:
    """Return the arguments of a call, drawn anew with the same numbers at every call."""
    generator = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)  # noqa: E731
    given: Arguments = {"q_BHND": draw(B, H, N, D)}
    if name == "cross_routing":
        return given | {
            "k_BHMD": draw(B, H, N + 2, D),
            "v_BHMD": draw(B, H, N + 2, D),
            "centroid_HCD": draw(H, 2, D),
            "window": 4,
            "context_window": 3,
        }
    keyless = name in ("random", "routing, topk", "routing, causal", "routing, nearest")
    if not name.startswith("lsh"):
        given["k_BHND"] = None if keyless else draw(B, H, N, D)
    given["v_BHND"] = draw(B, H, N, D)
    return given | of_pattern(name, H, D, draw)


def of_pattern(name: str, H: int, D: int, draw: Callable[..., Tensor]) -> Arguments:
    """Return what a pattern takes beside queries, keys and values."""
    if name.startswith("lsh"):
        return {"rotation_HTDF": rotations(H, 2, D, 4, seed=1), "window": 4, "variant": name.split()[1]}
    if name.startswith("routing"):
        selections = {"routing, nearest": "nearest", "routing, causal": "causal", "routing, separate causal": "causal"}
        with torch.random.fork_rng():
            torch.manual_seed(0)
            projection_HDD = orthonormal(H, D)
        return {
            "centroid_HCD": draw(H, 3, D),
            "window": 4,
            "selection": selections.get(name, "topk"),
            "threshold_HC": 0.3 * draw(H, 3),
            "key_threshold_HC": 0.3 * draw(H, 3),
            "projection_HDD": projection_HDD if name == "routing, projected" else None,
            "causal": name != "routing, encoder",
        }
    return {
        "full": {},
        "local": {"window": 4},
        "strided": {"stride": 3},
        "fixed": {"block": 4, "summary": 2},
        "adaptive_span": {"span_H": 3 * draw(H).sigmoid(), "window": 5, "ramp": 2},
        "random": {"clusters": 3, "window": 4, "seed": 5},
    }[name.split(",")[0]]


def call(name: str, given: Arguments, **changes: Any) -> Tensor:
    """Return what the function makes of the arguments, with changes."""
    return FUNCTIONS[name](**(given | changes))


def takes(name: str, argument: str) -> bool:
    """Tell whether the function has the argument."""
    return argument in inspect.signature(FUNCTIONS[name]).parameters


def masks(name: str, given: Arguments, real: Callable[[Tensor], Tensor]) -> Arguments:
    """Return padding masks for a call; `real` turns a mask of true into the one wanted."""
    B, _, N, _ = given["q_BHND"].shape
    found = {"mask_BN": real(torch.ones(B, N, dtype=torch.bool))}
    if name == "cross_routing":
        found["context_mask_BM"] = real(torch.ones(B, given["k_BHMD"].shape[2], dtype=torch.bool))
    return found
