"""Selections in which every query chooses keys of its own by content, strictly causal: exact, by an indexer, by blocks.

Shapes: B sequences, H heads, N positions, D head size, K keys of a query, E width of what a choice reads, Q queries of
a piece, G blocks of b positions.
"""

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rtx.attention import oracle
from rtx.attention.arguments import check_positive, check_seed, check_within
from rtx.attention.cache import Cache, RowCache, place
from rtx.attention.engine.softmax import LogitTerms, RelativeTables, recomputed
from rtx.attention.members import MAX_SCORES, normalise_twice, products
from rtx.attention.pattern import Pattern, Prepared
from rtx.attention.reads import IndexReads, MemberLists, QueriesKeys, Reads, members_read
from rtx.attention.static import is_static, selection_functions
from rtx.attention.ties import best_places, tie_margin


class TopKeys(Pattern):
    """H heads whose queries each choose at most `window` keys of the prefix.

    Subclasses say what the choice reads, and override `best` where products of these are not the scores of keys.

    Args:
        window: W.
        qk_norm: normalise queries and keys (LayerNorm without scale or bias), as heads with clusters of both do.
    """

    def __init__(self, *, window: int, qk_norm: bool = False, **options: Any) -> None:
        super().__init__(**options)
        check_positive(window=window)
        self.window = window
        self.qk_norm = qk_norm

    def prepare(self, q_BHND: Tensor, k_BHND: Tensor | None) -> Prepared:
        given = super().prepare(q_BHND, k_BHND)
        if not self.qk_norm:
            return given
        wide_q_BHND, narrow_q_BHND = normalise_twice(given.q_BHND, self.backend)
        wide_k_BHND, narrow_k_BHND = normalise_twice(given.k_BHND, self.backend)
        return Prepared(wide_q_BHND, wide_k_BHND, narrow_q_BHND, narrow_k_BHND)

    @property
    def has_index(self) -> bool:
        """Whether `reads` returns an index, and no lists."""
        return True

    def choice_queries(self, qk: QueriesKeys) -> Tensor:
        """Return what the choice reads of the queries, `[B, H, N, E]`."""
        return qk.rotated_q_BHND

    def choice_keys(self, qk: QueriesKeys) -> Tensor:
        """Return what the choice reads of the keys, `[B, H, N, E]`."""
        return qk.rotated_k_BHND

    def best(self, query_BHQE: Tensor, key_BHNE: Tensor, positions: range) -> Tensor:
        """Return the positions `[B, H, Q, K]` that queries at some positions read, -1 for none.

        The keys are those of positions 0, 1, ...; keys behind a query are not read.
        """
        key_BHNE = key_BHNE[:, :, : positions.stop]
        N = key_BHNE.shape[2]
        last_Q1 = self.last(tensor_of(positions, key_BHNE.device))
        hidden_QN = torch.arange(N, device=key_BHNE.device) > last_Q1
        score_BHQN = products(query_BHQE, key_BHNE).masked_fill_(hidden_QN, -math.inf)
        at = self.best_of(score_BHQN, query_BHQE, key_BHNE, self.most_keys(N))
        return at.masked_fill(at > last_Q1, -1)

    def margins(self, query: Tensor, key: Tensor) -> Tensor:
        """Return how far apart scores with equals of keys may come out; the vectors broadcast but for their last E."""
        wide = torch.promote_types(key.dtype, torch.float32)
        norm, other = (x.to(wide).norm(dim=-1) for x in (query, key))
        return tie_margin(norm, other, wide)

    def best_of(self, score_BHQN: Tensor, query_BHQE: Tensor, key_BHNE: Tensor, count: int) -> Tensor:
        """Return the `count` best places `[B, H, Q, K]` by the scores of queries and keys."""

        def margin(place_BHQ1: Tensor) -> Tensor:
            return self.margins(query_BHQE, key_BHNE.take_along_dim(place_BHQ1, dim=2))[..., None]

        if is_static(score_BHQN, self.backend):
            return selection_functions(score_BHQN, self.backend).best_places(score_BHQN, count, margin)
        return best_places(score_BHQN, count, margin)

    def last(self, position_Q: Tensor) -> Tensor:
        """Return the last position that queries at some positions may read, `[Q, 1]`; the first has only itself."""
        return (position_Q if self.attend_self else (position_Q - 1).clamp(min=0))[:, None]

    def split(self, qk: QueriesKeys, keys: int) -> list[range]:
        """Return the positions in pieces whose scores of that many keys are held at once."""
        B, H, N, _ = qk.q_BHND.shape
        size = max(1, MAX_SCORES // max(1, B * H * keys))
        return [range(first, min(N, first + size)) for first in range(0, N, size)]

    def reads(self, qk: QueriesKeys, streaming: bool) -> list[Reads]:
        B, H, N, _ = qk.q_BHND.shape
        queries, keys = self.choice_queries(qk), self.choice_keys(qk)
        first_BH11 = torch.arange(B * H, device=qk.q_BHND.device).view(B, H, 1, 1) * N
        index_BHNK = torch.full((B, H, N, self.most_keys(N)), -1, device=qk.q_BHND.device)
        # Places are wider than scores, and there several times while they are made.
        for positions in self.split(qk, keys.shape[2] + 8 * self.most_keys(N)):
            some = slice(positions.start, positions.stop)
            at_BHQK = self.best(queries[:, :, some].contiguous(), keys, positions)
            rows_BHQK = (at_BHQK + first_BH11).masked_fill(at_BHQK < 0, -1)
            index_BHNK[:, :, some, : at_BHQK.shape[-1]] = rows_BHQK
        return [IndexReads(index_BHNK.flatten(0, 2), N)]

    def most_keys(self, length: int) -> int:
        """Return how many keys a query reads at the most."""
        return min(self.window, length)

    def rule(self, qk: QueriesKeys, head: int, streaming: bool) -> Tensor:
        query_NE, key_NE = self.choice_queries(qk)[0, head], self.choice_keys(qk)[0, head]
        margin_NN = self.margins(query_NE[:, None], key_NE)
        return oracle.best_keys(query_NE @ key_NE.T, margin_NN, self.most_keys(len(key_NE)), self.attend_self)

    def start(self, relative: RelativeTables | None = None) -> Cache:
        return GrowingCache(self, relative)


def tensor_of(positions: range, device: torch.device) -> Tensor:
    """Return the positions as a tensor."""
    return torch.arange(positions.start, positions.stop, device=device)


class Exact(TopKeys):
    """Each query reads its `window` best keys of the prefix by q k^T: the ceiling of every selection, O(N^2) in scores.

    The scores are the attention's own logits (Shaw's terms left out), held for some queries at a time.
    """


class Indexer(TopKeys):
    """A small indexer for each head chooses `window` past keys (DeepSeek sparse attention, without its gates).

    Scores are products of `units` numbers of the query and of the key, by matrices of their own. They learn by the
    Kullback-Leibler divergence to the head's attention, with queries and keys detached: over the whole prefix for the
    first `warmup` steps (`after_step` counts them), in which the head reads everything, then over the keys that are
    chosen. O(N^2) in scores.

    Args:
        heads, size: H and D.
        units: of the indexer.
        warmup: training steps for which the head is dense.
    """

    def __init__(self, heads: int, size: int, *, units: int = 16, warmup: int = 0, **options: Any) -> None:
        super().__init__(**options)
        check_positive(size=size, units=units)
        check_positive(0, heads=heads, warmup=warmup)
        self.heads, self.size, self.warmup = heads, size, warmup
        self.query_HDE, self.key_HDE = (nn.Parameter(torch.randn(heads, size, units) * size**-0.5) for _ in range(2))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.steps: Tensor
        self.step_count: int | None = 0
        """The number in `steps`, without a wait for the device; None until it has been read from there."""
        self.register_load_state_dict_post_hook(Indexer.forget_step_count)
        self.chosen: Tensor | None = None
        """Rows of the keys that `reads` chose in training, `[B, H, N, K]`, until `loss` has taken them."""

    def choice_queries(self, qk: QueriesKeys) -> Tensor:
        scaled_HDE = self.query_HDE * self.query_HDE.shape[-1] ** -0.5
        return qk.q_BHND.detach() @ scaled_HDE.to(qk.q_BHND.dtype)

    def choice_keys(self, qk: QueriesKeys) -> Tensor:
        return qk.k_BHND.detach() @ self.key_HDE.to(qk.k_BHND.dtype)

    def after_step(self) -> None:
        """Count the step."""
        self.set_steps(self.steps_taken() + 1)

    def set_steps(self, count: int) -> None:
        """Say how many training steps have been taken."""
        self.steps.fill_(count)
        self.step_count = count

    def steps_taken(self) -> int:
        """Return how many training steps have been taken; the CPU waits for that once, after a checkpoint is loaded."""
        if self.step_count is None:
            self.step_count = int(self.steps)
        return self.step_count

    def forget_step_count(self, _: object) -> None:
        """Read the count anew, as a checkpoint has brought another."""
        self.step_count = None

    @property
    def dense(self) -> bool:
        """Whether the head still reads every earlier position."""
        return self.steps_taken() < self.warmup

    @property
    def has_index(self) -> bool:
        return not self.dense

    def most_keys(self, length: int) -> int:
        return length if self.dense else min(self.window, length)

    def reads(self, qk: QueriesKeys, streaming: bool) -> list[Reads]:
        """See `Pattern.reads`; dense heads read one list, as an index would hold N^2 numbers."""
        B, H, N, _ = qk.q_BHND.shape
        self.chosen = None
        if not self.dense:
            (part,) = super().reads(qk, streaming)
            assert isinstance(part, IndexReads)
            self.chosen = part.index_RK.unflatten(0, (B, H, N)) if self.training else None
            return [part]
        row_M = torch.arange(B * H * N, device=qk.q_BHND.device)
        lists = MemberLists(row_M, row_M.new_full((B * H,), N))
        return [members_read(lists, lists, N, N, self.attend_self)]

    def loss(self, qk: QueriesKeys) -> Tensor:
        """Return the mean divergence over all positions in training, over the keys that `reads` chose."""
        if not self.training or not qk.q_BHND.numel():
            return super().loss(qk)
        chosen_BHNK, self.chosen = self.chosen, None
        assert chosen_BHNK is not None or self.dense, "the loss is of the keys that `reads` has chosen"
        (B, H, N, D), wide = qk.q_BHND.shape, torch.promote_types(qk.q_BHND.dtype, torch.float32)
        query_BHNE, scale = self.choice_queries(qk), self.terms(D, None).scale

        def divergence(positions: range, query_BHQE: Tensor, *every: Tensor) -> Tensor:
            """Return the sum of KL(attention || softmax of the scores) of some queries."""
            key_BHNE, q_BHND, k_BHND, *chosen = every
            some, stop = slice(positions.start, positions.stop), positions.stop
            score = query_BHQE @ key_BHNE[:, :, :stop].mT
            logit = q_BHND[:, :, some].contiguous() @ k_BHND[:, :, :stop].mT
            last_Q1 = self.last(tensor_of(positions, score.device))
            none = torch.arange(stop, device=score.device) > last_Q1
            for chosen_BHNK in chosen:
                row_BHQK = chosen_BHNK[:, :, some]
                none = row_BHQK < 0
                at_BHQK = (row_BHQK % N).masked_fill(none, 0)
                score = score.gather(-1, at_BHQK)
                logit = logit.gather(-1, at_BHQK)
            score = score.to(wide).masked_fill(none, -1e9).log_softmax(-1)
            logit = (logit * scale).to(wide).masked_fill(none, -1e9).log_softmax(-1)
            return F.kl_div(score, logit, reduction="sum", log_target=True)

        # Scores and logits of all keys are held at once, and some copies of those that count.
        positions = self.split(qk, 4 * N if chosen_BHNK is None else 2 * N + 8 * chosen_BHNK.shape[-1])
        pairs = zip(positions, query_BHNE.split(len(positions[0]), dim=2), strict=True)
        every = self.choice_keys(qk), qk.rotated_q_BHND.detach(), qk.rotated_k_BHND.detach()
        every += () if chosen_BHNK is None else (chosen_BHNK,)
        return torch.stack([recomputed(divergence, *pair, *every) for pair in pairs]).sum() / (B * H * N)


class Blocks(TopKeys):
    """Each query reads its own block up to itself, and the `window` / `block` best finished blocks (MoBA, NSA).

    A block's score is the product of the unturned query with the mean of its unturned keys, so that the queries and
    keys that attend also choose (Lu et al. 2025). Every position behind the first `window` reads as many keys, but for
    its place in its own block. Scores cost N^2 / block.

    Args:
        heads, size: H and D.
        block: b.
        compressed: attend over the means of keys and values of finished blocks, too, and join the two outputs by gates
            learned from the query, which trains the choice by gradients (Yuan et al. 2025, the compressed branch).
    """

    def __init__(self, heads: int, size: int, *, block: int = 16, compressed: bool = False, **options: Any) -> None:
        super().__init__(**options)
        check_positive(0, heads=heads)
        check_positive(size=size)
        check_within("block", block, self.window, "window")
        self.heads, self.size, self.block, self.count = heads, size, block, self.window // block
        self.gate_H2D = nn.Parameter(torch.zeros(heads, 2, size)) if compressed else None

    def means(self, x_BHND: Tensor) -> Tensor:
        """Return the mean of every finished block, `[B, H, G, D]`."""
        finished = x_BHND.shape[2] // self.block
        return x_BHND[:, :, : finished * self.block].unflatten(2, (finished, self.block)).mean(3)

    def scores(self, q_BHQD: Tensor, mean_BHGD: Tensor, position_Q: Tensor) -> Tensor:
        """Return the scores of blocks, `[B, H, Q, G]`; -inf for those that are not finished."""
        own_Q1, block_G = position_Q[:, None] // self.block, torch.arange(mean_BHGD.shape[2], device=position_Q.device)
        return products(q_BHQD, mean_BHGD).masked_fill(block_G >= own_Q1, -math.inf)

    def choice_queries(self, qk: QueriesKeys) -> Tensor:
        return qk.q_BHND

    def choice_keys(self, qk: QueriesKeys) -> Tensor:
        """Return the means of finished blocks."""
        return self.means(qk.k_BHND)

    def best(self, query_BHQE: Tensor, key_BHNE: Tensor, positions: range) -> Tensor:
        """See `TopKeys.best`: the positions of the best finished blocks and of the own block."""
        position_Q = tensor_of(positions, key_BHNE.device)
        score_BHQG = self.scores(query_BHQE, key_BHNE, position_Q)
        own_Q1, slot_b = position_Q[:, None] // self.block, torch.arange(self.block, device=position_Q.device)
        at = self.best_of(score_BHQG, query_BHQE, key_BHNE, self.count)
        chosen = (at[..., None] * self.block + slot_b).flatten(-2)
        every = torch.cat([chosen, (own_Q1 * self.block + slot_b).expand(*chosen.shape[:2], -1, -1)], dim=-1)
        # Where all finished blocks are among the best, everything up to the position is read.
        every = torch.where(own_Q1 <= self.count, torch.arange(every.shape[-1], device=every.device), every)
        return every.masked_fill(every > self.last(position_Q), -1)

    def most_keys(self, length: int) -> int:
        return min(self.count, length // self.block) * self.block + self.block

    def attend(self, qk: QueriesKeys, v_BHND: Tensor, parts: list[Reads], relative: RelativeTables | None) -> Tensor:
        out_BHND = super().attend(qk, v_BHND, parts, relative)
        if self.gate_H2D is None:
            return out_BHND
        means = self.means(qk.k_BHND), self.means(v_BHND)
        pieces = []
        for positions in self.split(qk, means[0].shape[2]):
            some = slice(positions.start, positions.stop)
            q_BHQD = qk.q_BHND[:, :, some].contiguous()
            out_BHQD = out_BHND[:, :, some].contiguous()
            position_Q = tensor_of(positions, q_BHQD.device)
            pieces.append(recomputed(self.gated, q_BHQD, out_BHQD, *means, position_Q))
        return torch.cat(pieces, dim=2) if pieces else out_BHND

    def gated(self, q_BHQD: Tensor, out_BHQD: Tensor, mean_k: Tensor, mean_v: Tensor, position_Q: Tensor) -> Tensor:
        """Return outputs joined, by gates of the query, with softmax attention over the means of finished blocks."""
        assert self.gate_H2D is not None
        q_BHQD, mean_k = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q_BHQD, mean_k))
        score_BHQG = self.scores(q_BHQD, mean_k, position_Q) * self.terms(q_BHQD.shape[-1], None).scale
        none_Q1 = (position_Q < self.block)[:, None]
        weight_BHQG = score_BHQG.masked_fill(none_Q1, 0.0).softmax(-1).masked_fill(none_Q1, 0.0)
        gate_BHQ2 = (q_BHQD @ self.gate_H2D.to(q_BHQD.dtype).mT).sigmoid().to(out_BHQD.dtype)
        return gate_BHQ2[..., :1] * out_BHQD + gate_BHQ2[..., 1:] * (weight_BHQG.to(mean_v.dtype) @ mean_v)

    def rule(self, qk: QueriesKeys, head: int, streaming: bool) -> Tensor:
        """See `Pattern.rule`; of the branch that selects (`finish_by_rule` adds the other)."""
        position_N = torch.arange(qk.q_BHND.shape[2], device=qk.q_BHND.device)
        mean_BHGD = self.means(qk.k_BHND)
        score_NG = self.scores(qk.q_BHND, mean_BHGD, position_N)[0, head]
        margin_NG = self.margins(qk.q_BHND[0, head][:, None], mean_BHGD[0, head])
        return oracle.best_blocks(score_NG, margin_NG, self.block, self.count, self.attend_self)

    def finish_by_rule(
        self,
        out_ND: Tensor,
        qk: QueriesKeys,
        v_ND: Tensor,
        head: int,
        terms: LogitTerms,
    ) -> Tensor:
        """Return the outputs combined, by gates, with attention over the means of finished blocks.

        A query that finds no finished block gets zero from that branch.
        """
        if self.gate_H2D is None:
            return out_ND
        outs = []
        for i, q_D in enumerate(qk.q_BHND[0, head]):
            finished = i // self.block
            stop = finished * self.block
            other_D = torch.zeros_like(v_ND[0])
            if finished:
                mean_k_GD = qk.k_BHND[0, head, :stop].unflatten(0, (finished, self.block)).mean(1)
                mean_v_GD = v_ND[:stop].unflatten(0, (finished, self.block)).mean(1)
                weight_G = (terms.scale * (mean_k_GD @ q_D)).softmax(0)
                other_D = weight_G @ mean_v_GD
            gate_2 = (self.gate_H2D[head] @ q_D).sigmoid()
            outs.append(gate_2[0] * out_ND[i] + gate_2[1] * other_D)
        return torch.stack(outs)

    def start(self, relative: RelativeTables | None = None) -> Cache:
        return BlockCache(self, relative)


