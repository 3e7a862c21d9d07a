"""Fixed attention: position i reads its own block up to itself, and the summary columns of every earlier block.

The pattern of Child et al. 2019 for data without a period, such as text. Summary columns are c positions of a block of
L. Heads take different ones: head h, counted from 0, takes the sub-block s = h mod (L // c) from the block's end, the
columns L - (s + 1) c to L - s c - 1. One softmax spans both sets.

Shapes: B sequences or streams, H heads, N positions, D head size, L block, G blocks, R blocks of one group, S summary
keys, K = S + L keys of a query.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rtx.attention import by_flex, by_reference, reference
from rtx.attention.arguments import check_attention, check_numbers, check_positive
from rtx.attention.backends import Call, check_backend, choose
from rtx.attention.heads import HeadState, PositionHeads, Rotate, RotateFrom, turn, turn_step
from rtx.attention.weights import Distances, attend, in_graph, logit_scale, without_padding

GROUPS = 16
"""Parts of a sequence that are attended one after the other: more waste fewer keys, fewer make fewer calls."""

KEPT = 4
"""Copies of the keys (summary keys for each query of a block) above which they are made again for the gradient."""


def fixed(
    q_BHND: Tensor,
    k_BHND: Tensor,
    v_BHND: Tensor,
    *,
    block: int,
    summary: int,
    scale: float | None = None,
    dropout: float = 0.0,
    relative: Distances | None = None,
    mask_BN: Tensor | None = None,
    backend: str = "auto",
    check_finite: bool = False,
) -> Tensor:
    """Return causal attention over the own block and the summary columns of earlier ones, `[B, H, N, D]`.

    Any N; up to N = block it is full attention. Cost N (L + c N / L). Each block's keys are gathered behind the
    summaries of the blocks before it; where that would keep much for the gradient, or with `relative` or `mask_BN`, it
    is done again in the backward pass, a sixteenth of the sequence at a time.

    Args:
        q_BHND, k_BHND, v_BHND: queries, keys and values; the index of a head chooses its summary columns.
        block: L, at least 1.
        summary: c, from 1 to L.
        scale: factor on the logits (default 1 / sqrt(D)).
        dropout: share of the attention weights to drop.
        relative: Shaw's terms, by true distance.
        mask_BN: true at real positions; the others are not read, and their output is zero.
        backend: "auto", "reference", "torch" or "flex", see `rtx.attention.backends`; the same result from each.
        check_finite: refuse inputs that hold NaN or infinity (padding may). Without it such a value may spread inside
            one tile of a fast path; by backend="reference" it never reaches an earlier position.

    Raises:
        ValueError: tensors that do not go together, a block below 1, or a summary that is not from 1 to `block`.
    """
    given = {"mask_BN": mask_BN, "scale": scale, "dropout": dropout, "relative": relative}
    check_attention(q_BHND, k_BHND, v_BHND, **given, needs_keys=True, finite=check_finite)
    check_sizes(block, summary)
    chosen = choose(backend, Call("fixed", q_BHND, k_BHND, v_BHND, dropout, relative))
    if chosen == "reference":
        options = {"scale": scale, "relative": relative, "mask_BN": mask_BN}
        rule = functools.partial(reference.fixed_sets, block=block, summary=summary)
        return by_reference.read_heads(q_BHND, k_BHND, v_BHND, lambda b, h: functools.partial(rule, head=h), **options)
    if chosen == "flex":
        return by_flex.fixed(q_BHND, k_BHND, v_BHND, block=block, summary=summary, scale=scale, mask_BN=mask_BN)
    _, H, N, _ = q_BHND.shape
    if not v_BHND.numel():
        return in_graph(torch.zeros_like(v_BHND), q_BHND, k_BHND, v_BHND, *(relative or ()))
    q_BHND, k_BHND, v_BHND = (without_padding(x, mask_BN) for x in (q_BHND, k_BHND, v_BHND))
    first_H = first_columns(H, block, summary)
    if block >= N:  # nothing is earlier, and no key need be padded
        block, summary, first_H = N, 1, [0] * H
    q_BHGLD, k_BHGLD, v_BHGLD = (
        F.pad(x, (0, 0, 0, -N % block)).unflatten(2, (-1, block)) for x in (q_BHND, k_BHND, v_BHND)
    )
    columns_HC = torch.tensor(first_H, device=q_BHND.device)[:, None] + torch.arange(summary, device=q_BHND.device)
    read = functools.partial(
        read_group,
        columns_HC=columns_HC,
        mask_BN=None if mask_BN is None else F.pad(mask_BN, (0, -N % block)),
        scale=logit_scale(scale, q_BHND.shape[-1]),
        dropout=dropout,
        relative=relative,
    )
    G = q_BHGLD.shape[2]
    large = relative is not None or mask_BN is not None or G * summary > 2 * KEPT * block
    if large and G > 1 and torch.is_grad_enabled():
        read = functools.partial(checkpoint, read, use_reentrant=False)
    sums_k, sums_v = (summaries(x, first_H, summary) for x in (k_BHGLD, v_BHGLD))
    size = -(-G // GROUPS)
    # Split, since the gradient of a slice would be a zero-filled copy of the whole for each group.
    groups = zip(*(x.split(size, dim=2) for x in (q_BHGLD, k_BHGLD, v_BHGLD)), strict=True)
    out = []
    for first, (q, k, v) in zip(range(0, G, size), groups, strict=True):
        earlier = (min(first + size, G) - 1) * summary
        out.append(read(q, k, v, sums_k[:, :, :earlier], sums_v[:, :, :earlier], first))
    out_BHND = torch.cat(out, dim=2).flatten(2, 3)[:, :, :N]
    return without_padding(out_BHND, mask_BN)


def check_sizes(block: int, summary: int) -> None:
    """Raise a ValueError unless 1 <= summary <= block."""
    check_positive("block", block)
    check_positive("summary", summary)
    if not 1 <= summary <= block:
        raise ValueError(f"summary={summary}: must be from 1 to block={block}")


def first_columns(heads: int, block: int, summary: int) -> list[int]:
    """Return the first summary column of each head."""
    return [block - (head % (block // summary) + 1) * summary for head in range(heads)]


def summaries(x_BHGLD: Tensor, first_H: list[int], summary: int) -> Tensor:
    """Return each head's summary columns of all blocks, `[B, H, G c, D]`."""
    columns = [x_BGLD[:, :, first : first + summary] for x_BGLD, first in zip(x_BHGLD.unbind(1), first_H, strict=True)]
    return torch.stack(columns, dim=1).flatten(2, 3)


