"""The base class of attention patterns: heads that choose by one rule which keys a query reads.

`Pattern.forward` takes whole sequences. It prepares queries and keys (`inputs`), gets from the
pattern which query reads which keys (`observe`, which calls `reads`), and attends over these keys
(`attend_parts`). `Pattern.stream` returns a `Stream`, which takes one position after the other and
has a `Cache`.

Names from other files that this one uses:

    attend          softmax attention over the keys that are read, by one of several engines
    attend_padded   removes padding, calls the forward pass for the real positions as if they
                    followed one another (windows and distances count them alone), and writes
                    the outputs back (padding.py)
    attend_groups   the same for groups of sequences, such as documents of equal length
    grouped         query heads that share keys and values
    QueriesKeys     prepared queries and keys, before and after rotation
    Reads           which query reads which keys: lists, or an index (reads.py)

Shapes: B sequences or streams, N positions, D head size, C lists of a head; H heads that choose
keys, G heads of keys and values, and Q queries of a head at one position, see `Cache`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rtx.attention import grouped
from rtx.attention.arguments import (
    check_across,
    check_bidirectional,
    check_bidirectional_call,
    check_call,
    check_causal,
    check_choice,
    check_documents,
    check_finite_call,
    check_heads,
    check_memory,
    check_number,
    check_positive,
    check_shape,
)
from rtx.attention.documents import Documents, groups_of_documents
from rtx.attention.engine import BACKENDS, attend
from rtx.attention.engine.softmax import LogitTerms, RelativeTables
from rtx.attention.padding import QKV, attend_groups, attend_padded
from rtx.attention.pairs import triangle
from rtx.attention.precision import wide_type
from rtx.attention.reads import QueriesKeys, Reads
from rtx.attention.static import is_static

Rotate = Callable[..., Tensor]
"""`rotate(x_BHND, first=0)` returns vectors rotated by their positions `first`, `first` + 1, ..."""


class Prepared(NamedTuple):
    """Queries and keys after the pattern's preprocessing, such as LayerNorm, before rotation.

    Selections need them in a wide type, float32 or wider. Attention uses them in the type of the
    inputs, for example bfloat16. A kernel that normalises may return both.
    """

    q_BHND: Tensor
    k_BHND: Tensor
    """The same object as `q_BHND` where queries serve as keys."""
    narrow_q_BHND: Tensor | None = None
    """`q_BHND` rounded to the type of the inputs; None: not computed yet."""
    narrow_k_BHND: Tensor | None = None


class Pattern(nn.Module, ABC):
    """H heads of one attention pattern.

    A pattern implements `rule` (for the oracle and pictures), `reads` and, for streams, `start`. A
    pattern that chooses by position alone subclasses `PositionPattern` instead.

    Args:
        scale: multiplies the logits; None: 1 / sqrt(D).
        dropout: probability, on attention weights, in training.
        attend_self: False: a position reads itself only if it reads nothing else. None: the
            default of the class.
        backend: "auto", "torch", "native", "triton" or "flex", see `rtx.attention.engine`. All
            give the same results, up to rounding.
        causal: False: without a left-to-right mask, as in an encoder. A position then reads later
            positions, too, and there are no streams and no tables by distance.

    Raises:
        ValueError: an argument out of its range, or causal=False of a pattern that is always causal
            (`may_be_bidirectional`).
    """

    has_keys = True
    """Whether `forward` takes keys; otherwise queries serve as keys."""
    strictly_causal = True
    """Whether outputs depend on earlier positions alone, without `streaming`."""
    attend_self = True
    """Whether a query that reads other keys of a list reads its own key, too.

    `rule` ignores it; the oracle applies it to the mask that `rule` returns.
    """
    may_be_bidirectional = False
    """Whether the pattern can be made with causal=False."""
    takes_other_keys = False
    """Whether, with causal=False, there may be another number of keys than of queries
    (cross-attention). False where positions decide what is read."""
    normalises = False
    """Whether `prepare` normalises the queries and the keys."""
    takes_memory = False
    """Whether the first positions of the inputs may be a memory, see `forward`."""
    merge = "mean"
    """How the outputs of several lists are merged, see `rtx.attention.engine.attend`."""
    bounds_documents = False
    """Whether `reads` keeps to `QueriesKeys.documents`. Otherwise `forward` attends documents of
    equal length together, as sequences."""
    heads: int | None = None
    """H, if a tensor of the pattern fixes it."""
    size: int | None = None
    """D, if a tensor of the pattern fixes it."""
    queries_of_key_head = 1
    """The number of query heads of each key-value head, see `group_queries`."""
    chooses_together = False
    """Whether the query heads of a key-value head choose together."""

    def __init__(
        self,
        *,
        scale: float | None = None,
        dropout: float = 0.0,
        attend_self: bool | None = None,
        backend: str = "auto",
        causal: bool = True,
    ) -> None:
        super().__init__()
        if scale is not None:
            # At 0 torch's kernel would give NaN.
            check_number("scale", scale, "finite and above 0", lambda x: 0 < x < math.inf)
        check_number("dropout", dropout, "at least 0 and less than 1", lambda x: 0 <= x < 1)
        check_choice("backend", backend, BACKENDS)
        self.scale = scale
        self.dropout = dropout
        self.backend = backend
        self.register_parameter("sink_H", None)
        self.sink_H: nn.Parameter | None
        if attend_self is None:
            attend_self = self.attend_self
        self.attend_self = attend_self
        self.causal = causal
        if not causal:
            check_bidirectional(self)
            self.strictly_causal = False

    def group_queries(self, queries: int, *, together: bool = False) -> None:
        """Let `queries` query heads share each key-value head; see `rtx.attention.grouped`.

        Keys and values then have the number of query heads divided by `queries`.

        Args:
            together: the query heads of a key-value head read the same keys, by the mean of their
                queries. The pattern must have been made for as many heads as there are key-value
                heads; otherwise for as many as there are query heads.

        Raises:
            ValueError: a number below 1.
        """
        check_positive(queries=queries)
        self.queries_of_key_head = queries
        self.chooses_together = together and queries > 1

    def add_sinks(self, heads: int) -> None:
        """Give each query head a learned sink, a logit in its softmaxes that has no value.

        A query can then attend to nothing (OpenAI 2025, gpt-oss). Sinks start at 0.
        """
        check_positive(0, heads=heads)
        self.sink_H = nn.Parameter(torch.zeros(heads))

    def sinks(self) -> Tensor | None:
        """Return the sinks of H heads that choose, for I query heads of each, `[I, H]`.

        I is above 1 only if query heads choose together. None: there are no sinks.
        """
        if self.sink_H is None:
            return None
        if not self.chooses_together:
            return self.sink_H[None]
        return torch.unflatten(self.sink_H, 0, (-1, self.queries_of_key_head)).T

    @property
    def key_copies(self) -> int:
        """The number of successive heads of prepared keys that are copies of one key head.

        Query heads that choose by themselves get a copy each.
        """
        if self.chooses_together or not self.has_keys:
            return 1
        return self.queries_of_key_head

    @abstractmethod
    def rule(self, qk: QueriesKeys, head: int, streaming: bool) -> Tensor:
        """Return which keys each position reads in each list of a head, `[C, N, N]`, bool.

        This defines the pattern, for the first sequence of the batch. It is written for clarity,
        not for speed. `rtx.attention.oracle` computes attention with it, and pictures show it.
        """

    def finish_by_rule(
        self,
        out_ND: Tensor,
        qk: QueriesKeys,
        v_ND: Tensor,
        head: int,
        terms: LogitTerms,
    ) -> Tensor:
        """Return the pattern's outputs of one head, from those of attention by `rule`, `[N, D]`.

        For the oracle, and the first sequence of the batch. A pattern overrides this if its outputs
        are more than attention over the keys that it reads.
        """
        return out_ND

    def prepare(self, q_BHND: Tensor, k_BHND: Tensor | None) -> Prepared:
        """Return the preprocessed queries and keys, which selections and logits use."""
        assert k_BHND is not None
        return Prepared(q_BHND, k_BHND)

    @abstractmethod
    def reads(self, qk: QueriesKeys, streaming: bool) -> list[Reads]:
        """Return which query reads which keys, in one or several parts.

        If there are several parts, one softmax spans them. No two parts contain the same pair of
        positions, and a position reads at most one list of each part.

        Args:
            streaming: make every choice from the prefix alone.
        """

    def observe(self, qk: QueriesKeys, streaming: bool) -> list[Reads]:
        """Return the result of `reads`, and in training also gather statistics for `after_step`.

        `forward` calls this. Patterns without statistics do not override it.
        """
        return self.reads(qk, streaming)

    def loss(self, qk: QueriesKeys, parts: list[Reads]) -> Tensor:
        """Return the auxiliary loss, zero for most patterns; `parts` is the result of `reads`."""
        return qk.q_BHND.new_zeros((), dtype=wide_type(qk.q_BHND.dtype))

    def pairs_of_head(self, length: int) -> float:
        """Return how many pairs (query, key) a head reads in a sequence of N = `length` positions.

        Plans count operations by it. Where it depends on content it is an estimate; clusters count
        as equally filled. This default is an upper bound, all pairs of full attention.
        """
        return triangle(length)

    def choice_operations(self, length: int, size: int) -> float:
        """Return the operations by which a head chooses the keys of a sequence; 0: by position.

        Multiplications and additions count as one operation each, for plans.

        Args:
            length, size: N and D.
        """
        return 0.0

    def after_step(self) -> None:
        """Update tensors that the optimizer does not train, after each step, on every rank."""

    @abstractmethod
    def start(self, relative: RelativeTables | None = None) -> Cache:
        """Return the empty KV cache of a batch of streams."""

    def stream(
        self,
        *,
        rotate: Rotate | None = None,
        relative: RelativeTables | None = None,
    ) -> Stream:
        """Return a new stream, at position 0; the arguments are those of `forward`.

        Raises:
            ValueError: the pattern has causal=False.
        """
        check_causal(self.causal, "stream()")
        return Stream(self, rotate, relative)

    def read_prompt(
        self,
        q_BHND: Tensor,
        k_BHND: Tensor | None,
        v_BHND: Tensor,
        rotate: Rotate | None,
        relative: RelativeTables | None,
    ) -> tuple[Tensor, QueriesKeys, list[Reads] | None]:
        """Return the outputs of a prompt, its prepared queries and keys, and what it reads.

        Every selection is made from the prefix, as in a stream. The third result may be None, see
        `choose_and_attend`.
        """
        check_call(self.has_keys, q_BHND, k_BHND, v_BHND, None, relative, self.queries_of_key_head)
        qk = self.inputs(q_BHND, k_BHND, rotate)
        out_BHND, _, parts = self.choose_and_attend(qk, v_BHND, relative, streaming=True)
        return out_BHND, qk, parts

    def terms(self, size: int, relative: RelativeTables | None) -> LogitTerms:
        """Return the terms of logits and weights besides queries, keys and values.

        Args:
            size: D.
        """
        scale = self.scale
        if scale is None:
            scale = 1 / math.sqrt(size)
        dropout = 0.0
        if self.training:
            dropout = self.dropout
        return LogitTerms(scale, dropout, relative, sink_IH=self.sinks())

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
        documents: Documents | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs `[B, H, N, D]` of positions after a memory, and the auxiliary loss.

        Args:
            q_BHND, k_BHND, v_BHND: queries, keys (None where queries serve as keys) and values.
                After `group_queries`, keys and values have fewer heads. With `takes_other_keys` and
                causal=False the number of keys and values may be another than that of queries
                (cross-attention, without padding, documents and rotation).
            rotate: rotates queries and keys (rotary positions). Clusters, blocks and indexers
                select by the vectors before rotation, `Exact` and `Probed` by the rotated ones.
            relative: tables by distance.
            streaming: make every choice from the prefix alone, as a stream does. It matters for
                patterns that are not strictly causal.
            real_BN: False at padding, whose outputs are zero. The other positions get the outputs
                that they would get without it, and the loss is the mean over them, see
                `rtx.attention.padding`.
            check_finite: refuse NaN and infinity, except at padding. Without it such a value may
                spread, even to earlier positions.
            memory: the number of positions at the start that serve as keys and values alone, for
                patterns that take a memory. They have no outputs.
            documents: the documents of the sequences. Positions get the outputs that they would get
                if each document were a sequence by itself, see `rtx.attention.documents`. None:
                each sequence is one document.

        Raises:
            ValueError: tensors that do not fit together. The message names the argument.
        """
        if not self.causal:
            check_bidirectional_call(relative, streaming, memory)
            if k_BHND is not None and k_BHND.shape[2:3] != q_BHND.shape[2:3]:
                others = (rotate, real_BN, documents)
                return self.forward_across((q_BHND, k_BHND, v_BHND), others, check_finite)
        check_call(
            self.has_keys, q_BHND, k_BHND, v_BHND, real_BN, relative, self.queries_of_key_head
        )
        if check_finite:
            check_finite_call(q_BHND, k_BHND, v_BHND, real_BN, relative)
        check_memory(memory, q_BHND.shape[2], self.takes_memory)
        check_documents(documents, q_BHND, memory)
        qkv = (q_BHND, k_BHND, v_BHND)
        attend_unpadded = partial(
            self.forward_unpadded,
            rotate=rotate,
            relative=relative,
            streaming=streaming,
        )
        if real_BN is not None and not bool(real_BN.all()):
            if documents is None:
                return attend_padded(attend_unpadded, qkv, real_BN, memory)
            return attend_groups(attend_unpadded, qkv, *groups_of_documents(documents, real_BN))
        if documents is not None and self.attends_documents_apart(rotate, relative):
            return attend_groups(attend_unpadded, qkv, *groups_of_documents(documents))
        return attend_unpadded(qkv, memory, documents=documents)

    def attends_documents_apart(
        self,
        rotate: Rotate | None,
        relative: RelativeTables | None,
    ) -> bool:
        """Return whether each document must be attended as a sequence by itself."""
        # A table by distance has the same keys for all positions. Its product with a rotated query
        # depends on the angle of the query, which must then be 0 at the start of each document.
        needs_new_angles = rotate is not None and relative is not None
        return needs_new_angles or not self.bounds_documents or not self.causal

    def forward_across(
        self,
        qkv: tuple[Tensor, Tensor, Tensor],
        others: tuple[object, ...],
        check_finite: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return the result of `forward` for another number of keys than of queries.

        Zeros are added to the queries, or to keys and values, so that all have the same number of
        positions; no list contains these, and no query reads them.

        Args:
            others: the rotation, padding and documents, which must be None here.
        """
        check_across(self, qkv, others)
        q_BHND, k_BHND, v_BHND = qkv
        if check_finite:
            check_finite_call(q_BHND, k_BHND, v_BHND, None, None)
        query_count = q_BHND.shape[2]
        key_count = k_BHND.shape[2]
        after_queries = (0, 0, 0, max(0, key_count - query_count))
        after_keys = (0, 0, 0, max(0, query_count - key_count))
        k_BHND = F.pad(k_BHND, after_keys)
        v_BHND = F.pad(v_BHND, after_keys)
        qk = self.inputs(F.pad(q_BHND, after_queries), k_BHND, None)
        qk = qk._replace(counts=(query_count, key_count))
        out_BHND, loss, _ = self.choose_and_attend(qk, v_BHND, None, streaming=False)
        return out_BHND[:, :, :query_count], loss

    def forward_unpadded(
        self,
        qkv: QKV,
        memory: int,
        rotate: Rotate | None,
        relative: RelativeTables | None,
        streaming: bool,
        documents: Documents | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the result of `forward` for sequences without padding.

        Args:
            documents: None unless `bounds_documents`.
        """
        q_BHND, k_BHND, v_BHND = qkv
        qk = self.inputs(q_BHND, k_BHND, rotate)
        qk = qk._replace(memory=memory, documents=documents)
        out_BHND, loss, _ = self.choose_and_attend(qk, v_BHND, relative, streaming)
        return out_BHND[:, :, memory:], loss

    def choose_and_attend(
        self,
        qk: QueriesKeys,
        v_BHND: Tensor,
        relative: RelativeTables | None,
        streaming: bool,
    ) -> tuple[Tensor, Tensor, list[Reads] | None]:
        """Return the outputs of all query heads, `[B, H, N, D]`, the auxiliary loss, and the reads.

        The third result is what `reads` returns for `qk`. It is None if `attend_together` has made
        the choice in another form.
        """
        if self.chooses_together:
            return self.attend_together(qk, v_BHND, relative, streaming)
        with torch.no_grad():
            parts = self.observe(qk, streaming)
        v_BHND = grouped.expanded(v_BHND, self.queries_of_key_head)
        out_BHND = self.attend_parts(qk, v_BHND, parts, relative)
        return out_BHND, self.loss(qk, parts), parts

    def attend_together(
        self,
        qk: QueriesKeys,
        v_BGND: Tensor,
        relative: RelativeTables | None,
        streaming: bool,
    ) -> tuple[Tensor, Tensor, list[Reads] | None]:
        """Return the result of `choose_and_attend` for query heads that choose together.

        They are attended as copies of the sequences (`rtx.attention.grouped`). There are two ways
        to get the lists of the copies:

        - The sequences choose once, and their lists are repeated for the copies.
        - Lists in static shapes end with unused entries, so they cannot be repeated. There each
          copy chooses, all by the same queries and keys. The third result is then None.
        """
        copies_choose = is_static(qk.q_BHND, self.backend)
        copies = self.queries_of_key_head
        if copies_choose:
            # The queries of each query head are of the copies already.
            qk = grouped.repeated_inputs(qk, copies)._replace(
                each_q_xHND=qk.each_q_xHND,
                rotated_each_q_xHND=qk.rotated_each_q_xHND,
            )
        with torch.no_grad():
            parts = self.observe(qk, streaming)
        loss = self.loss(qk, parts)
        v_xGND = v_BGND.repeat(copies, 1, 1, 1)
        if copies_choose:
            out_xGND = self.attend_parts(grouped.for_attention(qk, 1), v_xGND, parts, relative)
            return grouped.copies_to_heads(out_xGND, copies), loss, None
        rows = qk.q_BHND.shape[:3].numel()
        copied = [grouped.repeated_reads(part, copies, rows) for part in parts]
        out_xGND = self.attend_parts(grouped.for_attention(qk, copies), v_xGND, copied, relative)
        return grouped.copies_to_heads(out_xGND, copies), loss, parts

    def inputs(
        self,
        q_BHND: Tensor,
        k_BHND: Tensor | None,
        rotate: Rotate | None,
        first: int = 0,
    ) -> QueriesKeys:
        """Return the queries and keys of the positions from `first` on, prepared and rotated.

        If each query head chooses by itself, they have all query heads. If query heads choose
        together, `q_BHND` has a head for each key-value head, with the means of its queries, and
        `each_q_xHND` has the queries of all query heads.
        """
        if self.chooses_together:
            return self.inputs_together(q_BHND, k_BHND, rotate, first)
        if k_BHND is not None:
            k_BHND = grouped.expanded(k_BHND, self.queries_of_key_head)
        return self.inputs_of_heads(q_BHND, k_BHND, rotate, first)

    def inputs_together(
        self,
        q_BHND: Tensor,
        k_BGND: Tensor | None,
        rotate: Rotate | None,
        first: int,
    ) -> QueriesKeys:
        """Return the result of `inputs` for query heads that choose together."""
        mean_BGND = grouped.group_mean(q_BHND, self.queries_of_key_head)
        qk = self.inputs_of_heads(mean_BGND, k_BGND, rotate, first)
        q_xGND = grouped.heads_to_copies(q_BHND, self.queries_of_key_head)
        k_xGND = None
        if self.has_keys:
            # Only the queries are used here, but `prepare` needs some keys.
            k_xGND = q_xGND
        prepared_xGND = self.prepare(q_xGND, k_xGND).q_BHND
        return qk._replace(
            each_q_xHND=prepared_xGND,
            rotated_each_q_xHND=rotated(prepared_xGND, rotate, first),
        )

    def inputs_of_heads(
        self,
        q_BHND: Tensor,
        k_BHND: Tensor | None,
        rotate: Rotate | None,
        first: int,
    ) -> QueriesKeys:
        """Return the result of `inputs` for as many heads of keys as of queries."""
        check_heads(q_BHND, self.heads, self.size)
        prepared = self.prepare(q_BHND, k_BHND)
        rotated_q_BHND = rotated(prepared.q_BHND, rotate, first)
        rotated_k_BHND = rotated_q_BHND
        if prepared.k_BHND is not prepared.q_BHND:
            rotated_k_BHND = rotated(prepared.k_BHND, rotate, first)
        qk = QueriesKeys(prepared.q_BHND, prepared.k_BHND, rotated_q_BHND, rotated_k_BHND)
        if rotate is not None:
            return qk
        return qk._replace(
            narrow_q_BHND=prepared.narrow_q_BHND,
            narrow_k_BHND=prepared.narrow_k_BHND,
        )

    def attend_parts(
        self,
        qk: QueriesKeys,
        v_BHND: Tensor,
        parts: list[Reads],
        relative: RelativeTables | None,
    ) -> Tensor:
        """Return attention over the keys that are read according to `parts`, `[B, H, N, D]`."""
        q_BHND = in_type(v_BHND.dtype, qk.rotated_q_BHND, qk.narrow_q_BHND)
        k_BHND = q_BHND
        if qk.rotated_k_BHND is not qk.rotated_q_BHND:
            k_BHND = in_type(v_BHND.dtype, qk.rotated_k_BHND, qk.narrow_k_BHND)
        terms = self.terms(q_BHND.shape[-1], relative)
        return attend(q_BHND, k_BHND, v_BHND, parts, terms, self.backend, self.merge)


def rotated(x_BHND: Tensor, rotate: Rotate | None, first: int) -> Tensor:
    """Return `rotate(x_BHND, first)`, or the vectors themselves for None."""
    if rotate is None:
        return x_BHND
    rotated_BHND = rotate(x_BHND, first=first)
    check_shape("what rotate returns", rotated_BHND, tuple(x_BHND.shape), x_BHND)
    return rotated_BHND


def in_type(dtype: torch.dtype, wide_BHND: Tensor, narrow_BHND: Tensor | None) -> Tensor:
    """Return the vectors in a type: the narrow ones if they are of it, else the wide ones cast."""
    if narrow_BHND is not None and narrow_BHND.dtype == dtype:
        return narrow_BHND
    return wide_BHND.to(dtype)


# Streams.


class Cache(ABC):
    """The KV cache of a batch of streams, for the heads of one pattern.

    Caches of patterns with a window are bounded; those of patterns that may read any earlier
    position grow. Each pattern has its cache in its file, or in that of its base class.

    Keys and values are stored for G key-value heads. H heads choose keys, and each of them has Q
    queries at the newest position. Example: 8 query heads, of which 4 share each of G = 2 key-value
    heads (`rtx.attention.grouped`):

        each query head chooses    H = 8, Q = 1: a head is a query head
        they choose together       H = 2, Q = 4: a head is a key-value head
    """

    @abstractmethod
    def prefill(
        self,
        qk: QueriesKeys,
        v_BGND: Tensor,
        parts: list[Reads] | None = None,
    ) -> None:
        """Store the positions 0 to N - 1 of each stream, before any step.

        The cache then has the same contents as after N calls of `decode`. The outputs of these
        positions come from the pattern's forward pass with `streaming`.

        Args:
            v_BGND: the values, for key-value heads.
            parts: the result of `Pattern.reads` with `streaming`, so that a selection need not be
                computed twice; None: not available.
        """

    @abstractmethod
    def decode(self, qk: QueriesKeys, v_BG1D: Tensor, position: int) -> Tensor:
        """Store the next position of each stream, and return its outputs `[B, H * Q, 1, D]`."""


class Stream:
    """B sequences that grow by one position at a time; `Pattern.stream` makes it.

    Its outputs are those of the pattern's forward pass with `streaming=True`. It has no gradients,
    no dropout and no padding: use it in evaluation mode.

    Args:
        rotate, relative: see `Pattern.forward`.
    """

    def __init__(
        self,
        pattern: Pattern,
        rotate: Rotate | None,
        relative: RelativeTables | None,
    ) -> None:
        self.pattern = pattern
        self.rotate = rotate
        self.relative = relative
        self.cache = pattern.start(relative)
        self.position = 0
        """The number of positions that have been read."""
        self.shape_BH: tuple[int, int] | None = None
        """The numbers of sequences and of heads of values; None: nothing has been read yet."""

    @torch.no_grad()
    def prefill(self, q_BHND: Tensor, k_BHND: Tensor | None, v_BHND: Tensor) -> Tensor:
        """Return the outputs `[B, H, N, D]` of the first N positions, read in one pass.

        Raises:
            ValueError: the stream has read positions already.
        """
        if self.position:
            raise ValueError(
                f"prefill reads the first positions of a stream, and this one is at position"
                f" {self.position}: use decode for the next one, or begin a new stream"
            )
        out_BHND, qk, parts = self.pattern.read_prompt(
            q_BHND,
            k_BHND,
            v_BHND,
            self.rotate,
            self.relative,
        )
        self.cache.prefill(qk, v_BHND, parts)
        self.position = v_BHND.shape[2]
        if self.position:
            self.shape_BH = (v_BHND.shape[0], v_BHND.shape[1])
        return out_BHND

    @torch.no_grad()
    def decode(self, q_BH1D: Tensor, k_BH1D: Tensor | None, v_BH1D: Tensor) -> Tensor:
        """Return the output `[B, H, 1, D]` of the next position.

        Raises:
            ValueError: more or fewer than one position, or other numbers of sequences or heads than
                before.
        """
        B, H, N, _ = v_BH1D.shape
        if N != 1:
            raise ValueError(
                f"v_BH1D has {N} positions: decode reads one at a time, and prefill the first ones"
            )
        if self.shape_BH is not None and self.shape_BH != (B, H):
            streams, heads = self.shape_BH
            raise ValueError(f"v_BH1D has B={B}, H={H}: this stream has B={streams}, H={heads}")
        qk = self.pattern.inputs(q_BH1D, k_BH1D, self.rotate, self.position)
        out_BH1D = self.cache.decode(qk, v_BH1D, self.position)
        self.position += 1
        self.shape_BH = (B, H)
        return out_BH1D
