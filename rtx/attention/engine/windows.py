"""Attention over packed lists in static shapes, by PyTorch's operations, if our kernels cannot run.

The query members are cut into tiles of TILE consecutive ones. The keys that a tile may read are one
window of consecutive key members, whose width follows from `RangeReads.most`, the largest number of
keys of a query. So no shape depends on numbers in tensors, and the CPU never waits for the GPU. A
mask hides those key slots that a query does not read.

For example, tiles of 4 queries that read at most 3 keys each, where queries and keys are the same
lists:

    tile 0   query members 0 1 2 3   key slots -2 -1 0 1 2 3     (-2 and -1 are empty)
    tile 1   query members 4 5 6 7   key slots  2  3 4 5 6 7

Shapes: P query members and M key members of all lists together, G tiles, Q query slots and K key
slots of a tile, S = G * Q query slots of all tiles, R rows, D head size, L lists; T the tiles of
one list.
"""

import torch
from torch import Tensor

from rtx.attention.engine.blocks import MAX_SCORES_GPU, attend_block, head_of, without_holes
from rtx.attention.engine.problem import Problem, Result
from rtx.attention.engine.rounding import whole_pieces
from rtx.attention.engine.softmax import LogitTerms
from rtx.attention.precision import wide_type
from rtx.attention.reads import MemberLists, RangeReads
from rtx.attention.recompute import recomputed

TILE = 128
"""Query members of a tile."""


def refusal(problem: Problem) -> str | None:
    """Return why this engine cannot run the problem, or None if it can."""
    part = problem.part
    if not isinstance(part, RangeReads):
        return "its keys are an index, not ranges of lists"
    if part.most is None:
        return "nothing bounds the number of keys that a query reads"
    if problem.q_BHND.is_cpu:
        return "it is for GPUs"
    # A tile is computed with the terms of one head, and may lie across the lists of two, unless
    # each list is a whole sequence (see `tiles_of`).
    if has_terms_by_head(problem.terms) and part.window is None:
        return "its tiles hold several heads, whose terms by distance differ"
    return None


def has_terms_by_head(terms: LogitTerms) -> bool:
    """Return whether terms by distance differ from head to head."""
    if terms.bias_HM is not None:
        return True
    if terms.relative is None:
        return False
    return terms.relative.keys_MD.dim() == 3


def attend(problem: Problem) -> Result:
    """Return outputs and log-sums, see `Result`."""
    part = problem.part
    assert isinstance(part, RangeReads)
    out_SD, sum_S = attend_slots(problem)
    slot_P = slots_of_queries(part)
    v_BHND = problem.v_BHND
    wide = wide_type(v_BHND.dtype)
    out_PD = out_SD[slot_P].to(wide)
    sum_P = sum_S[slot_P]
    if problem.by_member:
        return out_PD, sum_P
    row_P = part.query.row_M
    rows = v_BHND.shape[:3].numel()
    # A mean over the lists in which the row reads something: its other members have no share.
    reads_P = sum_P > float("-inf")
    share_P = reads_P.to(wide) / part.lists_read_P(rows)
    out_RD = out_PD.new_zeros(rows, v_BHND.shape[-1])
    out_RD = out_RD.index_add(0, row_P, out_PD * share_P[:, None])
    return out_RD, sum_P


