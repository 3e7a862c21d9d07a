"""Attention by an index of the keys that each query reads, with PyTorch's operations.

The scores of queries with all earlier keys are computed, and a mask hides the keys that are not in
the index. To gather the keys of each query instead would take longer, except in very long
sequences. For example, the index row [0, 3, -1] of position 4 becomes the mask 1 0 0 1 0.

Scores are computed in pieces: some heads of all sequences at a time, then some queries at a time. A
piece leaves out the keys after its last query, unless queries may read later keys. On a CPU,
positions at which no head reads anything are left out.

Shapes: B sequences, H heads, X = B * H heads of all sequences, G some of them, N positions,
R = X * N rows, K keys of a query, T positions at which some head reads, Q some of these, D head
size.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from rtx.attention.engine import blocks
from rtx.attention.engine.problem import Problem, Result
from rtx.attention.engine.rounding import whole_pieces
from rtx.attention.engine.softmax import LogitTerms, soft_attend
from rtx.attention.reads import IndexReads
from rtx.attention.recompute import recomputed
from rtx.attention.typed_torch import tolist


def refusal(problem: Problem) -> str | None:
    """Return why this engine cannot run the problem, or None if it can."""
    if not isinstance(problem.part, IndexReads):
        return "its keys are ranges of lists, not an index"
    return None


class Heads(NamedTuple):
    """The inputs of some heads: queries at T positions, and all keys and values."""

    head_G: Tensor
    """Numbers of the heads, 0 to H - 1."""
    k_GND: Tensor
    v_GND: Tensor
    q_GTD: Tensor
    index_GTK: Tensor
    """Rows of the keys that each query reads; -1: none."""

    def split(self, size: int) -> list["Heads"]:
        """Return the heads, `size` at a time."""
        fields = (torch.split(x, size) for x in self)
        return [Heads(*piece) for piece in zip(*fields, strict=True)]


def attend(problem: Problem) -> Result:
    """Return outputs and log-sums by row, see `Result`: every row is one query member."""
    part = problem.part
    assert isinstance(part, IndexReads)
    N = part.length
    heads = problem.q_BHND.shape[:2].numel()
    on_cpu = problem.q_BHND.is_cpu
    most = blocks.MAX_SCORES_GPU
    if on_cpu:
        most = blocks.MAX_SCORES_CPU
    index_XNK = torch.unflatten(part.index_RK, 0, (heads, N))
    position_T = positions_that_read(index_XNK)
    all_inputs = all_heads(problem, index_XNK, position_T)
    queries = max(1, most // N)
    if on_cpu and not part.both_sides:
        # At least four pieces: the keys after the last query of a piece are left out.
        queries = min(queries, whole_pieces(N, 4))
    # All scores take little memory then, and the backward pass need not compute them again.
    are_few = heads * N * N <= blocks.MAX_SCORES_CPU
    attend_some = partial(
        attend_heads,
        position_T=position_T,
        queries=queries,
        terms=problem.terms,
        store=are_few,
        both_sides=part.both_sides,
    )
    outs: list[Tensor] = []
    sums: list[Tensor] = []
    heads_at_once = max(1, most // N**2)
    for some in all_inputs.split(heads_at_once):
        out_GTD, sum_GT = attend_some(some)
        outs.append(out_GTD)
        sums.append(sum_GT)
    out_XTD = torch.cat(outs)
    sum_XT = torch.cat(sums)
    if len(position_T) == N:
        return out_XTD.flatten(0, 1), sum_XT.flatten()
    out_XND = out_XTD.new_zeros(heads, N, out_XTD.shape[-1])
    out_XND = out_XND.index_copy(1, position_T, out_XTD)
    sum_XN = sum_XT.new_full((heads, N), float("-inf"))
    sum_XN = sum_XN.index_copy(1, position_T, sum_XT)
    return out_XND.flatten(0, 1), sum_XN.flatten()


def all_heads(problem: Problem, index_XNK: Tensor, position_T: Tensor) -> Heads:
    """Return the inputs of the heads of all sequences, with the queries at some positions."""
    N = index_XNK.shape[1]
    rows = problem.rows()
    q_XND, k_XND, v_XND = (torch.unflatten(x_RD, 0, (-1, N)) for x_RD in rows)
    number_X = torch.arange(len(q_XND), device=q_XND.device)
    head_X = number_X % problem.terms.heads
    if len(position_T) < N:
        q_XND = q_XND.index_select(1, position_T)
        index_XNK = index_XNK.index_select(1, position_T)
    return Heads(head_X, k_XND, v_XND, q_XND, index_XNK)


def positions_that_read(index_XNK: Tensor) -> Tensor:
    """Return the positions at which some head reads a key, `[T]`, ascending.

    On a GPU they are all positions: the CPU would have to wait for their number.
    """
    if index_XNK.is_cpu:
        reads_XN = (index_XNK >= 0).any(-1)
        return reads_XN.any(0).nonzero()[:, 0]
    return torch.arange(index_XNK.shape[1], device=index_XNK.device)


def attend_heads(
    heads: Heads,
    position_T: Tensor,
    queries: int,
    terms: LogitTerms,
    store: bool,
    both_sides: bool,
) -> tuple[Tensor, Tensor]:
    """Return outputs `[G, T, D]` and log-sums `[G, T]`, computed for `queries` at a time.

    Args:
        store: store the scores for the backward pass, which otherwise computes them again.
        both_sides: whether queries may read keys after themselves. Otherwise a piece needs only the
            keys up to its last query.
    """
    outs: list[Tensor] = []
    sums: list[Tensor] = []
    key_stop = 0
    N = heads.k_GND.shape[1]
    positions = torch.split(position_T, queries)
    vectors = torch.split(heads.q_GTD, queries, 1)
    indexes = torch.split(heads.index_GTK, queries, 1)
    for position_Q, q_GQD, index_GQK in zip(positions, vectors, indexes, strict=True):
        if both_sides:
            key_stop = N
        elif position_T.is_cpu:
            key_stop = max(tolist(position_Q), default=0) + 1
        else:
            # The queries are those of all positions, so the number follows without reading the GPU.
            key_stop = min(N, key_stop + queries)
        out_GQD, sum_GQ = recomputed(
            attend_queries,
            terms,
            key_stop,
            heads.head_G,
            heads.k_GND,
            heads.v_GND,
            position_Q,
            q_GQD,
            index_GQK,
            store=store,
        )
        outs.append(out_GQD)
        sums.append(sum_GQ)
    return torch.cat(outs, 1), torch.cat(sums, 1)


def attend_queries(
    terms: LogitTerms,
    key_stop: int,
    head_G: Tensor,
    k_GND: Tensor,
    v_GND: Tensor,
    position_Q: Tensor,
    q_GQD: Tensor,
    index_GQK: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the results of `soft_attend` for queries that read keys before position `key_stop`."""
    N = k_GND.shape[1]
    # The last slot receives the entries of -1.
    slot_GQK = torch.where(index_GQK < 0, key_stop, index_GQK % N)
    G, Q, _ = q_GQD.shape
    mask_GQN = slot_GQK.new_zeros(G, Q, key_stop + 1, dtype=torch.bool)
    mask_GQN.scatter_(2, slot_GQK, True)
    distance_GQN = None
    if terms.by_distance:
        key_position_N = torch.arange(key_stop, device=q_GQD.device)
        distance_QN = position_Q[:, None] - key_position_N
        distance_GQN = distance_QN.expand(G, -1, -1)
    k_GND = k_GND[:, :key_stop]
    v_GND = v_GND[:, :key_stop]
    mask_GQN = mask_GQN[..., :key_stop]
    return soft_attend(q_GQD, k_GND, v_GND, mask_GQN, distance_GQN, head_G, terms)
