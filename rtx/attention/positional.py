"""Patterns that choose by position: full and local heads, their base classes, and their KV cache.

A pattern defines for each pair of positions whether the query reads the key (`sees`). For speed it
also describes the same pairs as lists (`position_lists`). Tests compare the two.

Example: `Local` with W = 3 has `since(i)` = i - 2. `ContiguousPattern` derives from it `sees(i, j)`
= (j >= i - 2), and one list of all positions, of which the query at i reads i - 2 to i. The cache
of a stream (`PositionCache`) has W = 3 slots, and position n is in slot n modulo 3: when position 7
is read, slot 1 gets its key and value in place of those of position 4, and the query at 7 reads all
three slots.

recurrent.py, sparse_transformer.py (strided and fixed heads) and adaptive_span.py (local heads that
learn their window) have more of these patterns.

Names from other files that this one uses:

    Pattern           the base class: its forward pass, with or without padding, and the prompt
                      of a stream call `reads` and attend over the result (pattern.py)
    RangeReads        packed lists: a query reads a range of one list (reads.py has a picture)
    IndexReads        an index: the numbers of the keys that each query reads
    Documents         the documents that are packed into sequences, and positions in them
    cached_by_shape   calls a function, and caches the result for the same pattern and shapes
    attend_step       softmax attention of queries at one position, over some keys

Shapes: B sequences or streams, H heads, G key-value heads, N positions, D head size, K keys of a
query, S slots of a cache.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rtx.attention.arguments import check_positive
from rtx.attention.documents import Documents
from rtx.attention.engine.newest import attend_step
from rtx.attention.engine.softmax import LogitTerms, RelativeTables
from rtx.attention.grouped import as_heads, first_of_each, rotated_queries, vectors_in_slots
from rtx.attention.once import cached_by_shape
from rtx.attention.pairs import count_pairs
from rtx.attention.pattern import Cache, Pattern
from rtx.attention.reads import (
    IndexReads,
    MemberLists,
    QueriesKeys,
    RangeReads,
    Reads,
    Window,
    first_rows,
    mask_without_self,
    pack,
    ranges_between,
    without_self,
    without_self_inside,
)

FIRST_SLOTS = 256
"""The number of slots that a growing cache starts with; it doubles when they are full."""
PLAIN = (bool, int, float, str, type(None))
"""Types of attributes that may enter a cache key, see `PositionPattern.form_of_attributes`."""
FAR = 1 << 40
"""A position after all others."""
FIRST_OF_ALL = -FAR
"""A position before all others; those of a memory are negative."""


class PositionLists(NamedTuple):
    """Lists of positions: the query at n reads a range of the keys of list_HN[n].

    The range is the positions since_N[n] to until_N[n] - 1. Neither bound decreases from one query
    of a list to the next.
    """

    list_HN: Tensor
    """The list that the query of each position reads, `[N]` for all heads or `[H, N]`."""
    key_list_HN: Tensor
    """The list that contains the key of each position, `[N]` or `[H, N]`; -1: none."""
    since_N: Tensor
    until_N: Tensor

    def number_of_lists(self) -> int:
        """Return the number of lists of a head, one at least."""
        list_of_queries = self.list_HN.flatten()
        list_of_keys = self.key_list_HN.flatten()
        number = torch.cat([list_of_queries, list_of_keys])
        if not len(number):
            return 1
        return int(number.max()) + 1


RENAMED = {"spreads": "position_lists", "keeps": "cache_size"}
"""Former names of optional methods. A pattern of a user that still has one is refused: it would be
ignored, and the pattern would run, but slowly."""


class PositionPattern(Pattern):
    """A pattern that chooses by position alone, defined in three steps; the first is enough.

    1. `sees` defines which pairs of positions are read. Forward passes, gradients, padding,
       streams, the oracle and pictures follow from it. Once for each shape it is evaluated for all
       pairs, which takes N^2 memory for each head; an index of each query's keys stays in memory.
    2. `position_lists` describes the same pairs as lists, which are faster and linear in N.
    3. `cache_size` bounds the cache of a stream, which otherwise has all keys and values.
    """

    cache_size: int | None = None
    """How many of the last keys and values a stream keeps; None: all.

    A subclass that sets it guarantees i - j < cache_size for every key j that a query i reads.
    """
    reads_all_cached = False
    """Whether a stream reads all filled slots of its cache; with `attend_self` without a mask."""
    last_form: Hashable | None = None
    """The last result of `form`, for compiled graphs: torch 2.11 cannot trace through `vars`."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for former, name in RENAMED.items():
            if former in vars(cls):
                raise ValueError(f"{cls.__name__}.{former} is never called: rename it to {name}")

    @abstractmethod
    def sees(self, head: int, i: Tensor, j: Tensor) -> Tensor:
        """Return whether the query at i reads the key at j, for j <= i.

        i and j are tensors that broadcast; results for j > i are ignored, unless the pattern has
        causal=False.
        """

    def position_lists(self, position_N: Tensor, heads: int) -> list[PositionLists] | None:
        """Return the pairs of `sees` as lists, for some positions in any order.

        No pair of positions may be in two of the `PositionLists`. None: there are no lists, and
        `sees` is evaluated for all pairs.
        """
        return None

    def rule(self, qk: QueriesKeys, head: int, streaming: bool) -> Tensor:
        N = qk.q_BHND.shape[2]
        position_N = torch.arange(N, device=qk.q_BHND.device) - qk.memory
        mask_NN = self.pairs(head, position_N)
        return mask_NN[None]

    def pairs(self, head: int, position_N: Tensor) -> Tensor:
        """Return the mask of the pairs (query, key) by `sees`, `[N, N]`, bool."""
        i_N1 = position_N[:, None]
        is_seen_NN = self.sees(head, i_N1, position_N)
        if not self.causal:
            return is_seen_NN.expand(len(position_N), -1)
        is_past_NN = position_N <= i_N1
        return is_past_NN & is_seen_NN

    def reads(self, qk: QueriesKeys, streaming: bool) -> list[Reads]:
        B, H, N, _ = qk.q_BHND.shape
        documents = qk.documents
        if documents is None:
            shape = (B, H, N)
            return self.reads_of_shape(shape, qk.memory, qk.q_BHND.device)
        form = self.form()
        make = partial(self.reads_of_documents, documents, H)
        if form is None:
            return [*make()]
        key = (type(self), form, H)
        return [*documents.cached(key, make)]

    def reads_of_shape(
        self,
        shape: tuple[int, int, int],
        memory: int,
        device: torch.device,
    ) -> list[Reads]:
        """Return the result of `reads`, from the cache after the first call for a shape.

        Args:
            shape: B, H and N.
        """
        make = partial(self.make_reads, *shape, memory)
        form = self.form()
        if form is None:
            return [*make(device)]
        key = (type(self), form, *shape, memory)
        return [*cached_by_shape(key, device, make)]

    def pairs_of_head(self, length: int) -> float:
        """Return the number of pairs of head 0, counted."""
        return self.counted_pairs(length, memory=0)

    def counted_pairs(self, length: int, memory: int) -> float:
        """Return the number of pairs of head 0 whose queries are at N positions after a memory."""
        shape = (1, 1, memory + length)
        parts = self.reads_of_shape(shape, memory, torch.device("cpu"))
        return float(count_pairs(parts))

    def form(self) -> Hashable | None:
        """Return the *form*: what the result of `reads` depends on besides shapes.

        It is a part of the key by which results are cached. None: `reads` may depend on a tensor,
        so its results are not cached.
        """
        if torch.compiler.is_compiling() and self.last_form is not None:
            return self.last_form
        self.last_form = self.form_of_attributes()
        return self.last_form

    def form_of_attributes(self) -> Hashable | None:
        """Return the names and values of all attributes as the form.

        None if there are parameters or buffers, or if an attribute is not `PLAIN`.
        """
        for name, _ in self.named_parameters():
            # Sinks change weights, and not what is read.
            if name != "sink_H":
                return None
        if [*self.buffers()]:
            return None
        attributes: dict[str, Hashable] = {}
        for name, value in vars(self).items():
            if name.startswith("_") or name == "last_form":
                continue
            if not isinstance(value, PLAIN):
                return None
            attributes[name] = value
        return tuple(attributes.items())

    def make_reads(
        self,
        B: int,
        H: int,
        N: int,
        memory: int,
        device: torch.device,
    ) -> Sequence[Reads]:
        """Return the result of `reads` for B sequences and H heads.

        Args:
            N: the number of positions, the memory included.
        """
        position_N = torch.arange(-memory, N - memory, device=device)
        all_lists = self.position_lists(position_N, H)
        if all_lists is None:
            return [self.index_of_pairs(B, H, position_N)]
        parts = [packed_ranges(lists, B, H, memory) for lists in all_lists]
        if self.attend_self:
            return parts
        if not self.causal:
            return without_self_inside(parts, B * H * N)
        return without_self(parts, B * H * N)

    @property
    def bounds_documents(self) -> bool:  # type: ignore[override]
        """Whether there are lists, whose ranges documents can bound."""
        return type(self).position_lists is not PositionPattern.position_lists

    @torch.no_grad()
    def reads_of_documents(self, documents: Documents, H: int) -> list[RangeReads]:
        """Return the result of `reads` for H heads of sequences of several documents.

        Positions count from the start of each document, and its bounds are added to the ranges.
        """
        lists_of_sequences: list[list[PositionLists]] = []
        for position_N in documents.position_BN:
            lists = self.position_lists(position_N, H)
            assert lists is not None
            lists_of_sequences.append(lists)
        parts: list[RangeReads] = []
        # Each part has one `PositionLists` of every sequence.
        for lists_B in zip(*lists_of_sequences, strict=True):
            parts.append(packed_ranges_in_documents(lists_B, documents, H))
        B, N = documents.first_BN.shape
        if self.attend_self:
            return parts
        others = without_self(parts, B * H * N)
        return [part._replace(derived={}) for part in others]

    def index_of_pairs(self, B: int, H: int, position_N: Tensor) -> IndexReads:
        """Return the pairs of `sees`, which is evaluated for all of them, as an index."""
        N = len(position_N)
        device = position_N.device
        read_HNN = self.pairs_of_heads(H, position_N)
        most = 0
        if H * N:
            count_HN = read_HNN.sum(-1)
            most = int(count_HN.max())
        # The numbers of each query's keys, ascending; then N, if it reads fewer than the most.
        number_N = torch.arange(N, device=device)
        key_HNN = torch.where(read_HNN, number_N, N)
        key_HNK = key_HNN.topk(most, largest=False).values
        row_BHNK = first_rows(B, H, N, device) + key_HNK
        row_BHNK = torch.where(key_HNK < N, row_BHNK, -1)
        return IndexReads(row_BHNK.flatten(0, 2), N, both_sides=not self.causal)

    def pairs_of_heads(self, H: int, position_N: Tensor) -> Tensor:
        """Return the mask of what each head reads, `[H, N, N]`, bool."""
        masks = [self.pairs(head, position_N) for head in range(H)]
        if not masks:
            N = len(position_N)
            return torch.zeros(0, N, N, dtype=torch.bool, device=position_N.device)
        read_HNN = torch.stack(masks)
        if self.attend_self:
            return read_HNN
        position_N1 = position_N[:, None]
        is_self_NN = position_N == position_N1
        return mask_without_self(read_HNN, is_self_NN)

    def start(self, relative: RelativeTables | None = None) -> Cache:
        return PositionCache(self, relative, self.cache_size)


