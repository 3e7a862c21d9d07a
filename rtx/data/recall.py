"""Recall tasks: keys with their values, filler, and questions for the values; nothing is on disk.

A sequence of N tokens shows each of its keys before its value, and once more, as a question, before
the value again: the answer. Values are drawn independently, so only the pair determines an answer.
Only answers are scored; there are A <= P of them.

recall: P pairs at the start, filler, and the P keys in random order at the end. In all other tasks
a sequence has P, P / 2 or P / 4 pairs.
mqar: pairs at the start; questions at positions drawn without replacement after P pairs and D
tokens (Arora et al. 2024).
induction: pairs, too, at positions drawn evenly, each question at least D tokens after its pair.
copy: one key, the marker, before a string of values; the string again at a position as in mqar.
masked: sequences of induction, for encoders. Of each key one of its two values is hidden, so that
the other one may be on either side: the first value if half the sum of the positions of both keys
is odd, else the second.
"""

from __future__ import annotations

from dataclasses import dataclass
from struct import pack
from typing import TYPE_CHECKING, Any

import numpy as np

from rtx.data.store import FoundAnswers
from rtx.data.synthetic import TRAIN, SyntheticStore, hashed

if TYPE_CHECKING:
    from torch import Tensor

POWER = 0.01
"""The exponent a of data.gaps=power, as in Zoology's settings."""
CANDIDATES_PER_PAIR = 64
"""Positions drawn for each pair of induction before the first attempt to place all."""


@dataclass(frozen=True)
class Draws:
    """The random numbers of one sequence, 64-bit integers, by what they decide."""

    keys: np.ndarray
    """Which keys: `[keys]`."""
    values: np.ndarray
    """Which value each pair has: `[P]`."""
    questions: np.ndarray
    """Where, or in which order, questions are."""
    filler: np.ndarray
    """Which filler fills each free position."""
    pairs: int
    """How many pairs the sequence has."""


