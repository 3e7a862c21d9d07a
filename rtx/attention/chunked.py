"""Softmax attention inside blocks with what no kernel offers: Shaw's terms, dropout in bounded memory on a CPU, and
products by the faster of its libraries.

Shapes: G blocks, Q queries, K keys, D head size, M distances; within a tile G, Q and K count what the tile holds.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rtx.attention.derivatives import first_alone
from rtx.attention.products import wide_products
from rtx.attention.shaw import Distances, Rule, Tile

MAX_SCORES_CPU, MAX_SCORES_GPU = 1 << 19, 1 << 26
"""Attention scores worked on at once: few enough for a CPU's cache, enough to fill a GPU."""

MIN_ROWS = 32
"""Queries of a tile at the least. A block is cut into four where that leaves so many: under a causal or banded mask a
quarter reads fewer keys than the whole."""


class Settings(NamedTuple):
    """What is not differentiated: which pairs are read, the factor on the logits, dropout, rows of Shaw's tables."""

    mask: Tensor
    """True where a key may be read; every query must see at least one. One for all blocks, `[Q, K]`, or `[G, Q, K]`."""
    scale: float
    dropout: float
    seed: int
    """Of the dropout: the backward pass draws the same numbers again."""
    rule: Rule | None

    def blocked(self, tile: Tile) -> Tensor:
        """Return where a tile's keys may not be read."""
        return ~self.mask[tile if self.mask.dim() == 3 else tile[1:]]


class ChunkedAttention(torch.autograd.Function):
    """softmax(scale * q (k + key of distance)) (v + value of distance), tile by tile, forward and backward.

    Nothing but inputs is kept for the backward pass, which works the weights out again: autograd by itself would keep
    weights, logits and row numbers of all blocks. All arithmetic is float32 or wider.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q_GQD: Tensor,
        k_GKD: Tensor,
        v_GKD: Tensor,
        keys_MD: Tensor | None,
        values_MD: Tensor | None,
        settings: Settings,
    ) -> Tensor:
        """Return the outputs `[G, Q, D]`."""
        ctx.save_for_backward(q_GQD, k_GKD, v_GKD, keys_MD, values_MD)
        ctx.settings = settings
        out_GQD = torch.empty(*q_GQD.shape[:2], v_GKD.shape[-1], dtype=v_GKD.dtype, device=v_GKD.device)
        with wide_products(q_GQD):
            for number, tile in enumerate(tiles(settings.mask, len(q_GQD))):
                read = read_tile(tile, (q_GQD, k_GKD, v_GKD), (keys_MD, values_MD), settings.scale)
                out_GQD[tile.part, tile.rows] = attend_tile(read, tile, number, settings)
        return out_GQD

    @staticmethod
    @first_alone
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of queries, keys, values and both tables."""
        q_GQD, k_GKD, v_GKD, keys_MD, values_MD = ctx.saved_tensors
        settings: Settings = ctx.settings
        grads = Gradients.like(q_GQD, k_GKD, v_GKD, keys_MD, values_MD)
        with wide_products(q_GQD):
            for number, tile in enumerate(tiles(settings.mask, len(q_GQD))):
                read = read_tile(tile, (q_GQD, k_GKD, v_GKD), (keys_MD, values_MD), settings.scale)
                grad_out_GQD = gradients[0][tile.part, tile.rows].to(grads.wide).contiguous()
                grads.add(read, grad_out_GQD, tile, number, settings)
        inputs = (k_GKD, v_GKD, keys_MD, values_MD)  # saved tensors may be asked for once alone
        sums = zip((grads.k, grads.v, grads.keys, grads.values), inputs, strict=True)
        return grads.q, *(None if total is None else total.to(x.dtype) for total, x in sums), None


class Gradients(NamedTuple):
    """The gradients being made; all but those of the queries add up over the tiles, in `wide`."""

    q: Tensor
    k: Tensor
    v: Tensor
    keys: Tensor | None
    values: Tensor | None
    wide: torch.dtype

    @classmethod
    def like(cls, q: Tensor, k: Tensor, v: Tensor, keys: Tensor | None, values: Tensor | None) -> Gradients:
        """Return room for the gradients of these."""
        wide = torch.promote_types(q.dtype, torch.float32)
        sums = [None if x is None else torch.zeros_like(x, dtype=wide) for x in (k, v, keys, values)]
        return cls(torch.empty_like(q), *sums, wide)  # type: ignore[arg-type]

    def add(self, read: list[Tensor | None], grad_out_GQD: Tensor, tile: Tile, number: int, settings: Settings) -> None:
        """Work out one tile, the `number`-th."""
        q, k, v, keys, values = read
        assert q is not None and k is not None and v is not None
        rule = settings.rule
        weights_GQK = weigh(q, k, keys, tile, settings)
        keep_GQK = kept(weights_GQK, number, settings)
        read_GQK = weights_GQK * keep_GQK if settings.dropout else weights_GQK
        self.v[tile.part, tile.columns].baddbmm_(read_GQK.transpose(1, 2), grad_out_GQD)
        grad_GQK = grad_out_GQD @ v.transpose(1, 2)
        if rule is not None and values is not None and self.values is not None:
            over_slots(self.values, rule.collect(read_GQK, len(values), tile), grad_out_GQD)
            rule.add(grad_GQK, grad_out_GQD @ values.T, tile)
        if settings.dropout:
            grad_GQK *= keep_GQK
        # What is masked has weight 0, so its gradient ends as 0 whatever stands there.
        grad_GQK = torch.ops.aten._softmax_backward_data(grad_GQK, weights_GQK, -1, weights_GQK.dtype)
        grad_q_GQD = grad_GQK @ k
        if rule is not None and keys is not None and self.keys is not None:
            summed_GQM = rule.collect(grad_GQK, len(keys), tile)
            grad_q_GQD += summed_GQM @ keys
            over_slots(self.keys, summed_GQM, q)
        self.q[tile.part, tile.rows] = grad_q_GQD.mul_(settings.scale)
        self.k[tile.part, tile.columns].baddbmm_(grad_GQK.transpose(1, 2), q)


