"""What a pattern is: heads that say who reads whom, and by which rule; everything else follows from that.

Shapes: B sequences, H heads of one kind, N positions, D head size, P parts' lists.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rtx.attention.arguments import (
    check_call,
    check_choice,
    check_heads,
    check_number,
    check_positive,
    check_shape,
    check_whole,
)
from rtx.attention.cache import Cache, ClusterCache, PositionCache
from rtx.attention.engine import BACKENDS, MERGES, attend
from rtx.attention.engine.softmax import LogitTerms, RelativeTables
from rtx.attention.members import normalise_twice
from rtx.attention.once import made_once
from rtx.attention.reads import (
    MemberLists,
    QueriesKeys,
    RangeReads,
    Reads,
    Window,
    bounded_read,
    members_read,
    pack,
    without_self,
)
from rtx.config import Config, clusters, hash_buckets, memory_slots, reads_self

PLAIN = (bool, int, float, str, type(None))
"""Types of attributes that are compared by value."""
Rotate = Callable[..., Tensor]
"""Turns queries or keys by their positions, the first of which is `first`: `rotate(x_BHND, first=0)`."""
QKV = tuple[Tensor, Tensor | None, Tensor]


class Prepared(NamedTuple):
    """Queries and keys as choices and logits use them."""

    q_BHND: Tensor
    k_BHND: Tensor
    narrow_q_BHND: Tensor | None = None
    """The same queries in the type that they were given in, where that is there already."""
    narrow_k_BHND: Tensor | None = None


class Pattern(nn.Module, ABC):
    """H heads of one pattern.

    A pattern implements `reads`, `start` for streams and, for the oracle and pictures, `rule`. One that chooses by
    position alone subclasses `PositionPattern` instead.

    Args:
        scale: multiplies the logits; None: 1 / sqrt(D).
        dropout: on attention weights, in training.
        attend_self: false: a position reads itself only where it sees nothing else.
        backend: "auto", "torch", "native", "triton" or "flex", see `rtx.attention.engine`; all compute the same.
    """

    has_keys = True
    """Whether keys are given; else the queries stand for them."""
    strictly_causal = True
    """Whether outputs depend on earlier positions alone, without `streaming`."""
    attend_self = True
    """Whether a query that reads other keys of a list reads its own, too; rules leave that to the oracle."""
    merge = "mean"
    """What a position in several lists of one part gets, see `rtx.attention.engine.attend`."""
    heads: int | None = None
    """H and D of the inputs, where a pattern's own tensors have them."""
    size: int | None = None
    decided: tuple[str, ...] = ()
    """Arguments that this class itself gives to those above, so that no configuration does."""
    configured: tuple[str, ...] = ("scale", "dropout", "attend_self", "backend")
    """Arguments of this class with a default that a configuration sets all the same; the others keep their default."""

    def __init__(
        self,
        *,
        scale: float | None = None,
        dropout: float = 0.0,
        attend_self: bool | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        if scale is not None:  # at 0 torch's kernel gives NaN
            check_number("scale", scale, "finite and above 0", lambda x: 0 < x < math.inf)
        check_number("dropout", dropout, "at least 0 and less than 1", lambda x: 0 <= x < 1)
        check_choice("backend", backend, BACKENDS)
        self.scale, self.dropout, self.backend = scale, dropout, backend
        self.attend_self = self.attend_self if attend_self is None else attend_self

    @classmethod
    def from_config(cls, known: Mapping[str, Any]) -> Self:
        """Return the heads that a configuration describes; `known`: what `keys_of` returns."""
        return cls(**of_configuration(cls, known))

    def prepare(self, q_BHND: Tensor, k_BHND: Tensor | None) -> Prepared:
        """Return queries and keys as choices and logits use them."""
        assert k_BHND is not None
        return Prepared(q_BHND, k_BHND)

    @abstractmethod
    def reads(self, qk: QueriesKeys, streaming: bool) -> list[Reads]:
        """Return who reads whom; several parts share no pair, and each shows a position one list at the most.

        `streaming`: every choice is made from the prefix alone.
        """

    def gather(self, qk: QueriesKeys) -> None:
        """Gather, before `reads`, what training is to move by; nothing here for patterns without such."""

    @abstractmethod
    def rule(self, qk: QueriesKeys, head: int, streaming: bool) -> Tensor:
        """Return which keys each position of the first sequence reads in each of a head's lists, `[P, N, N]`, bool.

        Written for the reader, not for speed: the oracle of `rtx.attention.oracle`, and what pictures draw.
        """

    @abstractmethod
    def start(self, relative: RelativeTables | None = None) -> Cache:
        """Return the empty KV cache of a stream, or of a batch of them."""

    def loss(self, qk: QueriesKeys, parts: list[Reads]) -> Tensor:
        """Return the auxiliary loss, zero where the pattern has none; `parts`: what `reads` returned."""
        return qk.q_BHND.new_zeros((), dtype=torch.promote_types(qk.q_BHND.dtype, torch.float32))

    def after_step(self) -> None:
        """Do what is due after each optimizer step, on every rank."""

    def terms(self, size: int, relative: RelativeTables | None) -> LogitTerms:
        """Return what logits and weights get besides queries, keys and values."""
        scale = 1 / math.sqrt(size) if self.scale is None else self.scale
        return LogitTerms(scale, self.dropout if self.training else 0.0, relative)

    def forward(
        self,
        q_BHND: Tensor,
        k_BHND: Tensor | None,
        v_BHND: Tensor,
        *,
        rotate: Rotate | None = None,
        relative: RelativeTables | None = None,
        streaming: bool = False,
        real_BN: Tensor | None = None,
        check_finite: bool = False,
        memory: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs `[B, H, N, D]`, of positions behind a memory, and the auxiliary loss.

        Args:
            q_BHND, k_BHND, v_BHND: queries, keys (None where the queries stand for them) and values.
            rotate: applied to queries and keys after any choice by content (rotary positions).
            relative: tables by true distance.
            prefix: every choice is made from the prefix alone, as a stream makes it (it matters for patterns that are
                not strictly causal).
            real_BN: false at padding, which gets zero; the others get what they would without it. The loss is the mean
                over them. Sequences that are padded alike are one pass.
            check_finite: refuse NaN and infinity (padding may hold them). Without it such a value may spread, into the
                past, too.
            memory: so many positions in front are read, but not asked (of a `ContiguousPattern`).

        Raises:
            ValueError: tensors that do not go together; always with the argument's name.
        """
        check_call(self.has_keys, q_BHND, k_BHND, v_BHND, real_BN, relative, check_finite)
        with_memory, N = isinstance(self, ContiguousPattern), q_BHND.shape[2]
        check_whole("memory", memory, 0, N * with_memory, f"from 0 to N={N}" if with_memory else "0 for this pattern")
        if real_BN is not None and not bool(real_BN.all()):
            return self.forward_padded((q_BHND, k_BHND, v_BHND), real_BN, memory, rotate, relative, streaming)
        return self.forward_whole((q_BHND, k_BHND, v_BHND), memory, rotate, relative, streaming)

    def forward_whole(
        self, qkv: QKV, memory: int, rotate: Rotate | None, relative: RelativeTables | None, streaming: bool
    ) -> tuple[Tensor, Tensor]:
        """Return what `forward` does for sequences without padding."""
        q_BHND, k_BHND, v_BHND = qkv
        qk = self.inputs(q_BHND, k_BHND, rotate)._replace(memory=memory)
        with torch.no_grad():
            self.gather(qk)
            parts = self.reads(qk, streaming)
        return self.attend(qk, v_BHND, parts, relative)[:, :, memory:], self.loss(qk, parts)

    def forward_padded(self, qkv: QKV, real_BN: Tensor, memory: int, *own: Any) -> tuple[Tensor, Tensor]:
        """Return what `forward` does: all sequences of one mask together, without their padding."""
        (B, H, N, D), (masks_XN, mask_B) = qkv[2].shape, real_BN.unique(dim=0, return_inverse=True)
        order_B, row_BN = mask_B.argsort(stable=True), torch.arange(B * N, device=real_BN.device).view(B, N)
        row_S = row_BN[order_B][real_BN[order_B]]
        counts = mask_B.bincount(), masks_XN.sum(1), masks_XN[:, :memory].sum(1)
        groups = [x for x in zip(*(count_X.tolist() for count_X in counts), strict=True) if x[1]] or [(B, 0, 0)]
        sizes, outs, losses = [b * n for b, n, _ in groups], [], []
        # One gather and one write, so that gradients are added up once.
        parts = [x if x is None else x.transpose(1, 2).flatten(0, 1)[row_S].split(sizes) for x in qkv]
        for number, (b, n, behind) in enumerate(groups):
            q, k, v = (None if x is None else x[number].unflatten(0, (b, n)).transpose(1, 2) for x in parts)
            assert q is not None and v is not None
            out, loss = self.forward_whole((q, k, v), behind, *own)
            outs.append(F.pad(out, (0, 0, behind, 0)).transpose(1, 2).flatten(0, 1))
            losses.append(loss * (b * n / max(1, len(row_S))))
        out_RHD = qkv[2].new_zeros(B * N, H, D).index_copy(0, row_S, torch.cat(outs))
        return out_RHD.view(B, N, H, D).transpose(1, 2)[:, :, memory:], torch.stack(losses).sum()

    def inputs(self, q_BHND: Tensor, k_BHND: Tensor | None, rotate: Rotate | None, first: int = 0) -> QueriesKeys:
        """Return the queries and keys of positions from `first` on."""
        check_heads(q_BHND, self.heads, self.size)
        ready = self.prepare(q_BHND, k_BHND)
        rotated_q_BHND = rotated_k_BHND = turn(ready.q_BHND, rotate, first)
        if ready.k_BHND is not ready.q_BHND:
            rotated_k_BHND = turn(ready.k_BHND, rotate, first)
        given = QueriesKeys(ready.q_BHND, ready.k_BHND, rotated_q_BHND, rotated_k_BHND)
        if rotate is not None:
            return given
        return given._replace(narrow_q_BHND=ready.narrow_q_BHND, narrow_k_BHND=ready.narrow_k_BHND)

    def attend(self, qk: QueriesKeys, v_BHND: Tensor, parts: list[Reads], relative: RelativeTables | None) -> Tensor:
        """Return the outputs for what is read."""
        q_BHND = of_type(v_BHND.dtype, qk.rotated_q_BHND, qk.narrow_q_BHND)
        k_BHND = q_BHND
        if qk.rotated_k_BHND is not qk.rotated_q_BHND:
            k_BHND = of_type(v_BHND.dtype, qk.rotated_k_BHND, qk.narrow_k_BHND)
        terms = self.terms(q_BHND.shape[-1], relative)
        return attend(q_BHND, k_BHND, v_BHND, parts, terms, self.backend, self.merge)


class ClusterPattern(Pattern):
    """Heads of clusters: each position reads, in every cluster that it is a member of, the last W members up to itself.

    Queries and keys are normalised (LayerNorm without scale or bias), but for hashing.

    Args:
        has_keys: whether keys are given, else the queries stand for them.
        window: W.
        attend_self: false: a position reads itself only where it sees nothing else; None: so where queries stand for
            keys, as a vector is nearest to itself.
        merge: "mean": a position in several clusters gets the mean of their outputs (the paper's
            released code divides by their number + 0.01). "lse": one softmax over the keys of all.
    """

    configured = ("attend_self", "merge")

    def __init__(
        self, *, has_keys: bool, window: int, attend_self: bool | None = None, merge: str = "mean", **options: Any
    ) -> None:
        super().__init__(attend_self=has_keys if attend_self is None else attend_self, **options)
        check_positive(window=window)
        check_choice("merge", merge, MERGES)
        self.has_keys, self.window, self.merge = has_keys, window, merge

    def prepare(self, q_BHND: Tensor, k_BHND: Tensor | None) -> Prepared:
        q_BHND, narrow_q_BHND = normalise_twice(q_BHND, self.backend)
        if k_BHND is None:
            return Prepared(q_BHND, q_BHND, narrow_q_BHND, narrow_q_BHND)
        k_BHND, narrow_k_BHND = normalise_twice(k_BHND, self.backend)
        return Prepared(q_BHND, k_BHND, narrow_q_BHND, narrow_k_BHND)

    @abstractmethod
    def lists(self, qk: QueriesKeys) -> list[MemberLists]:
        """Return the members of every cluster, or those of queries and of keys."""

    def reads(self, qk: QueriesKeys, streaming: bool) -> list[Reads]:
        lists, N = self.lists(qk), qk.q_BHND.shape[2]
        return [members_read(lists[0], lists[-1], N, self.window, self.attend_self)]

    def start(self, relative: RelativeTables | None = None) -> Cache:
        return ClusterCache(self, self.window, relative)

    def lists_kept(self, qk: QueriesKeys, cache: ClusterCache) -> MemberLists:
        """Return the members that a prompt leaves in a stream's cache."""
        return self.lists(qk)[-1]

    @abstractmethod
    def join(self, qk: QueriesKeys, position: int, cache: ClusterCache) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return which clusters the next query and key of a stream join, `[B, H, C]`.

        And the slots that the key takes there; None: those of the oldest members.
        """


def keys_of(config: Config, heads: int, layer: int, routed: bool) -> dict[str, Any]:
    """Return what a resolved configuration says to some heads of a layer (0 is the lowest), by names of arguments.

    The keys of `routing` for the heads that these describe, else those of `model`, by their own names, but for what is
    called otherwise or made of several: `heads` are these, `dropout` is that of attention weights.
    """
    model, routing, size = config.model, config.routing, config.model.hidden // config.model.heads
    known = {**vars(routing if routed else model), "heads": heads, "size": size, "length": config.data.length}
    known |= {"dropout": model.attention_dropout, "backend": config.hardware.attention, "scale": size**-0.5}
    known |= {"seed": config.seed * 1_000 + layer}
    if routed:
        keys = "separate" if routing.keys == "tied" else routing.keys
        scale = {"sqrt_d": size**-0.5, "none": 1.0, "unit": 1 / size}[routing.logit_scale]
        known |= {"clusters": clusters(config), "keys": keys, "has_keys": keys != "shared"}
        return known | {"scale": scale, "attend_self": reads_self(routing)}
    known |= {"memory": memory_slots(model), "block": model.stride, "ramp": model.span_ramp, "cost": model.span_cost}
    return known | {"variant": model.lsh, "rounds": model.hash_rounds, "buckets": hash_buckets(config)}


def of_configuration(kind: type, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is known of the arguments of a class, and of those above that it hands further ones to.

    An argument with a default keeps it, unless its class, or one that builds on that, lists it as `configured`.
    """
    found: dict[str, Any] = {}
    decided: set[str] = set()
    configured: set[str] = set()
    for each in kind.__mro__:
        own = vars(each)
        configured.update(own.get("configured", ()))
        takes = inspect.signature(own["__init__"]).parameters.values() if "__init__" in own else []
        named = [one for one in takes if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
        kept = {one.name for one in named if one.default is not one.empty} - configured
        decided |= kept - found.keys()  # also for the classes above: this one hands its own value on
        wanted = {one.name for one in named} & known.keys() - decided
        found |= {name: known[name] for name in wanted}
        decided.update(own.get("decided", ()))
        if takes and all(one.kind is not one.VAR_KEYWORD for one in takes):
            break
    return found


def turn(x_BHND: Tensor, rotate: Rotate | None, first: int = 0) -> Tensor:
    """Return the vectors, turned where there is anything to turn by."""
    if rotate is None:
        return x_BHND
    turned_BHND = rotate(x_BHND, first=first)
    check_shape("what rotate returns", turned_BHND, tuple(x_BHND.shape), x_BHND)
    return turned_BHND


def of_type(dtype: torch.dtype, wide_BHND: Tensor, narrow_BHND: Tensor | None) -> Tensor:
    """Return the vectors in a type: those that are in it already, else the wide ones rounded."""
    if narrow_BHND is not None and narrow_BHND.dtype == dtype:
        return narrow_BHND
    return wide_BHND.to(dtype)


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
