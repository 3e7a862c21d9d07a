"""Memberships by threshold, by Triton kernels: scores are compared where they are computed and never written to memory.

The first kernel leaves one bit for each position and cluster, and counts; the second writes the packed lists from them.
Importing this module imports Triton.

Shapes: B sequences, H heads, C clusters, N positions, D head size, L = B * H * C lists, M members of all lists
together, G blocks of positions.
"""

# Triton's own types do not describe what kernels may do with tensors.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from rtx.attention.lists import Members
from rtx.attention.triton_clusters import device_refusal, launch, size_refusal, wide

BLOCK, SPAN, DEPTH = 128, 4096, 32
"""Positions scored by a program; positions that a program writes members of, a multiple of it; columns multiplied at a
time: in full precision a program holds its factors in registers."""


@torch.no_grad()
def select_by_threshold(
    x_BHND: Tensor, centroid_HCD: Tensor, threshold_HC: Tensor, mask_BN: Tensor | None = None
) -> tuple[Members, Tensor]:
    """Return the lists of all clusters and the nearest centroid `[B, H, N]` of each position.

    As `pack(threshold_members(...))` and `argmax` on `centroid_scores(...)` with padding masked out: float32 inside; a
    score may differ from torch's in its last bits, and so may the membership of a position that stands right on a
    threshold. Of equal scores the first centroid is the nearest; padding is nearest to centroid 0 and in no list.

    Raises:
        ValueError: what `select_refusal` says.
    """
    refusal = select_refusal(x_BHND)
    if refusal is not None:
        raise ValueError(refusal)
    B, H, N, D = x_BHND.shape
    C = centroid_HCD.shape[1]
    blocks, device = -(-N // BLOCK), x_BHND.device
    nearest_BHN = torch.empty(B, H, N, dtype=torch.int64, device=device)
    bits_LX = torch.empty(B * H * C, blocks * BLOCK // 8, dtype=torch.uint8, device=device)
    count_LG = torch.empty(B * H * C, blocks, dtype=torch.int32, device=device)
    if not count_LG.numel():
        return Members(nearest_BHN.new_empty(0), nearest_BHN.new_zeros(B * H * C), N, B * H * N), nearest_BHN
    real_BN = x_BHND.new_empty(0, dtype=torch.uint8) if mask_BN is None else mask_BN.to(torch.uint8).contiguous()
    with torch.cuda.device_of(x_BHND):
        launch(
            score_blocks,
            (blocks, B * H),
            x_BHND.reshape(-1, D).contiguous(),
            centroid_HCD.float().contiguous(),
            threshold_HC.float().contiguous(),
            real_BN,
            bits_LX,
            count_LG,
            nearest_BHN,
            H,
            C,
            N,
            MASKED=mask_BN is not None,
            D=D,
            DEPTH=DEPTH,
            STEP=min(32, wide(C)),
            WIDTH=BLOCK,
            num_warps=8,
            num_stages=3,
        )
        end_X = count_LG.flatten().cumsum(0)
        row_M = torch.empty(int(end_X[-1]), dtype=torch.int64, device=device)
        if len(row_M):
            begin_LG = end_X.view_as(count_LG) - count_LG
            grid = (B * H * C, -(-N // SPAN))
            launch(write_members, grid, bits_LX, begin_LG, row_M, C, N, blocks, LENGTH=SPAN, WIDTH=BLOCK)
    return Members(row_M, count_LG.sum(1), N, B * H * N), nearest_BHN


def select_refusal(x_BHND: Tensor) -> str | None:
    """Return why `select_by_threshold` cannot run a case; None where it can."""
    return size_refusal("x_BHND", x_BHND) or device_refusal("x_BHND", x_BHND)


@triton.jit
def load_part(x_RD, row_S, real_S, start, D: tl.constexpr, DEPTH: tl.constexpr):
    """Return some columns `[S, DEPTH]` of rows, zeros where they are not real."""
    column_X = start + tl.arange(0, DEPTH)
    there_SX = real_S[:, None] & (column_X < D)[None, :]
    return tl.load(x_RD + row_S.to(tl.int64)[:, None] * D + column_X[None, :], mask=there_SX, other=0.0)


@triton.jit
def score_blocks(
    x_RD, centroid_HCD, threshold_HC, real_BN, bits_LX, count_LG, nearest_BHN, H, C, N,
    MASKED: tl.constexpr, D: tl.constexpr, DEPTH: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Score one block of positions by every centroid; write membership bits, counts and nearest centroids."""
    block, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    position_N = block * WIDTH + tl.arange(0, WIDTH)
    real_N = position_N < N
    inside_N = real_N
    if MASKED:
        inside_N = tl.load(real_BN + head // H * N + position_N, mask=real_N, other=0) != 0
    best_N = tl.full([WIDTH], float("-inf"), tl.float32)
    nearest_N = tl.zeros([WIDTH], tl.int32)
    column_X = tl.arange(0, WIDTH // 8)
    for start in range(0, C, STEP):
        cluster_C = start + tl.arange(0, STEP)
        real_C = cluster_C < C
        row_C = head % H * C + cluster_C
        threshold_C = tl.load(threshold_HC + row_C, mask=real_C, other=0.0)
        score_CN = tl.zeros([STEP, WIDTH], tl.float32)
        for depth in range(0, D, DEPTH):
            x_NX = load_part(x_RD, head * N + position_N, real_N, depth, D, DEPTH).to(tl.float32)
            centroid_CX = load_part(centroid_HCD, row_C, real_C, depth, D, DEPTH)
            score_CN += tl.dot(centroid_CX, tl.trans(x_NX), input_precision="ieee")
        member_CN = ((score_CN >= threshold_C[:, None]) & real_C[:, None] & inside_N[None, :]).to(tl.int32)
        member_CX8 = tl.reshape(member_CN, [STEP, WIDTH // 8, 8])
        bits_CX = tl.sum(member_CX8 << tl.arange(0, 8)[None, None, :], 2)
        list_C = head * C + cluster_C
        at_CX = list_C[:, None] * (tl.num_programs(0) * (WIDTH // 8)) + block * (WIDTH // 8) + column_X[None, :]
        tl.store(bits_LX + at_CX, bits_CX.to(tl.uint8), mask=real_C[:, None])
        tl.store(count_LG + list_C * tl.num_programs(0) + block, tl.sum(member_CN, 1), mask=real_C)
        score_CN = tl.where(real_C[:, None] & inside_N[None, :], score_CN, float("-inf"))
        higher_N = tl.max(score_CN, 0)
        # The first of equals: the least number among the clusters that reach the maximum.
        first_N = tl.min(tl.where(score_CN == higher_N[None, :], cluster_C[:, None], C), 0)
        nearest_N = tl.where(higher_N > best_N, first_N, nearest_N)
        best_N = tl.maximum(best_N, higher_N)
    tl.store(nearest_BHN + head * N + position_N, nearest_N.to(tl.int64), mask=real_N)


@triton.jit
def write_members(bits_LX, begin_LG, row_M, C, N, blocks, LENGTH: tl.constexpr, WIDTH: tl.constexpr):
    """Write the members of one list among some of the positions, in order."""
    number, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position_N = part * LENGTH + tl.arange(0, LENGTH)
    byte_N = tl.load(bits_LX + number * (blocks * (WIDTH // 8)) + position_N // 8, mask=position_N < N, other=0)
    member_N = (byte_N.to(tl.int32) >> (position_N % 8)) & 1
    rank_N = tl.cumsum(member_N, 0) - member_N
    begin = tl.load(begin_LG + number * blocks + part * (LENGTH // WIDTH))
    tl.store(row_M + begin + rank_N, number // C * N + position_N, mask=member_N != 0)
