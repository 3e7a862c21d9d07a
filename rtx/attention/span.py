"""Adaptive span (Sukhbaatar et al. 2019): local attention in which every head learns how far back it reads.

A key at distance x = i - j >= 0 counts with the weight m_z(x) = clamp((R + z - x) / R, 0, 1) beside its softmax term:
fully up to the span z, fading out over the ramp of R positions behind it, never at `window` or farther.

Shapes: B sequences, H heads, N positions, D head size, G blocks, Q query and K key slots of a block, M distances.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rtx.attention import by_reference
from rtx.attention.arguments import check_attention, check_finite_values, check_floats, check_numbers, check_positive
from rtx.attention.backends import Call, check_backend, choose
from rtx.attention.heads import HeadState, PositionHeads, Rotate, RotateFrom, last_slots, turn, turn_step
from rtx.attention.weights import Distances, in_graph, logit_scale, without_padding

BLOCK = 512
"""Most queries of a block: a longer reach takes several blocks of keys, so that few keys beyond it are computed."""


def adaptive_span(
    q_BHND: Tensor,
    k_BHND: Tensor,
    v_BHND: Tensor,
    span_H: Tensor,
    *,
    window: int,
    ramp: int = 32,
    scale: float | None = None,
    dropout: float = 0.0,
    relative: Distances | None = None,
    mask_BN: Tensor | None = None,
    backend: str = "auto",
    check_finite: bool = False,
) -> Tensor:
    """Return causal attention with weights m_z(i - j) exp(s_ij) / sum_j m_z(i - j) exp(s_ij), `[B, H, N, D]`.

    Args:
        q_BHND, k_BHND, v_BHND: queries, keys and values of one type.
        span_H: the span z of each head in positions, held in [0, window]; it gets a gradient.
        window: keys that no span goes beyond, the own position included.
        ramp: R, positions over which the weight falls from 1 to 0.
        scale: multiplies the logits (default 1 / sqrt(D)).
        dropout: on attention weights.
        relative: Shaw's terms by true distance.
        mask_BN: true at real positions; padding is not read, and its own output is zero.
        backend: "auto", "reference" or "torch", see `rtx.attention.backends`; the same result from each.
        check_finite: refuse inputs that hold NaN or infinity (padding may). Without it such a value may spread inside
            one tile of a fast path; by backend="reference" it never reaches an earlier position.

    Strictly causal for any N; cost and memory grow with N times what the longest span reaches, min(window, z + R). The
    longest span is read back from the device once a call.

    Raises:
        ValueError: window or ramp below 1, spans that are not one for each head, or keys, values or a mask that do not
            fit the queries.
    """
    given = {"mask_BN": mask_BN, "scale": scale, "dropout": dropout, "relative": relative}
    check_attention(q_BHND, k_BHND, v_BHND, **given, needs_keys=True, finite=check_finite)
    check_positive("window", window)
    check_positive("ramp", ramp)
    check_floats("span_H", span_H, (q_BHND.shape[1],), q_BHND)
    if check_finite:
        check_finite_values(span_H=span_H)
    if choose(backend, Call("adaptive_span", q_BHND, k_BHND, v_BHND, dropout, relative)) == "reference":
        options = {"scale": scale, "relative": relative, "mask_BN": mask_BN, "window": window, "ramp": ramp}
        return by_reference.adaptive_span(q_BHND, k_BHND, v_BHND, hold(span_H, window), **options)
    span_H = span_H.to(torch.promote_types(span_H.dtype, q_BHND.dtype))
    scale = logit_scale(scale, q_BHND.shape[-1])
    B, H, N = q_BHND.shape[:3]
    if not B * H * N:
        return in_graph(torch.zeros_like(v_BHND), q_BHND, k_BHND, v_BHND, span_H, *(relative or ()))
    reach = min(span_reach(span_H, window, ramp), N)
    block = min(reach, BLOCK)
    before = -(-(reach - 1) // block)
    real_BN = torch.ones(B, N, dtype=torch.bool, device=q_BHND.device) if mask_BN is None else mask_BN
    q_BHND, k_BHND, v_BHND = (without_padding(x, mask_BN) for x in (q_BHND, k_BHND, v_BHND))
    q_BGHQD, k_BGHQD, v_BGHQD = (cut(x, block) for x in (q_BHND, k_BHND, v_BHND))
    slot_Q = torch.arange(block, device=q_BHND.device)
    slot_K = torch.arange((before + 1) * block, device=q_BHND.device)
    distance_QK = slot_Q[:, None] + before * block - slot_K[None]
    bias_1HQK = log_weights(span_H, distance_QK, window, ramp)
    real_BGQ = F.pad(real_BN, (0, -N % block)).unflatten(1, (-1, block))
    options = {"scale": scale, "dropout": dropout, "relative": None if relative is None else shorten(relative, reach)}

    def read(first: int, last: int, back: int) -> Tensor:
        """Read blocks first to last - 1 with `back` blocks before each: every key that their queries reach."""
        keep = (before - back) * block
        bias = bias_1HQK[..., keep:]
        if mask_BN is not None:
            seen_BG1QK = with_blocks_before(real_BGQ[:, first - back : last], back, 2)[:, :, None, None]
            bias = bias.masked_fill(~(seen_BG1QK | (distance_QK[:, keep:] == 0)), float("-inf")).flatten(0, 1)
        return soft_attend(
            q_BGHQD[:, first:last].flatten(0, 1),
            with_blocks_before(k_BGHQD[:, first - back : last], back, 3).flatten(0, 1),
            with_blocks_before(v_BGHQD[:, first - back : last], back, 3).flatten(0, 1),
            bias,
            distance_QK[:, keep:],
            **options,
        ).unflatten(0, (B, last - first))

    blocks = q_BGHQD.shape[1]
    # The first blocks have fewer blocks before them than the others, each its own number.
    parts = [read(g, g + 1, g) for g in range(min(before, blocks))]
    if blocks > before:
        parts.append(read(before, blocks, before))
    out_BHND = torch.cat(parts, dim=1).transpose(1, 2).flatten(2, 3)[:, :, :N]
    return without_padding(out_BHND, mask_BN)


def cut(x_BHND: Tensor, block: int) -> Tensor:
    """Return `[B, G, H, block, D]`, padded with zeros behind the end."""
    return F.pad(x_BHND, (0, 0, 0, -x_BHND.shape[2] % block)).unflatten(2, (-1, block)).transpose(1, 2)


def with_blocks_before(x_BG: Tensor, back: int, slots: int) -> Tensor:
    """Return every block but the first `back` behind the `back` blocks before it, joined along dimension `slots`."""
    count = x_BG.shape[1] - back
    return torch.cat([x_BG[:, first : first + count] for first in range(back + 1)], dim=slots)


@torch.no_grad()
def span_reach(span_H: Tensor, window: int, ramp: int) -> int:
    """Return how many keys, its own included, the head with the longest span reads: behind them all weights are 0."""
    longest = float(span_H.max()) if len(span_H) else 0.0
    reach = ramp + max(longest, 0.0)
    return math.ceil(reach) if reach < window else window


def shorten(relative: Distances, reach: int) -> Distances:
    """Return the rows of Shaw's tables that distances below `reach` use."""
    return Distances(relative.keys_MD[:reach], relative.values_MD[:reach])


