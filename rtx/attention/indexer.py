"""The indexer: a small product of learned projections chooses the keys of each query (DeepSeek-AI
2025, DeepSeek-V3.2, arXiv 2512.02556, section 2.1, here for each head and without its gates).

With two matrices of shape `[D, E]`, learned for each head, the score of key j for query i is

    (q_i P_q) . (k_j P_k) / sqrt(E),

and the query reads the W keys, up to its position, with the largest scores. With causal=False it
chooses among all keys, also those of another sequence. The choice has no gradient, so P_q and P_k
learn by an auxiliary loss: the mean over all queries of

    KL(attention over the keys that are read || softmax of their scores),

with q and k detached. For the first `warmup` training steps the heads are dense: they read every
earlier key, and the loss is over all of these.

Shapes: B sequences, H heads, N positions, D head size, E width of the indexer, Q queries of a
piece, K keys of a query.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rtx.attention.arguments import check_positive
from rtx.attention.pairs import pairs_within
from rtx.attention.precision import widened
from rtx.attention.reads import (
    IndexReads,
    MemberLists,
    QueriesKeys,
    Reads,
    first_rows,
    members_around,
    members_read,
)
from rtx.attention.recompute import recomputed
from rtx.attention.top_keys import TopKeys, positions_in
from rtx.attention.typed_torch import register_load_state_dict_post_hook

WIDTH = 16
"""E, unless an argument says otherwise."""
UNREAD = -1e9
"""The logit of a key that is not read. With -inf, the gradient of a query without keys would be
NaN."""


class Indexer(TopKeys):
    """H heads whose queries read the W keys that an indexer scores highest; see the module.

    The scores take O(N^2) time.

    Args:
        heads, size: H and D.
        width: E.
        warmup: the number of training steps for which the heads are dense.

    Raises:
        ValueError: a size or E below 1, or heads or steps below 0.
    """

    may_be_bidirectional = True
    takes_other_keys = True

    def __init__(
        self,
        heads: int,
        size: int,
        *,
        width: int = WIDTH,
        warmup: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        check_positive(size=size, width=width)
        check_positive(0, heads=heads, warmup=warmup)
        self.heads = heads
        self.size = size
        self.warmup = warmup
        deviation = size**-0.5
        query_HDE = torch.randn(heads, size, width)
        key_HDE = torch.randn(heads, size, width)
        self.query_HDE = nn.Parameter(query_HDE * deviation)
        """P_q."""
        self.key_HDE = nn.Parameter(key_HDE * deviation)
        """P_k."""
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.steps: Tensor
        self.step_count: int | None = 0
        """The number in `steps`, so that the CPU need not wait for a GPU to learn it; None: not
        yet copied from there."""
        register_load_state_dict_post_hook(self, Indexer.forget_step_count)

    def vectors_by_rule(self, qk: QueriesKeys, head: int) -> tuple[Tensor, Tensor]:
        """Return q_i P_q / sqrt(E) and k_j P_k, one position after the other."""
        query_DE = self.query_HDE[head]
        key_DE = self.key_HDE[head]
        E = query_DE.shape[1]
        q_ND = qk.q_BHND[0, head]
        k_ND = qk.k_BHND[0, head]
        query_NE = q_ND.new_zeros(len(q_ND), E)
        key_NE = k_ND.new_zeros(len(k_ND), E)
        for i, q_D in enumerate(q_ND):
            query_E = query_DE.T @ q_D
            query_NE[i] = query_E / math.sqrt(E)
        for j, k_D in enumerate(k_ND):
            key_NE[j] = key_DE.T @ k_D
        return query_NE, key_NE

    def choice_queries(self, qk: QueriesKeys) -> Tensor:
        q_BHND = qk.q_BHND.detach()
        E = self.query_HDE.shape[-1]
        scaled_HDE = self.query_HDE * E**-0.5
        return q_BHND @ scaled_HDE.to(q_BHND.dtype)

    def choice_keys(self, qk: QueriesKeys) -> Tensor:
        k_BHND = qk.k_BHND.detach()
        return k_BHND @ self.key_HDE.to(k_BHND.dtype)

    def after_step(self) -> None:
        """Count the training step."""
        self.set_steps(self.steps_taken() + 1)

    def set_steps(self, count: int) -> None:
        """Set the number of training steps that were taken."""
        self.steps.fill_(count)
        self.step_count = count

    def steps_taken(self) -> int:
        """Return the number of training steps that were taken.

        The first call after a checkpoint was loaded waits for the device of `steps`.
        """
        if self.step_count is None:
            self.step_count = int(self.steps)
        return self.step_count

    def forget_step_count(self, _: object) -> None:
        """Let `steps_taken` read the number again, after a checkpoint was loaded."""
        self.step_count = None

    @property
    def is_dense(self) -> bool:
        """Whether the heads still read every earlier key."""
        return self.steps_taken() < self.warmup

    @property
    def has_index(self) -> bool:
        return not self.is_dense

    def max_keys(self, length: int) -> int:
        if self.is_dense:
            return length
        return min(self.window, length)

    def choice_operations(self, length: int, size: int) -> float:
        """Return the operations of the projections of queries and keys, and of all scores."""
        E = self.query_HDE.shape[-1]
        projections = 2 * size * length
        pairs = pairs_within(length, length, self.causal)
        return 2.0 * E * (pairs + projections)

    def reads(self, qk: QueriesKeys, streaming: bool) -> list[Reads]:
        if not self.is_dense:
            return super().reads(qk, streaming)
        # One list of all positions: an index would have N^2 entries for each head.
        N = qk.q_BHND.shape[2]
        query_count, key_count = qk.numbers()
        queries = first_positions(qk.q_BHND, query_count)
        keys = queries
        if key_count != query_count:
            keys = first_positions(qk.q_BHND, key_count)
        make_ranges = members_around
        if self.causal:
            make_ranges = members_read
        return [make_ranges(queries, keys, N, N, self.attend_self)]

    def loss(self, qk: QueriesKeys, parts: list[Reads]) -> Tensor:
        """Return the mean divergence over all queries in training, otherwise zero."""
        if not self.training or not qk.q_BHND.numel() or not all(qk.numbers()):
            return super().loss(qk, parts)
        B, H, N, _ = qk.q_BHND.shape
        queries, keys = qk.numbers()
        inputs = [
            self.choice_keys(qk)[:, :, :keys],
            qk.rotated_q_BHND.detach(),
            qk.rotated_k_BHND.detach()[:, :, :keys],
        ]
        # For each query its scores and logits of all keys are in memory at once, and some copies of
        # those of the keys that it reads.
        numbers_of_query = 4 * N
        (part,) = parts
        if isinstance(part, IndexReads):
            index_BHNK = torch.unflatten(part.index_RK, 0, (B, H, N))
            inputs.append(index_BHNK)
            K = index_BHNK.shape[-1]
            numbers_of_query = 2 * N + 8 * K
        pieces = self.query_pieces(qk, numbers_of_query)
        positions_of_piece = pieces[0].stop
        query_BHNE = self.choice_queries(qk)[:, :, :queries]
        queries_of_pieces = torch.split(query_BHNE, positions_of_piece, dim=2)
        sums: list[Tensor] = []
        for positions, query_BHQE in zip(pieces, queries_of_pieces, strict=True):
            divergence = recomputed(self.divergence, positions, query_BHQE, *inputs)
            sums.append(divergence)
        total = torch.stack(sums).sum()
        return total / (B * H * queries)

    def divergence(
        self,
        positions: slice,
        query_BHQE: Tensor,
        key_BHNE: Tensor,
        q_BHND: Tensor,
        k_BHND: Tensor,
        index_BHNK: Tensor | None = None,
    ) -> Tensor:
        """Return the sum of the divergences of the queries at some positions.

        Args:
            query_BHQE, key_BHNE: what the choice compares, of these queries and of all keys.
            q_BHND, k_BHND: what the attention compares, of all queries and keys.
            index_BHNK: the rows of the keys that each query reads; None: all that it may read.
        """
        stop = key_BHNE.shape[2]
        if self.causal:
            stop = positions.stop
        device = q_BHND.device
        q_BHQD = q_BHND[:, :, positions].contiguous()
        score_BHQK = query_BHQE @ key_BHNE[:, :, :stop].mT
        product_BHQK = q_BHQD @ k_BHND[:, :, :stop].mT
        if index_BHNK is None:
            position_Q1 = positions_in(positions, device)[:, None]
            position_K = torch.arange(stop, device=device)
            is_unread = self.are_unreadable(position_K, position_Q1, stop)
        else:
            row_BHQK = index_BHNK[:, :, positions]
            is_unread = row_BHQK < 0
            N = index_BHNK.shape[2]
            key_BHQK = (row_BHQK % N).masked_fill(is_unread, 0)
            score_BHQK = score_BHQK.gather(-1, key_BHQK)
            product_BHQK = product_BHQK.gather(-1, key_BHQK)
        D = q_BHND.shape[-1]
        scale = self.terms(D, None).scale
        return summed_divergence(score_BHQK, product_BHQK * scale, is_unread)


def first_positions(x_BHND: Tensor, count: int) -> MemberLists:
    """Return one list for each sequence and head: the rows of its first `count` positions."""
    B, H, N, _ = x_BHND.shape
    position_N = torch.arange(count, device=x_BHND.device)
    row_BH1N = first_rows(B, H, N, x_BHND.device).mT + position_N
    count_L = row_BH1N.new_full((B * H,), count)
    return MemberLists(row_BH1N.flatten(), count_L)


def summed_divergence(score: Tensor, logit: Tensor, is_unread: Tensor) -> Tensor:
    """Return the sum over all queries of KL(softmax(logit) || softmax(score)).

    Args:
        score, logit: `[..., K]`.
        is_unread: true for keys that both softmaxes exclude, in a shape that broadcasts.
    """
    score = widened(score).masked_fill(is_unread, UNREAD)
    logit = widened(logit).masked_fill(is_unread, UNREAD)
    return F.kl_div(
        input=score.log_softmax(-1),
        target=logit.log_softmax(-1),
        reduction="sum",
        log_target=True,
    )
