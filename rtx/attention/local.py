"""Local attention: position i reads i - W < j <= i, exactly W keys with its own."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rtx.attention import by_flex, by_reference, reference
from rtx.attention.arguments import check_attention, check_numbers, check_positive
from rtx.attention.backends import Call, check_backend, choose
from rtx.attention.heads import HeadState, PositionHeads, Rotate, RotateFrom, last_slots, turn, turn_step
from rtx.attention.shaw import Band
from rtx.attention.weights import Distances, attend, in_graph, logit_scale, without_padding


def local(
    q_BHND: Tensor,
    k_BHND: Tensor,
    v_BHND: Tensor,
    *,
    window: int,
    scale: float | None = None,
    dropout: float = 0.0,
    relative: Distances | None = None,
    mask_BN: Tensor | None = None,
    backend: str = "auto",
    check_finite: bool = False,
) -> Tensor:
    """Return causal attention over the last `window` positions, `[B, H, N, D]`; any N, cost and memory linear in N.

    The sequence is cut into blocks of `window` positions. The first block reads itself; every other reads the block
    before it and itself through a banded mask.

    Args:
        window: W; more than N is N.
        scale: multiplies the logits (default 1 / sqrt(D)).
        relative: Shaw's terms, by true distance.
        mask_BN: true at real positions; the others are not read, and their output is zero.
        backend: "auto", "reference", "torch" or "flex", see `rtx.attention.backends`; the same result from each.
        check_finite: refuse inputs that hold NaN or infinity (padding may). Without it such a value may spread inside
            one tile of a fast path; by backend="reference" it never reaches an earlier position.

    Raises:
        ValueError: tensors that do not go together, or a window below 1.
    """
    given = {"mask_BN": mask_BN, "scale": scale, "dropout": dropout, "relative": relative}
    check_attention(q_BHND, k_BHND, v_BHND, **given, needs_keys=True, finite=check_finite)
    check_positive("window", window)
    chosen = choose(backend, Call("local", q_BHND, k_BHND, v_BHND, dropout, relative))
    if chosen == "reference":
        options = {"scale": scale, "relative": relative, "mask_BN": mask_BN}
        sets = functools.partial(reference.local_sets, window=window)
        return by_reference.read_heads(q_BHND, k_BHND, v_BHND, lambda b, h: sets, **options)
    if chosen == "flex":
        return by_flex.local(q_BHND, k_BHND, v_BHND, window=window, scale=scale, mask_BN=mask_BN)
    B, H, N, _ = q_BHND.shape
    if not q_BHND.numel():
        return in_graph(torch.zeros_like(v_BHND), q_BHND, k_BHND, v_BHND, *(relative or ()))
    q_BHND, k_BHND, v_BHND = (without_padding(x, mask_BN) for x in (q_BHND, k_BHND, v_BHND))
    scale = logit_scale(scale, q_BHND.shape[-1])
    block = min(window, N)
    padding = -N % block
    q_XGQD, k_XGQD, v_XGQD = (
        (F.pad(x, (0, 0, 0, padding)) if padding else x).flatten(0, 1).unflatten(1, (-1, block))
        for x in (q_BHND, k_BHND, v_BHND)
    )
    slot_Q, slot_K = torch.arange(block, device=q_BHND.device), torch.arange(2 * block, device=q_BHND.device)
    distance_QK = slot_Q[:, None] + block - slot_K[None]
    band_QK = (distance_QK >= 0) & (distance_QK < window)
    own_QQ = distance_QK[:, block:]
    read = functools.partial(attend, scale=scale, dropout=dropout, relative=relative)
    first_mask = None if relative is None else own_QQ >= 0
    if mask_BN is not None:
        real_XQ = F.pad(mask_BN, (0, padding)).unflatten(1, (-1, block)).repeat_interleave(H, 0)
        first_mask = readable(own_QQ >= 0, real_XQ[:, :1], own_QQ)
        band_QK = readable(band_QK, torch.cat([real_XQ[:, :-1], real_XQ[:, 1:]], dim=2), distance_QK)
    if window >= N:  # one block; some GPU kernels refuse to attend in none at all
        out_XGQD = read(q_XGQD, k_XGQD, v_XGQD, mask_QK=first_mask, distance_QK=own_QQ)
    else:
        first_q, other_q = q_XGQD.split([1, q_XGQD.shape[1] - 1], dim=1)
        (first_k, other_k), (first_v, other_v) = WithPrevious.apply(k_XGQD), WithPrevious.apply(v_XGQD)
        first = read(first_q, first_k, first_v, mask_QK=first_mask, distance_QK=own_QQ)
        others = read(other_q, other_k, other_v, mask_QK=band_QK, distance_QK=Band(window))
        out_XGQD = torch.cat([first, others], dim=1)
    return without_padding(out_XGQD.flatten(1, 2)[:, :N].unflatten(0, (B, H)), mask_BN)


def readable(mask_QK: Tensor, real_XGK: Tensor, distance_QK: Tensor) -> Tensor:
    """Return the mask `[X, G, Q, K]` without padded keys; padding reads itself, so that its softmax is defined."""
    return (mask_QK & real_XGK[:, :, None]) | (distance_QK == 0)


class WithPrevious(torch.autograd.Function):
    """The first block alone, and every other block behind the one before it.

    Written out because autograd would add up four zero-filled copies of the whole to make the gradient.
    """

    @staticmethod
    def forward(ctx: Any, x_XGQD: Tensor) -> tuple[Tensor, Tensor]:
        """Return `[X, 1, Q, D]` and `[X, G - 1, 2 Q, D]`."""
        return x_XGQD[:, :1].clone(), torch.cat([x_XGQD[:, :-1], x_XGQD[:, 1:]], dim=2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """Add up what each block received as the first, as a previous and as an own block."""
        first_X1QD, others_XGKD = gradients
        previous_XGQD, own_XGQD = others_XGKD.chunk(2, dim=2)
        gradient_XGQD = torch.cat([first_X1QD, own_XGQD], dim=1)
        gradient_XGQD[:, :-1] += previous_XGQD
        return gradient_XGQD


class LocalHeads(PositionHeads):
    """Heads of `local`; `window`, `scale`, `dropout` (in training) and `backend` as there."""

    def __init__(self, *, window: int, scale: float | None = None, dropout: float = 0.0, backend: str = "auto") -> None:
        super().__init__()
        check_positive("window", window)
        check_numbers(scale, dropout)
        check_backend(backend)
        self.window, self.scale, self.dropout, self.backend = window, scale, dropout, backend

    def read(self, q_BHND: Tensor, k_BHND: Tensor, v_BHND: Tensor, **options: Any) -> Tensor:
        """See `PositionHeads`."""
        return local(q_BHND, k_BHND, v_BHND, window=self.window, **options)

    def start(self, relative: Distances | None = None) -> LocalState:
        """See `Heads.start`."""
        return LocalState(self.window, self.scale, relative)


class LocalState(HeadState):
    """What a streaming local head keeps: the last `window` keys and values."""

    def __init__(self, window: int, scale: float | None = None, relative: Distances | None = None) -> None:
        self.window, self.scale, self.relative = window, scale, relative
        self.keys_BHWD: Tensor | None = None
        self.values_BHWD: Tensor | None = None

    def fill(self, q_BHND: Tensor, k_BHND: Tensor | None, v_BHND: Tensor, rotate: RotateFrom | None = None) -> None:
        """See `HeadState`."""
        assert k_BHND is not None
        self.keys_BHWD = last_slots(turn(k_BHND, rotate), self.window)
        self.values_BHWD = last_slots(v_BHND, self.window)

    def step(
        self, q_BHD: Tensor, k_BHD: Tensor | None, v_BHD: Tensor, position: int, rotate: Rotate | None = None
    ) -> Tensor:
        """Take in the next position of each stream and return its output `[B, H, D]`."""
        assert k_BHD is not None
        q_BHD, k_BHD = turn_step(q_BHD, rotate), turn_step(k_BHD, rotate)
        if self.keys_BHWD is None or self.values_BHWD is None:
            shape = (*k_BHD.shape[:2], self.window, k_BHD.shape[-1])
            self.keys_BHWD, self.values_BHWD = k_BHD.new_zeros(shape), v_BHD.new_zeros(shape)
        self.keys_BHWD[:, :, position % self.window] = k_BHD
        self.values_BHWD[:, :, position % self.window] = v_BHD
        seen = min(position + 1, self.window)
        distance_1K = None
        if self.relative is not None:
            # Slot s holds the latest position that leaves the remainder s.
            distance_1K = ((position - torch.arange(seen, device=q_BHD.device)) % self.window)[None]
        out_BH1D = attend(
            q_BHD[:, :, None],
            self.keys_BHWD[:, :, :seen],
            self.values_BHWD[:, :, :seen],
            logit_scale(self.scale, q_BHD.shape[-1]),
            mask_QK=torch.ones(1, seen, dtype=torch.bool, device=q_BHD.device),
            relative=self.relative,
            distance_QK=distance_1K,
        )
        return out_BH1D[:, :, 0]