def packed_ranges(lists: PositionLists, B: int, H: int, memory: int) -> RangeReads:
    """Return lists of N positions as packed lists of rows.

    Args:
        memory: the number of positions of the memory, which come first.
    """
    N = len(lists.since_N)
    count = lists.number_of_lists()
    list_HN = lists.list_HN
    if memory:
        number_N = torch.arange(N, device=list_HN.device)
        list_HN = list_HN.masked_fill(number_N < memory, -1)
    key_list_BHN = lists.key_list_HN.expand(B, H, N)
    keys = pack(key_list_BHN, count)
    queries = keys
    if list_HN is not lists.key_list_HN:
        list_BHN = list_HN.expand(B, H, N)
        queries = pack(list_BHN, count)
    since_N = lists.since_N + memory
    until_N = lists.until_N + memory
    return ranges_between(queries, keys, N, since_N, until_N)


def packed_ranges_in_documents(
    lists_B: Sequence[PositionLists], documents: Documents, H: int
) -> RangeReads:
    """Return lists of the positions in documents as packed lists of rows, bounded by documents.

    A list may contain positions of several documents.

    Args:
        lists_B: the lists of each sequence, whose positions are those in its documents.
    """
    B, N = documents.first_BN.shape
    count = max(lists.number_of_lists() for lists in lists_B)
    shares_lists = all(lists.list_HN is lists.key_list_HN for lists in lists_B)
    keys = pack_sequences([lists.key_list_HN for lists in lists_B], H, count)
    queries = keys
    if not shares_lists:
        queries = pack_sequences([lists.list_HN for lists in lists_B], H, count)
    since_BN = torch.stack([lists.since_N for lists in lists_B])
    until_BN = torch.stack([lists.until_N for lists in lists_B])
    # Before its document a query reads nothing, and it stops at its own position at the latest.
    since_BN = documents.first_BN + since_BN.clamp(min=0)
    until_BN = documents.first_BN + until_BN
    since_BHN = since_BN[:, None].expand(B, H, N)
    until_BHN = until_BN[:, None].expand(B, H, N)
    part = ranges_between(queries, keys, N, since_BHN.flatten(), until_BHN.flatten())
    # All layers read the same lists, so engines store their tables in them.
    return part._replace(derived={})


