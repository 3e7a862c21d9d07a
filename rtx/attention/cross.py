"""Routing between two sequences: queries of one read keys of the other that the same centroid takes (TACL 4.1).

Shapes: B pairs of sequences, H heads, C clusters, N query and M key positions, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rtx.attention import by_reference
from rtx.attention.arguments import (
    check_centroids,
    check_finite_values,
    check_mask,
    check_numbers,
    check_positive,
    check_queries,
    check_tensor,
)
from rtx.attention.backends import Call, check_backend, choose
from rtx.attention.choice import Rule, Wish, read_scores
from rtx.attention.content import normalise, without_padding
from rtx.attention.kmeans import Centroids
from rtx.attention.separate import attend_lists
from rtx.attention.weights import logit_scale


def cross_routing(
    q_BHND: Tensor,
    k_BHMD: Tensor,
    v_BHMD: Tensor,
    centroid_HCD: Tensor,
    *,
    window: int,
    context_window: int | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    mask_BN: Tensor | None = None,
    context_mask_BM: Tensor | None = None,
    backend: str = "auto",
    check_finite: bool = False,
) -> Tensor:
    """Return attention of queries over the keys of another sequence, `[B, H, N, D]`, without a causal mask.

    Each centroid takes its `window` best queries and its `context_window` (unset: `window`) best keys, both after
    LayerNorm, and a query reads all keys of its cluster. In several clusters it gets the mean; in none, or where the
    other sequence is all padding, zero.

    Args:
        q_BHND: queries of one sequence, before normalisation.
        k_BHMD, v_BHMD: keys (before normalisation) and values of the other sequence, of any length.
        centroid_HCD: centroids, of any norm.
        scale: multiplies the logits (default 1 / sqrt(D); Algorithm 1 prints 1).
        mask_BN, context_mask_BM: true at real positions of the sequence of queries, and of that of keys. Padding is in
            no cluster, is read by nobody and gets zero.
        backend: "auto", "reference" or "torch", see `rtx.attention.backends`; the same result from each.
        check_finite: refuse inputs that hold NaN or infinity (padding may).

    Raises:
        ValueError: shapes, types or devices that differ, or a window below 1.
    """
    context_window = window if context_window is None else context_window
    check_cross(q_BHND, k_BHMD, v_BHMD, centroid_HCD, mask_BN, context_mask_BM, check_finite)
    check_positive("window", window)
    check_positive("context_window", context_window)
    check_numbers(scale, dropout)
    if choose(backend, Call("cross_routing", q_BHND, k_BHMD, v_BHMD, dropout)) == "reference":
        return by_reference.cross_routing(
            q_BHND,
            k_BHMD,
            v_BHMD,
            centroid_HCD,
            window=window,
            context_window=context_window,
            scale=scale,
            mask_BN=mask_BN,
            context_mask_BM=context_mask_BM,
        )
    q_BHND = normalise(without_padding(q_BHND, mask_BN))
    k_BHMD = normalise(without_padding(k_BHMD, context_mask_BM))
    queries = read_scores(centroid_HCD, q_BHND, mask_BN, Wish(Rule("topk", window))).members
    keys = read_scores(centroid_HCD, k_BHMD, context_mask_BM, Wish(Rule("topk", context_window))).members
    assert queries is not None and keys is not None
    return attend_lists(
        q_BHND.to(v_BHMD.dtype),
        k_BHMD.to(v_BHMD.dtype),
        v_BHMD,
        queries,
        keys,
        window=context_window,
        scale=logit_scale(scale, q_BHND.shape[-1]),
        causal=False,
        dropout=dropout,
    )


def check_cross(
    q_BHND: Tensor,
    k_BHMD: Tensor,
    v_BHMD: Tensor,
    centroid_HCD: Tensor,
    mask_BN: Tensor | None,
    context_mask_BM: Tensor | None,
    finite: bool,
) -> None:
    """Refuse tensors that `cross_routing` cannot read."""
    check_tensor("k_BHMD", k_BHMD)
    positions = k_BHMD.shape[-2] if k_BHMD.dim() > 1 else 0
    check_queries(q_BHND, k_BHMD, v_BHMD, positions)
    check_centroids(centroid_HCD, q_BHND)
    check_mask("mask_BN", mask_BN, len(q_BHND), q_BHND.shape[2], q_BHND)
    check_mask("context_mask_BM", context_mask_BM, len(q_BHND), positions, q_BHND)
    if finite:
        check_finite_values(mask_BN, q_BHND=q_BHND)
        check_finite_values(context_mask_BM, k_BHMD=k_BHMD, v_BHMD=v_BHMD)
        check_finite_values(centroid_HCD=centroid_HCD)


def first_real(x_BHND: Tensor, mask_BN: Tensor | None) -> Tensor:
    """Return the normalised vectors of the first sequence, without padding."""
    return normalise(x_BHND[:1] if mask_BN is None else x_BHND[:1, :, mask_BN[:1].flatten()])


class CrossRoutingHeads(nn.Module):
    """H heads of `cross_routing` with their centroids, which count queries and keys both.

    Args:
        centroids: made with keys="separate"; their window is that of queries.
        context_window: keys of a cluster; unset: as many as queries.
        scale: multiplies the logits.
        dropout: on attention weights, in training.
        backend: as in `cross_routing`.

    Raises:
        ValueError: centroids with other keys.
    """

    def __init__(
        self,
        centroids: Centroids,
        *,
        context_window: int | None = None,
        scale: float | None = None,
        dropout: float = 0.0,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        if centroids.keys != "separate":
            raise ValueError(f"centroids with keys={centroids.keys!r}: must be 'separate' for cross-attention")
        self.centroids = centroids
        if context_window is not None:
            check_positive("context_window", context_window)
        check_numbers(scale, dropout)
        check_backend(backend)
        self.context_window, self.scale, self.dropout, self.backend = context_window, scale, dropout, backend

    def forward(
        self,
        q_BHND: Tensor,
        k_BHMD: Tensor,
        v_BHMD: Tensor,
        *,
        mask_BN: Tensor | None = None,
        context_mask_BM: Tensor | None = None,
    ) -> Tensor:
        """Return what `cross_routing` does; in training, gather the statistics of queries and keys.

        Centroids that wait for data (`initialise_from_data`) first start at queries of the first sequence.
        """
        if self.centroids.seed_with_next:
            check_cross(q_BHND, k_BHMD, v_BHMD, self.centroids.centroid_HCD, mask_BN, context_mask_BM, False)
            self.centroids.seed_from(first_real(q_BHND, mask_BN), first_real(k_BHMD, context_mask_BM))
        out_BHND = cross_routing(
            q_BHND,
            k_BHMD,
            v_BHMD,
            self.centroids.centroid_HCD,
            window=self.centroids.window,
            context_window=self.context_window,
            scale=self.scale,
            dropout=self.dropout if self.training else 0.0,
            mask_BN=mask_BN,
            context_mask_BM=context_mask_BM,
            backend=self.backend,
        )
        if self.training:
            self.observe(q_BHND, k_BHMD, mask_BN, context_mask_BM)
        return out_BHND

    @torch.no_grad()
    def observe(self, q_BHND: Tensor, k_BHMD: Tensor, mask_BN: Tensor | None, context_mask_BM: Tensor | None) -> None:
        """Gather the statistics of a training batch."""
        q_BHND = normalise(without_padding(q_BHND, mask_BN))
        k_BHMD = normalise(without_padding(k_BHMD, context_mask_BM))
        self.centroids.observe(q_BHND, self.centroids.look(q_BHND, mask_BN), mask_BN)
        self.centroids.observe_keys(k_BHMD, self.centroids.look(k_BHMD, context_mask_BM), context_mask_BM)
