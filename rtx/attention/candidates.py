"""Candidates: the keys that a query probes, of which it reads the W with the largest logits.

The compiled kernel makes `native_index`. Torch's operations make `candidate_index`, for some
queries of some heads at a time.

Shapes: B sequences, H heads, X = B * H of them or some of those, C clusters, N positions, D head
size, R = B * H * N rows, Q queries of a piece, A candidates of a query, W keys that it reads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from rtx.attention.engine import native
from rtx.attention.engine.triton_probing import Reach
from rtx.attention.inverted_file import Search, max_probed, searches
from rtx.attention.members import products
from rtx.attention.pieces import pieces
from rtx.attention.reads import IndexReads
from rtx.attention.static import best_places
from rtx.attention.top_keys import positions_in, product_margins


def native_index(
    centroid_HCD: Tensor,
    q_BHND: Tensor,
    k_BHND: Tensor,
    reach: Reach,
    window: int,
) -> IndexReads:
    """Return the rows of each query's W best candidates, by the compiled kernel for CPUs.

    Args:
        reach: m, as `target`, and whether a query may read its own key.
        window: W, at most N.
    """
    index_RW = native.probe_best(
        centroid_HCD,
        q_BHND,
        k_BHND,
        candidates=reach.target,
        window=window,
        attend_self=reach.attend_self,
    )
    return IndexReads(index_RW, q_BHND.shape[2])


def candidate_index(
    centroid_HCD: Tensor,
    q_BHND: Tensor,
    k_BHND: Tensor,
    reach: Reach,
    window: int,
    backend: str,
) -> IndexReads:
    """Return the rows of each query's W best candidates, by torch's operations.

    Args:
        reach: m, as `target`, and whether a query may read its own key.
        window: W, at most N.
        backend: of the pattern.
    """
    B, H, N, _ = q_BHND.shape
    device = q_BHND.device
    shape_XNW = (B * H, N, window)
    index_XNW = torch.full(shape_XNW, -1, device=device)
    for heads, search in searches(centroid_HCD, q_BHND, k_BHND, reach):
        head_X = torch.arange(heads.start, heads.stop, device=device)
        first_row_X = head_X * N
        for queries, position_XQA in candidates(search, reach):
            q_XQD = search.q_XND[:, queries]
            k_XQAD = keys_at(search.k_XND, position_XQA)
            best_XQW = best_candidates(
                q_XQD,
                k_XQAD,
                position_XQA,
                length=N,
                window=window,
                backend=backend,
            )
            row_XQW = first_row_X[:, None, None] + best_XQW
            index_XNW[heads, queries] = torch.where(best_XQW < 0, -1, row_XQW)
    return IndexReads(index_XNW.flatten(0, 1), N, both_sides=not reach.causal)


def candidates(search: Search, reach: Reach) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of the queries, and the positions of their candidates, `[X, Q, A]`.

    The positions ascend. Where a query has fewer candidates, the last entries are N.
    """
    X, N, D = search.q_XND.shape
    target = reach.target
    most = max_probed(target, N)
    is_probed_XNC = search.probed_XNC(target)
    order_XN = search.order_XN()
    # For each candidate its key, its logit and some int64 numbers are in memory.
    numbers_of_position = X * most * (D + 8)
    for queries in pieces(N, numbers_of_position):
        readable_XQC = search.readable_XNC[:, queries]
        is_probed_XQC = is_probed_XNC[:, queries]
        taken_XQC = readable_XQC.clamp(max=target) * is_probed_XQC
        stop_XQC = search.first_X1C + search.stop_XNC[:, queries]
        position_XQA = positions_taken(order_XN, stop_XQC, taken_XQC, most)
        if not reach.causal and not reach.attend_self:
            position_XQA = without_own(position_XQA, queries, N)
        yield queries, position_XQA


