"""How far routing has moved since the last validation: who belongs to which cluster of one and the same sequence.

The same sequence is read by the model of then and by the model of now, so that a cluster that moves along with its
queries counts as one that stayed.

Shapes: B sequences (one), H heads, C clusters, N positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rtx.attention.lists import Members
from rtx.attention.routing import RoutingHeads


@torch.no_grad()
def read_memberships(model: nn.Module, tokens_BN: Tensor) -> list[Tensor]:
    """Return the memberships of one sequence, one tensor for each routing head, layers in the order they run.

    A tensor (int32, on the CPU) holds c * N + i for each cluster c and each position i that belongs to it, ascending;
    keys with memberships of their own are counted on from C * N. The model, which has `loss(tokens_BN)`, is run once in
    evaluation mode, and nothing of it changes.
    """
    noted: list[Tensor] = []

    def note(heads: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        assert isinstance(heads, RoutingHeads)
        q_BHND, k_BHND, _ = given
        content = heads.read(q_BHND, k_BHND)
        own = [found.members for found in heads.choose(content, None) if found is not None]
        of_heads = [
            head_numbers(members.of_first_sequence(q_BHND.shape[1]), q_BHND.shape[1])
            for members in own
            if members is not None
        ]
        cells = heads.centroids.centroid_HCD.shape[1] * q_BHND.shape[2]
        for each in zip(*of_heads, strict=True):
            joined_X = torch.cat([number_X + which * cells for which, number_X in enumerate(each)])
            noted.append(joined_X.to("cpu", torch.int32))

    routed = [heads for heads in model.modules() if isinstance(heads, RoutingHeads)]
    if not routed:
        return noted
    hooks = [heads.register_forward_pre_hook(note, with_kwargs=True) for heads in routed]
    was_training = model.training
    model.eval()
    try:
        model.loss(tokens_BN)  # type: ignore[operator]
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
    return noted


def head_numbers(members: Members, heads: int) -> list[Tensor]:
    """Return c * N + i for each cluster c and each of its members i, of each head of one sequence."""
    clusters = len(members.count_L) // heads
    number_M = members.list_M() % clusters * members.length + members.position_M()
    return list(number_M.split(members.count_L.view(heads, clusters).sum(-1).tolist()))


def turnover(before: Sequence[Tensor], after: Sequence[Tensor]) -> dict[str, float]:
    """Return `routing/turnover`, the mean over heads of the share of memberships that only one of two readings has.

    1 - |both| / |either|: 0 where nothing changed (or there was no member at all), 1 where no membership stayed.

    Args:
        before: from `read_memberships`; empty: there is nothing to compare with, and the result is empty.
        after: of the same heads and the same sequence, later.
    """
    shares = []
    for before_X, after_X in zip(before, after, strict=bool(before)):
        both = int(torch.isin(after_X, before_X, assume_unique=True).sum())
        either = len(before_X) + len(after_X) - both
        shares.append(1 - both / either if either else 0.0)
    return {"routing/turnover": sum(shares) / len(shares)} if shares else {}
