"""What trains each choice of keys, and whether it does.

A choice of keys has no gradient itself, so something else must train it.
"""

import copy
import math
from typing import Any

import torch
from torch import Tensor

from rtx.attention import Random
from rtx.attention.blocks import RandomBlocks
from rtx.attention.centroids import Centroids, after_step, all_centroids
from rtx.attention.clusters import Routing
from rtx.attention.indexer import Indexer
from rtx.attention.lsh import Lsh
from rtx.attention.pattern import Pattern
from rtx.attention.probed import Probed
from rtx.model.transformer import Transformer
from rtx.settings.derived import ROUTED


def choice_gradients(model: Transformer, tokens_BN: Tensor) -> list[dict[str, Any]]:
    """Train a copy of a model for one step, and return what that did for each choice of keys.

    The result has a row for each group of heads that choose by content, or whose keys are drawn.
    `trained_by` says what trains its choice. `gradient` is the norm of the gradient of its queries,
    or the least norm among its own parameters; None if nothing trains, or if it is not finite.
    `missing` is whether there is no such gradient, or the step moves no centroid.
    """
    model = copy.deepcopy(model).train()
    take_gradients(model, tokens_BN)
    frozen = frozen_centroids(model)
    rows = []
    for layer, attention in enumerate(model.attentions()):
        weight_grad = attention.qkv.weight.grad
        assert weight_grad is not None
        parts = attention.by_group(weight_grad.split(attention.widths))
        for group, (query_grad, _, _) in zip(attention.head_groups(), parts, strict=True):
            if group.name == ROUTED or isinstance(group.pattern, Lsh):
                row = gradient_row(group.pattern, query_grad, frozen)
                rows.append({"layer": layer, "heads": group.name, **row})
    return rows


def take_gradients(model: Transformer, tokens_BN: Tensor) -> None:
    """Compute the gradients of a training step, and leave random streams as they were."""
    devices = []
    if tokens_BN.is_cuda:
        devices = [tokens_BN.device]
    model.zero_grad()
    with torch.random.fork_rng(devices), torch.enable_grad():
        nats_BN, auxiliary = model.loss(tokens_BN)
        loss = nats_BN.mean() + auxiliary
        loss.backward()


def frozen_centroids(model: Transformer) -> list[Centroids]:
    """Move centroids as after a training step, and return those that did not move."""
    before = {centroids: centroids.centroid_HCD.clone() for centroids in all_centroids(model)}
    after_step(model)
    frozen = []
    for centroids, old_HCD in before.items():
        if torch.allclose(centroids.centroid_HCD, old_HCD):
            frozen.append(centroids)
    return frozen


def gradient_row(pattern: Pattern, query_grad: Tensor, frozen: list[Centroids]) -> dict[str, Any]:
    """Return what trained the choice of heads.

    Args:
        query_grad: the gradient of the matrix that makes their queries.
        frozen: the centroids that did not move.
    """
    row: dict[str, Any] = {"trained_by": trained_by(pattern), "gradient": None, "missing": False}
    if isinstance(pattern, Random | RandomBlocks):
        return row
    norm = least_norm(pattern, query_grad)
    has_gradient = 0 < norm < math.inf
    if math.isfinite(norm):
        row["gradient"] = norm
    is_frozen = isinstance(pattern, Routing | Probed) and pattern.centroids in frozen
    row["missing"] = is_frozen or not has_gradient
    return row


def least_norm(pattern: Pattern, query_grad: Tensor) -> float:
    """Return the least norm of the gradients of a pattern's parameters, else that of its queries.

    One that is not finite counts as less than all others.
    """
    grads = [parameter.grad for parameter in pattern.parameters()] or [query_grad]
    norms = []
    for grad in grads:
        norm = 0.0
        if grad is not None:
            norm = float(grad.norm())
        norms.append(norm)
    return min(norms, key=lambda norm: (math.isfinite(norm), norm))


TRAINED_BY: tuple[tuple[Any, str], ...] = (
    (Random | RandomBlocks, "nothing: it is drawn"),
    (Lsh, "its queries, by the attention; what they are hashed by is drawn"),
    (Indexer, "the divergence of its scores to the attention"),
    (Probed, "the attention's own queries and keys; centroids by k-means of the keys"),
)
"""What trains the choice of some patterns, in words."""


def trained_by(pattern: Pattern) -> str:
    """Return what trains the choice of a pattern, in words."""
    for kind, words in TRAINED_BY:
        if isinstance(pattern, kind):
            return words
    if isinstance(pattern, Routing):
        return what_trains_clusters(pattern)
    phrase = "the attention's own queries and keys"
    if [*pattern.parameters()]:
        phrase += ", parameters of its own"
    return phrase


def what_trains_clusters(pattern: Routing) -> str:
    """Return what trains the clusters of routing heads, in words."""
    vectors = "queries"
    if pattern.has_keys:
        vectors = "queries and keys"
    losses = "the attention"
    if pattern.commitment:
        losses = "the attention and the commitment to centroids"
    rule = f"update={pattern.centroids.update_rule}"
    return f"its {vectors}, by {losses}; centroids by k-means ({rule})"
