"""What benchmarks/attention.py times: our patterns and public peers, each a call on queries, keys
and values.

`Size` and the command's arguments (heads H, size of a head, device) say how large; peers are PyPI
packages (extra `peers`).
"""

from __future__ import annotations

import argparse
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rtx.attention import (
    ROUTING_CLASSES,
    AdaptiveSpan,
    Blocks,
    Centroids,
    Exact,
    Fixed,
    Full,
    Indexer,
    Local,
    Lsh,
    Pattern,
    Random,
    RelativeTables,
    Routing,
    Strided,
    Thresholds,
    after_step,
    oracle,
)
from rtx.attention.engine import native
from rtx.attention.pairs import triangle, window_pairs
from rtx.model.positions import rotate

Attention = Callable[[Tensor, Tensor, Tensor], Tensor | tuple[Tensor, Tensor]]
"""From queries, keys and values to outputs, and a loss beside them where there is one."""


class Size(NamedTuple):
    """One shape; `group` says which question it answers."""

    group: str
    N: int
    W: int
    C: int


INDEXED = ("exact", "blocks", "indexer")
"""Patterns whose queries name their keys one by one, chosen in their own type: not for
FlexAttention.
"""

BLOCK = 16
"""Positions of a block of `blocks`."""

SUMMARY = 8
"""Positions of the summary of a block of `fixed`."""

SETTLING = 30
"""Steps after which thresholds have brought the counts of causal selection near W, as in training.
"""

ROUNDS = 4
"""Hash rounds of `lsh_rounds`."""

PEERS = {
    "peer_routing": "routing_transformer",
    "peer_local": "local-attention",
    "peer_lsh": "reformer_pytorch",
}
"""The distribution behind each peer; `sdpa`, torch's own attention over the whole sequence, is
always there.
"""


