"""Attention over packed lists in static shapes, by PyTorch's operations: for a GPU where our kernels do not run.

A tile is a run of consecutive query members and one contiguous range of key slots. Its shape does not
depend on the data, so the CPU never waits for the GPU. A mask hides the key slots that a query does
not read.

Shapes: P query members and M key members of all lists together, G tiles, Q query slots and K key slots
of a tile, R rows, D head size.
"""

import torch
from torch import Tensor

from rtx.attention.engine.blocks import MAX_SCORES_GPU, soft_block
from rtx.attention.engine.problem import Problem, Result
from rtx.attention.engine.softmax import Terms, recomputed
from rtx.attention.packed import Reads

TILE = 128
"""Query members of a tile."""


def refusal(problem: Problem) -> str | None:
    """Return why this engine cannot run the problem; None where it can."""
    part = problem.part
    if not isinstance(part, Reads):
        return "its keys are an index, not ranges of lists"
    if part.most is None:
        return "nothing bounds the number of keys that a query reads"
    if problem.q_BHND.is_cpu:
        return "it is for GPUs"
    if has_terms_by_head(problem.terms) and part.window is None:
        return "its tiles hold several heads, whose terms by distance differ"
    return None


def has_terms_by_head(terms: Terms) -> bool:
    """Tell whether heads have terms by distance of their own."""
    if terms.bias_HM is not None:
        return True
    return terms.relative is not None and terms.relative.keys_MD.dim() == 3


def attend(problem: Problem) -> Result:
    """Return outputs and log-sums, see `Problem`."""
    q_RD, k_RD, v_RD = problem.rows()
    part, terms = problem.part, problem.terms
    assert isinstance(part, Reads) and part.most is not None
    wide = torch.promote_types(v_RD.dtype, torch.float32)
    query_GQ, key_GK = tiles(part)
    scores_of_tile = query_GQ.shape[1] * key_GK.shape[1]
    size = max(1, MAX_SCORES_GPU // max(1, scores_of_tile))
    outs, sums = [], []
    for query, key in zip(query_GQ.split(size), key_GK.split(size), strict=True):
        mask = slots_read(part, query, key)
        row_GQ = part.query.row_M[query.clamp(max=len(part.start_P) - 1)].long()
        row_GK = part.key.row_M[key.clamp(0, len(part.key.row_M) - 1)].long()
        head_G = row_GQ[:, 0] // part.length % terms.heads
        q, k, v = q_RD[row_GQ], k_RD[row_GK], v_RD[row_GK]
        out, total = recomputed(soft_block, q, k, v, mask, row_GQ, row_GK, head_G, terms)
        outs.append(out.flatten(0, 1))
        sums.append(total.flatten())
    slot_P = slots_of_queries(part)
    out_PD, sum_P = torch.cat(outs)[slot_P].to(wide), torch.cat(sums)[slot_P]
    if problem.by_member:
        return out_PD, sum_P
    times_P = part.times_R(len(q_RD)).clamp(min=1)[part.query.row_M]
    share_P = (sum_P > float("-inf")).to(wide) / times_P
    total_RD = out_PD.new_zeros(len(q_RD), v_RD.shape[1])
    return total_RD.index_add(0, part.query.row_M, out_PD * share_P[:, None]), sum_P


def tiles(part: Reads) -> tuple[Tensor, Tensor]:
    """Return the members in the query slots `[G, Q]` and the key slots `[G, K]` of every tile.

    A query number of P or more, and a key number outside 0 to M - 1, is an empty slot. Where queries and
    keys are the same lists, member p reads no key before p - most + 1, so a tile of TILE queries needs
    TILE + most - 1 key slots. Otherwise each query is a tile of its own.
    """
    assert part.most is not None
    P, device = len(part.start_P), part.start_P.device
    if part.query is not part.key:
        every_P1 = torch.arange(P, device=device)[:, None]
        return every_P1, part.start_P[:, None] + torch.arange(part.most, device=device)
    slot_Q = torch.arange(TILE, device=device)
    if part.window is None:
        first_G1 = torch.arange(0, P, TILE, device=device)[:, None]
        query_GQ = first_G1 + slot_Q
    else:  # every list is a sequence, and no tile holds two
        N = part.length
        begin_T1 = torch.arange(0, N, TILE, device=device)[:, None]
        query_TQ = torch.where(begin_T1 + slot_Q < N, begin_T1 + slot_Q, P)
        list_L11 = torch.arange(P // N, device=device)[:, None, None] * N
        query_GQ = (list_L11 + query_TQ).flatten(0, 1)
        first_G1 = query_GQ[:, :1]
    key_GK = first_G1 + torch.arange(1 - part.most, TILE, device=device)
    return query_GQ, key_GK


def slots_of_queries(part: Reads) -> Tensor:
    """Return where each query member is among the flattened query slots of `tiles`, `[P]`."""
    every_P = torch.arange(len(part.start_P), device=part.start_P.device)
    if part.query is not part.key or part.window is None:
        return every_P
    slots_of_list = -(-part.length // TILE) * TILE
    return every_P // part.length * slots_of_list + every_P % part.length


def slots_read(part: Reads, query_GQ: Tensor, key_GK: Tensor) -> Tensor:
    """Return which key slots each query slot reads, `[G, Q, K]`."""
    P, M = len(part.start_P), len(part.key.row_M)
    at_GQ = query_GQ.clamp(max=P - 1)
    key_G1K = key_GK[:, None]
    start_GQ1 = part.start_P[at_GQ][..., None]
    stop_GQ1 = part.stop_P[at_GQ][..., None]
    mask = (key_G1K >= start_GQ1) & (key_G1K < stop_GQ1) & (query_GQ < P)[..., None]
    for value_M, low_P, high_P in zip(*part.hidden or (), strict=True):
        value_G1K = value_M[key_GK.clamp(0, M - 1)][:, None]
        below = value_G1K < low_P[at_GQ][..., None]
        mask = mask & (below | (value_G1K >= high_P[at_GQ][..., None]))
    return mask
