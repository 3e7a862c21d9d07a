"""Where the gradient of every choice by content comes from, and whether one that should train gets any.

A choice of keys has no gradient of its own. What makes it must be trained by something else, or it stays as it began.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import textwrap
from dataclasses import dataclass
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


@dataclass(frozen=True)
class ChoiceGradient:
    """What trains the choice of one group of a layer's heads."""

    layer: int
    """1 the lowest."""
    group: str
    source: str
    norm: float | None
    """Of the gradient of what should train; None: nothing should."""

    @property
    def missing(self) -> bool:
        """Whether something should train and gets no gradient, or none that is finite."""
        return self.norm is not None and not 0 < self.norm < math.inf

    def record(self) -> dict[str, Any]:
        """Return what the command keeps; a norm that is not finite is null."""
        norm = self.norm if self.norm is not None and math.isfinite(self.norm) else None
        return {**dataclasses.asdict(self), "norm": norm, "missing": self.missing}

    def line(self) -> str:
        """Return what the command prints."""
        said = "" if self.norm is None else f"; gradient {self.norm:.1e}"
        alarm = " BUT GETS NONE: it stays as it is" if self.missing else ""
        line = f"layer {self.layer} {self.group}: the choice is trained by {self.source}{said}{alarm}"
        return textwrap.fill(line, 100, subsequent_indent="  ")


def choice_gradients(model: Transformer, tokens_BN: Tensor) -> list[ChoiceGradient]:
    """Take one training pass, forward and backward, with a copy of the model; nothing of the model changes."""
    model = copy.deepcopy(model).train()
    model.zero_grad()
    devices = [tokens_BN.device] if tokens_BN.is_cuda else []
    with statistics_paused(), torch.random.fork_rng(devices), torch.enable_grad():
        nats_BN, auxiliary = model.loss(tokens_BN)
        (nats_BN.mean() + auxiliary).backward()
    found = []
    for layer, block in enumerate(model.blocks, start=1):
        attention: MultiheadAttention = block.attention  # type: ignore[assignment]
        for number, (name, pattern) in enumerate(zip(attention.groups, attention.each(), strict=True)):
            if isinstance(pattern, Routing | Random | Choice):
                found.append(ChoiceGradient(layer, name, source_of(pattern), norm_of(attention, number, pattern)))
    return found


def source_of(pattern: Pattern) -> str:
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


def norm_of(attention: MultiheadAttention, number: int, pattern: Pattern) -> float | None:
    """Return the norm of the gradient of what should train: the indexer, or what makes a group's queries and keys."""
    if isinstance(pattern, Random | RandomBlocks):
        return None
    if isinstance(pattern, Indexer):
        gradients = [parameter.grad for parameter in pattern.choice_parameters()]
    else:
        which = [number] + ([len(attention.with_keys) + sum(attention.with_keys[:number])] if pattern.has_keys else [])
        weight = attention.qkv.weight.grad
        gradients = [] if weight is None else [weight.split(attention.widths)[part] for part in which]
    return math.hypot(*(float(x.norm()) for x in gradients if x is not None), 0.0)
