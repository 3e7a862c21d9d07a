"""What benchmarks/attention.py times: our patterns and public peers, each a call on queries, keys and values.

`Size` and the command's arguments (heads H, size of a head, device) say how large; peers are PyPI packages (extra
`peers`).
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

from rtx.analysis.cost import fixed_pairs, strided_pairs, triangle, window_pairs
from rtx.attention.arguments import SELECTIONS
from rtx.attention.cross import CrossRoutingHeads
from rtx.attention.fixed import FixedHeads
from rtx.attention.full import FullHeads
from rtx.attention.heads import Heads
from rtx.attention.kmeans import Centroids, update_centroids
from rtx.attention.local import LocalHeads
from rtx.attention.lsh import LshHeads
from rtx.attention.random import RandomHeads
from rtx.attention.routing import RoutingHeads
from rtx.attention.span import SpanHeads
from rtx.attention.strided import StridedHeads
from rtx.attention.weights import Distances
from rtx.model.positions import Rotary

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Size(NamedTuple):
    """One shape; `group` says which question it answers."""

    group: str
    N: int
    W: int
    C: int


OWN_KEYS = ("full", "local", "strided", "fixed", "adaptive_span", "routing_separate", "routing_projected")
"""Patterns with keys of their own; elsewhere queries stand for keys."""

ROUNDS = 4
"""Hash rounds of `lsh_rounds`."""

PEERS = {"peer_routing": "routing_transformer", "peer_local": "local-attention", "peer_lsh": "reformer_pytorch"}
"""The distribution behind each peer; `sdpa`, torch's own attention over the whole sequence, is always there."""


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
    """A call of one of our head modules."""

    heads: Heads
    own_keys: bool
    relative: Distances | None = None
    rotate: Rotary | None = None

    def __call__(self, q_BHND: Tensor, k_BHND: Tensor, v_BHND: Tensor) -> Tensor:
        """Return the output, and the loss in it."""
        positions: dict[str, Any] = {"relative": self.relative, "rotate": self.rotate}
        out_BHND, loss = self.heads(q_BHND, k_BHND if self.own_keys else None, v_BHND, **positions)
        return out_BHND + loss


def cluster_sizes(attention: Attention) -> dict[str, float]:
    """Return the fewest, mean and most members of a cluster in the last call; nothing but for causal selection."""
    heads = attention.heads if isinstance(attention, Ours) else None
    if not isinstance(heads, RoutingHeads) or heads.selection != "causal" or heads.snapshot is None:
        return {}
    count_L = heads.snapshot.members.count_L.double()
    return {"min": int(count_L.min()), "mean": round(float(count_L.mean()), 1), "max": int(count_L.max())}


def routed(size: Size, args: argparse.Namespace, selection: str, backend: str) -> RoutingHeads:
    """Return routing heads whose thresholds have seen one batch.

    separate, projected, encoder: top-w with keys of their own, through W_R, without a causal mask.
    """
    keys = selection if selection in ("separate", "projected") else "shared"
    options: dict[str, Any] = {"window": size.W, "length": size.N, "decay": 0.999, "thresholds": selection == "causal"}
    centroids = Centroids(args.heads, size.C, args.dim, keys=keys, **options).to(args.device)
    how: dict[str, Any] = {"selection": selection if selection in SELECTIONS else "topk", "backend": backend}
    heads = RoutingHeads(centroids, scale=args.dim**-0.5, causal=selection != "encoder", **how)
    if selection == "causal":
        with torch.no_grad():
            heads.train()(make_inputs(size, args, seed=1)[0], None, make_inputs(size, args, seed=2)[0])
        update_centroids(heads)
    return heads


def shaw(args: argparse.Namespace) -> Distances:
    """Return Shaw's tables for distances up to 255."""
    keys_MD, values_MD = (torch.randn(256, args.dim, device=args.device) * 0.02 for _ in range(2))
    return Distances(keys_MD.requires_grad_(), values_MD.requires_grad_())


def cross_routing(size: Size, args: argparse.Namespace) -> Attention:
    """Return routing between two sequences, of whose queries and keys each cluster takes W."""
    centroids = Centroids(args.heads, size.C, args.dim, window=size.W, length=size.N, decay=0.999, keys="separate")
    return CrossRoutingHeads(centroids).to(args.device).train()