class RandomBlocks(Blocks):
    """The control of `Blocks`: as many blocks of the same sizes, drawn instead of chosen.

    What a query reads is a function of (seed, head, its position) alone.
    """

    def __init__(self, heads: int, size: int, *, seed: int, **options: Any) -> None:
        super().__init__(heads, size, **options)
        check_seed(seed)
        self.seed = seed

    def scores(self, q_BHQD: Tensor, mean_BHGD: Tensor, position_Q: Tensor) -> Tensor:
        """Return drawn numbers, by a hash of position, block, head and seed."""
        device = position_Q.device
        block_G = torch.arange(mean_BHGD.shape[2], device=device)
        head_H11 = torch.arange(q_BHQD.shape[1], device=device)[:, None, None]
        mixed_HQG = (
            position_Q[:, None] * 0x9E3779B1 + block_G * 0x85EBCA77 + head_H11 * 0xC2B2AE3D + self.seed * 0x27D4EB2F
        )
        for multiplier in (0x2C1B3C6D, 0x297A2D39):
            mixed_HQG = ((mixed_HQG ^ (mixed_HQG >> 15)) * multiplier) & 0xFFFFFFFF
        drawn_HQG = mixed_HQG.to(torch.float64).masked_fill(block_G >= position_Q[:, None] // self.block, -math.inf)
        return drawn_HQG.expand(len(q_BHQD), -1, -1, -1)

    def margins(self, query: Tensor, key: Tensor) -> Tensor:
        """Return zeros: what is drawn is not rounded."""
        return torch.zeros_like(super().margins(query, key))


class GrowingCache(RowCache):
    """Every key and value so far, for patterns whose queries choose among all of them by content."""

    choice_BHSE: Tensor | None = None
    """What the choice of keys reads of each earlier position."""

    def __init__(self, pattern: TopKeys, relative: RelativeTables | None = None) -> None:
        super().__init__(partial(pattern.terms, relative=relative))
        self.pattern = pattern

    def put(self, qk: QueriesKeys, v_BHND: Tensor, first: int) -> tuple[Tensor, Tensor]:
        self.choice_BHSE = place(self.choice_BHSE, self.pattern.choice_keys(qk), first)
        return super().put(qk, v_BHND, first)

    def decode(self, qk: QueriesKeys, v_BH1D: Tensor, position: int) -> Tensor:
        rows = self.put(qk, v_BH1D, position)
        assert self.choice_BHSE is not None
        queries = self.pattern.choice_queries(qk)
        slot_BH1K = self.pattern.best(queries, self.choice_BHSE, range(position, position + 1))
        k, v = (x.take_along_dim(slot_BH1K.mT.clamp(min=0), 2) for x in rows)
        return self.attend(qk, k, v, slot_BH1K >= 0, position - slot_BH1K)


class BlockCache(GrowingCache):
    """Every key and value so far, and the means of keys and values of finished blocks."""

    pattern: Blocks
    open_k: Tensor | None = None
    """The unturned keys of the block that is not finished."""
    mean_v: Tensor | None = None

    def put(self, qk: QueriesKeys, v_BHND: Tensor, first: int) -> tuple[Tensor, Tensor]:
        rows = RowCache.put(self, qk, v_BHND, first)
        b, end = self.pattern.block, first + v_BHND.shape[2]
        begin, stop = first // b, end // b
        k_BHND = qk.k_BHND if self.open_k is None else torch.cat([self.open_k, qk.k_BHND], dim=2)
        self.open_k = k_BHND[:, :, (stop - begin) * b :]
        self.choice_BHSE = place(self.choice_BHSE, self.pattern.means(k_BHND), begin)
        self.mean_v = place(self.mean_v, self.pattern.means(rows[1][:, :, begin * b : stop * b]), begin)
        return rows

    def decode(self, qk: QueriesKeys, v_BH1D: Tensor, position: int) -> Tensor:
        out_BH1D = super().decode(qk, v_BH1D, position)
        if self.pattern.gate_H2D is None:
            return out_BH1D
        assert self.choice_BHSE is not None and self.mean_v is not None
        position_1 = torch.tensor([position], device=v_BH1D.device)
        return self.pattern.gated(qk.q_BHND, out_BH1D, self.choice_BHSE, self.mean_v, position_1)