def read_group(
    q_BHRLD: Tensor,
    k_BHRLD: Tensor,
    v_BHRLD: Tensor,
    k_BHSD: Tensor,
    v_BHSD: Tensor,
    first: int,
    *,
    columns_HC: Tensor,
    mask_BN: Tensor | None,
    scale: float,
    dropout: float,
    relative: Distances | None,
) -> Tensor:
    """Return the outputs `[B, H, R, L, D]` of R blocks from block `first` on.

    They share the summary keys of all blocks before the last of them; a mask hides from a block what is not earlier.
    """
    B, H, R, L, _ = q_BHRLD.shape
    keys_BHRKD, values_BHRKD = (
        torch.cat([shared[:, :, None].expand(-1, -1, R, -1, -1), own], dim=3)
        for shared, own in ((k_BHSD, k_BHRLD), (v_BHSD, v_BHRLD))
    )
    block_R = torch.arange(first, first + R, device=q_BHRLD.device)
    visible = visible_keys(block_R, L, k_BHSD.shape[2], columns_HC.shape[1])[None, None]
    if relative is None and mask_BN is None:
        distance_HRLK = None
    else:
        position_HRK = key_positions(block_R, L, k_BHSD.shape[2], columns_HC)
        distance_HRLK = position_HRK[..., -L:, None] - position_HRK[:, :, None]
        if mask_BN is not None:
            # Padding reads itself, so that no softmax is empty; what it reads is thrown away.
            visible = visible & (mask_BN[:, position_HRK][..., None, :] | (distance_HRLK == 0))
    options: dict[str, Any] = {"scale": scale, "dropout": dropout}
    if relative is not None:
        options |= {"relative": relative, "distance_QK": distance_HRLK}
        return attend(q_BHRLD, keys_BHRKD, values_BHRKD, mask_QK=visible, **options)
    # The fused kernels take four dimensions.
    q, keys, values = (x.flatten(0, 1) for x in (q_BHRLD, keys_BHRKD, values_BHRKD))
    return attend(q, keys, values, mask_QK=visible.flatten(0, 1), **options).unflatten(0, (B, H))


def visible_keys(block_R: Tensor, block: int, shared: int, summary: int) -> Tensor:
    """Return which of S = `shared` summary keys and L own keys each position of each block reads, `[R, L, K]`."""
    slot_L, slot_S = torch.arange(block, device=block_R.device), torch.arange(shared, device=block_R.device)
    earlier_RS = slot_S // summary < block_R[:, None]
    R = len(block_R)
    own = (slot_L[:, None] >= slot_L).expand(R, block, block)
    return torch.cat([earlier_RS[:, None].expand(R, block, shared), own], dim=-1)


def key_positions(block_R: Tensor, block: int, shared: int, columns_HC: Tensor) -> Tensor:
    """Return the position of each of the S = `shared` summary keys and L own keys of each block, `[H, R, K]`."""
    H, c = columns_HC.shape
    slot_L, slot_S = torch.arange(block, device=block_R.device), torch.arange(shared, device=block_R.device)
    position_HS = slot_S // c * block + columns_HC[:, slot_S % c]
    position_RL = block_R[:, None] * block + slot_L
    R = len(block_R)
    return torch.cat([position_HS[:, None].expand(H, R, shared), position_RL.expand(H, R, block)], dim=-1)


