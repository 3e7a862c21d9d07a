"""The engine by PyTorch's FlexAttention, for GPUs: one long row of queries and keys, packed list after list.

A block of the mask is kept where one of its queries may read one of its keys, which the lists tell without looking at
pairs; the mask itself takes a number for each pair of blocks of 128.

Shapes: R rows, P query members and M key members of all lists together, X blocks of queries, D head size.
"""

import functools
import math

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from rtx.attention.packed import Reads
from rtx.attention.softmax import Terms

BLOCK = 128
"""Positions of a block of the mask."""


@functools.cache
def compiled():
    """Return FlexAttention, compiled once a process."""
    return torch.compile(flex_attention, dynamic=True)


def block_mask(part: Reads) -> BlockMask:
    """Return the mask of packed queries over packed keys."""
    P, M = len(part.start_P), len(part.key.row_M)
    X, Y = -(-P // BLOCK), -(-M // BLOCK)
    device = part.start_P.device
    pad = torch.arange(X * BLOCK, device=device).clamp(max=P - 1)
    empty_P = part.stop_P <= part.start_P
    low_X = part.start_P.masked_fill(empty_P, M)[pad].view(X, BLOCK).amin(1).clamp(max=M - 1) // BLOCK
    high_X = (part.stop_P.masked_fill(empty_P, 0)[pad].view(X, BLOCK).amax(1) - 1).clamp(min=0) // BLOCK
    count_X = (high_X - low_X + 1).clamp(min=0)
    index_XY = (low_X[:, None] + torch.arange(Y, device=device)).clamp(max=Y - 1)
    start_P, stop_P = part.start_P, part.stop_P

    def reads(b, h, i, j):
        i = i.clamp(max=P - 1)
        seen = (j >= start_P[i]) & (j < stop_P[i])
        for value_M, low_P, high_P in zip(*part.hidden or (), strict=True):
            value = value_M[j.clamp(max=M - 1)]
            seen = seen & ((value < low_P[i]) | (value >= high_P[i]))
        return seen

    return BlockMask.from_kv_blocks(
        count_X[None, None].int(), index_XY[None, None].int(), BLOCK_SIZE=BLOCK, mask_mod=reads, seq_lengths=(P, M)
    )


def attend(q_RD: Tensor, k_RD: Tensor, v_RD: Tensor, part: Reads, terms: Terms, joined: bool) -> tuple[Tensor, Tensor]:
    """Return what `rtx.attention.engine.attend_part` does.

    Raises:
        ValueError: dropout, or terms by distance.
    """
    if terms.dropout or terms.by_distance:
        raise ValueError("backend='flex' has no dropout, Shaw's terms or adaptive spans: take backend='torch'")
    row_P, row_M = part.query.row_M, part.key.row_M
    out_RD = v_RD.new_zeros(v_RD.shape)
    if not len(row_P) or not len(row_M):
        return v_RD.new_zeros(len(row_P), v_RD.shape[1]) if joined else out_RD, q_RD.new_full(row_P.shape, -math.inf)
    attention = compiled() if q_RD.device.type != "cpu" else flex_attention
    q, k, v = q_RD[row_P][None, None], k_RD[row_M][None, None], v_RD[row_M][None, None]
    out, found = attention(q, k, v, block_mask=block_mask(part), scale=terms.scale, return_aux=AuxRequest(lse=True))
    sums = found.lse
    assert sums is not None
    seen_P = part.stop_P > part.start_P
    out_PD, sum_P = out[0, 0].masked_fill(~seen_P[:, None], 0), sums[0, 0].masked_fill(~seen_P, -math.inf)
    if joined:
        return out_PD, sum_P
    share_P = seen_P / part.times_R(len(q_RD)).clamp(min=1)[row_P]
    return out_RD.index_add(0, row_P, out_PD * share_P[:, None].to(out.dtype)), sum_P
