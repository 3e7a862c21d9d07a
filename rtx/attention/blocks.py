"""Selections of blocks of keys: each query reads its block and the best of the finished ones.

A sequence is cut into blocks of b positions. A block is *finished* for the queries after it, and
*open* for all others. The query at position i reads the keys of its block up to i, and those of
the W // b finished blocks with the largest q_i . (mean of the block's keys) (Lu et al. 2025, MoBA,
arXiv 2502.13189, section 2.2). Queries and keys are compared before they are rotated. Attention and
choice use the same queries and keys, so the gradient of the attention trains the choice as well.

Example: b = 2, W = 4. The query at position 7 is in block 3, of the positions 6 and 7. If its
products with the means of the blocks 0 to 2 are 3, 1 and 2, it reads the blocks 0 and 2: the
positions 0, 1, 4, 5, 6 and 7.

With causal=False a query reads its whole block, and the W // b best of all others, before and after
it. The last block of the sequence may then be shorter.

With the option `compressed` each head has a second branch (Yuan et al. 2025, NSA, arXiv 2502.11089,
section 3.3, with means in place of its learned compression): every query also attends over the
means of the keys and values of all finished blocks; with causal=False of all blocks but its own.
The output is the sum of both branches, each weighted by a gate, so that every block gets a
gradient.

Shapes: B sequences, H heads, N positions, D head size, b positions of a block, g blocks, J of
them chosen, Q queries of a piece, K keys of a query.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from rtx.attention.arguments import check_positive, check_seed, check_within
from rtx.attention.engine.softmax import LogitTerms, RelativeTables
from rtx.attention.grouped import as_heads, expanded, unrotated_queries
from rtx.attention.members import products
from rtx.attention.pattern import Cache
from rtx.attention.positional import stored
from rtx.attention.precision import widened
from rtx.attention.reads import QueriesKeys, Reads
from rtx.attention.recompute import recomputed
from rtx.attention.ties import best, tie_margin
from rtx.attention.top_keys import (
    GrowingCache,
    TopKeys,
    positions_in,
)
from rtx.attention.typed_torch import vector_norm

POSITION_FACTOR = 0x9E3779B1
BLOCK_FACTOR = 0x85EBCA77
HEAD_FACTOR = 0xC2B2AE3D
SEED_FACTOR = 0x27D4EB2F
"""Factors of the hash of `RandomBlocks`: the first four primes of xxHash32."""
MIXING_FACTORS = (0x2C1B3C6D, 0x297A2D39)
"""The factors of `mixed`: odd, so that no two numbers of 32 bits get the same product."""
MASK_32 = 0xFFFFFFFF
"""The lowest 32 bits."""


def block_means(x_ND: Tensor, block: int) -> list[Tensor]:
    """Return the mean of each block of b positions, `[D]` each; the last may be shorter.

    Args:
        block: b.
    """
    means: list[Tensor] = []
    for x_bD in torch.split(x_ND, block):
        total_D = x_bD.sum(0)
        means.append(total_D / len(x_bD))
    return means


def other_blocks(i: int, length: int, block: int, causal: bool) -> list[int]:
    """Return the blocks among which the query at position i chooses.

    They are the finished ones; with causal=False all but its own.

    Args:
        length, block: N and b.
    """
    block_of_query = i // block
    if causal:
        return [*range(block_of_query)]
    blocks = math.ceil(length / block)
    return [g for g in range(blocks) if g != block_of_query]


def compressed(
    out_ND: Tensor,
    q_ND: Tensor,
    k_ND: Tensor,
    v_ND: Tensor,
    gate_2D: Tensor,
    block: int,
    scale: float,
    causal: bool,
) -> Tensor:
    """Return the gated sum of the outputs of both branches, `[N, D]`.

    Args:
        out_ND: the outputs of the branch that chooses.
        q_ND, k_ND: before they are rotated.
        gate_2D: the vectors whose products with a query, through a sigmoid, are the gates.
        block: b.
        scale: multiplies the logits.
        causal: see `other_blocks`.
    """
    both_ND = torch.zeros_like(out_ND)
    all_mean_k_gD = torch.stack(block_means(k_ND, block))
    all_mean_v_gD = torch.stack(block_means(v_ND, block))
    for i, q_D in enumerate(q_ND):
        others = other_blocks(i, len(q_ND), block, causal)
        mean_k_gD = all_mean_k_gD[others]
        mean_v_gD = all_mean_v_gD[others]
        logit_g = scale * mean_k_gD @ q_D
        weight_g = logit_g.softmax(0)
        other_D = weight_g @ mean_v_gD
        product_2 = gate_2D @ q_D
        gate, other_gate = product_2.sigmoid()
        both_ND[i] = gate * out_ND[i] + other_gate * other_D
    return both_ND


class Blocks(TopKeys):
    """H heads whose queries read their block and the W // b best finished blocks.

    Every query after the first W positions reads W // b blocks, and its block up to its position.
    With causal=False every query reads its whole block, and W // b others. The scores take
    O(N^2 / b) time.

    Args:
        heads, size: H and D.
        block: b, at most the window W.
        compressed: whether the heads have the second branch; see the module.

    Raises:
        ValueError: a size below 1, heads below 0, or a block that is not from 1 to W.
    """

    may_be_bidirectional = True

    def __init__(
        self,
        heads: int,
        size: int,
        *,
        block: int = 16,
        compressed: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        check_positive(0, heads=heads)
        check_positive(size=size)
        check_within("block", block, self.window, "window")
        self.heads = heads
        self.size = size
        self.block = block
        self.chosen_blocks = self.window // block
        """W // b, the most blocks that a query reads besides its own."""
        self.gate_H2D: nn.Parameter | None = None
        if compressed:
            zero_H2D = torch.zeros(heads, 2, size)
            self.gate_H2D = nn.Parameter(zero_H2D)

    def max_keys(self, length: int) -> int:
        chosen = min(self.chosen_blocks, self.block_count(length))
        blocks = chosen + 1
        return blocks * self.block

    def choice_queries(self, qk: QueriesKeys) -> Tensor:
        return qk.q_BHND

    def choice_keys(self, qk: QueriesKeys) -> Tensor:
        """Return the means of the keys of blocks, `[B, H, g, D]`."""
        return self.means_of_blocks(qk.k_BHND)

    def means_of_blocks(self, x_BHND: Tensor) -> Tensor:
        """Return the mean of each block that a query may choose, `[B, H, g, D]`.

        These are the whole blocks; with causal=False also a shorter one at the end.
        """
        N = x_BHND.shape[2]
        whole = N // self.block
        stop = whole * self.block
        x_BHgbD = torch.unflatten(x_BHND[:, :, :stop], 2, (whole, self.block))
        mean_BHgD = x_BHgbD.mean(3)
        if self.causal or stop == N:
            return mean_BHgD
        last_BH1D = x_BHND[:, :, stop:].mean(2, keepdim=True)
        return torch.cat([mean_BHgD, last_BH1D], dim=2)

    def scores(self, q_BHQD: Tensor, mean_BHgD: Tensor, position_Q: Tensor) -> Tensor:
        """Return the scores of blocks, `[B, H, Q, g]`; -inf for those that are open."""
        blocks = mean_BHgD.shape[2]
        is_open_Qg = self.are_open(position_Q, blocks)
        score_BHQg = products(q_BHQD, mean_BHgD)
        return score_BHQg.masked_fill(is_open_Qg, -math.inf)

    def are_open(self, position_Q: Tensor, blocks: int) -> Tensor:
        """Return which of the first blocks queries may not choose, `[Q, g]`.

        These are the blocks that are not finished; with causal=False that of the query alone.
        """
        block_g = torch.arange(blocks, device=position_Q.device)
        block_of_query_Q1 = position_Q[:, None] // self.block
        if self.causal:
            return block_g >= block_of_query_Q1
        return block_g == block_of_query_Q1

    def block_count(self, length: int) -> int:
        """Return how many blocks of N positions some query may choose, see `means_of_blocks`."""
        if self.causal:
            return length // self.block
        return math.ceil(length / self.block)

    def choosable(self, block_of_query: Tensor, length: int) -> Tensor:
        """Return how many blocks queries may choose, by the blocks of their positions.

        Args:
            length: N; it matters with causal=False alone.
        """
        if self.causal:
            return block_of_query
        return torch.full_like(block_of_query, self.block_count(length) - 1)

    @torch.no_grad()
    def rule(self, qk: QueriesKeys, head: int, streaming: bool) -> Tensor:
        """Return the mask of the branch that chooses; `finish_by_rule` adds the other branch."""
        q_ND = qk.q_BHND[0, head]
        k_ND = qk.k_BHND[0, head]
        means = block_means(k_ND, self.block)
        N = len(q_ND)
        mask_NN = torch.zeros(N, N, dtype=torch.bool, device=q_ND.device)
        for i, q_D in enumerate(q_ND):
            others = other_blocks(i, N, self.block, self.causal)
            chosen = self.best_by_rule(q_D, means, head, i, others)
            blocks = {i // self.block, *chosen}
            for j in self.readable_keys(i, N):
                if j // self.block in blocks:
                    mask_NN[i, j] = True
        return mask_NN[None]

    def best_by_rule(
        self,
        q_D: Tensor,
        means: list[Tensor],
        head: int,
        i: int,
        others: list[int],
    ) -> list[int]:
        """Return the blocks that the query at position i chooses.

        Args:
            means: the means of all blocks.
            others: the blocks among which it chooses.
        """
        scores: list[float] = []
        margins: list[float] = []
        for g in others:
            numbers = (head, i, g)
            scores.append(self.score_by_rule(q_D, means[g], numbers))
            margins.append(self.margin_by_rule(q_D, means[g]))
        chosen = best(scores, margins, self.chosen_blocks)
        return [others[number] for number in chosen]

    def score_by_rule(self, q_D: Tensor, mean_D: Tensor, numbers: tuple[int, int, int]) -> float:
        """Return the score of a block for a query.

        Args:
            numbers: the number of the head, the position of the query, and the number of the block.
        """
        return float(q_D @ mean_D)

    def margin_by_rule(self, q_D: Tensor, mean_D: Tensor) -> float:
        """Return the margin within which other scores count as equal to `score_by_rule`."""
        q_norm = vector_norm(q_D)
        mean_norm = vector_norm(mean_D)
        margin = tie_margin(q_norm, mean_norm, q_D.dtype)
        return float(margin)

    def finish_by_rule(
        self,
        out_ND: Tensor,
        qk: QueriesKeys,
        v_ND: Tensor,
        head: int,
        terms: LogitTerms,
    ) -> Tensor:
        if self.gate_H2D is None:
            return out_ND
        return compressed(
            out_ND,
            q_ND=qk.q_BHND[0, head],
            k_ND=qk.k_BHND[0, head],
            v_ND=v_ND,
            gate_2D=self.gate_H2D[head],
            block=self.block,
            scale=terms.scale,
            causal=self.causal,
        )

    def chosen_keys(
        self,
        query_BHQE: Tensor,
        key_BHNE: Tensor,
        positions: slice,
        length: int,
    ) -> Tensor:
        """Return the positions in the block of a query and in the best blocks.

        See `TopKeys.chosen_keys`.

        Args:
            key_BHNE: the means of the blocks 0, 1, ....
        """
        B, H, _, _ = query_BHQE.shape
        position_Q = positions_in(positions, key_BHNE.device)
        own_block_Q1 = position_Q[:, None] // self.block
        score_BHQg = self.scores(query_BHQE, key_BHNE, position_Q)
        block_BHQJ = self.best_of_keys(score_BHQg, query_BHQE, key_BHNE, self.chosen_blocks)
        chosen_BHQJb = self.positions_of_blocks(block_BHQJ)
        chosen_BHQK = chosen_BHQJb.flatten(-2)
        own_Q1b = self.positions_of_blocks(own_block_Q1)
        own_Qb = own_Q1b[:, 0]
        own_BHQb = own_Qb.expand(B, H, -1, -1)
        key_BHQK = torch.cat([chosen_BHQK, own_BHQb], dim=-1)
        # A query that may choose at most `chosen_blocks` blocks chooses all of them, and
        # `block_BHQJ` may contain open blocks as well. So its keys are set to the first K
        # positions, among which are all that it may read.
        K = key_BHQK.shape[-1]
        number_K = torch.arange(K, device=key_BHQK.device)
        has_few_blocks_Q1 = self.choosable(own_block_Q1, length) <= self.chosen_blocks
        key_BHQK = torch.where(has_few_blocks_Q1, number_K, key_BHQK)
        is_unreadable_BHQK = self.are_unreadable(key_BHQK, position_Q[:, None], length)
        if not self.causal:
            # The last block may be shorter.
            is_unreadable_BHQK |= key_BHQK >= length
        return key_BHQK.masked_fill(is_unreadable_BHQK, -1)

    def positions_of_blocks(self, block: Tensor) -> Tensor:
        """Return the positions in each block, `[..., b]`."""
        column_b = torch.arange(self.block, device=block.device)
        first = block * self.block
        return first[..., None] + column_b

    def attend_parts(
        self,
        qk: QueriesKeys,
        v_BHND: Tensor,
        parts: list[Reads],
        relative: RelativeTables | None,
    ) -> Tensor:
        out_BHND = super().attend_parts(qk, v_BHND, parts, relative)
        if self.gate_H2D is None or not out_BHND.shape[2]:
            return out_BHND
        mean_k_BHgD = self.means_of_blocks(qk.k_BHND)
        mean_v_BHgD = self.means_of_blocks(v_BHND)
        blocks = mean_k_BHgD.shape[2]
        outs: list[Tensor] = []
        for positions in self.query_pieces(qk, blocks):
            q_BHQD = qk.q_BHND[:, :, positions].contiguous()
            out_BHQD = out_BHND[:, :, positions].contiguous()
            position_Q = positions_in(positions, q_BHQD.device)
            gated_BHQD = recomputed(
                self.gated,
                q_BHQD,
                out_BHQD,
                mean_k_BHgD,
                mean_v_BHgD,
                position_Q,
            )
            outs.append(gated_BHQD)
        return torch.cat(outs, dim=2)

    def gated(
        self,
        q_BHQD: Tensor,
        out_BHQD: Tensor,
        mean_k_BHgD: Tensor,
        mean_v_BHgD: Tensor,
        position_Q: Tensor,
    ) -> Tensor:
        """Return the gated sum of the outputs of both branches, `[B, H, Q, D]`.

        Args:
            q_BHQD: the queries at some positions.
            out_BHQD: their outputs by the branch that chooses.
            mean_k_BHgD, mean_v_BHgD: of the blocks 0, 1, ....
            position_Q: the positions.
        """
        q_BHQD = widened(q_BHQD)
        D = q_BHQD.shape[-1]
        scale = self.terms(D, None).scale
        mean_k_BHgD = mean_k_BHgD.to(q_BHQD.dtype)
        score_BHQg = self.scores(q_BHQD, mean_k_BHgD, position_Q)
        logit_BHQg = score_BHQg * scale
        is_open_Qg = self.are_open(position_Q, mean_k_BHgD.shape[2])
        reads_none_Q1 = is_open_Qg.all(-1, keepdim=True)
        # The softmax of a row of -inf is NaN.
        logit_BHQg = logit_BHQg.masked_fill(reads_none_Q1, 0.0)
        weight_BHQg = logit_BHQg.softmax(-1)
        weight_BHQg = weight_BHQg.masked_fill(reads_none_Q1, 0.0)
        other_BHQD = weight_BHQg.to(mean_v_BHgD.dtype) @ mean_v_BHgD
        gate_BHQ2 = self.gates(q_BHQD).to(out_BHQD.dtype)
        gate_BHQ1, other_gate_BHQ1 = torch.split(gate_BHQ2, 1, dim=-1)
        return gate_BHQ1 * out_BHQD + other_gate_BHQ1 * other_BHQD

    def gates(self, q_BHQD: Tensor) -> Tensor:
        """Return the weights of both branches, `[B, H, Q, 2]`."""
        assert self.gate_H2D is not None
        gate_H2D = self.gate_H2D.to(q_BHQD.dtype)
        product_BHQ2 = q_BHQD @ gate_H2D.mT
        return product_BHQ2.sigmoid()

    def pairs_of_head(self, length: int) -> float:
        """Return the pairs in own blocks and in chosen ones; a mean of a block is one more key."""
        position_N = torch.arange(length)
        read_of_own_block_N = position_N % self.block + 1
        if not self.causal:
            block_N = position_N // self.block
            read_of_own_block_N = torch.bincount(block_N)[block_N]
        pairs = int(read_of_own_block_N.sum())
        pairs += self.block * self.choices(length, self.chosen_blocks)
        if self.gate_H2D is not None:
            pairs += self.choices(length, length)
        return float(pairs)

    def choices(self, length: int, most: int) -> int:
        """Return the number of blocks that each query may choose, at most `most`, summed over N."""
        block_N = torch.arange(length) // self.block
        choosable_N = self.choosable(block_N, length).clamp(max=most)
        return int(choosable_N.sum())

    def choice_operations(self, length: int, size: int) -> float:
        scores = self.choices(length, length)
        return 2.0 * size * scores

    def start(self, relative: RelativeTables | None = None) -> Cache:
        return BlockCache(self, relative)


class RandomBlocks(Blocks):
    """The control of `Blocks`: as many blocks of the same size, drawn at random.

    What a query reads follows from the seed, its head and its position alone.

    Args:
        seed: the seed of the draw.
    """

    def __init__(self, heads: int, size: int, *, seed: int, **options: Any) -> None:
        super().__init__(heads, size, **options)
        check_seed(seed)
        self.seed = seed

    def scores(self, q_BHQD: Tensor, mean_BHgD: Tensor, position_Q: Tensor) -> Tensor:
        """Return random scores, a hash of seed, head, position and block; see `Blocks.scores`."""
        B, H, _, _ = q_BHQD.shape
        blocks = mean_BHgD.shape[2]
        device = position_Q.device
        head_H = torch.arange(H, device=device)
        block_g = torch.arange(blocks, device=device)
        of_position_Q = position_Q * POSITION_FACTOR
        of_block_g = block_g * BLOCK_FACTOR
        of_head_H = head_H * HEAD_FACTOR
        # Sums and products of int64 tensors keep the lowest 64 bits, as `as_int64` does.
        of_seed = as_int64(self.seed * SEED_FACTOR)
        number_Qg = of_position_Q[:, None] + of_block_g
        number_HQg = number_Qg + of_head_H[:, None, None] + of_seed
        score_HQg = mixed(number_HQg).to(torch.float64)
        is_open_Qg = self.are_open(position_Q, blocks)
        score_HQg = score_HQg.masked_fill(is_open_Qg, -math.inf)
        return score_HQg.expand(B, -1, -1, -1)

    def tie_margins(self, query: Tensor, key: Tensor) -> Tensor:
        """Return zeros: the scores are not rounded."""
        margin = super().tie_margins(query, key)
        return torch.zeros_like(margin)

    def score_by_rule(self, q_D: Tensor, mean_D: Tensor, numbers: tuple[int, int, int]) -> float:
        """Return the hash of `scores`, by Python's integers."""
        head, i, g = numbers
        number = i * POSITION_FACTOR + g * BLOCK_FACTOR + head * HEAD_FACTOR
        number = as_int64(number + self.seed * SEED_FACTOR)
        return float(mixed(number))

    def margin_by_rule(self, q_D: Tensor, mean_D: Tensor) -> float:
        return 0.0

    def choice_operations(self, length: int, size: int) -> float:
        return 0.0


Number = TypeVar("Number", int, Tensor)


def mixed(number: Number) -> Number:
    """Return numbers of 32 bits, in each of which every bit depends on all bits of the argument."""
    for factor in MIXING_FACTORS:
        shifted = number >> 15
        number = ((number ^ shifted) * factor) & MASK_32
    return number


def as_int64(number: int) -> int:
    """Return the int64 whose bits are the lowest 64 of the number."""
    half = 1 << 63
    return (number + half) % (2 * half) - half


class BlockCache(GrowingCache):
    """All keys and values so far, and the means of the keys and values of finished blocks.

    The means of keys are what the choice compares (`GrowingCache.choice_BHSE`).
    """

    pattern: Blocks
    open_k_BHND: Tensor | None = None
    """The keys, not rotated, of the block that is not finished."""
    mean_v_BGgD: Tensor | None = None
    """The means of values; those of keys are in `choice_BHSE`."""

    def put_choice(self, qk: QueriesKeys, first: int) -> None:
        k_BHND = qk.k_BHND
        if self.open_k_BHND is not None:
            k_BHND = torch.cat([self.open_k_BHND, k_BHND], dim=2)
        mean_BHgD = self.pattern.means_of_blocks(k_BHND)
        block = self.pattern.block
        first_block = first // block
        self.choice_BHSE = stored(self.choice_BHSE, mean_BHgD, first_block)
        finished = mean_BHgD.shape[2] * block
        # A slice would keep the memory of the whole prompt.
        self.open_k_BHND = k_BHND[:, :, finished:].clone()

    def put(self, qk: QueriesKeys, v_BGND: Tensor, first: int) -> tuple[Tensor, Tensor]:
        k_BGSD, v_BGSD = super().put(qk, v_BGND, first)
        block = self.pattern.block
        first_block = first // block
        stop = first + v_BGND.shape[2]
        # All whole blocks among the new positions, and the one that they complete.
        begin = first_block * block
        end = stop // block * block
        finished_v_BGND = v_BGSD[:, :, begin:end]
        mean_BGgD = self.pattern.means_of_blocks(finished_v_BGND)
        self.mean_v_BGgD = stored(self.mean_v_BGgD, mean_BGgD, first_block)
        return k_BGSD, v_BGSD

    def decode(self, qk: QueriesKeys, v_BG1D: Tensor, position: int) -> Tensor:
        out_BH1D = super().decode(qk, v_BG1D, position)
        if self.pattern.gate_H2D is None:
            return out_BH1D
        assert self.choice_BHSE is not None and self.mean_v_BGgD is not None
        q_BHQD = unrotated_queries(qk)
        B, H, Q, _ = q_BHQD.shape
        D = out_BH1D.shape[-1]
        out_BHQD = out_BH1D.reshape(B, H, Q, D)
        mean_v_BHgD = expanded(self.mean_v_BGgD, self.copies)
        position_Q = torch.full((Q,), position, device=q_BHQD.device)
        out_BHQD = self.pattern.gated(q_BHQD, out_BHQD, self.choice_BHSE, mean_v_BHgD, position_Q)
        return as_heads(out_BHQD)
