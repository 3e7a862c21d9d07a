"""Softmax attention inside blocks with what no kernel offers: Shaw's terms, and dropout in bounded memory on a CPU.

Shapes: G blocks, Q queries, K keys, D head size, M distances.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rtx.attention.shaw import Distances, Rule

MAX_SCORES_CPU, MAX_SCORES_GPU = 1 << 18, 1 << 26
"""Attention scores worked on at once: few enough for a CPU's cache, enough to fill a GPU."""


class Settings(NamedTuple):
    """What is not differentiated: which pairs are read, the factor on the logits, dropout, rows of Shaw's tables."""

    mask_GQK: Tensor
    """True where a key may be read; every query must see at least one. May be an expanded view."""
    scale: float
    dropout: float
    seed: int
    """Of the dropout: the backward pass draws the same numbers again."""
    rule: Rule | None


class ChunkedAttention(torch.autograd.Function):
    """softmax(scale * q (k + key of distance)) (v + value of distance), a few blocks at a time, forward and backward.

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
        for part in parts(settings.mask_GQK):
            q, k, v, keys, values = widened(part, (q_GQD, k_GKD, v_GKD), (keys_MD, values_MD))
            weights_GQK = weigh(q, k, keys, part, settings)
            weights_GQK *= kept(weights_GQK, part, settings)
            chunk_GQD = weights_GQK @ v
            if settings.rule is not None and values is not None:
                chunk_GQD += settings.rule.collect(weights_GQK, len(values), part) @ values
            out_GQD[part] = chunk_GQD
        return out_GQD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of queries, keys, values and both tables."""
        q_GQD, k_GKD, v_GKD, keys_MD, values_MD = ctx.saved_tensors
        settings: Settings = ctx.settings
        grads = Gradients.like(q_GQD, k_GKD, v_GKD, keys_MD, values_MD)
        for part in parts(settings.mask_GQK):
            chunk = widened(part, (q_GQD, k_GKD, v_GKD), (keys_MD, values_MD))
            grads.add(chunk, gradients[0][part].to(grads.wide), part, settings)  # type: ignore[arg-type]
        tables = [None if x is None else x.to(q_GQD.dtype) for x in (grads.keys, grads.values)]
        return grads.q, grads.k, grads.v, *tables, None


class Gradients(NamedTuple):
    """The gradients being made; those of the tables add up over the chunks, in `wide`."""

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
        sums = [None if table is None else torch.zeros_like(table, dtype=wide) for table in (keys, values)]
        return cls(torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), sums[0], sums[1], wide)

    def add(self, chunk: list[Tensor | None], grad_out_GQD: Tensor, part: slice, settings: Settings) -> None:
        """Work out one chunk."""
        q, k, v, keys, values = chunk
        assert q is not None and k is not None and v is not None
        weights_GQK = weigh(q, k, keys, part, settings)
        keep_GQK = kept(weights_GQK, part, settings)
        read_GQK = weights_GQK * keep_GQK if settings.dropout else weights_GQK
        self.v[part] = read_GQK.transpose(1, 2) @ grad_out_GQD
        grad_GQK = grad_out_GQD @ v.transpose(1, 2)
        if settings.rule is not None and values is not None and self.values is not None:
            self.values.add_(over_slots(settings.rule.collect(read_GQK, len(values), part), grad_out_GQD))
            settings.rule.add(grad_GQK, grad_out_GQD @ values.T, part)
        grad_GQK *= keep_GQK
        # What is masked has weight 0, so its gradient ends as 0 whatever stands there.
        grad_GQK.sub_((grad_GQK * weights_GQK).sum(-1, keepdim=True)).mul_(weights_GQK).mul_(settings.scale)
        grad_q_GQD = grad_GQK @ k
        if settings.rule is not None and keys is not None and self.keys is not None:
            summed_GQM = settings.rule.collect(grad_GQK, len(keys), part)
            grad_q_GQD += summed_GQM @ keys
            self.keys.add_(over_slots(summed_GQM, q))
        self.q[part] = grad_q_GQD
        self.k[part] = grad_GQK.transpose(1, 2) @ q


def over_slots(x_GQM: Tensor, y_GQD: Tensor) -> Tensor:
    """Return the sum over blocks and queries of x^T y, `[M, D]`."""
    return x_GQM.flatten(0, 1).T @ y_GQD.flatten(0, 1)


def parts(mask_GQK: Tensor) -> list[slice]:
    """Return slices of blocks that hold a bounded number of scores each."""
    most = MAX_SCORES_CPU if mask_GQK.device.type == "cpu" else MAX_SCORES_GPU
    step = max(1, most // max(1, mask_GQK.shape[1] * mask_GQK.shape[2]))
    return [slice(start, start + step) for start in range(0, len(mask_GQK), step)]


def widened(part: slice, blocks: tuple[Tensor, ...], tables: tuple[Tensor | None, ...]) -> list[Any]:
    """Return a part of the blocks, and the tables, in float32 or wider."""
    wide = torch.promote_types(blocks[0].dtype, torch.float32)
    return [*(x[part].to(wide) for x in blocks), *(None if x is None else x.to(wide) for x in tables)]


def weigh(q_GQD: Tensor, k_GKD: Tensor, keys_MD: Tensor | None, part: slice, settings: Settings) -> Tensor:
    """Return the attention weights `[G, Q, K]` before dropout."""
    logits_GQK = q_GQD @ k_GKD.transpose(1, 2)
    if settings.rule is not None and keys_MD is not None:
        settings.rule.add(logits_GQK, q_GQD @ keys_MD.T, part)
    return logits_GQK.mul_(settings.scale).masked_fill_(~settings.mask_GQK[part], float("-inf")).softmax(-1)


def kept(weights_GQK: Tensor, part: slice, settings: Settings) -> Tensor | float:
    """Return what dropout multiplies the weights with."""
    if not settings.dropout:
        return 1.0
    generator = torch.Generator(weights_GQK.device).manual_seed(settings.seed + part.start)
    share = 1 - settings.dropout
    return torch.empty_like(weights_GQK).bernoulli_(share, generator=generator).div_(share)


def chunked(
    q_GQD: Tensor,
    k_GKD: Tensor,
    v_GKD: Tensor,
    scale: float,
    mask_GQK: Tensor,
    *,
    dropout: float = 0.0,
    relative: Distances | None = None,
    rule: Rule | None = None,
) -> Tensor:
    """Return softmax attention inside blocks, `[G, Q, D]`; `rule` says which rows of `relative` the pairs take."""
    # Drawn from torch's own generator, so that a seed and a resumed run give the same dropout.
    seed = int(torch.randint(1 << 62, ()).item()) if dropout else 0
    keys_MD, values_MD = (None, None) if relative is None else relative
    settings = Settings(mask_GQK, scale, dropout, seed, rule)
    with torch.autocast(q_GQD.device.type, enabled=False):  # the backward pass has none either
        return ChunkedAttention.apply(q_GQD, k_GKD, v_GKD, keys_MD, values_MD, settings)  # type: ignore[return-value]