def log_weights(span_H: Tensor, distance_QK: Tensor, window: int, ramp: int) -> Tensor:
    """Return log m_z(distance) `[1, H, Q, K]`: -inf where the weight is 0, below distance 0 and from `window` on."""
    wide_H = hold(span_H.to(torch.promote_types(span_H.dtype, torch.float32)), window)
    weight_HQK = ((ramp + wide_H[:, None, None] - distance_QK) / ramp).clamp(0, 1)
    seen_HQK = (weight_HQK > 0) & (distance_QK >= 0) & (distance_QK < window)
    # The logarithm of 1 where nothing is seen: that of 0 would turn its gradient into NaN.
    return weight_HQK.masked_fill(~seen_HQK, 1).log().masked_fill(~seen_HQK, float("-inf"))[None]


def soft_attend(
    q_GHQD: Tensor,
    k_GHKD: Tensor,
    v_GHKD: Tensor,
    bias: Tensor,
    distance_QK: Tensor,
    *,
    scale: float,
    dropout: float = 0.0,
    relative: Distances | None = None,
) -> Tensor:
    """Return softmax(scale * q k^T + bias) v; the bias broadcasts over `[G, H, Q, K]`, each query sees some key."""
    if relative is None:
        bias = bias.to(q_GHQD.dtype)
        return F.scaled_dot_product_attention(q_GHQD, k_GHKD, v_GHKD, attn_mask=bias, dropout_p=dropout, scale=scale)
    rows_QK = distance_QK.clamp(0, len(relative.keys_MD) - 1)
    by_distance_GHQM = q_GHQD @ relative.keys_MD.to(q_GHQD.dtype).T
    logits_GHQK = q_GHQD @ k_GHKD.transpose(-1, -2)
    rows_GHQK = rows_QK.expand_as(logits_GHQK)
    logits_GHQK = (logits_GHQK + by_distance_GHQM.gather(-1, rows_GHQK)) * scale + bias
    weights_GHQK = F.dropout(logits_GHQK.softmax(-1).to(v_GHKD.dtype), dropout, training=dropout > 0)
    spread_GHQM = torch.zeros_like(by_distance_GHQM, dtype=v_GHKD.dtype).scatter_add(-1, rows_GHQK, weights_GHQK)
    return weights_GHQK @ v_GHKD + spread_GHQM @ relative.values_MD.to(v_GHKD.dtype)