def pack_sequences(lists: list[Tensor], H: int, count: int) -> MemberLists:
    """Return packed lists of several sequences, from the list of each position, `[N]` or `[H, N]`.

    Args:
        count: the number of lists of a head.
    """
    lists_of_heads = [list_HN.expand(H, -1) for list_HN in lists]
    return pack(torch.stack(lists_of_heads), count)


class ContiguousPattern(PositionPattern):
    """A pattern in which the query at i reads all keys from `since(i)` to `until(i)` - 1.

    `until(i)` is i + 1, except with causal=False.
    """

    takes_memory = True

    @abstractmethod
    def since(self, i: Tensor) -> Tensor:
        """Return the first position that the queries at `i` read; it never decreases as i grows.

        It may be negative.
        """

    def until(self, i: Tensor) -> Tensor:
        """Return the position before which the queries at `i` stop reading; it never decreases."""
        return i + 1

    def sees(self, head: int, i: Tensor, j: Tensor) -> Tensor:
        is_from_first = j >= self.since(i)
        is_before_end = j < self.until(i)
        return is_from_first & is_before_end

    def position_lists(self, position_N: Tensor, heads: int) -> list[PositionLists]:
        list_N = torch.zeros_like(position_N)
        since_N = self.since(position_N)
        until_N = self.until(position_N)
        return [PositionLists(list_N, list_N, since_N, until_N)]

    def make_reads(
        self,
        B: int,
        H: int,
        N: int,
        memory: int,
        device: torch.device,
    ) -> Sequence[Reads]:
        parts = super().make_reads(B, H, N, memory, device)
        # `most` and `window` are set for one part with causal ranges up to the query itself. `most`
        # is read from a tensor. On a GPU the CPU would wait for it, so there it is not set.
        if device.type != "cpu" or not self.causal:
            return parts
        if not self.attend_self or len(parts) > 1 or memory >= N:
            return parts
        (part,) = parts
        assert isinstance(part, RangeReads)
        count_P = part.stop_P - part.start_P
        most = 0
        if len(count_P):
            most = int(count_P.max())
        part = part._replace(most=most)
        has_one_list = len(part.query.count_L) == B * H
        if has_one_list and self.is_window(most, memory, N - memory):
            part = part._replace(window=Window(N, most, memory))
        return [part]

    def is_window(self, keys: int, memory: int, length: int) -> bool:
        """Return whether `length` positions after a memory each read the last `keys` positions."""
        position_N = torch.arange(length)
        first_N = self.since(position_N)
        first_N = first_N.clamp(min=-memory)
        read_N = position_N + 1 - first_N
        readable_N = position_N + 1 + memory
        window_N = readable_N.clamp(max=keys)
        return torch.equal(read_N, window_N)


