"""Full attention: position i reads every j <= i, or in an encoder every j."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rtx.attention import by_flex, by_reference, reference
from rtx.attention.arguments import check_attention, check_numbers
from rtx.attention.backends import Call, check_backend, choose
from rtx.attention.heads import HeadState, PositionHeads, Rotate, RotateFrom, turn, turn_step
from rtx.attention.weights import Distances, attend, in_graph, logit_scale, without_padding

MAX_SCORES = 1 << 25
"""Attention scores whose distances are held at once."""


def full(
    q_BHND: Tensor,
    k_BHND: Tensor,
    v_BHND: Tensor,
    *,
    scale: float | None = None,
    dropout: float = 0.0,
    relative: Distances | None = None,
    causal: bool = True,
    mask_BN: Tensor | None = None,
    backend: str = "auto",
    check_finite: bool = False,
) -> Tensor:
    """Return softmax attention over the whole sequence, `[B, H, N, D]`; the cost grows with N squared, memory with N.

    Args:
        scale: multiplies the logits (default 1 / sqrt(D)).
        relative: Shaw's terms by true distance; they need causal attention.
        causal: false: every position reads every other, as in an encoder.
        mask_BN: true at real positions; the others are not read, and their output is zero. It costs memory for N^2.
        backend: "auto", "reference", "torch" or "flex", see `rtx.attention.backends`; the same result from each.
        check_finite: refuse inputs that hold NaN or infinity (padding may). Without it such a value may spread inside
            one tile of a fast path; by backend="reference" it never reaches an earlier position
            (where attention is causal).

    Raises:
        ValueError: tensors that do not go together, or `relative` without `causal`.
    """
    given = {"mask_BN": mask_BN, "scale": scale, "dropout": dropout, "relative": relative}
    check_attention(q_BHND, k_BHND, v_BHND, **given, needs_keys=True, finite=check_finite)
    if relative is not None and not causal:
        raise ValueError("causal=False: relative terms count how far back a key stands; they need causal=True")
    chosen = choose(backend, Call("full", q_BHND, k_BHND, v_BHND, dropout, relative))
    if chosen == "reference":
        every = range(q_BHND.shape[2])
        sets = reference.full_sets if causal else lambda i: [list(every)]
        options = {"scale": scale, "relative": relative, "mask_BN": mask_BN}
        return by_reference.read_heads(q_BHND, k_BHND, v_BHND, lambda b, h: sets, **options)
    if chosen == "flex":
        return by_flex.full(q_BHND, k_BHND, v_BHND, causal=causal, scale=scale, mask_BN=mask_BN)
    B, H, N, D = q_BHND.shape
    scale = logit_scale(scale, D)
    if relative is None and mask_BN is None and causal:
        return attend(q_BHND, k_BHND, v_BHND, scale, dropout=dropout)
    q_BHND, k_BHND, v_BHND = (without_padding(x, mask_BN) for x in (q_BHND, k_BHND, v_BHND))
    position_N = torch.arange(N, device=q_BHND.device)
    block = max(1, min(N, MAX_SCORES // max(1, B * H * N)))
    outputs = []
    for start in range(0, N, block):
        stop = min(start + block, N)
        seen = stop if causal else N
        distance_QK = position_N[start:stop, None] - position_N[None, :seen]
        mask_QK = distance_QK >= 0 if causal else torch.ones_like(distance_QK, dtype=torch.bool)
        if mask_BN is not None:  # padding reads itself, so that its softmax is defined, and is zeroed below
            mask_QK = (mask_QK & mask_BN[:, None, None, :seen]) | (distance_QK == 0)
        outputs.append(
            attend(
                q_BHND[:, :, start:stop],
                k_BHND[:, :, :seen],
                v_BHND[:, :, :seen],
                scale,
                mask_QK=mask_QK,
                dropout=dropout,
                relative=relative,
                distance_QK=distance_QK,
            )
        )
    if not outputs:
        return in_graph(torch.zeros_like(v_BHND), q_BHND, k_BHND, v_BHND, *(relative or ()))
    return without_padding(torch.cat(outputs, dim=2), mask_BN)


def check_streams(causal: bool) -> None:
    """Refuse streams through heads that read later positions."""
    if not causal:
        raise ValueError("causal=False: a stream has no later positions to read")


class FullHeads(PositionHeads):
    """Heads of `full`; `scale`, `dropout` (in training), `causal` and `backend` as there."""

    def __init__(
        self, *, scale: float | None = None, dropout: float = 0.0, causal: bool = True, backend: str = "auto"
    ) -> None:
        super().__init__()
        check_numbers(scale, dropout)
        check_backend(backend)
        self.scale, self.dropout, self.causal, self.backend = scale, dropout, causal, backend

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
        """See `Heads.forward`."""
        check_streams(self.causal or not streaming)
        return super().forward(q_BHND, k_BHND, v_BHND, rotate=rotate, relative=relative, mask_BN=mask_BN)

    def read(self, q_BHND: Tensor, k_BHND: Tensor, v_BHND: Tensor, **options: Any) -> Tensor:
        """See `PositionHeads`."""
        return full(q_BHND, k_BHND, v_BHND, causal=self.causal, **options)

    def start(self, relative: Distances | None = None) -> FullState:
        """See `Heads.start`.

        Raises:
            ValueError: heads without a causal mask.
        """
        check_streams(self.causal)
        return FullState(self.scale, relative)


class FullState(HeadState):
    """What a streaming full head keeps: every key and value so far (it grows with the position)."""

    def __init__(self, scale: float | None = None, relative: Distances | None = None) -> None:
        self.scale, self.relative = scale, relative
        self.keys_BHND: Tensor | None = None
        self.values_BHND: Tensor | None = None

    def fill(self, q_BHND: Tensor, k_BHND: Tensor | None, v_BHND: Tensor, rotate: RotateFrom | None = None) -> None:
        """See `HeadState`."""
        assert k_BHND is not None
        self.keys_BHND = turn(k_BHND, rotate)
        self.values_BHND = v_BHND

    def step(
        self, q_BHD: Tensor, k_BHD: Tensor | None, v_BHD: Tensor, position: int, rotate: Rotate | None = None
    ) -> Tensor:
        """Take in the next position of each stream and return its output `[B, H, D]`."""
        assert k_BHD is not None
        q_BHD, k_BHD = turn_step(q_BHD, rotate), turn_step(k_BHD, rotate)
        k_BH1D, v_BH1D = k_BHD[:, :, None], v_BHD[:, :, None]
        if self.keys_BHND is None or self.values_BHND is None:
            self.keys_BHND, self.values_BHND = k_BH1D, v_BH1D
        else:
            self.keys_BHND = torch.cat([self.keys_BHND, k_BH1D], dim=2)
            self.values_BHND = torch.cat([self.values_BHND, v_BH1D], dim=2)
        distance_1K = position - torch.arange(position + 1, device=q_BHD.device)[None]
        out_BH1D = attend(
            q_BHD[:, :, None],
            self.keys_BHND,
            self.values_BHND,
            logit_scale(self.scale, q_BHD.shape[-1]),
            mask_QK=distance_1K >= 0,
            relative=self.relative,
            distance_QK=distance_1K,
        )
        return out_BH1D[:, :, 0]
