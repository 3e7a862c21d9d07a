"""The patterns that choose by position: who reads whom in full, local, recurrent, strided and fixed heads.

Each states its lists for the engine (`spreads`) and its rule for the oracle and pictures (`sees`), in one place.

Shapes: B sequences, H heads, N positions, D head size, K keys read, S slots of a cache.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rtx.attention.arguments import check_positive, check_within
from rtx.attention.cache import Cache, RowCache, mask_without_self
from rtx.attention.engine.softmax import RelativeTables
from rtx.attention.once import made_once
from rtx.attention.pattern import Pattern
from rtx.attention.reads import QueriesKeys, RangeReads, Reads, Window, bounded_read, pack, without_self

PLAIN = (bool, int, float, str, type(None))
"""Types of attributes that are compared by value."""


class PositionLists(NamedTuple):
    """Lists chosen by position: the query at n reads the keys of its list at positions since_N[n] to until_N[n] - 1."""

    list_HN: Tensor
    """The list that the query of each position reads, one for all heads or `[H, N]`."""
    key_list_HN: Tensor
    """The list that the key of each position stands in; -1: in none."""
    since_N: Tensor
    until_N: Tensor
    """Both never fall along a list."""


class PositionPattern(Pattern):
    """A pattern that chooses by position alone: it implements `spreads` and `sees`.

    It gets forward, gradients, padding, a stream's cache, the oracle and pictures from them.
    """

    keeps: int | None = None
    """Positions behind which a key is never read again, which bounds a stream's cache; None: never."""
    reads_all_kept = False
    """Whether every position reads all keys that a stream keeps, so that a step of it takes no mask."""

    @abstractmethod
    def spreads(self, position_N: Tensor, heads: int) -> list[PositionLists]:
        """Return who reads whom at some positions, in any order; the keys of several spreads differ for every query."""

    @abstractmethod
    def sees(self, head: int, i: Tensor, j: Tensor) -> Tensor:
        """Return whether the query at i reads the key at j, for j <= i (tensors that broadcast)."""

    def rule(self, qk: QueriesKeys, head: int, streaming: bool) -> Tensor:
        i = torch.arange(qk.q_BHND.shape[2], device=qk.q_BHND.device)[:, None] - qk.memory
        return ((i >= i.T) & self.sees(head, i, i.T))[None]

    def reads(self, qk: QueriesKeys, streaming: bool) -> list[Reads]:
        B, H, N, _ = qk.q_BHND.shape
        make = partial(self.make_reads, B, H, N, qk.memory)
        form = self.form()
        if form is None:
            return [*make(qk.q_BHND.device)]
        return [*made_once((type(self), form, B, H, N, qk.memory), qk.q_BHND.device, make)]

    known_form: Hashable | None = None
    """What `form` has returned last. A compiled graph takes it: torch 2.11 cannot trace through `vars`."""

    def form(self) -> Hashable | None:
        """Return what, beside shapes, decides who reads whom; None where a tensor of the pattern may have a say."""
        if torch.compiler.is_compiling() and self.known_form is not None:
            return self.known_form
        self.known_form = self.form_now()
        return self.known_form

    def form_now(self) -> Hashable | None:
        """Return what `form` does, from the attributes as they are."""
        if [*self.parameters()] or [*self.buffers()]:
            return None
        hidden = ("_", "known_form")
        attributes = {name: value for name, value in vars(self).items() if not name.startswith(hidden)}
        is_plain = all(isinstance(value, PLAIN) for value in attributes.values())
        return tuple(attributes.items()) if is_plain else None

    def make_reads(self, B: int, H: int, N: int, memory: int, device: torch.device) -> list[RangeReads]:
        """Return who reads whom in B sequences and H heads of N positions, a memory included."""
        position_N = torch.arange(-memory, N - memory, device=device)
        parts = []
        for spread in self.spreads(position_N, H):
            numbers = [spread.list_HN.flatten(), spread.key_list_HN.flatten()]
            lists = int(torch.cat(numbers).max()) + 1 if N else 1
            keys = pack(spread.key_list_HN.expand(B, H, N), lists)
            query_list_HN = spread.list_HN
            if memory:
                query_list_HN = torch.where(position_N < 0, -1, query_list_HN)
            queries = keys
            if query_list_HN is not spread.key_list_HN:
                queries = pack(query_list_HN.expand(B, H, N), lists)
            since_N, until_N = spread.since_N + memory, spread.until_N + memory
            parts.append(bounded_read(queries, keys, N, since_N, until_N))
        return parts if self.attend_self else without_self(parts, B * H * N)

    def start(self, relative: RelativeTables | None = None) -> Cache:
        return PositionCache(self, relative, self.keeps)


