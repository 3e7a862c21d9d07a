"""What attention heads read of one sequence: the weight of its positions on every key.

With unit vectors as values a head's output is its weight on each key; of heads with a second branch (blocks with
routing.compressed) it is the branch that selects.

Shapes: N positions, P of them looked at, K keys of a block, H heads of a group, C clusters.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rtx.attention.engine import attend
from rtx.attention.packed import Indexed, Part, Reads
from rtx.attention.pattern import Inputs, Pattern
from rtx.attention.patterns import Random
from rtx.attention.routing import Routing
from rtx.attention.softmax import Relative
from rtx.model.block import Block
from rtx.model.multihead import MultiheadAttention
from rtx.model.transformer import Transformer

KEYS = 256
"""Keys whose weights are worked out at once."""

Heads = tuple[Pattern, Inputs, list[Part], Relative | None]
"""The heads of a group, what they are given, what they read, and Shaw's tables."""


@torch.no_grad()
def layer_inputs(model: Transformer, tokens_BN: Tensor) -> Iterator[tuple[MultiheadAttention, Tensor]]:
    """Yield the attention of every layer, the lowest first, with what it reads of the sequences, `[B, N, E]`."""
    x_BNE = model.embedding(tokens_BN)
    for block in model.blocks:
        assert isinstance(block, Block)
        yield block.attention, block.attention_norm(x_BNE) if block.pre else x_BNE
        x_BNE, _ = block(x_BNE)


@torch.no_grad()
def groups_of(attention: MultiheadAttention, x_1NE: Tensor) -> dict[str, Heads]:
    """Return the groups of a layer's heads, with what they read of one sequence."""
    groups = {}
    every = zip(attention.groups, attention.each(), attention.relative(), attention.split(x_1NE), strict=True)
    for name, pattern, relative, (q_1HND, k_1HND, _) in every:
        given = pattern.inputs(q_1HND, k_1HND, attention.rotary)
        groups[name] = pattern, given, pattern.reads(given, None, False), relative
    return groups


def read_by(part: Part, kept_R: Tensor) -> Part:
    """Return what is left of a part when only some rows ask."""
    if isinstance(part, Indexed):
        kept_P = kept_R[part.query_row_P]
        return Indexed(part.query_row_P[kept_P], part.index_PK[kept_P], part.length)
    kept_P = kept_R[part.query.row_M]
    return Reads(part.query.keep(kept_R), part.key, part.start_P[kept_P], part.stop_P[kept_P], part.length)


@torch.no_grad()
def weight_blocks(heads: Heads, at_P: Tensor) -> Iterator[Tensor]:
    """Yield the weights of some positions of one sequence on its keys, `[H, P, K]`, the first keys first.

    They are float32 or wider; over all keys a position's sum to 1, or to 0 where it reads nothing.
    """
    pattern, given, parts, relative = heads
    _, H, N, D = given.q_BHND.shape
    wide, device = torch.promote_types(given.q_BHND.dtype, torch.float32), given.q_BHND.device
    at_P = at_P.to(device)
    parts = [read_by(part, torch.isin(torch.arange(N, device=device), at_P).repeat(H)) for part in parts]
    for first in range(0, N, KEYS):
        unit_NK = torch.eye(N, min(KEYS, N - first), dtype=wide, device=device).roll(first, dims=0)
        if relative is not None:
            relative = Relative(relative.keys_MD, unit_NK.new_zeros(len(relative.keys_MD), unit_NK.shape[1]))
        with torch.autocast(device.type, enabled=False):
            q, k = given.turned_q_BHND.to(wide), given.turned_k_BHND.to(wide)
            terms = pattern.terms(D, relative)
            yield attend(q, k, unit_NK.expand(1, H, N, -1), parts, terms, "torch")[0][:, at_P]


@torch.no_grad()
def clusters_of(heads: Heads, head: int, at_P: Tensor) -> Tensor | None:
    """Return the first cluster that holds a position and a key, int16 `[P, N]`, -1: none; None without clusters."""
    pattern, given, (part, *_), _ = heads
    if not isinstance(pattern, Routing | Random) or isinstance(part, Indexed):
        return None
    H, N = given.q_BHND.shape[1:3]
    member_CN = []
    for lists in (part.query, part.key):
        C = len(lists.count_L) // H
        member_LN = torch.zeros(H * C, N, dtype=torch.bool, device=lists.row_M.device)
        member_LN[lists.list_M(), lists.row_M % N] = True
        member_CN.append(member_LN.view(H, C, N)[head].cpu())
    cluster_PN = torch.full((len(at_P), N), -1, dtype=torch.int16)
    for cluster, (query_N, key_N) in enumerate(zip(*member_CN, strict=True)):
        cluster_PN[query_N[at_P, None] & key_N & (cluster_PN < 0)] = cluster
    return cluster_PN


def summary(weight_PN: Tensor, at_P: Tensor) -> dict[str, Any]:
    """Return what a head reads on average over the positions at which it reads anything; None where at none.

    `keys` read, `distance` by weight and the `farthest` one, and the weight that a position puts on itself.
    """
    reads_P = weight_PN.sum(1) > 0.5
    weight_PN, at_P1 = weight_PN[reads_P], at_P[reads_P, None]
    distance_PN = at_P1 - torch.arange(weight_PN.shape[1])
    found = {"reads_share": float(reads_P.float().mean())}
    if not len(weight_PN):
        return found | dict.fromkeys(("keys", "distance", "farthest", "self_weight"))
    return found | {
        "keys": float((weight_PN > 0).sum(1).float().mean()),
        "distance": float((weight_PN * distance_PN).sum(1).mean()),
        "farthest": int(distance_PN[weight_PN > 0].max()),
        "self_weight": float(weight_PN.gather(1, at_P1).mean()),
    }