def attend_tile(read: list[Any], tile: Tile, number: int, settings: Settings) -> Tensor:
    """Return the outputs `[G, Q, D]` of the queries of a tile, the `number`-th."""
    q, k, v, keys, values = read
    weights_GQK = weigh(q, k, keys, tile, settings)
    if settings.dropout:
        weights_GQK *= kept(weights_GQK, number, settings)
    out_GQD = weights_GQK @ v
    if settings.rule is not None and values is not None:
        out_GQD += settings.rule.collect(weights_GQK, len(values), tile) @ values
    return out_GQD


def over_slots(total_MD: Tensor, x_GQM: Tensor, y_GQD: Tensor) -> None:
    """Add the sum over blocks and queries of x^T y to the total."""
    total_MD.addmm_(x_GQM.flatten(0, 1).T, y_GQD.flatten(0, 1))


def tiles(mask: Tensor, blocks: int) -> list[Tile]:
    """Return tiles that hold a bounded number of scores each; under one mask for all blocks, `[Q, K]`, they leave out
    keys that none of their queries reads."""
    on_cpu, shared = mask.device.type == "cpu", mask.dim() == 2
    most = MAX_SCORES_CPU if on_cpu else MAX_SCORES_GPU
    Q, K = mask.shape[-2:]
    height = max(MIN_ROWS, -(-Q // 4)) if on_cpu and shared else Q
    height = max(1, min(height, most // max(1, K)))
    found = []
    for start in range(0, Q, height):
        rows = slice(start, min(start + height, Q))
        columns = read_columns(mask[rows]) if shared else slice(0, K)
        step = max(1, most // max(1, (rows.stop - start) * (columns.stop - columns.start)))
        found += [Tile(slice(first, min(first + step, blocks)), rows, columns) for first in range(0, blocks, step)]
    return found


def read_columns(mask_QK: Tensor) -> slice:
    """Return the keys from the first to the last that some query reads."""
    read_K = mask_QK.any(0).nonzero()[:, 0].tolist()
    return slice(read_K[0], read_K[-1] + 1) if read_K else slice(0, 0)


def read_tile(tile: Tile, blocks: tuple[Tensor, ...], tables: tuple[Tensor | None, ...], scale: float) -> list[Any]:
    """Return a tile's queries times the scale, its keys and values, and the tables, in float32 or wider."""
    q_GQD, k_GKD, v_GKD = blocks
    wide = torch.promote_types(q_GQD.dtype, torch.float32)
    q_GQD = q_GQD[tile.part, tile.rows].to(wide) * scale
    # In one piece, or oneDNN copies their transposes, number by number.
    k_GKD, v_GKD = (x[tile.part, tile.columns].to(wide).contiguous() for x in (k_GKD, v_GKD))
    return [q_GQD, k_GKD, v_GKD, *(None if x is None else x.to(wide) for x in tables)]


def weigh(q_GQD: Tensor, k_GKD: Tensor, keys_MD: Tensor | None, tile: Tile, settings: Settings) -> Tensor:
    """Return the attention weights `[G, Q, K]` of a tile before dropout; queries are scaled already."""
    logits_GQK = q_GQD @ k_GKD.transpose(1, 2)
    if settings.rule is not None and keys_MD is not None:
        settings.rule.add(logits_GQK, q_GQD @ keys_MD.T, tile)
    return logits_GQK.masked_fill_(settings.blocked(tile), float("-inf")).softmax(-1)


def kept(weights_GQK: Tensor, number: int, settings: Settings) -> Tensor | float:
    """Return what dropout multiplies the weights of a tile with, by the tile's number."""
    if not settings.dropout:
        return 1.0
    # A CPU's generator reads the lowest 32 bits of its seed.
    generator = torch.Generator(weights_GQK.device).manual_seed(settings.seed + number)
    share = 1 - settings.dropout
    return torch.empty_like(weights_GQK).bernoulli_(share, generator=generator).div_(share)


def chunked(
    q_GQD: Tensor,
    k_GKD: Tensor,
    v_GKD: Tensor,
    scale: float,
    mask: Tensor,
    *,
    dropout: float = 0.0,
    relative: Distances | None = None,
    rule: Rule | None = None,
) -> Tensor:
    """Return softmax attention inside blocks, `[G, Q, D]`; `rule` says which rows of `relative` the pairs take.

    `mask` is `[G, Q, K]`, or `[Q, K]` for all blocks, whose unread keys then cost nothing.
    """
    # Drawn from torch's own generator, so that a seed and a resumed run give the same dropout.
    seed = int(torch.randint(1 << 62, ()).item()) if dropout else 0
    keys_MD, values_MD = (None, None) if relative is None else relative
    settings = Settings(mask, scale, dropout, seed, rule)
    with torch.autocast(q_GQD.device.type, enabled=False):  # the backward pass has none either
        return ChunkedAttention.apply(q_GQD, k_GKD, v_GKD, keys_MD, values_MD, settings)  # type: ignore[return-value]
