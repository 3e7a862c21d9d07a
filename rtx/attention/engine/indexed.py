"""Attention in which every query names the keys that it reads, by PyTorch's kernels.

All scores of some queries are computed at a time, and masked: gathering the keys of each query takes
longer, but for very long sequences.

Shapes: G heads of all sequences, N positions, R = G * N rows, K keys of a query, Q queries of a piece.
"""

import torch
from torch import Tensor

from rtx.attention.engine import blocks
from rtx.attention.engine.problem import Problem, Result
from rtx.attention.engine.softmax import Terms, recomputed, soft_attend
from rtx.attention.packed import Indexed


def refusal(problem: Problem) -> str | None:
    """Return why this engine cannot run the problem; None where it can."""
    if not isinstance(problem.part, Indexed):
        return "its keys are ranges of lists, not an index"
    return None


def attend(problem: Problem) -> Result:
    """Return outputs and log-sums by row, see `Problem`: every row is one query member."""
    q_RD, k_RD, v_RD = problem.rows()
    part, terms = problem.part, problem.terms
    assert isinstance(part, Indexed)
    N = part.length
    heads = len(q_RD) // N
    on_cpu = q_RD.device.type == "cpu"
    most = blocks.MAX_SCORES_CPU if on_cpu else blocks.MAX_SCORES_GPU
    query_N = positions_that_read(part.index_RK.view(heads, N, -1))
    # Shorter prefixes for earlier queries, where starting kernels costs little.
    step = max(1, min(most // N, -(-N // 4) if on_cpu else N))
    few = len(q_RD) * N <= blocks.MAX_SCORES_CPU  # few scores need no second pass
    head_G = torch.arange(heads, device=q_RD.device) % terms.heads
    k, v, q, index = (x.unflatten(0, (heads, N)) for x in (k_RD, v_RD, q_RD, part.index_RK))
    if query_N is not None:
        q = q.index_select(1, query_N)
        index = index.index_select(1, query_N)
    else:
        query_N = torch.arange(N, device=q.device)
    outs, sums = [], []
    size = max(1, most // N**2)
    pieces = zip(*(x.split(size) for x in (head_G, k, v, q, index)), strict=True)
    for some_G, some_k, some_v, some_q, some_index in pieces:
        some = some_G, some_k, some_v, some_q, some_index
        out_GQD, sum_GQ = heads_at_once(*some, query_N, N, step, terms, few)
        outs.append(out_GQD)
        sums.append(sum_GQ)
    out_GQD, sum_GQ = torch.cat(outs), torch.cat(sums)
    if len(query_N) < N:
        out_GND = out_GQD.new_zeros(heads, N, v_RD.shape[1])
        out_GQD = out_GND.index_copy(1, query_N, out_GQD)
        sum_GQ = sum_GQ.new_full((heads, N), float("-inf")).index_copy(1, query_N, sum_GQ)
    return out_GQD.flatten(0, 1), sum_GQ.flatten()


def positions_that_read(index_GNK: Tensor) -> Tensor | None:
    """Return the positions at which some head reads a key, on a CPU; None: all of them.

    A GPU would have to wait for their number.
    """
    if not index_GNK.is_cpu:
        return None
    query_N = (index_GNK >= 0).any(-1).any(0).nonzero()[:, 0]
    return query_N if len(query_N) < index_GNK.shape[1] else None


def heads_at_once(
    head_G: Tensor,
    k: Tensor,
    v: Tensor,
    q: Tensor,
    index: Tensor,
    query_N: Tensor,
    N: int,
    step: int,
    terms: Terms,
    few: bool,
) -> tuple[Tensor, Tensor]:
    """Return outputs `[G, Q, D]` and log-sums `[G, Q]` of some heads, `step` queries at a time."""
    outs, sums = [], []
    pieces = zip(query_N.split(step), q.split(step, 1), index.split(step, 1), strict=True)
    for number, (query_Q, q_GQD, index_GQK) in enumerate(pieces):
        if not q.is_cpu:
            keys = min(N, (number + 1) * step)  # all positions are here, in order
        else:
            keys = max(query_Q.tolist(), default=0) + 1
        given = terms, N, keys, head_G, k, v, query_Q, q_GQD, index_GQK
        out_GQD, sum_GQ = recomputed(soft_indexed, *given, kept=few)
        outs.append(out_GQD)
        sums.append(sum_GQ)
    return torch.cat(outs, 1), torch.cat(sums, 1)


def soft_indexed(
    terms: Terms,
    N: int,
    keys: int,
    head_G: Tensor,
    k: Tensor,
    v: Tensor,
    query_Q: Tensor,
    q: Tensor,
    index: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return what `soft_attend` does for queries at some positions, which read the first `keys` positions."""
    slot_GQK = torch.where(index < 0, keys, index % N)  # one slot more for what is none
    mask_GQK = slot_GQK.new_zeros(*q.shape[:2], keys + 1, dtype=torch.bool)
    mask_GQK.scatter_(2, slot_GQK, True)
    distance_GQK = None
    if terms.by_distance:
        distance_QK = query_Q[:, None] - torch.arange(keys, device=q.device)
        distance_GQK = distance_QK.expand(len(q), -1, -1)
    mask_GQK = mask_GQK[..., :keys]
    return soft_attend(q, k[:, :keys], v[:, :keys], mask_GQK, distance_GQK, head_G, terms)