def hold(x: Tensor, top: float) -> Tensor:
    """Return x clamped to [0, top]; the gradient passes but where descending along it would lead farther outside.

    A plain clamp has no gradient outside, so that an optimizer's momentum could push a span out for good.
    """
    return Hold.apply(x, top)  # type: ignore[no-any-return]


class Hold(torch.autograd.Function):
    """See `hold`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, top: float) -> Tensor:
        """Return x clamped."""
        ctx.save_for_backward(x)
        ctx.top = top
        return x.clamp(0, top)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Stop what points outwards."""
        (x,) = ctx.saved_tensors
        outwards = ((x < 0) & (gradients[0] > 0)) | ((x > ctx.top) & (gradients[0] < 0))
        return gradients[0].masked_fill(outwards, 0), None


class SpanHeads(PositionHeads):
    """Heads of `adaptive_span`, each with a span of its own.

    The parameter is the span's share of the window, which learning rates suit whatever the window; it starts at 0 (a
    head then reads the ramp), as in the released code. A span is held in [0, window].

    Args:
        heads: H.
        window, ramp, scale, dropout (in training), backend: as in `adaptive_span`.
        cost: weight, in the loss, of the heads' mean span in positions (the paper's lambda); the layers add up.
    """

    def __init__(
        self,
        heads: int,
        *,
        window: int,
        ramp: int = 32,
        cost: float = 0.0,
        scale: float | None = None,
        dropout: float = 0.0,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        check_positive("heads", heads)
        check_positive("window", window)
        check_positive("ramp", ramp)
        check_numbers(scale, dropout)
        check_backend(backend)
        self.backend = backend
        self.window, self.ramp, self.cost, self.scale, self.dropout = window, ramp, cost, scale, dropout
        self.share_H = nn.Parameter(torch.zeros(heads))

    def spans(self) -> Tensor:
        """The spans in positions, `[H]`, at least in float32."""
        return hold(self.share_H.to(torch.promote_types(self.share_H.dtype, torch.float32)), 1.0) * self.window

    def read(self, q_BHND: Tensor, k_BHND: Tensor, v_BHND: Tensor, **options: Any) -> Tensor:
        """See `PositionHeads`."""
        return adaptive_span(q_BHND, k_BHND, v_BHND, self.spans(), window=self.window, ramp=self.ramp, **options)

    def loss(self, like_BHND: Tensor) -> Tensor:
        """Return the weighted mean span, zero outside training."""
        span_H = self.spans()
        return self.cost * span_H.mean() if self.training else span_H.new_zeros(())

    def start(self, relative: Distances | None = None) -> SpanState:
        """See `Heads.start`."""
        return SpanState(self, relative)


class SpanState(HeadState):
    """What streaming heads keep: as many of the last keys and values as the longest span reaches, at most `window`."""

    def __init__(self, heads: SpanHeads, relative: Distances | None = None) -> None:
        self.heads = heads
        self.reach = span_reach(heads.spans(), heads.window, heads.ramp)
        self.relative = None if relative is None else shorten(relative, self.reach)
        self.keys_BHWD: Tensor | None = None
        self.values_BHWD: Tensor | None = None

    def fill(self, q_BHND: Tensor, k_BHND: Tensor | None, v_BHND: Tensor, rotate: RotateFrom | None = None) -> None:
        """See `HeadState`."""
        assert k_BHND is not None
        self.keys_BHWD = last_slots(turn(k_BHND, rotate), self.reach)
        self.values_BHWD = last_slots(v_BHND, self.reach)

    def step(
        self, q_BHD: Tensor, k_BHD: Tensor | None, v_BHD: Tensor, position: int, rotate: Rotate | None = None
    ) -> Tensor:
        """Take in the next position of each stream and return its output `[B, H, D]`."""
        assert k_BHD is not None
        q_BHD, k_BHD = turn_step(q_BHD, rotate), turn_step(k_BHD, rotate)
        if self.keys_BHWD is None or self.values_BHWD is None:
            shape = (*k_BHD.shape[:2], self.reach, k_BHD.shape[-1])
            self.keys_BHWD, self.values_BHWD = k_BHD.new_zeros(shape), v_BHD.new_zeros(shape)
        self.keys_BHWD[:, :, position % self.reach] = k_BHD
        self.values_BHWD[:, :, position % self.reach] = v_BHD
        seen = min(position + 1, self.reach)
        # Slot s holds the latest position that leaves the remainder s.
        distance_1K = ((position - torch.arange(seen, device=q_BHD.device)) % self.reach)[None]
        return soft_attend(
            q_BHD[:, :, None],
            self.keys_BHWD[:, :, :seen],
            self.values_BHWD[:, :, :seen],
            log_weights(self.heads.spans(), distance_1K, self.heads.window, self.heads.ramp),
            distance_1K,
            scale=logit_scale(self.heads.scale, q_BHD.shape[-1]),
            relative=self.relative,
        )[:, :, 0]