def attend_slots(problem: Problem) -> tuple[Tensor, Tensor]:
    """Return the outputs `[S, D]` and log-sums `[S]` of the query slots of all tiles.

    As many tiles are computed at once as have MAX_SCORES_GPU scores.
    """
    q_RD, k_RD, v_RD = problem.rows()
    part = problem.part
    terms = problem.terms
    assert isinstance(part, RangeReads)
    all_query_GQ, all_key_GK = tiles_of(part)
    scores_of_tile = all_query_GQ.shape[1] * all_key_GK.shape[1]
    size = max(1, MAX_SCORES_GPU // max(1, scores_of_tile))
    queries = torch.split(all_query_GQ, size)
    keys = torch.split(all_key_GK, size)
    outs: list[Tensor] = []
    sums: list[Tensor] = []
    for query_GQ, key_GK in zip(queries, keys, strict=True):
        mask_GQK = slots_read(part, query_GQ, key_GK)
        # Empty slots get the row of some member; the mask excludes it.
        row_GQ = part.query.row_M[existing(query_GQ, part.query)].long()
        row_GK = part.key.row_M[existing(key_GK, part.key)].long()
        out_GQD, sum_GQ = recomputed(
            attend_block,
            q_RD[row_GQ],
            k_RD[row_GK],
            v_RD[row_GK],
            mask_GQK,
            row_GQ,
            row_GK,
            head_of(row_GQ, part.length, terms.heads),
            terms,
        )
        outs.append(out_GQD.flatten(0, 1))
        sums.append(sum_GQ.flatten())
    return torch.cat(outs), torch.cat(sums)


def existing(member: Tensor, lists: MemberLists) -> Tensor:
    """Return the numbers of members, those of empty slots replaced by that of some member."""
    last = len(lists.row_M) - 1
    return member.clamp(0, last)


def tiles_of(part: RangeReads) -> tuple[Tensor, Tensor]:
    """Return the members in the query slots `[G, Q]` and in the key slots `[G, K]` of all tiles.

    Members are given by their numbers. A query slot with a number of P or more is empty, and so is
    a key slot with a number outside 0 to M - 1.

    If queries and keys share their lists, query member p reads only key members from p - most + 1
    to p, so a tile of TILE queries needs TILE + most - 1 key slots. If they have separate lists,
    neighbouring queries may read keys that are far apart. Then each query is one tile, with `most`
    key slots.
    """
    assert part.most is not None
    P = len(part.start_P)
    device = part.start_P.device
    if part.query is not part.key:
        query_G = torch.arange(P, device=device)
        slot_K = torch.arange(part.most, device=device)
        return query_G[:, None], part.start_P[:, None] + slot_K
    if part.window is None:
        query_GQ = consecutive_tiles(P, device)
    else:
        query_GQ = tiles_of_sequences(P, part.length, device)
    offset_K = torch.arange(1 - part.most, TILE, device=device)
    key_GK = query_GQ[:, :1] + offset_K
    return query_GQ, key_GK


def consecutive_tiles(count: int, device: torch.device) -> Tensor:
    """Return the numbers 0 to count - 1, in tiles of TILE, `[G, Q]`; the last tile goes on."""
    first_G = torch.arange(0, count, TILE, device=device)
    return first_G[:, None] + torch.arange(TILE, device=device)


def tiles_of_sequences(P: int, length: int, device: torch.device) -> Tensor:
    """Return the query members of tiles `[G, Q]` where each list is a sequence of `length`.

    No tile has members of two lists: the last tile of each is filled up with empty slots.
    """
    position_TQ = consecutive_tiles(length, device)
    position_TQ = torch.where(position_TQ < length, position_TQ, P)
    first_L = torch.arange(P // length, device=device) * length
    query_LTQ = first_L[:, None, None] + position_TQ
    return query_LTQ.flatten(0, 1)


def slots_of_queries(part: RangeReads) -> Tensor:
    """Return the place of each query member in the flattened query slots of `tiles_of`, `[P]`."""
    number_P = torch.arange(len(part.start_P), device=part.start_P.device)
    if part.query is not part.key or part.window is None:
        return number_P
    slots_of_list = whole_pieces(part.length, TILE) * TILE
    list_P = number_P // part.length
    position_P = number_P % part.length
    return list_P * slots_of_list + position_P


def slots_read(part: RangeReads, query_GQ: Tensor, key_GK: Tensor) -> Tensor:
    """Return which key slots each query slot reads, `[G, Q, K]`; no empty slot reads or is read."""
    P = len(part.start_P)
    existing_query_GQ = existing(query_GQ, part.query)
    start_GQ1 = part.start_P[existing_query_GQ][..., None]
    stop_GQ1 = part.stop_P[existing_query_GQ][..., None]
    key_G1K = key_GK[:, None]
    is_in_range_GQK = (key_G1K >= start_GQ1) & (key_G1K < stop_GQ1)
    mask_GQK = is_in_range_GQK & (query_GQ < P)[..., None]
    if part.holes is None:
        return mask_GQK
    return without_holes(mask_GQK, part.holes, existing_query_GQ, existing(key_GK, part.key))
