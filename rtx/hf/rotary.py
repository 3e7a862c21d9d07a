"""Queries and keys before their rotary angles, as a choice by content may compare them.

A model of transformers turns queries and keys by the angles of their positions before it calls the
attention function. `watch` keeps the angles of each layer's call, and `turned_back` turns by the
opposite ones, with the function of the model itself.

Shapes: B sequences, H query heads, G key-value heads, Q queries, K keys, D head size.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

ANGLES = "rtx_angles"
"""The attribute of an attention module that has the cosines and sines of its call."""
TOLERANCE = 1e-2
"""How far queries may be, relative to the largest, from those turned back and forth."""


def watch(model: nn.Module) -> None:
    """Let every attention module of a model keep the angles of its last call."""
    for module in model.modules():
        if hasattr(module, "layer_idx") and not hasattr(module, ANGLES):
            setattr(module, ANGLES, None)
            module.register_forward_pre_hook(keep_angles, with_kwargs=True)


def keep_angles(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Keep the cosines and sines that a call of an attention module gets."""
    setattr(module, ANGLES, options.get("position_embeddings"))


@torch.no_grad()
def turned_back(module: nn.Module, q_BHQD: Tensor, k_BGKD: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries and keys as they were before their rotary angles.

    Raises:
        ValueError: the model has no rotary positions that can be turned back, or the call has a
            cache, whose keys have other angles than the queries.
    """
    if q_BHQD.shape[2] != k_BGKD.shape[2]:
        raise ValueError(
            "rotary=before: takes whole sequences; a cache has the keys after rotation"
        )
    angles = getattr(module, ANGLES, None)
    turn = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
    if angles is None or turn is None:
        name = type(module).__name__
        raise ValueError(f"rotary=before: {name} has no rotary angles that rtx can turn back")
    cos, sin = angles
    # Some models scale the angles' cosines and sines.
    square = (cos.square() + sin.square()).mean()
    q_back_BHQD, k_back_BGKD = turn(q_BHQD, k_BGKD, cos / square, -sin / square)
    q_again_BHQD, _ = turn(q_back_BHQD, k_back_BGKD, cos, sin)
    largest_error = (q_again_BHQD - q_BHQD).abs().max()
    if largest_error > TOLERANCE * q_BHQD.abs().max():
        name = type(module).__name__
        raise ValueError(f"rotary=before: the rotation of {name} cannot be turned back")
    return q_back_BHQD, k_back_BGKD
