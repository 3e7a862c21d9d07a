"""Selections in which every query chooses keys of its own by content, strictly causal: exact, and by a small indexer.

Shapes: B sequences, H heads, N positions, D head size, K keys of a query, E width of what a choice reads, Q queries of
a piece.
"""

from __future__ import annotations

import math
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rtx.attention import oracle
from rtx.attention.arguments import check_positive
from rtx.attention.cache import Cache, GrowingCache
from rtx.attention.packed import Indexed, Part
from rtx.attention.pattern import Inputs, Pattern, routed_options
from rtx.attention.softmax import Relative, recomputed
from rtx.config import Config

MAX_SCORES = 1 << 22
"""Scores of queries and keys held at once."""


class Choice(Pattern):
    """H heads whose queries each choose at most `window` keys of the prefix.

    Subclasses say what the choice reads: products of `choice_queries` and `choice_keys` are the scores.
    """

    def __init__(self, *, window: int, attend_self: bool = True, **given: Any) -> None:
        super().__init__(**given)
        check_positive("window", window)
        self.window, self.attend_self = window, attend_self

    def choice_queries(self, given: Inputs) -> Tensor:
        """Return what the choice reads of the queries, `[B, H, N, E]`."""
        return given.q_BHND

    def choice_keys(self, given: Inputs) -> Tensor:
        """Return what the choice reads of the keys, `[B, H, N, E]`."""
        return given.k_BHND

    def best(self, query_BHQE: Tensor, key_BHNE: Tensor, position_Q: Tensor) -> Tensor:
        """Return the positions `[B, H, Q, K]` that queries at ascending positions read, -1 for none.

        Keys stand for positions 0, 1, ...; those behind a query are not read, whatever stands there.
        """
        key_BHNE = key_BHNE[:, :, : int(position_Q[-1]) + 1]
        N = key_BHNE.shape[2]
        score_BHQN = (query_BHQE @ key_BHNE.mT).masked_fill(self.hidden(position_Q, N), -math.inf)
        score, at = score_BHQN.topk(self.most_keys(N), dim=-1)
        return at.masked_fill(score == -math.inf, -1)

    def hidden(self, position_Q: Tensor, keys: int) -> Tensor:
        """Return which of the first keys queries at some positions may not read, `[Q, N]`."""
        last_Q = position_Q if self.attend_self else (position_Q - 1).clamp(min=0)  # the first has nothing else to read
        return torch.arange(keys, device=position_Q.device) > last_Q[:, None]

    def split(self, given: Inputs, keys: int) -> tuple[Tensor, ...]:
        """Return the positions in pieces whose scores of so many keys are held at once."""
        B, H, N, _ = given.q_BHND.shape
        positions_N = torch.arange(N, device=given.q_BHND.device)
        return positions_N.split(max(1, MAX_SCORES // max(1, B * H * keys))) if N else ()

    def reads(self, given: Inputs, real_BN: Tensor | None, prefix: bool) -> list[Part]:
        B, H, N, _ = given.q_BHND.shape
        if real_BN is not None and not bool(real_BN.all()):
            raise ValueError("real_BN: heads that choose keys query by query take no padding")
        queries, keys = self.choice_queries(given), self.choice_keys(given)
        index_BHNK = torch.full((B, H, N, self.most_keys(N)), -1, device=given.q_BHND.device)
        for position_Q in self.split(given, keys.shape[2]):
            at_BHQK = self.best(queries[:, :, position_Q], keys, position_Q)
            index_BHNK[:, :, position_Q, : at_BHQK.shape[-1]] = at_BHQK
        first_BH11 = torch.arange(B * H, device=index_BHNK.device).view(B, H, 1, 1) * N
        index_BHNK = torch.where(index_BHNK >= 0, index_BHNK + first_BH11, -1)
        return [Indexed(torch.arange(B * H * N, device=index_BHNK.device), index_BHNK.flatten(0, 2), N)]

    def most_keys(self, length: int) -> int:
        """Return how many keys a query reads at the most."""
        return min(self.window, length)

    def start(self, relative: Relative | None = None) -> Cache:
        return GrowingCache(self, relative)


class Exact(Choice):
    """Each query reads its `window` best keys of the prefix by q k^T: the ceiling of every selection, O(N^2) in scores.

    The scores are the attention's own logits (Shaw's terms left out), held for some queries at a time.
    """

    @classmethod
    def from_config(cls, config: Config, heads: int, layer: int) -> Self:
        return cls(window=config.routing.window, **routed_options(config))

    def choice_queries(self, given: Inputs) -> Tensor:
        return given.turned_q_BHND

    def choice_keys(self, given: Inputs) -> Tensor:
        return given.turned_k_BHND

    def rule(self, given: Inputs, head: int, prefix: bool) -> Tensor:
        score_NN = given.turned_q_BHND[0, head] @ given.turned_k_BHND[0, head].T
        return oracle.best_keys(score_NN, self.window, self.attend_self)


class Indexer(Choice):
    """A small indexer for each head chooses `window` past keys (DeepSeek sparse attention, without its gates).

    Scores are products of `size` units of the query and of the key, by matrices of their own. They learn by the
    Kullback-Leibler divergence to the head's attention, with queries and keys detached: over the whole prefix for the
    first `warmup` steps, in which the head reads everything, then over the keys that are chosen. O(N^2) in scores.

    Args:
        heads, size_of_head: H and D.
        size: units of the indexer.
        warmup: training steps for which the head is dense.
    """

    def __init__(self, heads: int, size_of_head: int, *, size: int = 16, warmup: int = 0, **given: Any) -> None:
        super().__init__(**given)
        for name, count in (("heads", heads), ("size_of_head", size_of_head), ("size", size)):
            check_positive(name, count)
        check_positive("warmup", warmup, least=0)
        self.warmup = warmup
        deviation = size_of_head**-0.5
        self.query_HDE = nn.Parameter(torch.randn(heads, size_of_head, size) * deviation)
        self.key_HDE = nn.Parameter(torch.randn(heads, size_of_head, size) * deviation)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.steps: Tensor

    @classmethod
    def from_config(cls, config: Config, heads: int, layer: int) -> Self:
        size, routing = config.model.hidden // config.model.heads, config.routing
        own = {"window": routing.window, "warmup": routing.warmup}
        return cls(heads, size, **own, **routed_options(config))

    def choice_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that choose, which must receive a gradient."""
        return [self.query_HDE, self.key_HDE]

    def choice_queries(self, given: Inputs) -> Tensor:
        scaled_HDE = self.query_HDE * self.query_HDE.shape[-1] ** -0.5
        return given.q_BHND.detach() @ scaled_HDE.to(given.q_BHND.dtype)

    def choice_keys(self, given: Inputs) -> Tensor:
        return given.k_BHND.detach() @ self.key_HDE.to(given.k_BHND.dtype)

    def after_step(self) -> None:
        """Count the step."""
        self.steps += 1

    @property
    def dense(self) -> bool:
        """Whether the head still reads every earlier position."""
        return int(self.steps) < self.warmup

    def most_keys(self, length: int) -> int:
        return length if self.dense else min(self.window, length)

    def loss(self, given: Inputs, real_BN: Tensor | None) -> Tensor:
        """Return the mean divergence over all positions in training."""
        if not self.training or not given.q_BHND.numel():
            return super().loss(given, real_BN)
        scale = self.terms(given.q_BHND.shape[-1], None).scale
        N = given.q_BHND.shape[2]
        turned_q, turned_k = given.turned_q_BHND.detach(), given.turned_k_BHND.detach()
        query_BHNE, key_BHNE = self.choice_queries(given), self.choice_keys(given)

        def part(position_Q: Tensor, query_BHQE: Tensor, key_BHNE: Tensor) -> Tensor:
            last = int(position_Q[-1]) + 1
            score_BHQN = query_BHQE @ key_BHNE[:, :, :last].transpose(-1, -2)
            logit_BHQN = turned_q[:, :, position_Q] @ turned_k[:, :, :last].transpose(-1, -2) * scale
            at_BHQK = self.best(query_BHQE.detach(), key_BHNE[:, :, :last].detach(), position_Q)
            none_BHQK = at_BHQK < 0
            score, logit = (
                x.gather(-1, at_BHQK.clamp(min=0)).masked_fill(none_BHQK, -1e9) for x in (score_BHQN, logit_BHQN)
            )
            return F.kl_div(score.log_softmax(-1), logit.log_softmax(-1), reduction="sum", log_target=True)

        pieces = [recomputed(part, p, query_BHNE[:, :, p], key_BHNE) for p in self.split(given, N)]
        return torch.stack(pieces).sum() / query_BHNE[..., 0].numel()

    def rule(self, given: Inputs, head: int, prefix: bool) -> Tensor:
        score_NN = self.choice_queries(given)[0, head] @ self.choice_keys(given)[0, head].T
        return oracle.best_keys(score_NN, len(score_NN) if self.dense else self.window, self.attend_self)