class ContiguousPattern(PositionPattern):
    """A pattern whose positions read all keys from one on, up to themselves: it implements `since`."""

    takes_memory = True

    @abstractmethod
    def since(self, i: Tensor) -> Tensor:
        """Return the first position that the queries at `i` read; it never falls as i grows. Below 0: the first."""

    def spreads(self, position_N: Tensor, heads: int) -> list[PositionLists]:
        one_N = torch.zeros_like(position_N)
        return [PositionLists(one_N, one_N, self.since(position_N), position_N + 1)]

    def make_reads(self, B: int, H: int, N: int, memory: int, device: torch.device) -> list[RangeReads]:
        parts = super().make_reads(B, H, N, memory, device)
        if device.type != "cpu" or not self.attend_self or len(parts) > 1 or memory >= N:
            return parts  # only a CPU tells what tensors hold without a wait
        read_P = parts[0].stop_P - parts[0].start_P
        most = int(read_P.max()) if len(read_P) else 0
        parts = [parts[0]._replace(most=most)]
        since_N = self.since(torch.arange(N - memory))
        keys_N = torch.arange(1, N - memory + 1) - since_N.clamp(min=-memory)
        reach_N = (torch.arange(1, N - memory + 1) + memory).clamp(max=most)
        if self.has_one_list(parts[0], B * H) and torch.equal(keys_N, reach_N):
            parts = [parts[0]._replace(window=Window(N, most, memory))]
        return parts

    def has_one_list(self, part: RangeReads, sequences: int) -> bool:
        """Tell whether every sequence of a head is one list."""
        return len(part.query.count_L) == sequences

    def sees(self, head: int, i: Tensor, j: Tensor) -> Tensor:
        return j >= self.since(i)


class Full(ContiguousPattern):
    """Every position reads every j <= i. Cost N^2, memory linear in N.

    By torch's kernels not quite: terms by distance and dropout on a CPU hold keys and values N / 1024 times, and
    without `attend_self` there is a mask of N^2 for all heads.
    """

    reads_all_kept = True

    def since(self, i: Tensor) -> Tensor:
        return torch.full_like(i, -(1 << 40))  # positions of a memory are below 0


class Local(ContiguousPattern):
    """Position i reads i - W < j <= i: exactly `window` keys with its own."""

    reads_all_kept = True

    def __init__(self, *, window: int, **options: Any) -> None:
        super().__init__(**options)
        check_positive(window=window)
        self.window = self.keeps = window

    def since(self, i: Tensor) -> Tensor:
        return i + 1 - self.window