class FixedHeads(PositionHeads):
    """Heads of `fixed`; `block`, `summary`, `scale`, `dropout` (in training) and `backend` as there."""

    def __init__(
        self, *, block: int, summary: int, scale: float | None = None, dropout: float = 0.0, backend: str = "auto"
    ) -> None:
        super().__init__()
        check_sizes(block, summary)
        check_numbers(scale, dropout)
        check_backend(backend)
        self.block, self.summary, self.scale, self.dropout = block, summary, scale, dropout
        self.backend = backend

    def read(self, q_BHND: Tensor, k_BHND: Tensor, v_BHND: Tensor, **options: Any) -> Tensor:
        """See `PositionHeads`."""
        return fixed(q_BHND, k_BHND, v_BHND, block=self.block, summary=self.summary, **options)

    def start(self, relative: Distances | None = None) -> FixedState:
        """See `Heads.start`."""
        return FixedState(self.block, self.summary, self.scale, relative)


class FixedState(HeadState):
    """What a streaming fixed head keeps: c keys and values of every finished block, and behind them its own block."""

    def __init__(self, block: int, summary: int, scale: float | None = None, relative: Distances | None = None) -> None:
        self.block, self.summary, self.scale, self.relative = block, summary, scale, relative
        self.keys_BHKD: Tensor | None = None
        self.values_BHKD: Tensor | None = None

    def fill(self, q_BHND: Tensor, k_BHND: Tensor | None, v_BHND: Tensor, rotate: RotateFrom | None = None) -> None:
        """See `HeadState`."""
        assert k_BHND is not None
        _, H, N, _ = k_BHND.shape
        if not N:
            return
        self.keys_BHKD = self.kept(turn(k_BHND, rotate))
        self.values_BHKD = self.kept(v_BHND)
        position_1HN1 = torch.arange(N, device=k_BHND.device).expand(1, H, N)[..., None]
        self.position_HK = self.kept(position_1HN1)[0, :, :, 0]

    def kept(self, x_BHND: Tensor) -> Tensor:
        """Return what the state holds of a sequence: the summary columns of finished blocks, and room for a last one.

        The last block is not finished before the position behind it comes, so that it is never empty.
        """
        H, N = x_BHND.shape[1:3]
        finished = (N - 1) // self.block
        blocks_BHGLD, own_BHLD = x_BHND.split([finished * self.block, N - finished * self.block], dim=2)
        columns = first_columns(H, self.block, self.summary)
        past_BHSD = summaries(blocks_BHGLD.unflatten(2, (finished, self.block)), columns, self.summary)
        return torch.cat([past_BHSD, F.pad(own_BHLD, (0, 0, 0, self.block - own_BHLD.shape[2]))], dim=2)

    def step(
        self, q_BHD: Tensor, k_BHD: Tensor | None, v_BHD: Tensor, position: int, rotate: Rotate | None = None
    ) -> Tensor:
        """Take in the next position of each stream and return its output `[B, H, D]`."""
        assert k_BHD is not None
        q_BHD, k_BHD = turn_step(q_BHD, rotate), turn_step(k_BHD, rotate)
        if self.keys_BHKD is None or self.values_BHKD is None:
            shape = (*k_BHD.shape[:2], self.block, k_BHD.shape[-1])
            self.keys_BHKD, self.values_BHKD = k_BHD.new_zeros(shape), v_BHD.new_zeros(shape)
            self.position_HK = torch.zeros(shape[1], self.block, dtype=torch.int64, device=k_BHD.device)
        finished, slot = divmod(position, self.block)
        if slot == 0 and finished:
            self.finish_block((finished - 1) * self.summary)
        last = finished * self.summary + slot
        self.keys_BHKD[:, :, last], self.values_BHKD[:, :, last] = k_BHD, v_BHD
        self.position_HK[:, last] = position
        distance_H1K = (position - self.position_HK[:, : last + 1])[:, None]
        out_BH1D = attend(
            q_BHD[:, :, None],
            self.keys_BHKD[:, :, : last + 1],
            self.values_BHKD[:, :, : last + 1],
            logit_scale(self.scale, q_BHD.shape[-1]),
            mask_QK=distance_H1K[:1, 0] >= 0,
            relative=self.relative,
            distance_QK=distance_H1K,
        )
        return out_BH1D[:, :, 0]

    def finish_block(self, begin: int) -> None:
        """Keep of the block that stands from slot `begin` on the summary columns alone, with room behind them."""
        assert self.keys_BHKD is not None and self.values_BHKD is not None
        H = self.keys_BHKD.shape[1]
        for head, first in enumerate(first_columns(H, self.block, self.summary)):
            kept, columns = slice(begin, begin + self.summary), slice(begin + first, begin + first + self.summary)
            for x in (self.keys_BHKD, self.values_BHKD):
                x[:, head, kept] = x[:, head, columns].clone()
            self.position_HK[head, kept] = self.position_HK[head, columns].clone()
        missing = begin + self.summary + self.block - self.keys_BHKD.shape[2]
        if missing > 0:  # at least half as much again, so that growing costs little on average
            more = max(missing, self.keys_BHKD.shape[2] // 2)
            self.keys_BHKD, self.values_BHKD = (F.pad(x, (0, 0, 0, more)) for x in (self.keys_BHKD, self.values_BHKD))
            self.position_HK = F.pad(self.position_HK, (0, more))
