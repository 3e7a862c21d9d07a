"""Attention over packed lists by PyTorch's FlexAttention, for GPUs.

All query members are one long sequence of P queries, all key members one of M keys. FlexAttention
computes a square of BLOCK queries and BLOCK keys only where a `BlockMask` names it, and there it
masks pairs by a function. Starts and stops of ranges never fall from query to query; the key blocks
that a query block meets are therefore consecutive, and the bounds of a block's first and last query
tell them. For example, with blocks of 2:

    query member  0 1   2 3   4 5
    start_P       0 0   1 2   2 4        query block 0 meets key block 0
    stop_P        1 2   3 4   5 6        query block 1 meets key blocks 0 and 1
                                         query block 2 meets key blocks 1 and 2

Shapes: R rows, P query members and M key members of all lists together, X blocks of queries, Y
blocks of keys, Z blocks of either kind, D head size.
"""

# pyright: reportUnknownMemberType=false
# torch declares `compile` and the limit of compilations with a part of their types.

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from rtx.attention.engine.problem import PRODUCTS_ALONE, Problem, Result
from rtx.attention.engine.rounding import whole_pieces
from rtx.attention.reads import RangeReads
from rtx.attention.typed_torch import tolist

BLOCK = 128
"""Queries, and keys, of a block of the mask."""
MIN_SIZE = 16
"""The least head size of FlexAttention's kernels."""
FORMS = 64
"""Forms of masks (types, head sizes, holes) that a process may compile."""
PairMask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""A function of the numbers of sequence, head, query member and key member."""


def refusal(problem: Problem) -> str | None:
    """Return why FlexAttention cannot run the problem, or None if it can."""
    terms = problem.terms
    q_BHND = problem.q_BHND
    sizes = q_BHND.shape[-1], problem.v_BHND.shape[-1]
    if not isinstance(problem.part, RangeReads):
        return "its keys are an index, not ranges of lists"
    if terms.dropout or terms.by_distance:
        return PRODUCTS_ALONE
    if q_BHND.dtype == torch.float64 or min(sizes) < MIN_SIZE:
        return f"it computes in float32 or narrower, with heads of {MIN_SIZE} units or more"
    return None


def attend(problem: Problem) -> Result:
    """Return outputs and log-sums, see `Result`.

    The CPU waits for the GPU: which blocks the mask names depends on the lists.
    """
    q_RD, k_RD, v_RD = problem.rows()
    part = problem.part
    assert isinstance(part, RangeReads)
    out_PD, sum_P = attend_members(part, q_RD, k_RD, v_RD, problem.terms.scale)
    if problem.by_member:
        return out_PD, sum_P
    reads_P = part.stop_P > part.start_P
    share_P = reads_P / part.lists_read_P(len(q_RD))
    out_PD = out_PD * share_P[:, None]
    out_RD = v_RD.new_zeros(v_RD.shape)
    out_RD = out_RD.index_add(0, part.query.row_M, out_PD.to(out_RD.dtype))
    return out_RD, sum_P


def attend_members(
    part: RangeReads,
    q_RD: Tensor,
    k_RD: Tensor,
    v_RD: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return the outputs `[P, D]` and log-sums `[P]` of query members."""
    row_P = part.query.row_M
    row_M = part.key.row_M
    if not len(row_P) or not len(row_M):
        sum_P = q_RD.new_full(row_P.shape, -math.inf, dtype=torch.float32)
        return v_RD.new_zeros(len(row_P), v_RD.shape[1]), sum_P
    q_11PD = q_RD.index_select(0, row_P)[None, None]
    v_11MD = v_RD.index_select(0, row_M)[None, None]
    if k_RD is q_RD and part.key is part.query:
        # Another tensor object: torch.compile refuses the same one for two inputs.
        k_11MD = q_11PD.view(q_11PD.shape)
    else:
        k_11MD = k_RD.index_select(0, row_M)[None, None]
    out_PD, sum_P = attend_packed(q_11PD, k_11MD, v_11MD, block_mask(part), scale)
    # FlexAttention's results for a query that reads nothing are not those of `Result`.
    reads_nothing_P = part.stop_P <= part.start_P
    out_PD = out_PD.masked_fill(reads_nothing_P[:, None], 0)
    return out_PD, sum_P.masked_fill(reads_nothing_P, -math.inf)


