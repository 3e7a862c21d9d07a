"""The engine by PyTorch's FlexAttention, for GPUs: one long row of queries and keys, packed list after list.

A block of the mask is kept where one of its queries may read one of its keys, which the lists tell without looking at
pairs.

Shapes: R rows, P query members and M key members of all lists together, X blocks of queries, D head size.
"""

import functools
import math

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from rtx.attention.engine.problem import Problem, Result
from rtx.attention.packed import Reads

BLOCK = 128
"""Positions of a block of the mask."""
FORMS = 64
"""Forms of masks (types, head sizes, hidden ranges) that a process may compile."""


@functools.cache
def compiled():
    """Return FlexAttention, compiled at its first call, or an error: without the compiler it holds N^2 scores."""
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


def block_mask(part: Reads) -> BlockMask:
    """Return the mask of packed queries over packed keys."""
    P, M, start_P, stop_P = len(part.start_P), len(part.key.row_M), part.start_P, part.stop_P
    block_X, block_Y = (torch.arange(-(-n // BLOCK), device=start_P.device) for n in (P, M))
    # Where ranges never fall, the blocks that meet one block are neighbours.
    low_X = start_P[block_X * BLOCK] // BLOCK
    high_X = (stop_P[(block_X * BLOCK + BLOCK - 1).clamp(max=P - 1)] - 1) // BLOCK
    low_Y, high_Y = torch.searchsorted(high_X, block_Y), torch.searchsorted(low_X, block_Y, right=True) - 1
    falls = ((start_P.diff() < 0) | (stop_P.diff() < 0)).any()
    widths = torch.stack([(high_X - low_X).amax() + 1, (high_Y - low_Y).amax() + 1, falls.long()])
    of_query, of_key, fall = widths.tolist()  # the CPU waits for the GPU once
    if fall:
        raise ValueError("backend='flex' needs ranges that never fall from query to query: take backend='torch'")

    def reads(b, h, i, j):
        seen = (j >= start_P[i]) & (j < stop_P[i])
        for value_M, low_P, high_P in zip(*part.hidden or (), strict=True):
            value = value_M[j]
            seen = seen & ((value < low_P[i]) | (value >= high_P[i]))
        return seen

    keys, queries = neighbours(low_X, high_X, of_query, len(block_Y)), neighbours(low_Y, high_Y, of_key, len(block_X))
    return BlockMask((P, M), *keys, None, None, *queries, None, None, (BLOCK, BLOCK), reads)


def neighbours(low_X: Tensor, high_X: Tensor, width: int, blocks: int) -> tuple[Tensor, Tensor]:
    """Return how many of the blocks meet each block, and which: its lowest to its highest, `width` at the most."""
    index_XY = low_X[:, None] + torch.arange(max(1, width), device=low_X.device)
    return (high_X - low_X + 1).clamp(min=0)[None, None].int(), index_XY.clamp(max=blocks - 1)[None, None].int()


def refusal(problem: Problem) -> str | None:
    """Return why FlexAttention cannot run the problem; None where it can."""
    terms, q_BHND, v_BHND = problem.terms, problem.q_BHND, problem.v_BHND
    if not isinstance(problem.part, Reads):
        return "its keys are an index, not ranges of lists"
    if terms.dropout or terms.by_distance:
        return "it has no dropout, Shaw's terms or adaptive spans"
    if q_BHND.dtype == torch.float64 or min(q_BHND.shape[-1], v_BHND.shape[-1]) < 16:
        return "it computes in float32 or narrower, with heads of 16 units or more"
    return None


def attend(problem: Problem) -> Result:
    """Return outputs and log-sums, see `Problem`. The CPU waits for the GPU: the mask's blocks depend on the lists."""
    q_RD, k_RD, v_RD = problem.rows()
    part, by_member = problem.part, problem.by_member
    assert isinstance(part, Reads)
    row_P, row_M = part.query.row_M, part.key.row_M
    out_RD = v_RD.new_zeros(v_RD.shape)
    if not len(row_P) or not len(row_M):
        none_P = q_RD.new_full(row_P.shape, -math.inf)
        return (v_RD.new_zeros(len(row_P), v_RD.shape[1]) if by_member else out_RD), none_P
    attention = compiled() if q_RD.device.type != "cpu" else flex_attention
    q = q_RD.index_select(0, row_P)[None, None]
    v = v_RD.index_select(0, row_M)[None, None]
    if problem.shared and part.key is part.query:
        k = q.view(q.shape)  # a view: the compiler's guards want no tensor twice
    else:
        k = k_RD.index_select(0, row_M)[None, None]
    options = {"scale": problem.terms.scale, "return_aux": AuxRequest(lse=True)}
    with torch._dynamo.config.patch(recompile_limit=FORMS):  # torch 2.11's torch.compile has no argument for it
        out, found = attention(q, k, v, block_mask=block_mask(part), **options)
    assert found.lse is not None
    seen_P = part.stop_P > part.start_P
    out_PD = out[0, 0].masked_fill(~seen_P[:, None], 0)
    sum_P = found.lse[0, 0].masked_fill(~seen_P, -math.inf)
    if by_member:
        return out_PD, sum_P
    share_P = seen_P / part.times_R(len(q_RD)).clamp(min=1)[row_P]
    return out_RD.index_add(0, row_P, (out_PD * share_P[:, None]).to(out_RD.dtype)), sum_P