def sdpa_blocks(size: Size, args: argparse.Namespace) -> Attention:
    """Return the floor of top-w: torch's attention on blocks that are already gathered, causal inside each."""

    def call(q_BHND: Tensor, k_BHND: Tensor, v_BHND: Tensor) -> Tensor:
        blocks = (x[:, :, : size.C * size.W].unflatten(2, (size.C, size.W)).flatten(0, 1) for x in (q_BHND, v_BHND))
        q_XCWD, v_XCWD = blocks
        return F.scaled_dot_product_attention(q_XCWD, q_XCWD, v_XCWD, is_causal=True)

    return call


def peer_routing(size: Size, args: argparse.Namespace) -> Attention:
    """Return KmeansAttention of routing_transformer with shared queries and keys."""
    from routing_transformer.routing_transformer import KmeansAttention  # pyright: ignore[reportMissingImports]

    module = KmeansAttention(size.C, size.W, args.heads, args.dim, causal=True, shared_qk=True).to(args.device).train()

    def call(q_BHND: Tensor, k_BHND: Tensor, v_BHND: Tensor) -> Tensor:
        out_BHND, loss = module(q_BHND, q_BHND, v_BHND)
        return out_BHND + loss

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
    others = {"sdpa_blocks": sdpa_blocks, "cross_routing": cross_routing}
    others |= {"peer_routing": peer_routing, "peer_local": peer_local, "peer_lsh": peer_lsh}
    if name == "sdpa":
        return sdpa
    if name in others:
        return others[name](size, args)
    name, backend = pattern_and_backend(name)
    kind = without_positions(name)
    ours = Ours(make_heads(kind, size, args, backend).to(args.device).train(), own_keys=kind in OWN_KEYS)
    ours.relative = shaw(args) if name.endswith("_shaw") else None
    ours.rotate = Rotary(args.dim) if name.endswith("_rotary") else None
    return ours


def pattern_and_backend(name: str) -> tuple[str, str]:
    """Return the pattern of a row's name, and what runs it."""
    pattern = name.removesuffix("_triton")
    return pattern, "torch" if pattern == name else "triton"


def without_positions(pattern: str) -> str:
    """Return a pattern's name without its position terms."""
    return pattern.removesuffix("_shaw").removesuffix("_rotary")


def make_heads(kind: str, size: Size, args: argparse.Namespace, backend: str) -> Heads:
    """Return the heads of one of our patterns; strides and buckets so that about W keys are read."""
    scale, window = args.dim**-0.5, size.W
    if kind == "full":
        return FullHeads()
    if kind == "local":
        return LocalHeads(window=window)
    if kind == "strided":
        return StridedHeads(stride=size.C)
    if kind == "fixed":
        return FixedHeads(block=window, summary=8)
    if kind == "adaptive_span":
        heads = SpanHeads(args.heads, window=window)
        torch.nn.init.ones_(heads.share_H)  # spans as long as they can be
        return heads
    if kind.startswith("lsh"):
        rounds, variant = ROUNDS if kind == "lsh_rounds" else 1, "reformer" if kind == "lsh_reformer" else "causal"
        hashed: dict[str, Any] = {"window": window, "buckets": 2 * (size.C // 2), "seed": 0}
        return LshHeads(args.heads, args.dim, rounds=rounds, variant=variant, **hashed)
    if kind == "random":
        options: dict[str, Any] = {"window": window, "length": size.N, "seed": 0, "scale": scale}
        return RandomHeads(args.heads, size.C, backend=backend, **options)
    return routed(size, args, kind.removeprefix("routing_"), backend)


def pairs(name: str, size: Size) -> float:
    """Return how many pairs a head reads (routing and hashing heads: with clusters and buckets evenly filled)."""
    N, W = size.N, size.W
    kind = without_positions(pattern_and_backend(name)[0])
    if kind in ("full", "sdpa"):
        return triangle(N)
    if kind == "strided":
        return strided_pairs(N, size.C)
    if kind == "fixed":
        return fixed_pairs(N, W, 8)
    if kind in ("local", "peer_local", "adaptive_span"):
        return window_pairs(N, W)
    if kind in ("routing_encoder", "cross_routing"):
        return size.C * W * W
    return size.C * triangle(W) * (ROUNDS if kind == "lsh_rounds" else 1)
