"""Routing heads: a position reads the positions that share a cluster with it (paper section 4.1, Algorithm 1).

Shapes: B sequences, H routing heads, C clusters, N positions, D head size, W attention window.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rtx.attention import by_reference
from rtx.attention.arguments import (
    check_attention,
    check_causal,
    check_centroids,
    check_number,
    check_numbers,
    check_positive,
    check_routing,
    check_selection,
    check_streaming,
)
from rtx.attention.backends import Call, check_backend, choose
from rtx.attention.choice import Found, Rule, Wish, read_scores
from rtx.attention.content import Content, attend_content, normalise, read_content
from rtx.attention.heads import Heads, Rotate
from rtx.attention.kmeans import Centroids, to_sphere
from rtx.attention.lists import Members
from rtx.attention.prefix import Arrivals, arrivals, attend_prefix_topk
from rtx.attention.routing_state import RoutingState
from rtx.attention.selection import tie_margin
from rtx.attention.weights import Distances, logit_scale

__all__ = ["RoutingHeads", "Snapshot", "normalise", "routing"]


def routing(
    q_BHND: Tensor,
    k_BHND: Tensor | None,
    v_BHND: Tensor,
    centroid_HCD: Tensor,
    *,
    window: int,
    selection: str = "causal",
    threshold_HC: Tensor | None = None,
    key_threshold_HC: Tensor | None = None,
    projection_HDD: Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
    attend_self: bool = True,
    dropout: float = 0.0,
    relative: Distances | None = None,
    slot_distance: bool = False,
    rotate: Rotate | None = None,
    mask_BN: Tensor | None = None,
    streaming: bool = False,
    backend: str = "auto",
    check_finite: bool = False,
) -> Tensor:
    """Return routing attention, `[B, H, N, D]`. A position in several clusters gets the mean of their outputs.

    Args:
        q_BHND: queries before normalisation (LayerNorm without scale or bias), as keys are.
        k_BHND: keys; None: the queries stand for them (Algorithm 1 with its left-to-right mask). With keys, queries and
            keys have memberships of their own by the same centroids (TACL version, section 4.1); the mean is over the
            clusters in which a query sees a key.
        v_BHND: values.
        centroid_HCD: centroids, of any norm.
        selection: "topk": each centroid takes its `window` best positions (of queries and keys apart, where keys are
            given) of the whole sequence, and a member reads the keys up to itself. It follows Algorithm 1, but masks
            true positions, averages over the clusters of a position and divides by their count exactly. **It sees the
            future**: which past positions are members depends on later ones. "causal": a position joins every cluster
            whose centroid scores it at or above the threshold, and reads the last `window` members up to itself.
            "nearest": it joins only the cluster whose centroid scores it highest. The last two are strictly causal.
        threshold_HC, key_threshold_HC: thresholds of queries, and of keys with memberships of their own
            (selection="causal").
        projection_HDD: W_R, orthonormal: with keys, the memberships of queries and keys are one, those of
            W_R (q + k), and logits use q and k (the ICLR and first arXiv versions). They project queries and keys onto
            the unit ball, which is LayerNorm here; W_R (q + k) is not normalised again.
        causal: false: no mask inside a cluster, for encoders; selection="topk" only.
        scale: multiplies the logits (default 1 / sqrt(D); Algorithm 1 prints 1).
        attend_self: false: a position reads itself only where it sees nothing else.
        dropout: on attention weights.
        relative: Shaw's terms by true distance; by the difference of slot ranks inside the cluster with
            `slot_distance` (how many of the keys that a query may read are later), as in the released code.
        rotate: applied to the normalised queries and keys after selection (rotary positions).
        mask_BN: true at real positions. Padding is in no cluster, is read by nobody and gets zero.
        streaming: with "topk", decide every membership from the prefix alone (evaluation only): at position i a cluster
            holds the best `window` of 0..i, and no earlier output is revised.
        backend: "auto", "reference", "torch" or "triton", see `rtx.attention.backends`; up to the
            rounding of scores the same result from each.
        check_finite: refuse inputs that hold NaN or infinity (padding may). Without it such a value may spread inside
            one tile of a fast path; by backend="reference" it never reaches an earlier position (but with
            selection="topk", which reads the whole sequence). A query or key that holds one joins no cluster by
            thresholds.

    Raises:
        ValueError: an unknown selection, missing thresholds, arguments that do not go together, or shapes that differ.
    """
    given = {"mask_BN": mask_BN, "scale": scale, "dropout": dropout, "relative": relative}
    check_attention(q_BHND, k_BHND, v_BHND, **given, finite=check_finite)
    check_positive("window", window)
    choice = {
        "selection": selection,
        "threshold_HC": threshold_HC,
        "key_threshold_HC": key_threshold_HC,
        "projection_HDD": projection_HDD,
    }
    check_routing(q_BHND, k_BHND, centroid_HCD, **choice, finite=check_finite)
    check_causal(causal, selection, relative, streaming)
    check_streaming(streaming, selection, dropout)
    options = {
        "window": window,
        "scale": logit_scale(scale, q_BHND.shape[-1]),
        "attend_self": attend_self,
        "relative": relative,
        "slot_distance": slot_distance,
    }
    packed, by = {**options, "dropout": dropout}, unpacked_by(k_BHND, projection_HDD, causal, selection, streaming)
    chosen = choose(backend, Call("routing", q_BHND, k_BHND, v_BHND, dropout, relative, True, by))
    if chosen == "reference":
        rest = {"causal": causal, "rotate": rotate, "mask_BN": mask_BN, "streaming": streaming}
        return by_reference.routing(q_BHND, k_BHND, v_BHND, centroid_HCD, **choice, **rest, **options)
    content = read_content(q_BHND, k_BHND, projection_HDD, mask_BN)
    q_BHND, k_BHND = content.logits(rotate, v_BHND.dtype)
    if streaming and selection == "topk":
        return attend_prefix_topk(
            q_BHND, k_BHND, v_BHND, *both_arrivals(centroid_HCD, content, window, mask_BN), **options
        )
    wish = Wish(Rule(selection, window, threshold_HC))
    queries = read_scores(centroid_HCD, content.routed_BHND, mask_BN, wish, chosen).members
    assert queries is not None
    keys = None
    if content.routed_keys_BHND is not None:
        wish = Wish(Rule(selection, window, key_threshold_HC))
        keys = read_scores(centroid_HCD, content.routed_keys_BHND, mask_BN, wish).members
    return attend_content(q_BHND, k_BHND, v_BHND, queries, keys, causal=causal, backend=chosen, **packed)


def both_arrivals(
    centroid_HCD: Tensor, content: Content, window: int, mask_BN: Tensor | None
) -> tuple[Arrivals, Arrivals]:
    """Return who joins on arrival in streaming top-w: of queries, and of keys (the same where they are not apart)."""
    queries = arrivals(centroid_HCD, content.routed_BHND, mask_BN, window)
    if content.routed_keys_BHND is None:
        return queries, queries
    return queries, arrivals(centroid_HCD, content.routed_keys_BHND, mask_BN, window)


def unpacked_by(
    k_BHND: Tensor | None, projection_HDD: Tensor | None, causal: bool, selection: str, streaming: bool
) -> str:
    """Return the argument for which routing is not causal attention inside clusters of its positions; "" for none."""
    if not causal:
        return "causal=False"
    if streaming and selection == "topk":
        return "streaming=True"
    return "k_BHND without projection_HDD" if k_BHND is not None and projection_HDD is None else ""


class Snapshot(NamedTuple):
    """What the first sequence of the last training batch looked like to some heads, for telemetry."""

    members: Members
    key_members: Members
    """The memberships of keys; the same as `members` but where keys have their own."""
    nearest_HN: Tensor
    query_HND: Tensor
    key_HND: Tensor
    real_N: Tensor | None
    """False at padding, which is in no cluster; None: there is none."""


class RoutingHeads(Heads):
    """H routing heads with their centroids: `routing`, plus what training gathers.

    Args:
        centroids: the centroids of these heads; their `keys` say what stands for keys (shared, separate, projected).
        selection: "causal", "topk" or "nearest".
        scale: multiplies the logits (default 1 / sqrt(D)).
        attend_self: false: a position reads itself only where it sees nothing else.
        dropout: on attention weights, in training.
        commitment: weight of the mean squared distance between what is clustered (queries; queries and keys; or
            W_R (q + k)) and its nearest centroid.
        causal: false: no mask inside a cluster, for encoders.
        slot_distance: Shaw's terms by slot rank.
        backend: as in `routing`.

    Raises:
        ValueError: an unknown selection, one that has no meaning without a causal mask, or one by thresholds that the
            centroids do not learn; numbers out of range.
    """

    def __init__(
        self,
        centroids: Centroids,
        *,
        selection: str,
        scale: float | None = None,
        attend_self: bool = True,
        dropout: float = 0.0,
        commitment: float = 0.0,
        causal: bool = True,
        slot_distance: bool = False,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        check_backend(backend)
        self.backend = backend
        check_selection(selection)
        check_causal(causal, selection)
        check_numbers(scale, dropout)
        if selection == "causal" and not centroids.thresholds:
            raise ValueError("selection=causal needs centroids with thresholds=True: others never move")
        check_number("commitment", commitment, "at least 0", lambda x: x >= 0)
        self.centroids = centroids
        self.selection, self.causal, self.dropout, self.commitment = selection, causal, dropout, commitment
        self.scale = logit_scale(scale, centroids.centroid_HCD.shape[-1])
        self.attend_self, self.slot_distance = attend_self, slot_distance
        self.snapshot: Snapshot | None = None

    def forward(
        self,
        q_BHND: Tensor,
        k_BHND: Tensor | None,
        v_BHND: Tensor,
        *,
        rotate: Rotate | None = None,
        relative: Distances | None = None,
        streaming: bool = False,
        mask_BN: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `Heads.forward`; the loss is the weighted commitment loss, zero outside training.

        `mask_BN` is true at real positions: padding is in no cluster and in no statistics, and gets zero. `streaming`
        with top-w is for evaluation: in training it is refused where there is dropout, and gathers nothing.
        """
        check_attention(q_BHND, k_BHND, v_BHND, mask_BN=mask_BN, relative=relative)
        check_centroids(self.centroids.centroid_HCD, q_BHND)
        check_causal(self.causal, self.selection, relative, streaming)
        dropout = self.dropout if self.training else 0.0
        check_streaming(streaming, self.selection, dropout)
        content = self.read(q_BHND, k_BHND, mask_BN)
        query_BHND, key_BHND = content.logits(rotate, v_BHND.dtype)
        options = {
            "window": self.centroids.window,
            "scale": self.scale,
            "attend_self": self.attend_self,
            "relative": relative,
            "slot_distance": self.slot_distance,
        }
        packed = {**options, "dropout": dropout}
        by = unpacked_by(k_BHND, self.centroids.projection_HDD, self.causal, self.selection, streaming)
        chosen = choose(self.backend, Call("routing", q_BHND, k_BHND, v_BHND, dropout, relative, True, by))
        loss = content.q_BHND.new_zeros(())
        if streaming and self.selection == "topk":
            if chosen == "reference":
                return self.by_reference(q_BHND, k_BHND, v_BHND, rotate, mask_BN, streaming, options), loss
            chosen_BHN = both_arrivals(self.centroids.centroid_HCD, content, self.centroids.window, mask_BN)
            return attend_prefix_topk(query_BHND, key_BHND, v_BHND, *chosen_BHN, **options), loss
        observed = self.training and len(q_BHND) > 0 and q_BHND.shape[2] > 0
        found, of_keys = self.choose(content, mask_BN, observed, backend=chosen)
        queries, keys = found.members, None if of_keys is None else of_keys.members
        assert queries is not None
        if observed:
            loss = self.observe(content, found, of_keys, mask_BN)
            self.snapshot = self.first_sequence(found, keys or queries, query_BHND, key_BHND, mask_BN)
        if chosen == "reference":
            return self.by_reference(q_BHND, k_BHND, v_BHND, rotate, mask_BN, streaming, options), loss
        return attend_content(
            query_BHND, key_BHND, v_BHND, queries, keys, causal=self.causal, backend=chosen, **packed
        ), loss

    def by_reference(
        self,
        q_BHND: Tensor,
        k_BHND: Tensor | None,
        v_BHND: Tensor,
        rotate: Rotate | None,
        mask_BN: Tensor | None,
        streaming: bool,
        options: dict[str, Any],
    ) -> Tensor:
        """Return the outputs by the oracle's loops, `[B, H, N, D]`."""
        store = self.centroids
        threshold_HC, key_threshold_HC = self.thresholds()
        return by_reference.routing(
            q_BHND,
            k_BHND,
            v_BHND,
            store.centroid_HCD,
            selection=self.selection,
            threshold_HC=threshold_HC,
            key_threshold_HC=key_threshold_HC,
            projection_HDD=store.projection_HDD,
            causal=self.causal,
            rotate=rotate,
            mask_BN=mask_BN,
            streaming=streaming,
            **options,
        )

    def read(self, q_BHND: Tensor, k_BHND: Tensor | None, mask_BN: Tensor | None = None) -> Content:
        """Return what a sequence offers; centroids that wait for data take it from here."""
        store = self.centroids
        if (k_BHND is None) != (store.keys == "shared"):
            given = "k_BHND=None" if k_BHND is None else "k_BHND is given"
            raise ValueError(f"{given}, but keys={store.keys!r}: it must be given but for shared keys")
        content = read_content(q_BHND, k_BHND, store.projection_HDD, mask_BN)
        if store.seed_with_next:
            store.seed_from(content.routed_BHND, content.routed_keys_BHND, mask_BN)
        return content

    def choose(
        self,
        content: Content,
        mask_BN: Tensor | None,
        observed: bool = False,
        prompt: bool = False,
        backend: str = "torch",
    ) -> tuple[Found, Found | None]:
        """Return the memberships of queries, and of keys where they have their own.

        `observed`: with what a training batch is observed by. `prompt`: as single steps leave them, with topk's scores.
        """
        store, both = self.centroids, []
        best = prompt and self.selection == "topk"
        for x_BHND, threshold_HC in zip(
            (content.routed_BHND, content.routed_keys_BHND), self.thresholds(), strict=True
        ):
            if x_BHND is None:
                both.append(None)
                continue
            margin_HC = tie_margin(store.centroid_HCD, x_BHND.dtype) if best else None
            rule = Rule(self.selection, store.window, threshold_HC, margin_HC)
            if observed:
                both.append(store.look(x_BHND.detach(), mask_BN, rule, backend))
            else:
                both.append(read_scores(store.centroid_HCD, x_BHND, mask_BN, Wish(rule, best), backend))
        return both[0], both[1]

    def thresholds(self) -> tuple[Tensor | None, Tensor | None]:
        """The thresholds `[H, C]` of queries and keys; None for selections without."""
        if self.selection != "causal":
            return None, None
        return self.centroids.threshold_HC, self.centroids.key_threshold_HC

    def observe(self, content: Content, found: Found, of_keys: Found | None, mask_BN: Tensor | None) -> Tensor:
        """Gather the statistics of a training batch; return the commitment loss."""
        assert found.nearest_BHN is not None
        self.centroids.observe(content.routed_BHND.detach(), found, mask_BN)
        loss = self.commitment_loss(content.routed_BHND, found.nearest_BHN, mask_BN)
        if of_keys is None:
            return loss
        assert content.routed_keys_BHND is not None and of_keys.nearest_BHN is not None
        self.centroids.observe_keys(content.routed_keys_BHND.detach(), of_keys, mask_BN)
        return (loss + self.commitment_loss(content.routed_keys_BHND, of_keys.nearest_BHN, mask_BN)) / 2

    def first_sequence(
        self, found: Found, keys: Members, query_BHND: Tensor, key_BHND: Tensor, mask_BN: Tensor | None
    ) -> Snapshot:
        """Return what the first sequence looked like."""
        assert found.members is not None and found.nearest_BHN is not None
        heads = query_BHND.shape[1]
        of_queries = found.members.of_first_sequence(heads)
        of_keys = of_queries if keys is found.members else keys.of_first_sequence(heads)
        nearest_HN, query_HND, key_HND = (x[0].detach().clone() for x in (found.nearest_BHN, query_BHND, key_BHND))
        real_N = None if mask_BN is None else mask_BN[0].clone()
        return Snapshot(of_queries, of_keys, nearest_HN, query_HND, key_HND, real_N)

    def commitment_loss(self, x_BHND: Tensor, nearest_BHN: Tensor, mask_BN: Tensor | None = None) -> Tensor:
        """Return the weighted mean of (x - nearest centroid on the sphere)^2 over real positions."""
        if not self.commitment:
            return x_BHND.new_zeros(())
        centroid_HCD = to_sphere(self.centroids.centroid_HCD).to(x_BHND.dtype)
        head_H1 = torch.arange(x_BHND.shape[1], device=x_BHND.device)[:, None]
        target_BHND = centroid_HCD[head_H1, nearest_BHN]
        if mask_BN is None:
            return self.commitment * F.mse_loss(x_BHND, target_BHND)
        apart_BHND = (x_BHND - target_BHND).square() * mask_BN[:, None, :, None]
        return self.commitment * apart_BHND.sum() / (mask_BN.sum() * x_BHND[0, :, 0].numel()).clamp(min=1)

    def start(self, relative: Distances | None = None) -> RoutingState:
        """See `Heads.start`.

        Raises:
            ValueError: heads without a causal mask.
        """
        check_causal(self.causal, self.selection, relative, streaming=True)
        return RoutingState(self, relative)