class Full(ContiguousPattern):
    """Every position reads all positions up to itself (Vaswani et al. 2017, section 3.2).

    Cost N^2 / 2. Memory is linear in N, with two exceptions in PyTorch's kernels: tables by
    distance, and dropout on a CPU, copy keys and values N / 1024 times; without `attend_self` there
    is a mask of N^2 for all heads.
    """

    reads_all_cached = True
    may_be_bidirectional = True
    takes_other_keys = True

    def since(self, i: Tensor) -> Tensor:
        return torch.full_like(i, FIRST_OF_ALL)

    def until(self, i: Tensor) -> Tensor:
        if self.causal:
            return super().until(i)
        return torch.full_like(i, FAR)

    def rule(self, qk: QueriesKeys, head: int, streaming: bool) -> Tensor:
        if self.causal:
            return super().rule(qk, head, streaming)
        queries = qk.q_BHND.shape[2]
        keys = qk.k_BHND.shape[2]
        return qk.q_BHND.new_ones(1, queries, keys, dtype=torch.bool)

    def reads(self, qk: QueriesKeys, streaming: bool) -> list[Reads]:
        if qk.counts is None:
            return super().reads(qk, streaming)
        queries, keys = qk.counts
        B, H, N, _ = qk.q_BHND.shape
        position_N = torch.arange(N, device=qk.q_BHND.device)
        lists = PositionLists(
            list_HN=torch.where(position_N < queries, 0, -1),
            key_list_HN=torch.where(position_N < keys, 0, -1),
            since_N=torch.zeros_like(position_N),
            until_N=torch.full_like(position_N, N),
        )
        return [packed_ranges(lists, B, H, memory=0)]


