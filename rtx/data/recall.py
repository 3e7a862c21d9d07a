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
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from struct import pack
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from rtx.data.sampler import Sampler, SyntheticSampler
from rtx.data.store import Store
from rtx.errors import UserError
from rtx.settings.schema import Config, DataConfig

if TYPE_CHECKING:
    from torch import Tensor

    from rtx.data.store import Answers

FORMAT = 1
"""Version of how a sequence is made from its number."""
TRAIN = 0
VALID = 1
TEST = 2
HELD_OUT = {"valid": VALID, "test": TEST}
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
class RecallStore(Store):
    """A synthetic data set: an endless training split, and two fixed held-out ones `[S * N]`."""

    task: DataConfig
    """length (N), pairs (P), distance (D), keys, values, fillers and sequences (S)."""
    stamps: ClassVar[Mapping[str, Any]] = {}
    tokenizer: ClassVar[None] = None

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.task.name

    @property
    def unit(self) -> str:
        return "answer"

    @property
    def vocabulary(self) -> int:
        """Number of different tokens: keys first, then values, then fillers."""
        return self.task.keys + self.task.values + self.task.fillers

    @property
    def answers(self) -> Answers:
        return self.find_answers

    @property
    def answer_values(self) -> int:
        return self.task.values

    def find_answers(self, tokens_BN: Tensor) -> tuple[Tensor, Tensor]:
        """Return positions of answers, ascending, and distances to their pairs: int64 `[B, A]`.

        An answer is a value whose nearest key before it also occurs before that. Sequences with
        fewer than A answers end with positions -1 and distances 0.
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
        return torch.where(is_missing_BA, -1, at_BA), distance_BA.masked_fill(is_missing_BA, 0)

    def scored_tokens(self, tokens: np.ndarray) -> int:
        """Return how many answers whole sequences `[S * N]` have."""
        import torch

        tokens_SN = torch.from_numpy(tokens.reshape(-1, self.task.length)).long()
        at_SA, _ = self.find_answers(tokens_SN)
        return int((at_SA >= 0).sum())

    def sequence(self, seed: int, index: int, split: int = TRAIN) -> np.ndarray:
        """Return sequence `index` of a split, uint16 `[N]`, the same on every machine."""
        task = self.task
        header = pack("<QQQQ", FORMAT, split, seed, index)
        draws = self.draws(header)
        entries = self.entries(draws)
        rows, width = entries.shape
        if self.name == "induction":
            starts = self.scattered_starts(header, draws.pairs)
        else:
            starts = self.starts(draws.questions, rows, width)
        tokens = np.full(task.length, -1)
        tokens[starts[..., None] + np.arange(width)] = entries
        drawn = draws.filler % task.fillers
        filler = task.keys + task.values + drawn.astype(np.int64)
        is_free = tokens < 0
        tokens[is_free] = filler[: is_free.sum()]
        return tokens.astype(np.uint16)

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

    def split(self, name: str) -> np.ndarray:
        """Return the tokens of split valid or test, uint16 `[S * N]`; UserError for any other."""
        if name not in HELD_OUT:
            allowed = f"one of {', '.join(HELD_OUT)}"
            raise UserError(f"data={self.name} has no {name} split to read; {allowed}")
        return self.held_out[name]

    @cached_property
    def held_out(self) -> dict[str, np.ndarray]:
        """Both held-out splits, the same for every run."""
        splits = {}
        for name, split in HELD_OUT.items():
            numbers = range(self.task.sequences)
            splits[name] = np.concatenate([self.sequence(0, s, split) for s in numbers])
        return splits

    def training_sampler(self, config: Config) -> Sampler:
        return SyntheticSampler(self.sequence, config.seed, config.trainer.batch_size)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that determine the sequences."""
        names = ["length", "pairs", "keys", "values", "fillers", "sequences"]
        if self.name != "recall":
            names += ["name", "distance", "gaps"]
        return {name: getattr(self.task, name) for name in names}

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "unit": self.unit,
            "vocabulary": self.vocabulary,
            "fingerprint": self.fingerprint,
            "splits": {name: len(tokens) for name, tokens in self.held_out.items()},
            "source": {"place": "made as it is asked for", **self.settings},
            "stamps": self.stamps,
            "tokenizer": None,
            "folder": None,
        }

    def summary(self) -> list[str]:
        counts = []
        for name, tokens in self.held_out.items():
            counts.append(f"{self.scored_tokens(tokens):,} answers in {name}")
        answers = ", ".join(counts)
        return [f"data={self.name}: made on the fly; {answers}; {self.vocabulary} ids"]

    @cached_property
    def fingerprint(self) -> str:  # type: ignore[override]
        """sha256 of the settings and the held-out sequences: equal means the same data."""
        digest = hashlib.sha256(json.dumps([FORMAT, self.settings]).encode())
        for tokens in self.held_out.values():
            digest.update(tokens.astype("<u2").tobytes())
        return digest.hexdigest()


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


def hashed(header: bytes, count: int) -> np.ndarray:
    """Return `count` 64-bit integers that only `header` determines."""
    return np.frombuffer(hashlib.shake_256(header).digest(8 * count), dtype="<u8")
