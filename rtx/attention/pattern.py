"""What a pattern is: heads that say who reads whom, and by which rule; everything else follows from that.

Shapes: B sequences, H heads of one kind, N positions, D head size, P parts' lists.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from rtx.attention.arguments import (
    check_call,
    check_choice,
    check_heads,
    check_number,
    check_shape,
    check_whole,
)
from rtx.attention.cache import Cache
from rtx.attention.engine import BACKENDS, attend
from rtx.attention.engine.softmax import LogitTerms, RelativeTables
from rtx.attention.padding import QKV, attend_padded
from rtx.attention.reads import (
    QueriesKeys,
    Reads,
)
from rtx.attention.stream import Stream
from rtx.config import Config, clusters, hash_buckets, memory_slots, reads_self

Rotate = Callable[..., Tensor]
"""Turns queries or keys by their positions, the first of which is `first`: `rotate(x_BHND, first=0)`."""


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
    takes_memory = False
    """Whether the first positions of the inputs may be a memory, see `forward`."""
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

    def finish_by_rule(
        self,
        out_ND: Tensor,
        qk: QueriesKeys,
        v_ND: Tensor,
        head: int,
        terms: LogitTerms,
    ) -> Tensor:
        """Return what the oracle makes of one head's outputs by `rule`, for the first sequence.

        A pattern overrides this if its outputs are more than attention over what it reads.
        """
        return out_ND

    @abstractmethod
    def start(self, relative: RelativeTables | None = None) -> Cache:
        """Return the empty KV cache of a stream, or of a batch of them."""

    def stream(
        self,
        *,
        rotate: Rotate | None = None,
        relative: RelativeTables | None = None,
    ) -> Stream:
        """Return a new stream of these heads, at position 0; the arguments are those of `forward`."""

        def inputs(q_BHND: Tensor, k_BHND: Tensor | None, first: int) -> QueriesKeys:
            return self.inputs(q_BHND, k_BHND, rotate, first)

        def attend(q_BHND: Tensor, k_BHND: Tensor | None, v_BHND: Tensor) -> Tensor:
            return self(q_BHND, k_BHND, v_BHND, rotate=rotate, relative=relative, streaming=True)[0]

        return Stream(self.start(relative), inputs, attend)

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
            memory: so many positions in front are read, but not asked (where `takes_memory`).

        Raises:
            ValueError: tensors that do not go together; always with the argument's name.
        """
        check_call(self.has_keys, q_BHND, k_BHND, v_BHND, real_BN, relative, check_finite)
        with_memory, N = self.takes_memory, q_BHND.shape[2]
        check_whole("memory", memory, 0, N * with_memory, f"from 0 to N={N}" if with_memory else "0 for this pattern")
        qkv = (q_BHND, k_BHND, v_BHND)
        if real_BN is None or bool(real_BN.all()):
            return self.forward_whole(qkv, memory, rotate, relative, streaming)
        attend_whole = partial(self.forward_whole, rotate=rotate, relative=relative, streaming=streaming)
        return attend_padded(attend_whole, qkv, real_BN, memory)

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
