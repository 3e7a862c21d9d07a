"""What attention heads read of one sequence: the weights of some positions on all keys.

With unit vectors as values a head's output is its weight on each key. (With routing.compressed
these are the weights of the branch that selects.)

Shapes: B sequences, N positions, P of them whose weights are computed, K keys of a piece, H heads
of a group, R = H * N rows, E hidden width, D head size.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rtx.attention.engine import attend
from rtx.attention.engine.softmax import RelativeTables
from rtx.attention.grouped import for_attention, repeated_reads
from rtx.attention.pattern import Pattern
from rtx.attention.precision import no_autocast, wide_type
from rtx.attention.reads import Holes, IndexReads, QueriesKeys, RangeReads, Reads
from rtx.model.multihead import MultiheadAttention
from rtx.model.transformer import Transformer

KEYS = 256
"""The number of keys whose weights are computed at once."""


class Heads(NamedTuple):
    """The heads of a group, and what they read of one sequence."""

    pattern: Pattern
    qk: QueriesKeys
    parts: list[Reads]
    relative: RelativeTables | None
    head_H: Tensor | None = None
    """The place of each head of the group in `qk` and `parts`; None: they are in order."""


@torch.no_grad()
def layer_inputs(
    model: Transformer, tokens_BN: Tensor
) -> Iterator[tuple[MultiheadAttention, Tensor]]:
    """Yield the attention of every layer, the lowest first, with its input `[B, N, E]`."""
    x_BNE = model.embedding(tokens_BN)
    for block in model.blocks:
        yield block.attention, block.before_attention(x_BNE)  # type: ignore[misc, operator]
        x_BNE, _ = block(x_BNE)


@torch.no_grad()
def groups_of(attention: MultiheadAttention, x_1NE: Tensor) -> dict[str, Heads]:
    """Return the groups of a layer's heads by their names, with what they read of one sequence."""
    groups = {}
    for group, qkv in zip(attention.head_groups(), attention.project(x_1NE), strict=True):
        q_1HND, k_1HND, _ = qkv
        qk = group.inputs(q_1HND, k_1HND)
        parts = group.pattern.reads(qk, False)
        heads = Heads(group.pattern, qk, parts, group.relative())
        if group.pattern.chooses_together:
            heads = one_by_one(heads, group.queries_of_key_head)
        groups[group.name] = heads
    return groups


def one_by_one(heads: Heads, queries: int) -> Heads:
    """Return query heads that choose together as heads with queries and keys for each.

    Args:
        queries: the number of query heads that choose together.
    """
    _, G, N, _ = heads.qk.q_BHND.shape
    each = for_attention(heads.qk, queries)
    # The first query heads of all key-value heads come first.
    qk = QueriesKeys(
        each.q_BHND.flatten(0, 1)[None],
        each.k_BHND.flatten(0, 1)[None],
        each.rotated_q_BHND.flatten(0, 1)[None],
        each.rotated_k_BHND.flatten(0, 1)[None],
    )
    number_IG = torch.arange(queries * G).view(queries, G)
    return heads._replace(
        qk=qk,
        parts=[repeated_reads(part, queries, G * N) for part in heads.parts],
        head_H=number_IG.T.flatten(),
    )


def read_by(part: Reads, reads_R: Tensor) -> Reads:
    """Return a part of which only some rows read.

    Args:
        reads_R: whether a row reads.
    """
    if isinstance(part, IndexReads):
        index_RK = part.index_RK.masked_fill(~reads_R[:, None], -1)
        return part._replace(index_RK=index_RK)
    reads_P = reads_R[part.query.row_M]
    holes = None
    if part.holes is not None:
        low_IP = part.holes.low_IP[:, reads_P]
        high_IP = part.holes.high_IP[:, reads_P]
        holes = Holes(part.holes.value_IM, low_IP, high_IP)
    return RangeReads(
        part.query.keep(reads_R),
        part.key,
        part.start_P[reads_P],
        part.stop_P[reads_P],
        part.length,
        holes,
    )


@torch.no_grad()
def weight_blocks(heads: Heads, position_P: Tensor) -> Iterator[Tensor]:
    """Yield the weights of some positions on keys, `[H, P, K]`, piece by piece of the keys.

    They are float32 or wider. Over all keys the weights of a position add up to 1, or to 0 if it
    reads nothing.
    """
    _, H, N, _ = heads.qk.q_BHND.shape
    device = heads.qk.q_BHND.device
    wide = wide_type(heads.qk.q_BHND.dtype)
    position_P = position_P.to(device)
    reads_N = torch.isin(torch.arange(N, device=device), position_P)
    parts = [read_by(part, reads_N.repeat(H)) for part in heads.parts]
    for first in range(0, N, KEYS):
        keys = min(KEYS, N - first)
        unit_NK = torch.eye(N, keys, dtype=wide, device=device).roll(first, dims=0)
        weight_1HNK = outputs(heads, parts, unit_NK.expand(1, H, N, -1))
        weight_HPK = weight_1HNK[0][:, position_P]
        if heads.head_H is not None:
            weight_HPK = weight_HPK[heads.head_H]
        yield weight_HPK


def outputs(heads: Heads, parts: list[Reads], v_1HNK: Tensor) -> Tensor:
    """Return the outputs of heads for some values, `[1, H, N, K]`, without relative values."""
    qk = heads.qk
    relative = heads.relative
    if relative is not None:
        relative = relative._replace(values_MD=None)
    merge = heads.pattern.merge
    with no_autocast(v_1HNK):
        q_1HND = qk.rotated_q_BHND.to(v_1HNK.dtype)
        k_1HND = qk.rotated_k_BHND.to(v_1HNK.dtype)
        # Without sinks the weights on keys add up to 1.
        terms = heads.pattern.terms(q_1HND.shape[-1], relative)._replace(sink_IH=None)
        return attend(q_1HND, k_1HND, v_1HNK, parts, terms, "torch", merge)


def summary(weight_PN: Tensor, position_P: Tensor) -> dict[str, Any]:
    """Return what a head reads, on average over the positions at which it reads anything.

    `reads_share` is the share of these positions. The others are the number of `keys` read, their
    mean `distance` by weight, the `farthest` distance, and the weight of a position on itself.
    """
    reads_P = weight_PN.sum(1) > 0.5
    if not reads_P.any():
        return {"reads_share": 0.0}
    weight_PN = weight_PN[reads_P]
    position_P1 = position_P[reads_P, None]
    distance_PN = position_P1 - torch.arange(weight_PN.shape[1])
    is_read_PN = weight_PN > 0
    return {
        "reads_share": float(reads_P.float().mean()),
        "keys": float(is_read_PN.sum(1).float().mean()),
        "distance": float((weight_PN * distance_PN).sum(1).mean()),
        "farthest": int(distance_PN[is_read_PN].max()),
        "self_weight": float(weight_PN.gather(1, position_P1).mean()),
    }