def attend_packed(
    q_11PD: Tensor,
    k_11MD: Tensor,
    v_11MD: Tensor,
    mask: BlockMask,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return FlexAttention's outputs `[P, D]` and log-sums `[P]` of packed members.

    On a CPU, for tests, it is not compiled.
    """
    attention = flex_attention if q_11PD.is_cpu else compiled()
    auxiliary = AuxRequest(lse=True)
    # In torch 2.11 torch.compile has no argument for this limit.
    with torch._dynamo.config.patch(recompile_limit=FORMS):  # pyright: ignore[reportPrivateUsage]
        out_11PD, results = attention(
            q_11PD,
            k_11MD,
            v_11MD,
            block_mask=mask,
            scale=scale,
            return_aux=auxiliary,
        )
    assert results.lse is not None
    return out_11PD[0, 0], results.lse[0, 0]


@functools.cache
def compiled() -> Callable[..., Any]:
    """Return FlexAttention, compiled at its first call.

    What cannot be compiled raises an error: not compiled, FlexAttention would hold all P * M
    scores.
    """
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


def block_mask(part: RangeReads) -> BlockMask:
    """Return the mask of packed queries over packed keys.

    Raises:
        ValueError: starts or stops fall from one query to the next.
    """
    P = len(part.start_P)
    M = len(part.key.row_M)
    low_X, high_X = key_blocks(part)
    # The query blocks that meet key block y are those whose range of key blocks holds y.
    block_Y = torch.arange(whole_pieces(M, BLOCK), device=low_X.device)
    low_Y = torch.searchsorted(high_X, block_Y)
    high_Y = torch.searchsorted(low_X, block_Y, right=True) - 1
    start_falls_P = part.start_P.diff() < 0
    stop_falls_P = part.stop_P.diff() < 0
    falls = (start_falls_P | stop_falls_P).any()
    most_keys = (high_X - low_X).amax() + 1
    most_queries = (high_Y - low_Y).amax() + 1
    numbers = torch.stack([most_keys, most_queries, falls.long()])
    key_width, query_width, some_fall = tolist(numbers)  # the CPU waits for the GPU once
    if some_fall:
        need = "ranges that never fall from query to query"
        raise ValueError(f"backend='flex' needs {need}: take backend='torch'")
    key_counts, key_index = neighbours(low_X, high_X, key_width, len(block_Y))
    query_counts, query_index = neighbours(low_Y, high_Y, query_width, len(low_X))
    return BlockMask(
        seq_lengths=(P, M),
        kv_num_blocks=key_counts,
        kv_indices=key_index,
        full_kv_num_blocks=None,
        full_kv_indices=None,
        q_num_blocks=query_counts,
        q_indices=query_index,
        full_q_num_blocks=None,
        full_q_indices=None,
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=pair_mask(part),
    )


def key_blocks(part: RangeReads) -> tuple[Tensor, Tensor]:
    """Return the lowest and the highest key block that each query block meets, `[X]`."""
    P = len(part.start_P)
    first_X = torch.arange(0, P, BLOCK, device=part.start_P.device)
    last_X = (first_X + BLOCK - 1).clamp(max=P - 1)
    low_X = part.start_P[first_X] // BLOCK
    high_X = (part.stop_P[last_X] - 1) // BLOCK
    return low_X, high_X


def neighbours(low_Z: Tensor, high_Z: Tensor, width: int, blocks: int) -> tuple[Tensor, Tensor]:
    """Return how many blocks each block meets, `[1, 1, Z]`, and which, `[1, 1, Z, width]`, int32.

    Args:
        low_Z: the lowest block that it meets.
        high_Z: the highest block that it meets.
        width: the most blocks that one meets.
        blocks: how many blocks there are to be met.
    """
    count_Z = (high_Z - low_Z + 1).clamp(min=0)
    offset_W = torch.arange(max(1, width), device=low_Z.device)
    index_ZW = (low_Z[:, None] + offset_W).clamp(max=blocks - 1)
    return count_Z[None, None].int(), index_ZW[None, None].int()


def pair_mask(part: RangeReads) -> PairMask:
    """Return the function that tells FlexAttention whether query member i reads key member j."""
    start_P = part.start_P
    stop_P = part.stop_P
    conditions: list[tuple[Tensor, ...]] = []
    if part.holes is not None:
        conditions = list(zip(*part.holes, strict=True))

    def reads(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        is_read = (j >= start_P[i]) & (j < stop_P[i])
        for value_M, low_P, high_P in conditions:
            value = value_M[j]
            is_in_hole = (value >= low_P[i]) & (value < high_P[i])
            is_read = is_read & ~is_in_hole
        return is_read

    return reads