class Local(ContiguousPattern):
    """Position i reads i - W < j <= i: the last W = `window` positions, itself included.

    Padding is removed first, so these are the last W real positions. A stream reads the same, and
    its cache has the last W keys and values. With causal=False position i reads W positions around
    it, W // 2 of them before it.
    """

    reads_all_cached = True
    may_be_bidirectional = True

    def __init__(self, *, window: int, **options: Any) -> None:
        super().__init__(**options)
        check_positive(window=window)
        self.window = window
        self.cache_size = window

    def since(self, i: Tensor) -> Tensor:
        if self.causal:
            return i + 1 - self.window
        return i - self.window // 2

    def until(self, i: Tensor) -> Tensor:
        if self.causal:
            return super().until(i)
        return self.since(i) + self.window


class RowCache(Cache):
    """Keys and values of each stream by position: position n is in slot n modulo their number.

    Keys are stored after rotation, in the type of the values, once for each key-value head.

    Args:
        terms: takes the head size, and returns the terms of logits besides queries and keys.
        ring: a fixed number of slots, which later positions overwrite; None: the cache grows.
        copies: how many successive heads of `qk` have the same keys (`Pattern.key_copies`). These
            are stored once.
    """

    def __init__(
        self,
        terms: Callable[[int], LogitTerms],
        ring: int | None = None,
        copies: int = 1,
    ) -> None:
        self.terms = terms
        self.ring = ring
        self.copies = copies
        self.key_BGSD: Tensor | None = None
        self.value_BGSD: Tensor | None = None

    def prefill(
        self,
        qk: QueriesKeys,
        v_BGND: Tensor,
        parts: list[Reads] | None = None,
    ) -> None:
        self.put(qk, v_BGND, 0)

    def put(self, qk: QueriesKeys, v_BGND: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Store positions from `first` on, and return the keys and values of all slots."""
        k_BGND = first_of_each(qk.rotated_k_BHND, self.copies).to(v_BGND.dtype)
        self.key_BGSD = stored(self.key_BGSD, k_BGND, first, self.ring)
        self.value_BGSD = stored(self.value_BGSD, v_BGND, first, self.ring)
        return self.key_BGSD, self.value_BGSD

    def attend_newest(
        self,
        qk: QueriesKeys,
        k_BGKD: Tensor,
        v_BGKD: Tensor,
        mask_BH1K: Tensor | None,
        distance_BH1K: Tensor,
    ) -> Tensor:
        """Return the outputs of all query heads at the newest position, over K keys.

        `attend_step` explains the arguments.
        """
        terms = self.terms(qk.q_BHND.shape[-1])
        q_BHQD = rotated_queries(qk).to(v_BGKD.dtype)
        out_BHQD = attend_step(q_BHQD, k_BGKD, v_BGKD, mask_BH1K, distance_BH1K, terms)
        return as_heads(out_BHQD)


class PositionCache(RowCache):
    """The KV cache of a stream whose pattern chooses by position.

    It has the last `cache_size` keys and values, or all if that is None. If the pattern
    `reads_all_cached`, the newest position reads all slots that are filled; otherwise those of the
    positions that `position_lists` or `sees` name (`slots_read`).
    """

    def __init__(
        self,
        pattern: PositionPattern,
        relative: RelativeTables | None = None,
        ring: int | None = None,
    ) -> None:
        terms = partial(pattern.terms, relative=relative)
        super().__init__(terms, ring, pattern.key_copies)
        self.pattern = pattern

    def decode(self, qk: QueriesKeys, v_BG1D: Tensor, position: int) -> Tensor:
        k_BGSD, v_BGSD = self.put(qk, v_BG1D, position)
        H = qk.q_BHND.shape[1]
        slots = k_BGSD.shape[2]
        filled = min(slots, position + 1)
        k_BGSD = k_BGSD[:, :, :filled]
        v_BGSD = v_BGSD[:, :, :filled]
        slot_S = torch.arange(filled, device=k_BGSD.device)
        distance_S = (position - slot_S) % slots
        distance_111S = distance_S[None, None, None]
        if self.pattern.reads_all_cached and self.pattern.attend_self:
            return self.attend_newest(qk, k_BGSD, v_BGSD, None, distance_111S)
        position_S = position - distance_S
        read_HS = self.slots_read(position_S, position % slots, H)
        if self.ring is None and has_equal_counts(read_HS):
            return self.attend_copies(qk, k_BGSD, v_BGSD, read_HS, distance_S)
        read_1H1S = read_HS[None, :, None]
        return self.attend_newest(qk, k_BGSD, v_BGSD, read_1H1S, distance_111S)

    def attend_copies(
        self,
        qk: QueriesKeys,
        k_BGSD: Tensor,
        v_BGSD: Tensor,
        read_HS: Tensor,
        distance_S: Tensor,
    ) -> Tensor:
        """Return the outputs of the newest position, over copies of the slots that it reads.

        That is faster if most slots are not read, as in strided heads.

        Args:
            read_HS: the slots that each head reads, as many for each.
            distance_S: the distance of the newest position from that of each slot.
        """
        H = len(read_HS)
        slot_HK = read_HS.nonzero()[:, 1].view(H, -1)
        slot_1HK1 = slot_HK[None, :, :, None]
        k_BHKD = vectors_in_slots(k_BGSD, slot_1HK1)
        v_BHKD = vectors_in_slots(v_BGSD, slot_1HK1)
        distance_HK = distance_S[slot_HK]
        distance_1H1K = distance_HK[None, :, None]
        return self.attend_newest(qk, k_BHKD, v_BHKD, None, distance_1H1K)

    def slots_read(self, position_S: Tensor, slot: int, heads: int) -> Tensor:
        """Return which slots the newest position reads, `[H, S]`, bool.

        Args:
            position_S: the positions in the slots.
            slot: the slot of the newest position.
        """
        pattern = self.pattern
        read_HS = torch.zeros_like(position_S, dtype=torch.bool).repeat(heads, 1)
        all_lists = pattern.position_lists(position_S, heads)
        if all_lists is None:
            for head in range(heads):
                read_HS[head] = pattern.sees(head, position_S[slot], position_S)
        else:
            for lists in all_lists:
                is_from_S = position_S >= lists.since_N[slot]
                is_until_S = position_S < lists.until_N[slot]
                list_H1 = lists.list_HN[..., slot, None]
                is_in_list_HS = lists.key_list_HN == list_H1
                read_HS |= is_in_list_HS & is_from_S & is_until_S
        if pattern.attend_self:
            return read_HS
        return mask_without_self(read_HS, position_S == position_S[slot])


def has_equal_counts(read_HS: Tensor) -> bool:
    """Return whether all heads read the same number of slots; False without heads."""
    count_H = read_HS.sum(-1)
    if not len(count_H):
        return False
    is_equal_H = count_H == count_H[0]
    return bool(is_equal_H.all())


def stored(x_BGSD: Tensor | None, new_BGND: Tensor, first: int, ring: int | None = None) -> Tensor:
    """Return the slots with the vectors of the positions from `first` on written into them.

    Slots are changed in place if there are enough; otherwise the result has more.

    Args:
        x_BGSD: the slots; None: none yet.
        ring: a fixed number of slots; None: at least as many as there are positions.
    """
    B, G, N, D = new_BGND.shape
    if x_BGSD is None:
        slots = ring or max(FIRST_SLOTS, N)
        x_BGSD = new_BGND.new_zeros(B, G, slots, D)
    slots = x_BGSD.shape[2]
    missing = first + N - slots
    if not ring and missing > 0:
        added = max(missing, slots)
        x_BGSD = F.pad(x_BGSD, (0, 0, 0, added))
        slots += added
    if N == 1:
        slot = first % slots
        x_BGSD[:, :, slot] = new_BGND[:, :, 0]
        return x_BGSD
    # If there are more positions than slots, only the last ones remain.
    skipped = max(0, N - slots)
    last_BGND = new_BGND[:, :, skipped:]
    position_N = torch.arange(first + skipped, first + N, device=x_BGSD.device)
    slot_N = position_N % slots
    return x_BGSD.index_copy_(2, slot_N, last_BGND)
