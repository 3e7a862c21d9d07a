"""Long-context tasks: evidence anywhere in a text, and all questions at its end.

They are the kinds of RULER (Hsieh et al. 2024), in token ids and not in words. A sequence of N
tokens is a context of R tokens, D tokens of filler, and the questions, each followed by its
answers. So no answer depends on the last D tokens before the questions. Only answers are scored;
there are A of them. An answer is predicted with those before it in view.

needles: P pairs of a key and a value in filler. Every key has M values, in M pairs apart. A
question is a key; its answers are its M values in the order of the text. The keys that no question
names are distractors.
tracking: P assignments, pairs of a variable and what it takes: a value, or a variable that was
assigned before. Chains of H assignments lie between each other. A question is any variable of a
chain; its answer is the value at the start of the chain, 1 to H assignments away.
counting: values as often as a zeta distribution has them, in random order. The question is a
marker; its answers are the most frequent values, the most frequent one first.

Shapes: B sequences, N tokens, R of them context, C cells of two tokens of the context, P pairs, Q
questions, M values of a key, K answers of a marker, A answers of a sequence.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from struct import pack
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rtx.data.store import FoundAnswers
from rtx.data.synthetic import TRAIN, SyntheticStore, hashed
from rtx.settings.derived import context_length, counts_of_values

if TYPE_CHECKING:
    from torch import Tensor


class Parts(NamedTuple):
    """A sequence without its filler, int64."""

    context_R: np.ndarray
    """Tokens of the context; -1: filler."""
    questions: np.ndarray
    """Questions, each followed by its answers."""


@dataclass(frozen=True)
class LongContextStore(SyntheticStore):
    """A task whose questions are at the end."""

    @abstractmethod
    def parts(self, header: bytes) -> Parts:
        """Return the sequence that `header` names, without its filler."""

    @abstractmethod
    def solve(self, prompt: Sequence[int]) -> int:
        """Return the answer that follows a prompt, all tokens before it, by reading them."""

    @property
    def settings(self) -> dict[str, Any]:
        names = ["name", "length", "distance", "queries", "values", "fillers", "sequences"]
        return {name: getattr(self.task, name) for name in [*names, *self.own_settings]}

    @property
    def own_settings(self) -> Sequence[str]:
        """The names of the settings that not all tasks have."""
        return ()

    @property
    def context(self) -> int:
        """R."""
        return context_length(self.task)

    @property
    def cells(self) -> int:
        """C, the number of places for pairs."""
        return self.context // 2

    def sequence(self, seed: int, index: int, split: int = TRAIN) -> np.ndarray:
        header = self.name.encode() + pack("<QQQQ", self.version, split, seed, index)
        parts = self.parts(header)
        tokens = np.full(self.task.length, -1)
        tokens[: len(parts.context_R)] = parts.context_R
        tokens[self.task.length - len(parts.questions) :] = parts.questions
        return self.filled(tokens, hashed(header + b"filler", self.task.length))

    def solved(self, split: str) -> int:
        """Return how many answers of a split follow from their prompts, and check that all do."""
        import torch

        answers = 0
        for tokens in self.split(split).reshape(-1, self.task.length).astype(np.int64):
            position_1A = self.find_answers(torch.from_numpy(tokens)[None]).position_BA
            sequence = tokens.tolist()
            for position in position_1A[0].tolist():
                assert self.solve(sequence[:position]) == sequence[position], (split, position)
                answers += 1
        return answers

    def context_of_pairs(self, pair_P2: np.ndarray, header: bytes) -> np.ndarray:
        """Return pairs in their order at cells drawn evenly, the rest filler, `[R]`."""
        cell_P = np.sort(order_of(header + b"cells", self.cells)[: len(pair_P2)])
        cell_C2 = np.full((self.cells, 2), -1)
        cell_C2[cell_P] = pair_P2
        return cell_C2.ravel()

    def questions_of(self, tokens_BN: Tensor, width: int) -> Tensor:
        """Return the tokens of the questions with their answers, `[B, Q, width]`."""
        count = self.task.queries
        return tokens_BN[:, -count * width :].unflatten(1, (count, width))


class NeedleStore(LongContextStore):
    """Keys with their values among others."""

    @property
    def own_settings(self) -> Sequence[str]:
        return ("pairs", "keys", "needle_values")

    def parts(self, header: bytes) -> Parts:
        task = self.task
        count = task.pairs // task.needle_values
        key_of = order_of(header + b"keys", task.keys)[:count]
        # Which key each pair of the text has: every key in as many pairs.
        label_P = order_of(header + b"order", task.pairs) % count
        value_P = task.keys + drawn(header + b"values", task.pairs, task.values)
        pair_P2 = np.stack([key_of[label_P], value_P], axis=1)
        questions = []
        for label in order_of(header + b"questions", count)[: task.queries]:
            questions.append([key_of[label], *value_P[label_P == label]])
        return Parts(self.context_of_pairs(pair_P2, header), np.concatenate(questions))

    def solve(self, prompt: Sequence[int]) -> int:
        last = max(place for place, token in enumerate(prompt) if token < self.keys)
        earlier = prompt[last + 1 :]
        values = []
        for place in range(last):
            if prompt[place] == prompt[last]:
                values.append(prompt[place + 1])
        return values[len(earlier)]

    def find_answers(self, tokens_BN: Tensor) -> FoundAnswers:
        """Return where answers are; the distance is that to the value of the needle."""
        import torch

        B, N = tokens_BN.shape
        M = self.task.needle_values
        key_BQ = self.questions_of(tokens_BN, 1 + M)[:, :, 0]
        key_BC = tokens_BN[:, : 2 * self.cells : 2]
        is_needle_BQC = key_BQ[:, :, None] == key_BC[:, None]
        # The cells of needles ascend; other cells are after all of them.
        cell_C = torch.arange(self.cells, device=tokens_BN.device)
        needle_BQC = torch.where(is_needle_BQC, cell_C, self.cells).sort(-1).values
        value_BQM = 2 * needle_BQC[:, :, :M] + 1
        offset_QA = torch.arange(self.task.queries * (1 + M), device=tokens_BN.device)
        answer_QM = offset_QA.view(-1, 1 + M)[:, 1:] + N - len(offset_QA)
        position_BA = answer_QM.flatten().expand(B, -1)
        distance_BA = position_BA - value_BQM.flatten(1)
        return FoundAnswers(position_BA, distance_BA, torch.ones_like(position_BA))


class TrackingStore(LongContextStore):
    """Chains of assignments."""

    @property
    def own_settings(self) -> Sequence[str]:
        return ("pairs", "keys", "hops")

    def parts(self, header: bytes) -> Parts:
        task = self.task
        hops = task.hops
        chains = task.pairs // hops
        names = order_of(header + b"keys", task.keys)[: task.pairs].reshape(chains, hops)
        value_of = task.keys + drawn(header + b"values", chains, task.values)
        # What each variable takes: the chain's value, or the variable before it.
        sources = np.concatenate([value_of[:, None], names[:, :-1]], axis=1)
        chain_P = order_of(header + b"order", task.pairs) % chains
        link_P = occurrences(chain_P)
        pair_P2 = np.stack([names[chain_P, link_P], sources[chain_P, link_P]], axis=1)
        asked_Q = order_of(header + b"questions", chains)[: task.queries]
        link_Q = drawn(header + b"links", task.queries, hops)
        questions = np.stack([names[asked_Q, link_Q], value_of[asked_Q]], axis=1)
        return Parts(self.context_of_pairs(pair_P2, header), questions.ravel())

    def solve(self, prompt: Sequence[int]) -> int:
        value_of: dict[int, int] = {}
        target = None
        for token in prompt[:-1]:
            if target is not None:
                value_of.setdefault(target, value_of.get(token, token))
                target = None
            elif token < self.keys:
                target = token
        return value_of[prompt[-1]]

    def find_answers(self, tokens_BN: Tensor) -> FoundAnswers:
        """Return where answers are; the distance is that to the value at the start of a chain."""
        import torch

        B, N = tokens_BN.shape
        cell_BC2 = tokens_BN[:, : 2 * self.cells].unflatten(1, (self.cells, 2))
        variable_BC, source_BC = cell_BC2.unbind(-1)
        token_BQ = self.questions_of(tokens_BN, 2)[:, :, 0]
        cell_BQ = torch.zeros_like(token_BQ)
        hops_BQ = torch.zeros_like(token_BQ)
        for _ in range(self.task.hops):
            is_variable_BQ = token_BQ < self.task.keys
            is_cell_BQC = token_BQ[:, :, None] == variable_BC[:, None]
            cell_BQ = torch.where(is_variable_BQ, is_cell_BQC.byte().argmax(-1), cell_BQ)
            token_BQ = torch.where(is_variable_BQ, source_BC.gather(1, cell_BQ), token_BQ)
            hops_BQ += is_variable_BQ
        count = self.task.queries
        first = N - 2 * count + 1
        position_Q = torch.arange(first, N, 2, device=tokens_BN.device)
        position_BQ = position_Q.expand(B, -1)
        return FoundAnswers(position_BQ, position_BQ - (2 * cell_BQ + 1), hops_BQ)


class CountingStore(LongContextStore):
    """Values by how often they occur."""

    @property
    def keys(self) -> int:
        """One: the marker."""
        return 1

    @property
    def answer_values(self) -> Sequence[int]:
        """The values that no earlier answer has named."""
        return tuple(range(self.task.values, self.task.values - self.task.queries, -1))

    def parts(self, header: bytes) -> Parts:
        values = self.keys + order_of(header + b"values", self.task.values)
        content = np.repeat(values, counts_of_values(self.task))
        context_R = np.full(self.context, -1)
        context_R[order_of(header + b"order", self.context)[: len(content)]] = content
        marker = [0]
        return Parts(context_R, np.concatenate([marker, values[: self.task.queries]]))

    def solve(self, prompt: Sequence[int]) -> int:
        marker = prompt.index(0)
        is_value = range(self.keys, self.keys + self.task.values)
        counts = Counter(token for token in prompt[:marker] if token in is_value)
        earlier = prompt[marker + 1 :]
        ranked = [value for value, _ in counts.most_common()]
        return ranked[len(earlier)]

    def find_answers(self, tokens_BN: Tensor) -> FoundAnswers:
        """Return where answers are; none repeats one token, so distances are 0."""
        import torch

        B, N = tokens_BN.shape
        position_A = torch.arange(N - self.task.queries, N, device=tokens_BN.device)
        position_BA = position_A.expand(B, -1)
        nothing_BA = torch.zeros_like(position_BA)
        return FoundAnswers(position_BA, nothing_BA, nothing_BA)


def order_of(header: bytes, count: int) -> np.ndarray:
    """Return a permutation of 0 to `count` - 1 that `header` determines, int64."""
    return hashed(header, count).argsort(kind="stable")


def drawn(header: bytes, count: int, kinds: int) -> np.ndarray:
    """Return `count` numbers below `kinds`, each as likely, that `header` determines, int64."""
    return (hashed(header, count) % kinds).astype(np.int64)


def occurrences(label_P: np.ndarray) -> np.ndarray:
    """Return how many equal labels are before each label, `[P]`."""
    order_P = label_P.argsort(kind="stable")
    _, first = np.unique(label_P[order_P], return_index=True)
    number_P = np.empty_like(label_P)
    counts = np.diff([*first, len(label_P)])
    number_P[order_P] = np.arange(len(label_P)) - np.repeat(first, counts)
    return number_P
