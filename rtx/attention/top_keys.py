"""Selections in which each query chooses at most W keys by content, among those up to its position.

With causal=False it chooses among all keys.

`TopKeys` is their base class. A subclass defines which vectors of queries and keys the choice
compares (`choice_queries`, `choice_keys`); the W keys with the largest products are chosen. A
subclass that chooses in another way overrides `chosen_keys` as well. `Exact` compares the queries
and keys of the attention itself.

Example: W = 2. The products of the query at position 3 with the keys at 0 to 3 are 5, 1, 4 and 2,
so it reads the keys at 0 and 2. The queries at 0 and 1 read all keys up to their positions.

Shapes: B sequences, H heads, G key-value heads, N positions, S slots of a cache, D head size, E
width of the vectors that the choice compares, Q queries of a piece, K keys of a query.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rtx.attention.arguments import check_positive
from rtx.attention.engine.softmax import RelativeTables
from rtx.attention.grouped import vectors_in_slots
from rtx.attention.members import normalise_twice, products
from rtx.attention.pairs import pairs_within
from rtx.attention.pattern import Cache, Pattern, Prepared
from rtx.attention.pieces import pieces
from rtx.attention.positional import RowCache, stored
from rtx.attention.precision import wide_type
from rtx.attention.reads import IndexReads, QueriesKeys, Reads, first_rows
from rtx.attention.static import best_places
from rtx.attention.ties import best, tie_margin
from rtx.attention.typed_torch import tolist, vector_norm


def best_keys(
    score_NN: Tensor,
    margin_NN: Tensor,
    window: int,
    readable: list[list[int]],
) -> Tensor:
    """Return which keys each query reads, `[1, N, N]`, bool: the best ones that it may read.

    Args:
        score_NN: the score of each key (second dimension) for each query (first dimension).
        margin_NN: scores within the margin of the lowest selected score count as equal to it.
        window: the number of keys that a query reads at most.
        readable: the positions of the keys that each query may read, ascending.
    """
    mask_NN = torch.zeros_like(score_NN, dtype=torch.bool)
    scores = tolist(score_NN)
    margins = tolist(margin_NN)
    for i, positions in enumerate(readable):
        readable_scores = [scores[i][j] for j in positions]
        readable_margins = [margins[i][j] for j in positions]
        for number in best(readable_scores, readable_margins, window):
            mask_NN[i, positions[number]] = True
    return mask_NN[None]


def readable_keys(i: int, keys: int, attend_self: bool, causal: bool) -> list[int]:
    """Return the positions of the keys that the query at position i may read, ascending.

    They are those up to its position, or all with causal=False. Without `attend_self` its own key
    is not one of them, unless it is the only one.

    Args:
        keys: the number of all keys.
    """
    stop = keys
    if causal:
        stop = i + 1
    positions = [*range(stop)]
    others = [j for j in positions if j != i]
    if attend_self or not others:
        return positions
    return others


def readable_count(i: int, attend_self: bool) -> int:
    """Return the number of `readable_keys` of a causal pattern."""
    if attend_self or i == 0:
        return i + 1
    return i


class TopKeys(Pattern):
    """H heads whose queries each choose at most W keys, by content.

    Args:
        window: W.
        qk_norm: normalise queries and keys (LayerNorm without scale or bias), as routing heads do.

    Raises:
        ValueError: a window below 1.
    """

    def __init__(self, *, window: int, qk_norm: bool = False, **options: Any) -> None:
        super().__init__(**options)
        check_positive(window=window)
        self.window = window
        self.qk_norm = qk_norm
        self.normalises = qk_norm

    def prepare(self, q_BHND: Tensor, k_BHND: Tensor | None) -> Prepared:
        prepared = super().prepare(q_BHND, k_BHND)
        if not self.qk_norm:
            return prepared
        q_BHND, narrow_q_BHND = normalise_twice(prepared.q_BHND, self.backend)
        k_BHND, narrow_k_BHND = normalise_twice(prepared.k_BHND, self.backend)
        return Prepared(
            q_BHND=q_BHND,
            k_BHND=k_BHND,
            narrow_q_BHND=narrow_q_BHND,
            narrow_k_BHND=narrow_k_BHND,
        )

    @property
    def has_index(self) -> bool:
        """Whether `reads` returns an index; else it returns lists."""
        return True

    def max_keys(self, length: int) -> int:
        """Return how many keys a query reads at most, in a sequence of that length."""
        return min(self.window, length)

    def choice_queries(self, qk: QueriesKeys) -> Tensor:
        """Return the vectors that the choice compares for the queries, `[B, H, N, E]`."""
        return qk.rotated_q_BHND

    def choice_keys(self, qk: QueriesKeys) -> Tensor:
        """Return the vectors that the choice compares for the keys, `[B, H, N, E]`."""
        return qk.rotated_k_BHND

    def tie_margins(self, query: Tensor, key: Tensor) -> Tensor:
        """Return the margins within which the scores of keys count as equal.

        Args:
            query, key: what the choice compares, `[..., E]`, in shapes that broadcast.
        """
        return product_margins(query, key)

    def rule(self, qk: QueriesKeys, head: int, streaming: bool) -> Tensor:
        query_NE, key_NE = self.vectors_by_rule(qk, head)
        score_NN = query_NE @ key_NE.T
        query_N1E = query_NE[:, None]
        margin_NN = product_margins(query_N1E, key_NE)
        keys = len(key_NE)
        readable = [self.readable_keys(i, keys) for i in range(len(query_NE))]
        return best_keys(score_NN, margin_NN, self.max_keys(keys), readable)

    def readable_keys(self, i: int, keys: int) -> list[int]:
        """Return the positions of the keys that the query at position i may read, ascending."""
        return readable_keys(i, keys, self.attend_self, self.causal)

    def are_unreadable(self, key: Tensor, position: Tensor, keys: int) -> Tensor:
        """Return whether queries may not read keys, by their positions; see `readable_keys`.

        Args:
            key, position: the positions of keys and of queries, in shapes that broadcast.
            keys: the number of all keys.
        """
        if self.causal:
            return key > last_readable(position, self.attend_self)
        is_own = key == position
        if self.attend_self or keys == 1:
            return torch.zeros_like(is_own)
        return is_own

    def vectors_by_rule(self, qk: QueriesKeys, head: int) -> tuple[Tensor, Tensor]:
        """Return what the rule compares for the queries and keys of a head, `[N, E]` each.

        A subclass that compares other vectors computes them here in the plainest way, without
        `choice_queries` and `choice_keys`. Then tests compare two computations.
        """
        q_ND = qk.rotated_q_BHND[0, head]
        k_ND = qk.rotated_k_BHND[0, head]
        return q_ND, k_ND

    def reads(self, qk: QueriesKeys, streaming: bool) -> list[Reads]:
        B, H, N, _ = qk.q_BHND.shape
        queries, keys = qk.numbers()
        query_BHNE = self.choice_queries(qk)[:, :, :queries]
        key_BHNE = self.choice_keys(qk)[:, :, :keys]
        most = self.max_keys(keys)
        device = qk.q_BHND.device
        first_row_BH11 = first_rows(B, H, N, device)
        shape = (B, H, N, most)
        index_BHNK = torch.full(shape, -1, device=device)
        # For each query the scores of all keys are in memory, and several copies of its entries in
        # the index, which are wider than scores.
        scores = key_BHNE.shape[2]
        numbers_of_query = scores + 8 * most
        for positions in self.query_pieces(qk, numbers_of_query):
            query_BHQE = query_BHNE[:, :, positions].contiguous()
            chosen_BHQK = self.chosen_keys(query_BHQE, key_BHNE, positions, keys)
            row_BHQK = chosen_BHQK + first_row_BH11
            row_BHQK = row_BHQK.masked_fill(chosen_BHQK < 0, -1)
            # A query may have fewer keys than the index has columns.
            count = row_BHQK.shape[-1]
            index_BHNK[:, :, positions, :count] = row_BHQK
        index_RK = index_BHNK.flatten(0, 2)
        return [IndexReads(index_RK, N, both_sides=not self.causal)]

    def query_pieces(self, qk: QueriesKeys, numbers_of_query: int) -> list[slice]:
        """Return the positions of queries in pieces, so that few numbers are in memory at once.

        Args:
            numbers_of_query: how many are in memory for each query of a head, such as its scores.
        """
        B, H, _, _ = qk.q_BHND.shape
        queries, _ = qk.numbers()
        heads = B * H
        return pieces(queries, heads * numbers_of_query)

    def chosen_keys(
        self,
        query_BHQE: Tensor,
        key_BHNE: Tensor,
        positions: slice,
        length: int,
    ) -> Tensor:
        """Return the positions of the keys that queries read, `[B, H, Q, K]`; -1 names no key.

        Args:
            key_BHNE: the keys at the positions 0, 1, ...; a causal pattern does not read those
                after the last query.
            positions: the positions of the queries.
            length: the number of all keys that may be read.
        """
        device = key_BHNE.device
        if self.causal:
            key_BHNE = key_BHNE[:, :, : positions.stop]
        N = key_BHNE.shape[2]
        position_Q1 = positions_in(positions, device)[:, None]
        position_N = torch.arange(N, device=device)
        is_unreadable_QN = self.are_unreadable(position_N, position_Q1, N)
        score_BHQN = products(query_BHQE, key_BHNE)
        score_BHQN.masked_fill_(is_unreadable_QN, -math.inf)
        most = self.max_keys(N)
        key_BHQK = self.best_of_keys(score_BHQN, query_BHQE, key_BHNE, most)
        # If a query may read fewer than K keys, some of its K best have the score -inf.
        is_unreadable_BHQK = self.are_unreadable(key_BHQK, position_Q1, N)
        return key_BHQK.masked_fill(is_unreadable_BHQK, -1)

    def best_of_keys(
        self,
        score_BHQN: Tensor,
        query_BHQE: Tensor,
        key_BHNE: Tensor,
        count: int,
    ) -> Tensor:
        """Return the numbers of each query's `count` best keys, `[B, H, Q, K]`, in any order.

        Args:
            score_BHQN: the products of queries and keys, or -inf.
        """

        def margin(place_BHQ1: Tensor) -> Tensor:
            key_BHQE = key_BHNE.take_along_dim(place_BHQ1, dim=2)
            margin_BHQ = self.tie_margins(query_BHQE, key_BHQE)
            return margin_BHQ[..., None]

        return best_places(score_BHQN, count, margin, self.backend)

    def pairs_of_head(self, length: int) -> float:
        return pairs_within(length, self.window, self.causal)

    def choice_operations(self, length: int, size: int) -> float:
        """Return the operations of the products of all queries with all readable keys."""
        return 2.0 * size * pairs_within(length, length, self.causal)

    def start(self, relative: RelativeTables | None = None) -> Cache:
        return GrowingCache(self, relative)


def product_margins(query: Tensor, key: Tensor) -> Tensor:
    """Return the margins within which products of queries and keys count as equal.

    `tie_margin` has the formula.

    Args:
        query, key: `[..., E]`, in shapes that broadcast.
    """
    wide = wide_type(key.dtype)
    wide_query = query.to(wide)
    wide_key = key.to(wide)
    query_norm = vector_norm(wide_query, dim=-1)
    key_norm = vector_norm(wide_key, dim=-1)
    return tie_margin(query_norm, key_norm, wide)


def positions_in(positions: slice, device: torch.device) -> Tensor:
    """Return the positions of a slice as a tensor, `[Q]`."""
    return torch.arange(positions.start, positions.stop, device=device)


def last_readable(position: Tensor, attend_self: bool) -> Tensor:
    """Return the last position that each query may read, see `readable_count`.

    Args:
        position: the positions of the queries.
    """
    if attend_self:
        return position
    return (position - 1).clamp(min=0)


class Exact(TopKeys):
    """Each query reads the W keys, up to its position, with the largest q k^T.

    With causal=False it reads the W best of all keys, also of another sequence (cross-attention).

    The scores are the attention's logits without Shaw's tables, so no other selection of W keys
    has more of its weights. They take O(N^2) time; those of some queries are in memory at once.
    """

    may_be_bidirectional = True
    takes_other_keys = True


class GrowingCache(RowCache):
    """All keys and values so far, and the vectors that the choice compares for these keys.

    Of grouped queries that choose by themselves, these vectors are stored once for each query head.
    """

    choice_BHSE: Tensor | None = None
    """What the choice compares, one vector in each slot; see `put_choice`."""

    def __init__(self, pattern: TopKeys, relative: RelativeTables | None = None) -> None:
        terms = partial(pattern.terms, relative=relative)
        super().__init__(terms, copies=pattern.key_copies)
        self.pattern = pattern

    def put(self, qk: QueriesKeys, v_BGND: Tensor, first: int) -> tuple[Tensor, Tensor]:
        self.put_choice(qk, first)
        return super().put(qk, v_BGND, first)

    def put_choice(self, qk: QueriesKeys, first: int) -> None:
        """Store the vectors that the choice compares for the keys of positions from `first` on."""
        key_BHNE = self.pattern.choice_keys(qk)
        self.choice_BHSE = stored(self.choice_BHSE, key_BHNE, first)

    def decode(self, qk: QueriesKeys, v_BG1D: Tensor, position: int) -> Tensor:
        k_BGSD, v_BGSD = self.put(qk, v_BG1D, position)
        slot_BH1K = self.chosen_slots(qk, position)
        is_read_BH1K = slot_BH1K >= 0
        # Some slot takes the place of -1; the mask leaves it out.
        slot_BHK1 = slot_BH1K.mT.clamp(min=0)
        k_BHKD = vectors_in_slots(k_BGSD, slot_BHK1)
        v_BHKD = vectors_in_slots(v_BGSD, slot_BHK1)
        distance_BH1K = position - slot_BH1K
        return self.attend_newest(qk, k_BHKD, v_BHKD, is_read_BH1K, distance_BH1K)

    def chosen_slots(self, qk: QueriesKeys, position: int) -> Tensor:
        """Return the slots that the query at a position reads, `[B, H, 1, K]`; -1 names no slot."""
        assert self.choice_BHSE is not None
        query_BH1E = self.pattern.choice_queries(qk)
        positions = slice(position, position + 1)
        return self.pattern.chosen_keys(query_BH1E, self.choice_BHSE, positions, position + 1)
