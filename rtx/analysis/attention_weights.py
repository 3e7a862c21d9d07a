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
    projections = attention.project(x_1NE)
    for group, qkv in zip(attention.head_groups(), projections, strict=True):
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
    qk = QueriesKeys(
        heads_of_copies(each.q_BHND),
        heads_of_copies(each.k_BHND),
        heads_of_copies(each.rotated_q_BHND),
        heads_of_copies(each.rotated_k_BHND),
    )
    rows = G * N
    parts = [repeated_reads(part, queries, rows) for part in heads.parts]
    heads_in_all = queries * G
    number_IG = torch.arange(heads_in_all).view(queries, G)
    number_GI = number_IG.T
    return heads._replace(
        qk=qk,
        parts=parts,
        head_H=number_GI.flatten(),
    )


def heads_of_copies(x_xGND: Tensor) -> Tensor:
    """Return copies of one sequence as the heads of one sequence, `[1, H, N, D]`.

    The first query heads of all key-value heads come first.
    """
    x_HND = x_xGND.flatten(0, 1)
    return x_HND[None]


def read_by(part: Reads, reads_R: Tensor) -> Reads:
    """Return a part of which only some rows read.

    Args:
        reads_R: whether a row reads.
    """
    if isinstance(part, IndexReads):
        is_left_out_R = ~reads_R
        is_left_out_R1 = is_left_out_R[:, None]
        index_RK = part.index_RK.masked_fill(is_left_out_R1, -1)
        return part._replace(index_RK=index_RK)
    reads_P = reads_R[part.query.row_M]
    return RangeReads(
        part.query.keep(reads_R),
        part.key,
        part.start_P[reads_P],
        part.stop_P[reads_P],
        part.length,
        holes_of(part.holes, reads_P),
    )


def holes_of(holes: Holes | None, reads_P: Tensor) -> Holes | None:
    """Return the holes of some query members.

    Args:
        reads_P: whether a query member is one of them.
    """
    if holes is None:
        return None
    return Holes(
        holes.value_iM,
        holes.low_iP[:, reads_P],
        holes.high_iP[:, reads_P],
    )


@torch.no_grad()
def weight_blocks(heads: Heads, position_P: Tensor) -> Iterator[Tensor]:
    """Yield the weights of some positions on keys, `[H, P, K]`, piece by piece of the keys.

    They are float32 or wider. Over all keys the weights of a position add up to 1, or to 0 if it
    reads nothing.
    """
    q_BHND = heads.qk.q_BHND
    _, H, N, _ = q_BHND.shape
    device = q_BHND.device
    position_P = position_P.to(device)
    position_N = torch.arange(N, device=device)
    reads_N = torch.isin(position_N, position_P)
    reads_R = reads_N.repeat(H)
    parts = [read_by(part, reads_R) for part in heads.parts]
    for first in range(0, N, KEYS):
        unit_NK = unit_vectors(q_BHND, first)
        unit_1HNK = unit_NK.expand(1, H, N, -1)
        weight_1HNK = outputs(heads, parts, unit_1HNK)
        weight_HNK = weight_1HNK[0]
        weight_HPK = weight_HNK[:, position_P]
        if heads.head_H is not None:
            weight_HPK = weight_HPK[heads.head_H]
        yield weight_HPK


def unit_vectors(q_BHND: Tensor, first: int) -> Tensor:
    """Return the values of all positions for a piece of keys, `[N, K]`.

    Position `first` + m has the unit vector of component m; other positions have zero.

    Args:
        q_BHND: queries, whose device and type, float32 or wider, the result has.
    """
    N = q_BHND.shape[2]
    keys = min(KEYS, N - first)
    eye_NK = torch.eye(
        N,
        keys,
        dtype=wide_type(q_BHND.dtype),
        device=q_BHND.device,
    )
    return eye_NK.roll(first, dims=0)


def outputs(heads: Heads, parts: list[Reads], v_1HNK: Tensor) -> Tensor:
    """Return the outputs of heads for some values, `[1, H, N, K]`, without relative values."""
    qk = heads.qk
    relative = heads.relative
    if relative is not None:
        relative = relative._replace(values_MD=None)
    merge = heads.pattern.merge
    head_size = qk.rotated_q_BHND.shape[-1]
    terms = heads.pattern.terms(head_size, relative)
    # Without sinks the weights on keys add up to 1.
    terms = terms._replace(sink_IH=None)
    with no_autocast(v_1HNK):
        return attend(
            qk.rotated_q_BHND.to(v_1HNK.dtype),
            qk.rotated_k_BHND.to(v_1HNK.dtype),
            v_1HNK,
            parts,
            terms,
            "torch",
            merge,
        )


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
    key_N = torch.arange(weight_PN.shape[1])
    distance_PN = position_P1 - key_N
    is_read_PN = weight_PN > 0
    count_P = is_read_PN.sum(1)
    distance_P = (weight_PN * distance_PN).sum(1)
    weight_on_self_P1 = weight_PN.gather(1, position_P1)
    return {
        "reads_share": mean_of(reads_P),
        "keys": mean_of(count_P),
        "distance": mean_of(distance_P),
        "farthest": int(distance_PN[is_read_PN].max()),
        "self_weight": mean_of(weight_on_self_P1),
    }


def mean_of(x: Tensor) -> float:
    """Return the mean of numbers or truth values of any type."""
    if not x.is_floating_point():
        x = x.float()
    return float(x.mean())