@dataclass(frozen=True)
class RecallStore(SyntheticStore):
    """Pairs (P) of keys and values, and questions at a distance (D) from them."""

    @property
    def settings(self) -> dict[str, Any]:
        names = ["length", "pairs", "keys", "values", "fillers", "sequences"]
        if self.name != "recall":
            names += ["name", "distance", "gaps"]
        return {name: getattr(self.task, name) for name in names}

    def find_answers(self, tokens_BN: Tensor) -> FoundAnswers:
        """Return where answers are, and their distances to their pairs.

        An answer is a value whose nearest key before it also occurs before that. Of data=masked
        the first value of a key may be the answer instead, and positions do not ascend.
        """
        # Reports read this module without torch.
        import torch

        B, N = tokens_BN.shape
        keys = self.task.keys
        position_BN = torch.arange(N, device=tokens_BN.device).expand_as(tokens_BN)
        # The nearest key before each position, and where this key occurs first.
        question_BN = torch.where(tokens_BN < keys, position_BN, -1).cummax(1).values
        key_BN = tokens_BN.clamp(max=keys)
        first_BK = torch.full((B, keys + 1), N, device=tokens_BN.device)
        first_BK = first_BK.scatter_reduce(1, key_BN, position_BN, "amin")
        asked_key_BN = key_BN.gather(1, question_BN.clamp(min=0))
        distance_BN = question_BN - first_BK.gather(1, asked_key_BN)
        is_value_BN = (tokens_BN >= keys) & (tokens_BN < keys + self.task.values)
        is_answer_BN = is_value_BN & (distance_BN > 0)
        at_BN = torch.where(is_answer_BN, position_BN, N).sort(1).values
        at_BA = at_BN[:, : self.task.pairs]
        is_missing_BA = at_BA == N
        distance_BA = distance_BN.gather(1, at_BA.clamp(max=N - 1))
        at_BA = torch.where(is_missing_BA, -1, at_BA)
        distance_BA = distance_BA.masked_fill(is_missing_BA, 0)
        if self.name == "masked":
            at_BA = at_BA - distance_BA * hides_first(at_BA, distance_BA)
        return FoundAnswers(
            position_BA=at_BA,
            distance_BA=distance_BA,
            hops_BA=(~is_missing_BA).long(),
        )

    def sequence(self, seed: int, index: int, split: int = TRAIN) -> np.ndarray:
        task = self.task
        header = pack("<QQQQ", self.version, split, seed, index)
        draws = self.draws(header)
        entries = self.entries(draws)
        rows, width = entries.shape
        if self.name in ("induction", "masked"):
            starts = self.scattered_starts(header, draws.pairs)
        else:
            starts = self.starts(draws.questions, rows, width)
        tokens = np.full(task.length, -1)
        tokens[starts[..., None] + np.arange(width)] = entries
        return self.filled(tokens, draws.filler)

    def draws(self, header: bytes) -> Draws:
        """Return the random numbers of the sequence that `header` names."""
        task = self.task
        sizes = [task.keys, task.pairs, task.length, task.length, 1]
        if self.name == "recall":
            questions_and_filler = [task.pairs, task.length - 4 * task.pairs]
            sizes = [task.keys, task.pairs, *questions_and_filler, 0]
        numbers = hashed(header, sum(sizes))
        bounds = np.cumsum(sizes)[:-1]
        keys, values, questions, filler, count = np.split(numbers, bounds)
        pairs = task.pairs
        if self.name != "recall":
            pairs = max(1, task.pairs >> int(count[0] % 3))
        return Draws(keys, values, questions, filler, pairs)

    def entries(self, draws: Draws) -> np.ndarray:
        """Return keys with values `[pairs, 2]`; of copy the marker with all `[1, pairs + 1]`."""
        rows = 1 if self.name == "copy" else draws.pairs
        keys = draws.keys.argsort(kind="stable")[:rows, None]
        drawn = draws.values[: draws.pairs] % self.task.values
        values = self.task.keys + drawn.astype(np.int64)
        return np.concatenate([keys, values.reshape(rows, -1)], axis=1)

    def starts(self, draws: np.ndarray, rows: int, width: int) -> np.ndarray:
        """Return where entries of `width` tokens start, first and as questions: `[2, rows]`."""
        task = self.task
        first = np.arange(rows) * width
        if self.name == "recall":
            order = draws.argsort(kind="stable").argsort()
            return np.stack([first, task.length - rows * width + order * width])
        longest = 2 * task.pairs
        step = 2
        if self.name == "copy":
            longest = task.pairs + 1
            step = 1
        candidates = np.arange(longest + task.distance, task.length - width + 1, step)
        order = draws[: len(candidates)]
        if task.gaps == "power":
            # The least exponential variables are a draw without replacement by their rates.
            rates = np.arange(1, len(candidates) + 1) ** (1 - POWER)
            order = -np.log((order + 0.5) / 2**64) * rates
        chosen = order.argsort(kind="stable")[:rows]
        return np.stack([first, candidates[chosen]])

    def scattered_starts(self, header: bytes, pairs: int) -> np.ndarray:
        """Return starts of pairs and of their questions, drawn evenly, in order: `[2, pairs]`.

        A question is at least D tokens after its pair. So few pairs are allowed that a free
        position exists for every one; more candidates are drawn until all pairs are placed.
        """
        cells = self.task.length // 2
        least = max(1, -(-self.task.distance // 2))
        count = CANDIDATES_PER_PAIR * pairs
        while True:
            drawn = (hashed(header + b"places", count) % cells**2).astype(np.int64)
            first, question = np.divmod(drawn, cells)
            candidates = np.stack([first, question], axis=1)
            candidates = candidates[question - first >= least]
            chosen = disjoint(candidates.tolist(), pairs)
            if len(chosen) == pairs:
                return 2 * np.array(chosen).T
            count *= 2


def hides_first(at_BA: Tensor, distance_BA: Tensor) -> Tensor:
    """Return whether the first of two values is hidden, bool `[B, A]`.

    Args:
        at_BA: the position of the second value, one after its key; keys are at even positions.
        distance_BA: from the first value to the second.
    """
    halves_BA = (2 * (at_BA - 1) - distance_BA) // 2
    return halves_BA % 2 == 1


def disjoint(candidates: list[list[int]], count: int) -> list[list[int]]:
    """Return the first `count` candidates that share no number with one before, or fewer."""
    chosen: list[list[int]] = []
    taken: set[int] = set()
    for pair in candidates:
        if len(chosen) == count:
            break
        if taken.isdisjoint(pair):
            chosen.append(pair)
            taken.update(pair)
    return chosen