def without_own(position_XQA: Tensor, queries: slice, length: int) -> Tensor:
    """Return the candidates without the queries' own positions, where there are others.

    Args:
        position_XQA: ascending; N for none.
        length: N.
    """
    position_Q1 = positions_in(queries, position_XQA.device)[:, None]
    is_own_XQA = position_XQA == position_Q1
    is_other_XQA = ~is_own_XQA & (position_XQA < length)
    has_others_XQ1 = is_other_XQA.any(-1, keepdim=True)
    without_XQA = position_XQA.masked_fill(is_own_XQA & has_others_XQ1, length)
    return without_XQA.sort(dim=-1).values


def positions_taken(order_XN: Tensor, stop_XQC: Tensor, taken_XQC: Tensor, most: int) -> Tensor:
    """Return the positions that queries take of their clusters, ascending, `[X, Q, A]`.

    Where a query takes fewer than A, the last entries are N.

    Example, that of `rtx.attention.probed`: the clusters a, b and c have the positions 0 2 4, 1 5
    and 3, so the order is 0, 2, 4, 1, 5, 3. The query at position 5 may read all keys, so the stops
    of the clusters are 3, 5 and 6. It takes 3 keys of a, none of b and 1 of c:

        slot              0 1 2 3
        cluster           a a a c
        slots to its end  3 2 1 1
        place in order    0 1 2 5      the stop of the cluster - slots to its end
        position          0 2 4 3

    Args:
        order_XN: the positions, cluster after cluster.
        stop_XQC: where in the order the keys of each cluster end that a query may take.
        taken_XQC: how many keys before its stop a query takes of each cluster.
        most: A.
    """
    X, N = order_XN.shape
    _, Q, C = stop_XQC.shape
    end_XQC = taken_XQC.cumsum(-1)
    slot_A = torch.arange(most, device=order_XN.device)
    slot_XQA = slot_A.expand(X, Q, most).contiguous()
    is_none_XQA = slot_XQA >= end_XQC[..., -1:]
    cluster_XQA = torch.searchsorted(end_XQC, slot_XQA, right=True)
    cluster_XQA = cluster_XQA.clamp(max=C - 1)
    to_end_XQA = end_XQC.gather(-1, cluster_XQA) - slot_XQA
    place_XQA = stop_XQC.gather(-1, cluster_XQA) - to_end_XQA
    order_XQN = order_XN[:, None].expand(-1, Q, -1)
    last = max(0, N - 1)
    position_XQA = order_XQN.gather(-1, place_XQA.clamp(0, last))
    position_XQA = torch.where(is_none_XQA, N, position_XQA)
    return position_XQA.sort(dim=-1).values


def keys_at(k_XND: Tensor, position_XQA: Tensor) -> Tensor:
    """Return the keys at some positions, `[X, Q, A, D]`; an arbitrary key for position N."""
    X, N, _ = k_XND.shape
    head_X11 = torch.arange(X, device=k_XND.device)[:, None, None]
    position_XQA = position_XQA.clamp(max=N - 1)
    return k_XND[head_X11, position_XQA]


def best_candidates(
    q_XQD: Tensor,
    k_XQAD: Tensor,
    position_XQA: Tensor,
    length: int,
    window: int,
    backend: str,
) -> Tensor:
    """Return the positions of each query's W best candidates, `[X, Q, W]`; -1 for none.

    Logits within the margin of the lowest selected logit count as equal to it.

    Args:
        k_XQAD: the candidates' keys.
        position_XQA: their positions, ascending; N for none.
        length: N.
        window: W.
        backend: of the pattern.
    """
    is_none_XQA = position_XQA >= length
    q_XQ1D = q_XQD[:, :, None]
    logit_XQ1A = products(q_XQ1D, k_XQAD)
    logit_XQA = logit_XQ1A[:, :, 0]
    logit_XQA = logit_XQA.masked_fill(is_none_XQA, -math.inf)

    def margin(slot_XQ1: Tensor) -> Tensor:
        k_XQ1D = k_XQAD.take_along_dim(slot_XQ1[..., None], dim=2)
        return product_margins(q_XQ1D, k_XQ1D)

    count = min(window, position_XQA.shape[-1])
    slot_XQW = best_places(logit_XQA, count, margin, backend)
    position_XQW = position_XQA.gather(-1, slot_XQW)
    return torch.where(position_XQW >= length, -1, position_XQW)