def installed(name: str) -> str | None:
    """Return the version of a distribution, None without it."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def make_inputs(size: Size, args: argparse.Namespace, seed: int = 0) -> list[Tensor]:
    """Return queries, keys and values `[B, H, N, D]`, each its own leaf."""
    generator = torch.Generator().manual_seed(seed)
    shape = (args.batch, args.heads, size.N, args.dim)
    drawn = (torch.randn(shape, generator=generator) for _ in range(3))
    return [x.to(args.device, getattr(torch, args.dtype)).requires_grad_() for x in drawn]


@dataclass
class Ours:
    """A call of one of our patterns."""

    pattern: Pattern
    relative: RelativeTables | None = None
    rotate: Callable[..., Tensor] | None = None

    def __call__(self, q_BHND: Tensor, k_BHND: Tensor, v_BHND: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output and the loss."""
        return self.pattern(
            *self.given(q_BHND, k_BHND, v_BHND), relative=self.relative, rotate=self.rotate
        )

    def oracle(self, *inputs: Tensor) -> tuple[Tensor, None]:
        """Return the output as the oracle has it in float64."""
        tables = None
        if self.relative is not None:
            tables = RelativeTables(
                **{name: x.double() for name, x in self.relative._asdict().items() if x is not None}
            )
        given = self.given(*(x.double() for x in inputs))
        out_BHND = oracle.attend_by_rule(
            self.pattern,
            *given,
            relative=tables,
            rotate=self.rotate,
        )
        return out_BHND, None

    def given(
        self, q_BHND: Tensor, k_BHND: Tensor, v_BHND: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return the inputs, without keys where queries stand for them."""
        return q_BHND, k_BHND if self.pattern.has_keys else None, v_BHND


def cluster_sizes(attention: Attention) -> dict[str, float]:
    """Return the fewest, mean and most members of a cluster in the last call; nothing but for
    causal selection.
    """
    pattern = attention.pattern if isinstance(attention, Ours) else None
    if not isinstance(pattern, Thresholds) or pattern.last_members is None:
        return {}
    count_L = pattern.last_members[0][0].count_L.double()
    return {
        "min": int(count_L.min()),
        "mean": round(float(count_L.mean()), 1),
        "max": int(count_L.max()),
    }


def routed(size: Size, args: argparse.Namespace, kind: str, backend: str) -> Routing:
    """Return routing heads whose thresholds have seen one batch; separate, projected: top-w with
    keys of their own.
    """
    keys = kind if kind in ("separate", "projected") else "shared"
    selection = "topk" if keys == kind else kind
    own: dict[str, Any] = {
        "update": "nearest" if selection == "topk" else "members",
        "threshold_rate": 0.1 if selection == "causal" else 0.0,
    }
    centroids = Centroids(
        args.heads, size.C, args.dim, window=size.W, length=size.N, decay=0.999, keys=keys, **own
    )
    pattern = ROUTING_CLASSES[selection](centroids, backend=backend).to(args.device)
    if selection == "causal":
        q_BHND, _, v_BHND = make_inputs(size, args, seed=1)
        for _ in range(SETTLING):
            with torch.no_grad():
                pattern.train()(q_BHND, None, v_BHND)
            after_step(pattern)
    return pattern


def shaw(args: argparse.Namespace) -> RelativeTables:
    """Return Shaw's tables for distances up to 255."""
    keys_MD, values_MD = (torch.randn(256, args.dim, device=args.device) * 0.02 for _ in range(2))
    return RelativeTables(keys_MD.requires_grad_(), values_MD.requires_grad_())


def sdpa_blocks(size: Size, args: argparse.Namespace) -> Attention:
    """Return the floor of top-w: torch's attention on blocks that are already gathered, causal
    inside each.
    """

    def call(q_BHND: Tensor, k_BHND: Tensor, v_BHND: Tensor) -> Tensor:
        blocks = (
            x[:, :, : size.C * size.W].unflatten(2, (size.C, size.W)).flatten(0, 1)
            for x in (q_BHND, v_BHND)
        )
        q_XCWD, v_XCWD = blocks
        return F.scaled_dot_product_attention(q_XCWD, q_XCWD, v_XCWD, is_causal=True)

    return call


def peer_routing(size: Size, args: argparse.Namespace) -> Attention:
    """Return KmeansAttention of routing_transformer with shared queries and keys."""
    from routing_transformer.routing_transformer import KmeansAttention  # pyright: ignore[reportMissingImports]

    module = (
        KmeansAttention(size.C, size.W, args.heads, args.dim, causal=True, shared_qk=True)
        .to(args.device)
        .train()
    )

    def call(q_BHND: Tensor, k_BHND: Tensor, v_BHND: Tensor) -> tuple[Tensor, Tensor]:
        return module(q_BHND, q_BHND, v_BHND)

    return call


def peer_local(size: Size, args: argparse.Namespace) -> Attention:
    """Return LocalAttention of local-attention with one block of look-back."""
    from local_attention import LocalAttention  # pyright: ignore[reportMissingImports]

    options: dict[str, Any] = {"use_rotary_pos_emb": False, "look_backward": 1, "look_forward": 0}
    return LocalAttention(size.W, causal=True, **options).to(args.device)


def peer_lsh(size: Size, args: argparse.Namespace) -> Attention:
    """Return LSHAttention of reformer_pytorch, one hash round, buckets of W / 2."""
    from reformer_pytorch import LSHAttention  # pyright: ignore[reportMissingImports]

    module = LSHAttention(bucket_size=size.W // 2, n_hashes=1, causal=True).to(args.device).train()

    def call(q_BHND: Tensor, k_BHND: Tensor, v_BHND: Tensor) -> Tensor:
        return module(q_BHND.flatten(0, 1), v_BHND.flatten(0, 1))[0]

    return call


def sdpa(q_BHND: Tensor, k_BHND: Tensor, v_BHND: Tensor) -> Tensor:
    """Full causal attention as torch offers it."""
    return F.scaled_dot_product_attention(q_BHND, k_BHND, v_BHND, is_causal=True)


def make(name: str, size: Size, args: argparse.Namespace) -> Attention:
    """Return the attention of one row."""
    others = {"sdpa_blocks": sdpa_blocks}
    others |= {"peer_routing": peer_routing, "peer_local": peer_local, "peer_lsh": peer_lsh}
    if name == "sdpa":
        return sdpa
    if name in others:
        return others[name](size, args)
    name, backend = pattern_and_backend(name)
    ours = Ours(make_pattern(without_positions(name), size, args, backend).to(args.device).train())
    ours.relative = shaw(args) if name.endswith("_shaw") else None
    ours.rotate = rotate if name.endswith("_rotary") else None
    return ours


def pattern_and_backend(name: str) -> tuple[str, str]:
    """Return the pattern of a row's name, and what runs it."""
    pattern = name.removesuffix("_native").removesuffix("_flex")
    return pattern, name[len(pattern) + 1 :] or "torch"


def without_positions(pattern: str) -> str:
    """Return a pattern's name without its position terms."""
    return pattern.removesuffix("_shaw").removesuffix("_rotary")


def faster(name: str, args: argparse.Namespace) -> list[str]:
    """Return the row of the same pattern by the backend that a device has beside torch's kernels,
    where it can run.
    """
    if name.endswith("_shaw") or without_positions(name) == "adaptive_span":
        return []
    if args.device == "cuda":
        return [] if without_positions(name) in INDEXED else [f"{name}_flex"]
    return [f"{name}_native"] if args.dtype == "float32" and native.library() else []


def make_pattern(kind: str, size: Size, args: argparse.Namespace, backend: str) -> Pattern:
    """Return heads of one of our patterns, with strides and buckets that make about W keys."""
    shape = (args.heads, args.dim)
    window = size.W
    if kind.startswith("lsh"):
        rounds = ROUNDS if kind == "lsh_rounds" else 1
        variant = "reformer" if kind == "lsh_reformer" else "causal"
        hashed: dict[str, Any] = {"window": window, "buckets": 2 * (size.C // 2), "seed": 0}
        return Lsh(*shape, rounds=rounds, variant=variant, backend=backend, **hashed)
    if kind.startswith("routing"):
        return routed(size, args, kind.removeprefix("routing_"), backend)
    if kind == "adaptive_span":
        pattern = AdaptiveSpan(args.heads, window=window, backend=backend)
        torch.nn.init.ones_(pattern.share_H)  # spans as long as they can be
        return pattern
    makers: dict[str, Callable[[], Pattern]] = {
        "full": lambda: Full(backend=backend),
        "local": lambda: Local(window=window, backend=backend),
        "strided": lambda: Strided(stride=size.C, backend=backend),
        "fixed": lambda: Fixed(block=window, summary=SUMMARY, backend=backend),
        "random": lambda: Random(
            args.heads, size.C, window=window, length=size.N, seed=0, backend=backend
        ),
        "exact": lambda: Exact(window=window, backend=backend),
        "blocks": lambda: Blocks(*shape, window=window, block=BLOCK, backend=backend),
        "indexer": lambda: Indexer(*shape, window=window, backend=backend),
    }
    return makers[kind]()


def differences(name: str, args: argparse.Namespace, dtype: str) -> tuple[float, float]:
    """Return how far a row's output and gradients are from the oracle's, on a small shape.

    The largest difference of numbers, and the largest norm of differences relative to the norm of
    what is right.
    """
    torch.manual_seed(0)
    small = argparse.Namespace(batch=2, heads=2, dim=16, device=args.device, dtype=dtype)
    size = Size("check", 128, 32, 4)
    ours = make(name, size, small)
    inputs = make_inputs(size, small)
    assert isinstance(ours, Ours)
    ours.pattern.eval()
    gradient_BHND = torch.randn(inputs[0].shape, device=args.device)
    found = []
    for call in (ours, ours.oracle):
        out, _ = call(*inputs)
        gradients = torch.autograd.grad(
            out,
            inputs,
            gradient_BHND.to(out.dtype),
            allow_unused=True,
            materialize_grads=True,
        )
        found.append([out.detach(), *gradients])
    gaps = [(mine.double() - right, right.double()) for mine, right in zip(*found, strict=True)]
    most = max(float(gap.abs().max()) for gap, _ in gaps)
    return most, max(float(gap.norm() / right.norm().clamp(min=1e-9)) for gap, right in gaps)


def pairs(name: str, size: Size) -> float:
    """Return how many pairs a head reads (routing and hashing heads: with clusters and buckets
    evenly filled).
    """
    N = size.N
    W = size.W
    kind = without_positions(pattern_and_backend(name)[0])
    if kind in ("full", "sdpa"):
        return triangle(N)
    if kind == "strided":
        return Strided(stride=size.C).pairs_of_head(N)
    if kind == "fixed":
        return Fixed(block=W, summary=SUMMARY).pairs_of_head(N)
    if kind == "blocks":
        return Blocks(1, 1, window=W, block=BLOCK).pairs_of_head(N)
    if kind in ("local", "peer_local", "adaptive_span", "exact", "indexer"):
        return window_pairs(N, W)
    return size.C * triangle(W) * (ROUNDS if kind == "lsh_rounds" else 1)
