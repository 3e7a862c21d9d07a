"""Tiny models of every kind, with output weights that tell hidden states apart, and tokens for them."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from rtx.checks import resolve
from rtx.config import Config, DataConfig, ModelConfig, RoutingConfig
from rtx.model.transformer import Transformer

VOCABULARY = 11
SELECTIONS = ("causal", "topk", "random")
POSITIONS = ("rotary", "shaw", "learned", "axial", "none")
KINDS = list(itertools.product(SELECTIONS, POSITIONS, ("pre", "post"), ("local", "full", "local+full")))
KINDS += [(*kind, "lsh+adaptive_span") for kind in (("causal", "rotary", "pre"), ("topk", "shaw", "post"))]
KINDS += [(*kind, "lsh+adaptive_span") for kind in (("random", "none", "post"), ("causal", "shaw", "pre"))]
KINDS += [
    ("causal", positions, "pre", base) for positions in POSITIONS for base in ("strided", "fixed", "strided+fixed")
]
"""Selection, positions, norm and base pattern."""


def tiny_config(length: int = 24, selection: str = "causal", **options: Any) -> Config:
    """Three layers of four heads of four units: a base layer, and two with two routing heads.

    `options` are fields of the model, or of the routing behind `routing_`.
    """
    sizes: dict[str, Any] = {"layers": 3, "heads": 4, "hidden": 16, "window": 5, "ffn_hidden": 24, "max_distance": 9}
    sizes |= {"stride": 7, "summary": 3, "axes": f"{length // 2}x2" if options.get("positions") == "axial" else None}
    clusters: dict[str, Any] = {"selection": selection, "heads": 2, "layers": 2, "window": 6, "clusters": 4}
    for name, value in options.items():
        group = clusters if name.startswith("routing_") else sizes
        group[name.removeprefix("routing_")] = value
    routing, model = RoutingConfig(**clusters), ModelConfig(**sizes)
    return resolve(Config(data=DataConfig(length=length), routing=routing, model=model))


def tiny_model(seed: int = 0, vocabulary: int = VOCABULARY, **config: Any) -> Transformer:
    """A float64 model in evaluation mode. Its output weights are random: as initialised, zero, they hide all else."""
    torch.manual_seed(seed)
    model = Transformer(tiny_config(**config), vocabulary).double().eval()
    with torch.no_grad():
        model.output_VS.normal_()
        model.embedding.table_VS.normal_()
        model.embedding.start_S.normal_()
    return model


def tokens(batch: int = 2, length: int = 24, seed: int = 0, vocabulary: int = VOCABULARY) -> Tensor:
    """Random units `[B, N]`."""
    return torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


def gradients(model: Transformer, tokens_BN: Tensor) -> dict[str, Tensor]:
    """Return the gradient of the mean nats and the auxiliary loss for every parameter."""
    model.zero_grad()
    nats_BN, auxiliary = model.loss(tokens_BN)
    (nats_BN.mean() + auxiliary).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
