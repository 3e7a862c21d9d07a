"""Random heads: the control of Table 1, routing top-w with memberships that read nothing of the sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from rtx.attention import by_reference
from rtx.attention.arguments import check_attention, check_numbers, check_positive, check_seed
from rtx.attention.backends import Call, attend_packed, check_backend, choose
from rtx.attention.content import normalise, without_padding
from rtx.attention.heads import Heads, HeadState, Rotate, RotateFrom, turn, turn_step
from rtx.attention.lists import Members
from rtx.attention.selection import random_positions
from rtx.attention.state import ClusterState
from rtx.attention.weights import Distances, logit_scale


def random(
    q_BHND: Tensor,
    k_BHND: Tensor | None,
    v_BHND: Tensor,
    *,
    clusters: int,
    window: int,
    seed: int,
    scale: float | None = None,
    attend_self: bool = True,
    dropout: float = 0.0,
    relative: Distances | None = None,
    slot_distance: bool = False,
    mask_BN: Tensor | None = None,
    backend: str = "auto",
    check_finite: bool = False,
) -> Tensor:
    """Return attention inside clusters of `window` random positions each, `[B, H, N, D]`; strictly causal.

    Memberships are a function of (seed, head, `clusters`, `window`, N) alone. Queries and keys are normalised as in
    `rtx.attention.routing`, and `scale`, `attend_self`, `dropout`, `relative`, `slot_distance` and `mask_BN` are as
    there. Without keys the queries stand for them.

    Args:
        backend: "auto", "reference", "torch" or "triton", see `rtx.attention.backends`; the same result from each.
        check_finite: refuse inputs that hold NaN or infinity (padding may). Without it such a value may spread inside
            one tile of a fast path; by backend="reference" it never reaches an earlier position.

    Raises:
        ValueError: fewer than one cluster or window, or shapes that differ.
    """
    given = {"mask_BN": mask_BN, "scale": scale, "dropout": dropout, "relative": relative}
    check_attention(q_BHND, k_BHND, v_BHND, **given, finite=check_finite)
    options = {"scale": scale, "attend_self": attend_self, "dropout": dropout}
    heads = RandomHeads(
        q_BHND.shape[1],
        clusters,
        window=window,
        length=max(1, q_BHND.shape[2]),
        seed=seed,
        slot_distance=slot_distance,
        backend=backend,
        **options,
    ).to(q_BHND.device)
    return heads(q_BHND, k_BHND, v_BHND, relative=relative, mask_BN=mask_BN)[0]


class RandomHeads(Heads):
    """H heads whose clusters hold W random positions of N each, fixed for the run by (seed, layer, head, C, W, N).

    A shorter sequence reads the memberships of its prefix; positions beyond N repeat them, and a member then reads the
    last W members of its cluster. The same for training, evaluation and streaming: the pattern is strictly causal.

    Args:
        heads, clusters, window, length: H, C, W and N.
        seed: a number made of the run's seed and the layer.
        scale, attend_self, dropout, slot_distance, backend: as in `RoutingHeads`.

    Where keys are given they are read, normalised as queries are; else the queries stand for them.
    """

    position_HCW: Tensor
    """The members of each cluster, ascending; further positions repeat them with the period N."""

    def __init__(
        self,
        heads: int,
        clusters: int,
        *,
        window: int,
        length: int,
        seed: int,
        scale: float | None = None,
        attend_self: bool = True,
        dropout: float = 0.0,
        slot_distance: bool = False,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        check_backend(backend)
        self.backend = backend
        check_positive("heads", heads, least=0)  # tensors without heads are a shape like others
        check_positive("clusters", clusters)
        check_positive("window", window)
        check_positive("length", length)
        check_seed(seed)
        check_numbers(scale, dropout)
        self.window, self.scale, self.attend_self, self.dropout = window, scale, attend_self, dropout
        self.slot_distance, self.length = slot_distance, length
        position_HCW = random_positions(heads, clusters, length, window, seed)
        self.register_buffer("position_HCW", position_HCW, persistent=False)

    def members(self, batch: int, length: int, mask_BN: Tensor | None = None) -> Members:
        """Return the lists of sequences of some length; padding belongs nowhere."""
        H, device = len(self.position_HCW), self.position_HCW.device
        turn_T1 = torch.arange(-(-length // self.length), device=device)[:, None]
        position_HCP = (turn_T1 * self.length + self.position_HCW[:, :, None]).flatten(2)
        real_BHCP = (position_HCP < length).expand(batch, *position_HCP.shape)
        if mask_BN is not None:
            real_BHCP = real_BHCP & mask_BN[:, position_HCP.clamp(max=length - 1)]
        first_BH = torch.arange(batch * H, device=device).view(batch, H) * length
        row_BHCP = first_BH[..., None, None] + position_HCP
        return Members(row_BHCP[real_BHCP], real_BHCP.sum(-1).flatten(), length, batch * H * length)

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
        """See `Heads.forward`; `mask_BN` is true at real positions, padding is not read and gets zero."""
        check_attention(q_BHND, k_BHND, v_BHND, mask_BN=mask_BN, relative=relative)
        if q_BHND.shape[1] != len(self.position_HCW):
            raise ValueError(
                f"q_BHND has {q_BHND.shape[1]} heads: must have {len(self.position_HCW)}, as the memberships"
            )
        options = {
            "scale": logit_scale(self.scale, q_BHND.shape[-1]),
            "window": self.window,
            "attend_self": self.attend_self,
            "relative": relative,
            "slot_distance": self.slot_distance,
        }
        dropout = self.dropout if self.training else 0.0
        packed = {**options, "dropout": dropout}
        chosen = choose(self.backend, Call("random", q_BHND, k_BHND, v_BHND, dropout, relative, in_clusters=True))
        loss = q_BHND.new_zeros((), dtype=torch.promote_types(q_BHND.dtype, torch.float32))
        if chosen == "reference":
            member_HCN = self.members(1, q_BHND.shape[2]).mask().unflatten(0, self.position_HCW.shape[:2])
            given = {"rotate": rotate, "mask_BN": mask_BN}
            return by_reference.random(q_BHND, k_BHND, v_BHND, member_HCN, **given, **options), loss
        query_BHND = key_BHND = self.logits(without_padding(q_BHND, mask_BN), rotate, v_BHND)
        if k_BHND is not None:
            key_BHND = self.logits(without_padding(k_BHND, mask_BN), rotate, v_BHND)
        members = self.members(len(q_BHND), q_BHND.shape[2], mask_BN)
        return attend_packed(chosen)(query_BHND, key_BHND, v_BHND, members, **packed), loss

    def logits(self, x_BHND: Tensor, rotate: Rotate | None, v_BHND: Tensor) -> Tensor:
        """Return queries or keys as the logits use them."""
        return turn(normalise(x_BHND), rotate).to(v_BHND.dtype)

    def start(self, relative: Distances | None = None) -> RandomState:
        """See `Heads.start`."""
        return RandomState(self, relative)


class RandomState(HeadState):
    """Streaming random heads: the last W members of each cluster."""

    def __init__(self, heads: RandomHeads, relative: Distances | None) -> None:
        self.heads = heads
        self.clusters = ClusterState(heads.window, heads.scale, heads.attend_self, relative, heads.slot_distance)
        position_M, self.order_M = heads.position_HCW.flatten().sort()
        every_N = torch.arange(heads.length + 1, device=position_M.device)
        self.first = torch.searchsorted(position_M, every_N).tolist()
        """Where the clusters of each position begin in `order_M`."""

    def joins(self, position: int) -> Tensor:
        """Return the clusters that have a position, `[H, C]`."""
        H, C, W = self.heads.position_HCW.shape
        position %= self.heads.length
        joins_L = torch.zeros(H * C, dtype=torch.bool, device=self.order_M.device)
        joins_L[self.order_M[self.first[position] : self.first[position + 1]] // W] = True
        return joins_L.view(H, C)

    def fill(self, q_BHND: Tensor, k_BHND: Tensor | None, v_BHND: Tensor, rotate: RotateFrom | None = None) -> None:
        """See `HeadState`."""
        key_BHND = self.heads.logits(q_BHND if k_BHND is None else k_BHND, rotate, v_BHND)
        self.clusters.fill(key_BHND, v_BHND, self.heads.members(len(v_BHND), v_BHND.shape[2]))

    def step(
        self, q_BHD: Tensor, k_BHD: Tensor | None, v_BHD: Tensor, position: int, rotate: Rotate | None = None
    ) -> Tensor:
        """Take in the next position of each stream and return its output `[B, H, D]`."""
        query_BHD = turn_step(normalise(q_BHD), rotate).to(v_BHD.dtype)
        key_BHD = query_BHD if k_BHD is None else turn_step(normalise(k_BHD), rotate).to(v_BHD.dtype)
        joins_BHC = self.joins(position).expand(q_BHD.shape[0], -1, -1)
        return self.clusters.step(query_BHD, key_BHD, v_BHD, joins_BHC, position)
