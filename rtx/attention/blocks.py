"""Block selection: each query reads its own block and the best finished blocks of the prefix (MoBA, NSA).

Shapes: B sequences, H heads, N positions, D head size, G blocks of b positions, Q queries of a piece, K keys of a
query.
"""

from __future__ import annotations

import math
from typing import Any, Self

import torch
from torch import Tensor, nn

from rtx.attention import oracle
from rtx.attention.arguments import check_positive, check_seed, check_within
from rtx.attention.cache import Cache, GrowingCache, RowCache, place
from rtx.attention.choices import Choice
from rtx.attention.packed import Part
from rtx.attention.pattern import Inputs, routed_options
from rtx.attention.softmax import Relative, recomputed
from rtx.config import Config


class Blocks(Choice):
    """Each query reads its own block up to itself, and the `window` / `block` best finished blocks.

    A block's score is the product of the unturned query with the mean of its unturned keys, so that the queries and
    keys that attend also choose (Lu et al. 2025). Every position behind the first `window` reads as many keys, but for
    its place in its own block. Scores cost N^2 / block.

    Args:
        heads, size: H and D.
        block: b.
        compressed: attend over the means of keys and values of finished blocks, too, and join the two outputs by gates
            learned from the query, which trains the choice by gradients (Yuan et al. 2025, the compressed branch).
    """

    def __init__(self, heads: int, size: int, *, block: int = 16, compressed: bool = False, **given: Any) -> None:
        super().__init__(**given)
        check_positive("heads", heads, least=0)
        check_within("block", block, self.window, "window")
        self.block, self.count = block, self.window // block
        self.gate_H2D = nn.Parameter(torch.zeros(heads, 2, size)) if compressed else None

    @classmethod
    def from_config(cls, config: Config, heads: int, layer: int) -> Self:
        size, routing = config.model.hidden // config.model.heads, config.routing
        own = {"window": routing.window, "block": routing.block, "compressed": routing.compressed}
        return cls(heads, size, **own, **cls.drawn(config, layer), **routed_options(config))

    @staticmethod
    def drawn(config: Config, layer: int) -> dict[str, int]:
        """Return what a draw depends on; nothing is drawn here."""
        return {}

    def means(self, x_BHND: Tensor) -> Tensor:
        """Return the mean of every finished block, `[B, H, G, D]`."""
        finished = x_BHND.shape[2] // self.block
        return x_BHND[:, :, : finished * self.block].unflatten(2, (finished, self.block)).mean(3)

    def scores(self, q_BHQD: Tensor, mean_BHGD: Tensor, position_Q: Tensor) -> Tensor:
        """Return the scores of blocks, `[B, H, Q, G]`; -inf for those that are not finished."""
        own_Q1, block_G = position_Q[:, None] // self.block, torch.arange(mean_BHGD.shape[2], device=position_Q.device)
        return (q_BHQD @ mean_BHGD.transpose(-1, -2)).masked_fill(block_G >= own_Q1, -math.inf)

    def choice_keys(self, given: Inputs) -> Tensor:
        """Return the means of finished blocks."""
        return self.means(given.k_BHND)

    def best(self, query_BHQE: Tensor, key_BHNE: Tensor, position_Q: Tensor) -> Tensor:
        """See `Choice.best`: the positions of the best finished blocks and of the own block."""
        score_BHQG = self.scores(query_BHQE, key_BHNE, position_Q)
        own_Q1, slot_b = position_Q[:, None] // self.block, torch.arange(self.block, device=position_Q.device)
        at = score_BHQG.topk(min(self.count, score_BHQG.shape[-1]), dim=-1).indices
        chosen = (at[..., None] * self.block + slot_b).flatten(-2)
        every = torch.cat([chosen, (own_Q1 * self.block + slot_b).expand(*chosen.shape[:2], -1, -1)], dim=-1)
        # Where all finished blocks are among the best, everything up to the position is read.
        every = torch.where(own_Q1 <= self.count, torch.arange(every.shape[-1], device=every.device), every)
        last_Q = position_Q if self.attend_self else (position_Q - 1).clamp(min=0)
        return every.masked_fill(every > last_Q[:, None], -1)

    def most_keys(self, length: int) -> int:
        return min(self.count, length // self.block) * self.block + self.block

    def attend(self, given: Inputs, v_BHND: Tensor, parts: list[Part], relative: Relative | None) -> Tensor:
        out_BHND = super().attend(given, v_BHND, parts, relative)
        if self.gate_H2D is None:
            return out_BHND
        means = self.means(given.k_BHND), self.means(v_BHND)
        pieces = [
            recomputed(self.gated, given.q_BHND[:, :, position_Q], out_BHND[:, :, position_Q], *means, position_Q)
            for position_Q in self.split(given, means[0].shape[2])
        ]
        return torch.cat(pieces, dim=2) if pieces else out_BHND

    def gated(self, q_BHQD: Tensor, out_BHQD: Tensor, mean_k: Tensor, mean_v: Tensor, position_Q: Tensor) -> Tensor:
        """Return outputs joined, by gates of the query, with softmax attention over the means of finished blocks."""
        assert self.gate_H2D is not None
        score_BHQG = self.scores(q_BHQD, mean_k, position_Q) * self.terms(q_BHQD.shape[-1], None).scale
        none_Q1 = (position_Q < self.block)[:, None]
        weight_BHQG = score_BHQG.masked_fill(none_Q1, 0.0).softmax(-1).masked_fill(none_Q1, 0.0)
        gate_BHQ2 = (q_BHQD @ self.gate_H2D.to(q_BHQD.dtype).mT).sigmoid().to(out_BHQD.dtype)
        return gate_BHQ2[..., :1] * out_BHQD + gate_BHQ2[..., 1:] * (weight_BHQG.to(mean_v.dtype) @ mean_v)

    def rule(self, given: Inputs, head: int, prefix: bool) -> Tensor:
        """See `Pattern.rule`; of the branch that selects."""
        position_N = torch.arange(given.q_BHND.shape[2], device=given.q_BHND.device)
        score_NG = self.scores(given.q_BHND, self.means(given.k_BHND), position_N)[0, head]
        return oracle.best_blocks(score_NG, self.block, self.count, self.attend_self)

    def start(self, relative: Relative | None = None) -> Cache:
        return BlockCache(self, relative)


class RandomBlocks(Blocks):
    """The control of `Blocks`: as many blocks of the same sizes, drawn instead of chosen.

    What a query reads is a function of (seed, head, its position) alone.
    """

    def __init__(self, heads: int, size: int, *, seed: int, **given: Any) -> None:
        super().__init__(heads, size, **given)
        check_seed(seed)
        self.seed, self.heads = seed, heads

    @staticmethod
    def drawn(config: Config, layer: int) -> dict[str, int]:
        """Return the seed of a layer."""
        return {"seed": config.seed * 1_000 + layer}

    def scores(self, q_BHQD: Tensor, mean_BHGD: Tensor, position_Q: Tensor) -> Tensor:
        """Return drawn numbers, by a hash of position, block, head and seed."""
        device = position_Q.device
        block_G = torch.arange(mean_BHGD.shape[2], device=device)
        head_H11 = torch.arange(q_BHQD.shape[1], device=device)[:, None, None]
        mixed_HQG = (
            position_Q[:, None] * 0x9E3779B1 + block_G * 0x85EBCA77 + head_H11 * 0xC2B2AE3D + self.seed * 0x27D4EB2F
        )
        for multiplier in (0x2C1B3C6D, 0x297A2D39):
            mixed_HQG = ((mixed_HQG ^ (mixed_HQG >> 15)) * multiplier) & 0xFFFFFFFF
        drawn_HQG = mixed_HQG.to(torch.float64).masked_fill(block_G >= position_Q[:, None] // self.block, -math.inf)
        return drawn_HQG.expand(len(q_BHQD), -1, -1, -1)


class BlockCache(GrowingCache):
    """Every key and value so far, and the means of keys and values of finished blocks."""

    pattern: Blocks
    open_k: Tensor | None = None
    """The unturned keys of the block that is not finished."""
    mean_v: Tensor | None = None

    def put(self, given: Inputs, v_BHND: Tensor, first: int) -> tuple[Tensor, Tensor]:
        rows = RowCache.put(self, given, v_BHND, first)
        b, end = self.pattern.block, first + v_BHND.shape[2]
        begin, stop = first // b, end // b
        k_BHND = given.k_BHND if self.open_k is None else torch.cat([self.open_k, given.k_BHND], dim=2)
        self.open_k = k_BHND[:, :, (stop - begin) * b :]
        self.choice_BHSE = place(self.choice_BHSE, self.pattern.means(k_BHND), begin)
        self.mean_v = place(self.mean_v, self.pattern.means(rows[1][:, :, begin * b : stop * b]), begin)
        return rows

    def decode(self, given: Inputs, v_BH1D: Tensor, position: int) -> Tensor:
        out_BH1D = super().decode(given, v_BH1D, position)
        if self.pattern.gate_H2D is None:
            return out_BH1D
        assert self.choice_BHSE is not None and self.mean_v is not None
        position_1 = torch.tensor([position], device=v_BH1D.device)
        return self.pattern.gated(given.q_BHND, out_BH1D, self.choice_BHSE, self.mean_v, position_1)
