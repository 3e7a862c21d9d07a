"""Which keys the heads of one layer read, from its queries and keys.

A query at position i reads its window, i - w < j <= i, and the s sinks, j < s. Its *far* keys are
those in between, s <= j <= i - w. A pattern of rtx chooses among them: it gets the keys from s on,
and the queries from s + w on, as if these were s + w positions earlier. So position 0 of the
pattern is the first query with a far key, and that key. Up to a query's position there are its far
keys and no others, and the pattern applies its rule as it is.

Example: w = 3, s = 1. The query at position 6 reads 4, 5 and 6, and 0. Its far keys are 1, 2 and 3.
The pattern has them at positions 0, 1 and 2, and the query at 6 - 4 = 2.

Shapes: B sequences, H query heads, G key-value heads, Q queries (the last ones), K keys, D head
size, N positions of the pattern, R = B * H * N rows, P query members, J pairs of a query and a key.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from rtx.attention import Exact, Pattern, Probed, TopK, after_step
from rtx.attention.members import products
from rtx.attention.reads import IndexReads, QueriesKeys, RangeReads, Reads
from rtx.attention.top_keys import GrowingCache, TopKeys
from rtx.hf.choice import Choice, make_pattern


class FarKeys:
    """The choice of one layer.

    Args:
        choice: the options.
        heads, key_heads, size: H, G and D.
        layer: the number of the layer.
    """

    def __init__(self, choice: Choice, heads: int, key_heads: int, size: int, layer: int) -> None:
        self.choice = choice
        self.group_size = heads // key_heads
        self.fitted = not choice.is_fitted
        choosing_heads = heads
        if choice.per == "group":
            choosing_heads = key_heads
        self.pattern: Pattern | None = None
        if choice.selection != "none":
            self.pattern = make_pattern(choice, choosing_heads, size, layer).eval()

    @torch.no_grad()
    def mask(self, q_BHQD: Tensor, k_BGKD: Tensor) -> Tensor:
        """Return which keys the last Q queries read, `[B, H, Q, K]`, bool.

        Raises:
            ValueError: the selection has not been fitted, or needs queries that are not there.
        """
        B, H, Q, _ = q_BHQD.shape
        near_QK = self.near_mask(Q, k_BGKD.shape[2], k_BGKD.device)
        mask_BHQK = near_QK.repeat(B, H, 1, 1)
        self.add_far(mask_BHQK, q_BHQD, k_BGKD)
        return mask_BHQK

    @torch.no_grad()
    def far_mask(self, q_BHQD: Tensor, k_BGKD: Tensor) -> Tensor:
        """Return which far keys the last Q queries read, `[B, H, Q, K]`, bool; see `mask`."""
        shape = (*q_BHQD.shape[:3], k_BGKD.shape[2])
        mask_BHQK = torch.zeros(shape, dtype=torch.bool, device=q_BHQD.device)
        self.add_far(mask_BHQK, q_BHQD, k_BGKD)
        return mask_BHQK

    def near_mask(self, queries: int, keys: int, device: torch.device) -> Tensor:
        """Return which keys are in the window of each query or are sinks, `[Q, K]`."""
        position_K = torch.arange(keys, device=device)
        position_Q1 = position_K[keys - queries :, None]
        is_past_QK = position_K <= position_Q1
        is_in_window_QK = position_K > position_Q1 - self.choice.window
        is_sink_K = position_K < self.choice.sinks
        return is_past_QK & (is_in_window_QK | is_sink_K)

    @torch.no_grad()
    def far_mask_at(self, q_BHKD: Tensor, k_BGKD: Tensor, position_P: Tensor) -> Tensor:
        """Return which far keys the queries at some positions read, `[B, H, P, K]`, bool.

        Of the best keys of all, only those of these queries are sought.
        """
        pattern = self.pattern
        if not isinstance(pattern, Exact) or bool((position_P < self.choice.near).any()):
            return self.far_mask(q_BHKD, k_BGKD)[:, :, position_P]
        q_BHPD, k_BHND = self.far_vectors(q_BHKD[:, :, position_P], k_BGKD)
        last_P1 = position_P[:, None] - self.choice.near
        is_later_PN = torch.arange(k_BHND.shape[2], device=k_BHND.device) > last_P1
        score_BHPN = products(q_BHPD, k_BHND).masked_fill(is_later_PN, -math.inf)
        most = pattern.max_keys(k_BHND.shape[2])
        key_BHPW = pattern.best_of_keys(score_BHPN, q_BHPD, k_BHND, most)
        far_BHPN = torch.zeros_like(score_BHPN, dtype=torch.bool)
        far_BHPN = far_BHPN.scatter_(-1, key_BHPW, True) & ~is_later_PN
        if self.choice.per == "group":
            far_BHPN = far_BHPN.repeat_interleave(self.group_size, dim=1)
        return F.pad(far_BHPN, (self.choice.sinks, self.choice.window))

    def add_far(self, mask_BHQK: Tensor, q_BHQD: Tensor, k_BGKD: Tensor) -> None:
        """Add the far keys that the last Q queries read to a mask."""
        Q = q_BHQD.shape[2]
        choosing = min(Q, k_BGKD.shape[2] - self.choice.near)
        if self.pattern is None or choosing < 1:
            return
        if not self.fitted:
            name = self.choice.selection
            raise ValueError(f"selection={name}: its centroids are not fitted; call rtx.hf.fit")
        q_BHND, k_BHND = self.far_vectors(q_BHQD[:, :, Q - choosing :], k_BGKD)
        far_BHQN = last_queries(self.pattern.to(q_BHND.device), q_BHND, k_BHND)
        if self.choice.per == "group":
            far_BHQN = far_BHQN.repeat_interleave(self.group_size, dim=1)
        first = self.choice.sinks
        last = first + far_BHQN.shape[-1]
        mask_BHQK[:, :, Q - choosing :, first:last] |= far_BHQN

    def far_vectors(self, q_BHQD: Tensor, k_BGKD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the queries and the far keys that the pattern compares.

        Every query has the far keys up to its position in the pattern, `[B, H, N, D]` with one key
        head for each head that chooses.
        """
        last = k_BGKD.shape[2] - self.choice.window
        far_BGND = k_BGKD[:, :, self.choice.sinks : last]
        if self.choice.per == "group":
            q_BGSQD = q_BHQD.unflatten(1, (-1, self.group_size))
            return q_BGSQD.mean(2), far_BGND.contiguous()
        return q_BHQD.contiguous(), far_BGND.repeat_interleave(self.group_size, dim=1)

    @torch.no_grad()
    def fit(self, q_BHKD: Tensor, k_BGKD: Tensor, steps: int) -> None:
        """Fit the centroids to the queries and keys of whole sequences.

        Args:
            steps: how often the centroids move.

        Raises:
            ValueError: sequences that have no far keys.
        """
        if self.pattern is None or not self.choice.is_fitted:
            return
        K = k_BGKD.shape[2]
        near = self.choice.near
        if near >= K:
            raise ValueError(f"fit: sequences of {K} positions have no key beyond {near}")
        q_BHND, k_BHND = self.far_vectors(q_BHKD[:, :, near:], k_BGKD)
        pattern = self.pattern.to(q_BHND.device).train()
        if isinstance(pattern, Probed):
            start_at_keys(pattern, k_BHND, k_BHND.shape[1] // k_BGKD.shape[1])
        qk = pattern.inputs(q_BHND, k_BHND, None)
        for _ in range(steps):
            if isinstance(pattern, Probed):
                # Of these, `observe` would also choose keys.
                pattern.gather(qk)
            else:
                pattern.observe(qk, streaming=False)
            after_step(pattern)
        pattern.eval()
        self.fitted = True


def start_at_keys(pattern: Probed, k_BHND: Tensor, group_size: int) -> None:
    """Initialise centroids with keys, so that heads with the same keys have the same centroids.

    Args:
        group_size: the number of neighbouring heads with the same keys.
    """
    centroids = pattern.centroids
    centroids.seed_from([k_BHND])
    first_of_group_GCD = centroids.centroid_HCD[::group_size]
    centroids.centroid_HCD.copy_(first_of_group_GCD.repeat_interleave(group_size, dim=0))


def last_queries(pattern: Pattern, q_BHQD: Tensor, k_BHND: Tensor) -> Tensor:
    """Return which keys the queries at the last Q of N positions read, `[B, H, Q, N]`, bool.

    Raises:
        ValueError: the choice depends on earlier queries, and Q < N.
    """
    B, H, N, _ = k_BHND.shape
    Q = q_BHQD.shape[2]
    if Q == 1 and isinstance(pattern, TopKeys):
        return next_query(pattern, q_BHQD, k_BHND)
    if isinstance(pattern, TopK) and Q < N:
        raise ValueError("selection=topk: a cache has no queries, and its choice needs all of them")
    # No other choice depends on the earlier queries.
    earlier_BHND = torch.zeros_like(k_BHND[:, :, : N - Q])
    q_BHND = torch.cat([earlier_BHND, q_BHQD], dim=2)
    qk = pattern.inputs(q_BHND, k_BHND, None)
    parts = pattern.reads(qk, streaming=True)
    return mask_of(parts, (B, H, N))[:, :, N - Q :]


def next_query(pattern: TopKeys, q_BH1D: Tensor, k_BHND: Tensor) -> Tensor:
    """Return which keys the query at the last position reads, `[B, H, 1, N]`, as a stream does."""
    cache = pattern.start()
    assert isinstance(cache, GrowingCache)
    N = k_BHND.shape[2]
    qk = QueriesKeys(q_BH1D, k_BHND, q_BH1D, k_BHND)
    cache.put_choice(qk, 0)
    slot_BH1K = cache.chosen_slots(qk, N - 1)
    # One more column, for -1, which names no slot.
    mask = torch.zeros(*slot_BH1K.shape[:3], N + 1, dtype=torch.bool, device=k_BHND.device)
    column_BH1K = torch.where(slot_BH1K < 0, N, slot_BH1K)
    return mask.scatter_(-1, column_BH1K, True)[..., :N]


def mask_of(parts: list[Reads], shape_BHN: tuple[int, int, int]) -> Tensor:
    """Return which query reads which key in any part, `[B, H, N, N]`, bool."""
    B, H, N = shape_BHN
    # One more column, for entries of an index that name no key.
    mask = torch.zeros(B * H * N, N + 1, dtype=torch.bool, device=device_of(parts[0]))
    for part in parts:
        if isinstance(part, IndexReads):
            key_RK = torch.where(part.index_RK < 0, N, part.index_RK % N)
            mask.scatter_(1, key_RK, True)
        else:
            row_J, key_J = pairs(part)
            mask[row_J, key_J % N] = True
    return mask.view(B, H, N, N + 1)[..., :N]


def device_of(part: Reads) -> torch.device:
    """Return the device of a part."""
    if isinstance(part, IndexReads):
        return part.index_RK.device
    return part.start_P.device


def pairs(part: RangeReads) -> tuple[Tensor, Tensor]:
    """Return the rows of each query and key of which the first reads the second, `[J]`."""
    count_P = part.stop_P - part.start_P
    member_P = torch.arange(len(count_P), device=count_P.device)
    member_J = torch.repeat_interleave(member_P, count_P)
    first_J = (count_P.cumsum(0) - count_P)[member_J]
    number_J = torch.arange(len(member_J), device=count_P.device) - first_J
    key_member_J = part.start_P[member_J] + number_J
    if part.holes is not None:
        value_iJ = part.holes.value_iM[:, key_member_J]
        is_low_iJ = value_iJ >= part.holes.low_iP[:, member_J]
        is_hole_iJ = is_low_iJ & (value_iJ < part.holes.high_iP[:, member_J])
        is_read_J = ~is_hole_iJ.any(0)
        member_J = member_J[is_read_J]
        key_member_J = key_member_J[is_read_J]
    return part.query.row_M[member_J], part.key.row_M[key_member_J]
