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
from rtx.attention.content import Content, attend_content, members, normalise, read_content
from rtx.attention.heads import Heads, HeadState, Rotate, RotateFrom
from rtx.attention.kmeans import Centroids, to_sphere
from rtx.attention.prefix import attend_prefix_topk
from rtx.attention.selection import BestOfPrefix, nearest_members
from rtx.attention.state import ClusterState
from rtx.attention.weights import Distances, logit_scale

__all__ = ["RoutingHeads", "RoutingState", "Snapshot", "normalise", "routing"]


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
    content = read_content(q_BHND, k_BHND, centroid_HCD, projection_HDD, mask_BN)
    q_BHND, k_BHND = content.logits(rotate, v_BHND.dtype)
    if streaming and selection == "topk":
        return attend_prefix_topk(q_BHND, k_BHND, v_BHND, content.score_BHCN, content.key_score_BHCN, **options)
    member_BHCN = members(content.score_BHCN, window, selection, threshold_HC, mask_BN)
    key_member_BHCN = None
    if content.key_score_BHCN is not None:
        key_member_BHCN = members(content.key_score_BHCN, window, selection, key_threshold_HC, mask_BN)
    return attend_content(q_BHND, k_BHND, v_BHND, member_BHCN, key_member_BHCN, causal=causal, backend=chosen, **packed)


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

    member_HCN: Tensor
    key_member_HCN: Tensor
    """The memberships of keys; the same as `member_HCN` but where keys have their own."""
    nearest_HN: Tensor
    query_HND: Tensor
    key_HND: Tensor


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
            scores = content.score_BHCN, content.key_score_BHCN
            return attend_prefix_topk(query_BHND, key_BHND, v_BHND, *scores, **options), loss
        member_BHCN, key_member_BHCN = self.members(content, mask_BN)
        if self.training and len(q_BHND) and q_BHND.shape[2]:
            nearest_BHN, loss = self.observe(content, mask_BN)
            key_member_HCN = (member_BHCN if key_member_BHCN is None else key_member_BHCN)[0]
            seen = member_BHCN[0], key_member_HCN, nearest_BHN[0], query_BHND[0].detach(), key_BHND[0].detach()
            self.snapshot = Snapshot(*(x.clone() for x in seen))
        if chosen == "reference":
            return self.by_reference(q_BHND, k_BHND, v_BHND, rotate, mask_BN, streaming, options), loss
        return attend_content(
            query_BHND, key_BHND, v_BHND, member_BHCN, key_member_BHCN, causal=self.causal, backend=chosen, **packed
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
        content = read_content(q_BHND, k_BHND, store.centroid_HCD, store.projection_HDD, mask_BN)
        if not store.seed_with_next:
            return content
        store.seed_from(content.routed_BHND, content.k_BHND if store.keys == "separate" else None, mask_BN)
        return read_content(q_BHND, k_BHND, store.centroid_HCD, store.projection_HDD, mask_BN)

    def members(self, content: Content, mask_BN: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the memberships of queries, and of keys where they have their own."""
        threshold_HC, key_threshold_HC = self.thresholds()
        window = self.centroids.window
        member_BHCN = members(content.score_BHCN, window, self.selection, threshold_HC, mask_BN)
        if content.key_score_BHCN is None:
            return member_BHCN, None
        return member_BHCN, members(content.key_score_BHCN, window, self.selection, key_threshold_HC, mask_BN)

    def thresholds(self) -> tuple[Tensor | None, Tensor | None]:
        """The thresholds `[H, C]` of queries and keys; None for selections without."""
        if self.selection != "causal":
            return None, None
        return self.centroids.threshold_HC, self.centroids.key_threshold_HC

    def observe(self, content: Content, mask_BN: Tensor | None) -> tuple[Tensor, Tensor]:
        """Gather the statistics of a training batch; return the queries' nearest centroids and the commitment loss."""
        nearest_BHN = self.centroids.observe(content.routed_BHND.detach(), content.score_BHCN, mask_BN)
        loss = self.commitment_loss(content.routed_BHND, nearest_BHN, mask_BN)
        if content.key_score_BHCN is not None:
            assert content.k_BHND is not None
            of_keys_BHN = self.centroids.observe_keys(content.k_BHND.detach(), content.key_score_BHCN, mask_BN)
            loss = (loss + self.commitment_loss(content.k_BHND, of_keys_BHN, mask_BN)) / 2
        return nearest_BHN, loss

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


class RoutingState(HeadState):
    """Streaming routing heads: for each cluster its last W members (causal, nearest) or best W of the prefix (topk).

    Members are keys; where these have memberships of their own, topk also keeps the scores of the prefix's best W
    queries, which say whether the next query joins.
    """

    def __init__(self, heads: RoutingHeads, relative: Distances | None) -> None:
        self.heads = heads
        window = heads.centroids.window
        self.clusters = ClusterState(window, heads.scale, heads.attend_self, relative, heads.slot_distance)
        self.best: dict[str, BestOfPrefix] = {}

    def fill(self, q_BHND: Tensor, k_BHND: Tensor | None, v_BHND: Tensor, rotate: RotateFrom | None = None) -> None:
        """See `HeadState`."""
        content = self.heads.read(q_BHND, k_BHND)
        member_BHCN, key_member_BHCN = self.heads.members(content, None)
        scores = {"queries": (content.score_BHCN, member_BHCN)}
        if content.key_score_BHCN is not None and key_member_BHCN is not None:
            scores["keys"] = content.key_score_BHCN, key_member_BHCN
        for what, (score_BHCN, of_BHCN) in scores.items() if self.heads.selection == "topk" else ():
            self.best[what] = BestOfPrefix(tuple(score_BHCN.shape[:3]), self.heads.centroids.window, score_BHCN)
            self.best[what].fill(score_BHCN, of_BHCN)
        key_BHND = content.logits(rotate, v_BHND.dtype)[1]
        self.clusters.fill(key_BHND, v_BHND, member_BHCN if key_member_BHCN is None else key_member_BHCN)

    def step(
        self, q_BHD: Tensor, k_BHD: Tensor | None, v_BHD: Tensor, position: int, rotate: Rotate | None = None
    ) -> Tensor:
        """Take in the next position of each stream and return its output `[B, H, D]`."""
        content = self.heads.read(q_BHD[:, :, None], None if k_BHD is None else k_BHD[:, :, None])
        query_BH1D, key_BH1D = content.logits(rotate, v_BHD.dtype)
        threshold_HC, key_threshold_HC = self.heads.thresholds()
        joins_BHC, slot_BHC = self.join("queries", content.score_BHCN[..., 0], threshold_HC, position)
        query_joins_BHC = None
        if content.key_score_BHCN is not None:
            query_joins_BHC = joins_BHC
            joins_BHC, slot_BHC = self.join("keys", content.key_score_BHCN[..., 0], key_threshold_HC, position)
        if slot_BHC is None:
            slot_BHC = self.clusters.oldest_slot(joins_BHC)
        query_BHD, key_BHD = query_BH1D[:, :, 0], key_BH1D[:, :, 0]
        return self.clusters.step(query_BHD, key_BHD, v_BHD, joins_BHC, slot_BHC, position, query_joins_BHC)

    def join(
        self, what: str, score_BHC: Tensor, threshold_HC: Tensor | None, position: int
    ) -> tuple[Tensor, Tensor | None]:
        """Return which clusters a position joins, and with topk the slot it takes there."""
        if threshold_HC is not None:
            return score_BHC >= threshold_HC, None
        if self.heads.selection == "nearest":
            return nearest_members(score_BHC[..., None])[..., 0], None
        if what not in self.best:
            self.best[what] = BestOfPrefix(tuple(score_BHC.shape), self.heads.centroids.window, score_BHC)
        joins_BHC, slot_BHC, _ = self.best[what].offer(score_BHC, position)
        return joins_BHC, slot_BHC
