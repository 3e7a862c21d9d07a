"""Where the gradient of every choice by content comes from, and whether one that should train gets any.

A choice of keys has no gradient of its own. What makes it must be trained by something else, or it stays as it began.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor

from rtx.attention.centroids import statistics_paused
from rtx.attention.choices import Blocks, Choice, Indexer, RandomBlocks
from rtx.attention.pattern import Pattern
from rtx.attention.patterns import Random
from rtx.attention.routing import Routing
from rtx.model.multihead import MultiheadAttention
from rtx.model.transformer import Transformer


def choice_gradients(model: Transformer, tokens_BN: Tensor) -> list[dict[str, Any]]:
    """Take one training pass, forward and backward, with a copy of the model; nothing of the model changes.

    Returns:
        A row for each group of heads that chooses: its layer, 0 the lowest, what trains its choice, the norm of that
        gradient (None: nothing should train, or it is not finite), and whether it is missing.
    """
    model = copy.deepcopy(model).train()
    model.zero_grad()
    devices = [tokens_BN.device] if tokens_BN.is_cuda else []
    with statistics_paused(), torch.random.fork_rng(devices), torch.enable_grad():
        nats_BN, auxiliary = model.loss(tokens_BN)
        (nats_BN.mean() + auxiliary).backward()
    rows = []
    for layer, block in enumerate(model.blocks):
        attention: MultiheadAttention = block.attention  # type: ignore[assignment]
        for number, (name, pattern) in enumerate(zip(attention.groups, attention.each(), strict=True)):
            if isinstance(pattern, Routing | Random | Choice):
                learns = not isinstance(pattern, Random | RandomBlocks)
                norm = gradient_norm(attention, number, pattern)
                row = {"layer": layer, "heads": name, "trained_by": source(pattern)}
                row["gradient"] = norm if learns and math.isfinite(norm) else None
                rows.append({**row, "missing": learns and not 0 < norm < math.inf})
    return rows


def source(pattern: Pattern) -> str:
    """Return what trains a choice, in words."""
    if isinstance(pattern, Random | RandomBlocks):
        return "nothing: it is drawn"
    if isinstance(pattern, Indexer):
        return "the divergence of its scores to the attention"
    if isinstance(pattern, Routing):
        vectors = "queries and keys" if pattern.has_keys else "queries"
        pull = " and the commitment to centroids" if pattern.commitment else ""
        return f"its {vectors}, by the attention{pull}; centroids by k-means (update={pattern.centroids.update_rule})"
    compressed = isinstance(pattern, Blocks) and pattern.gate_H2D is not None
    return "the attention's own queries and keys" + (", and the compressed branch" if compressed else "")


def gradient_norm(attention: MultiheadAttention, number: int, pattern: Pattern) -> float:
    """Return the norm of the gradient of what should train: the indexer, or what makes a group's queries and keys."""
    if isinstance(pattern, Indexer):
        gradients = [parameter.grad for parameter in pattern.choice_parameters()]
    else:
        which = [number] + ([len(attention.with_keys) + sum(attention.with_keys[:number])] if pattern.has_keys else [])
        weight = attention.qkv.weight.grad
        gradients = [] if weight is None else [weight.split(attention.widths)[part] for part in which]
    return math.hypot(*(float(x.norm()) for x in gradients if x is not None), 0.0)