class Recurrent(ContiguousPattern):
    """Position i reads its own segment of `length` positions up to itself, and `memory` positions before the segment.

    Transformer-XL (Dai et al. 2019, section 3.2). With `same_length` it reads `memory` keys, its own included, as the
    released code evaluates.
    """

    configured = ("same_length",)

    def __init__(self, *, length: int, memory: int, same_length: bool = False, **options: Any) -> None:
        super().__init__(**options)
        check_positive(length=length)
        check_positive(int(same_length), memory=memory)
        self.length, self.memory, self.same_length = length, memory, same_length
        self.keeps = memory if same_length else length + memory

    def since(self, i: Tensor) -> Tensor:
        return (i + 1 if self.same_length else i // self.length * self.length) - self.memory


class Strided(PositionPattern):
    """Position i reads i, i - stride, i - 2 stride, ...: for data with a period, such as rows of an image.

    Child et al. 2019. Cost N^2 / stride.
    """

    def __init__(self, *, stride: int, **options: Any) -> None:
        super().__init__(**options)
        check_positive(stride=stride)
        self.stride = stride

    def spreads(self, position_N: Tensor, heads: int) -> list[PositionLists]:
        remainder_N = position_N % self.stride
        return [PositionLists(remainder_N, remainder_N, torch.zeros_like(position_N), position_N + 1)]

    def sees(self, head: int, i: Tensor, j: Tensor) -> Tensor:
        return (i - j) % self.stride == 0


class Fixed(PositionPattern):
    """Position i reads its own block up to itself, and the summary columns of every earlier block.

    Child et al. 2019, for data without a period, such as text. Summary columns are `summary` positions of a `block`;
    head h takes the sub-block s = h mod (block // summary) counted from the block's end. One softmax spans both sets.
    Cost N (block + N summary / block).
    """

    def __init__(self, *, block: int, summary: int, **options: Any) -> None:
        super().__init__(**options)
        check_positive(block=block)
        check_within("summary", summary, block, "block")
        self.block, self.summary = block, summary

    def spreads(self, position_N: Tensor, heads: int) -> list[PositionLists]:
        """The own block's list, and the list of all summary columns of the head."""
        own_N, none_N = position_N // self.block, torch.zeros_like(position_N)
        head_H1 = torch.arange(heads, device=position_N.device)[:, None]
        column_HN = torch.where(self.is_summary(head_H1, position_N), 0, -1)
        return [
            PositionLists(own_N, own_N, none_N, position_N + 1),
            PositionLists(none_N, column_HN, none_N, own_N * self.block),
        ]

    def is_summary(self, head: int | Tensor, j: Tensor) -> Tensor:
        """Tell whether j is a summary column of its block."""
        end = self.block - self.summary * (head % (self.block // self.summary))
        column = j % self.block
        return (column >= end - self.summary) & (column < end)

    def sees(self, head: int, i: Tensor, j: Tensor) -> Tensor:
        return (i // self.block == j // self.block) | self.is_summary(head, j)


class FixedBlock(Recurrent):
    """Position i reads its own block up to itself: the first of the fixed pattern's parts on heads of its own."""

    decided = ("length", "memory", "same_length")

    def __init__(self, *, block: int, **options: Any) -> None:
        check_positive(block=block)
        super().__init__(length=block, memory=0, **options)

    def spreads(self, position_N: Tensor, heads: int) -> list[PositionLists]:
        own_N, none_N = position_N // self.length, torch.zeros_like(position_N)  # a list each: whole triangles
        return [PositionLists(own_N, own_N, none_N, position_N + 1)]


class FixedSummary(Fixed):
    """Position i reads the summary columns of all blocks up to itself: the fixed pattern's other part, see `Fixed`."""

    def spreads(self, position_N: Tensor, heads: int) -> list[PositionLists]:
        return [super().spreads(position_N, heads)[1]._replace(until_N=position_N + 1)]

    def sees(self, head: int, i: Tensor, j: Tensor) -> Tensor:
        return self.is_summary(head, j)


class PositionCache(RowCache):
    """The cache of a pattern that chooses by position."""

    def __init__(
        self, pattern: PositionPattern, relative: RelativeTables | None = None, ring: int | None = None
    ) -> None:
        super().__init__(partial(pattern.terms, relative=relative), ring)
        self.pattern = pattern

    def decode(self, qk: QueriesKeys, v_BH1D: Tensor, position: int) -> Tensor:
        k, v = self.put(qk, v_BH1D, position)
        slots, filled = k.shape[2], min(k.shape[2], position + 1)
        at_S = position - (position - torch.arange(filled, device=k.device)) % slots
        k, v = k[:, :, :filled], v[:, :, :filled]
        if self.pattern.reads_all_kept and self.pattern.attend_self:
            return self.attend(qk, k, v, None, (position - at_S)[None, None, None])
        seen_HS = self.seen(at_S, position % slots, k.shape[1])
        if self.ring is None and len(seen_HS) and bool((seen_HS.sum(-1) == seen_HS[0].sum()).all()):
            # Most of what is kept is not read: gather what is.
            slot_HK = seen_HS.nonzero()[:, 1].view(len(seen_HS), -1)
            k, v = (x.take_along_dim(slot_HK[None, :, :, None], 2) for x in (k, v))
            return self.attend(qk, k, v, None, (position - at_S[slot_HK])[None, :, None])
        return self.attend(qk, k, v, seen_HS[None, :, None], (position - at_S)[None, None, None])

    def seen(self, at_S: Tensor, own: int, heads: int) -> Tensor:
        """Return which slots the position in slot `own` reads, `[H, S]`, where they hold the positions `at_S`."""
        seen_HS = torch.zeros(heads, len(at_S), dtype=torch.bool, device=at_S.device)
        for spread in self.pattern.spreads(at_S, heads):
            between_S = (at_S >= spread.since_N[own]) & (at_S < spread.until_N[own])
            seen_HS |= (spread.key_list_HN == spread.list_HN[..., own, None]) & between_S
        return seen_HS if self.pattern.attend_self else mask_without_self(seen_HS, at_S == at_S[own])
