"""Attention weights, asked of the patterns themselves: with unit vectors as values, an output is a weight on each key.

Unit vectors of a block of keys at a time give the weights on that block, so that no matrix of N x N is held.

Shapes: B sequences, N positions, E hidden width, H heads of a group, D head size, M keys of a block.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rtx.attention.heads import Heads
from rtx.attention.shaw import Distances
from rtx.model.block import Block
from rtx.model.multihead import MultiheadAttention
from rtx.model.transformer import Transformer

MAX_WEIGHTS = 1 << 27
"""Weights of a layer's heads held at once."""

Head = tuple[str, int]
"""A head of a layer: its group, and its number in it."""


@torch.no_grad()
def layer_inputs(model: Transformer, tokens_BN: Tensor) -> Iterator[tuple[MultiheadAttention, Tensor]]:
    """Yield the attention of every layer, the lowest first, with what it reads of the sequences, `[B, N, E]`."""
    x_BNE = model.embedding(tokens_BN)
    for block in model.blocks:
        assert isinstance(block, Block)
        yield block.attention, block.attention_norm(x_BNE) if block.pre else x_BNE
        x_BNE, _ = block(x_BNE)


@torch.no_grad()
def weight_blocks(attention: MultiheadAttention, x_BNE: Tensor, kept: set[Head]) -> Iterator[dict[Head, Tensor]]:
    """Yield, for one block of keys after the other, the weights `[B, N, M]` that each head in `kept` puts on them."""
    B, N, _ = x_BNE.shape
    split = attention.split(x_BNE)
    block = max(1, MAX_WEIGHTS // (B * N * sum(q_BHND.shape[1] for q_BHND, _, _ in split)))
    for first in range(0, N, block):
        size = min(block, N - first)
        unit_NM = x_BNE.new_zeros(N, size)
        unit_NM[first : first + size] = torch.eye(size, dtype=x_BNE.dtype, device=x_BNE.device)
        weights: dict[Head, Tensor] = {}
        groups = zip(attention.groups, attention.each(), attention.relative(), split, strict=True)
        for name, heads, relative, (q_BHND, k_BHND, _) in groups:
            unit_BHNM = unit_NM.expand(*q_BHND.shape[:2], N, size)
            out_BHNM = read_values(attention, heads, relative, q_BHND, k_BHND, unit_BHNM)
            weights |= {(name, h): out_BHNM[:, h] for n, h in kept if n == name}
        yield weights


def read_values(
    attention: MultiheadAttention,
    heads: Heads,
    relative: Distances | None,
    q_BHND: Tensor,
    k_BHND: Tensor | None,
    v_BHNM: Tensor,
) -> Tensor:
    """Return what a group of heads makes of values of any width, `[B, H, N, M]`, by its queries and keys."""
    if relative is not None:  # values of distances are no weights
        relative = Distances(relative.keys_MD, relative.keys_MD.new_zeros(len(relative.keys_MD), v_BHNM.shape[-1]))
    return heads(q_BHND, k_BHND, v_BHNM, rotate=attention.rotary, relative=relative)[0]
