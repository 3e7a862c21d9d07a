"""Data sets that are made on the fly: an endless training split, and two fixed held-out ones.

A sequence is a function of its split, seed and number. Only its answers are scored.
"""

from __future__ import annotations

import hashlib
import json
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from rtx.data.sampler import Sampler, SyntheticSampler
from rtx.data.store import Answers, FoundAnswers, Store
from rtx.errors import UserError
from rtx.settings.data_sets import MADE
from rtx.settings.schema import Config, DataConfig

if TYPE_CHECKING:
    from torch import Tensor

TRAIN = 0
VALID = 1
TEST = 2
ANY_LENGTH = ("length", "sequences")
"""Settings that change no rule of a task."""
HELD_OUT = {"valid": VALID, "test": TEST}


@dataclass(frozen=True)
class SyntheticStore(Store):
    """A task whose sequences are computed: held-out splits have S sequences `[S * N]`."""

    task: DataConfig
    """length (N), sequences (S), keys, values, fillers, and the sizes of the task."""
    # Of all tasks.
    stamps: ClassVar[Mapping[str, Any]] = {}  # pyright: ignore[reportIncompatibleVariableOverride]
    tokenizer: ClassVar[None] = None  # pyright: ignore[reportIncompatibleVariableOverride]
    version: ClassVar[int] = 1
    """Version of how a sequence is made from its number."""

    @property
    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """The settings that determine the sequences."""

    @abstractmethod
    def sequence(self, seed: int, index: int, split: int = TRAIN) -> np.ndarray:
        """Return sequence `index` of a split, uint16 `[N]`, the same on every machine."""

    @abstractmethod
    def find_answers(self, tokens_BN: Tensor) -> FoundAnswers:
        """Return where the answers of sequences are, by their tokens alone."""

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.task.name

    @property
    def unit(self) -> str:
        return "answer"

    @property
    def keys(self) -> int:
        """Number of different keys."""
        return self.task.keys

    @property
    def vocabulary(self) -> int:
        """Number of different tokens: keys first, then values, then fillers."""
        return self.keys + self.task.values + self.task.fillers

    @property
    def answers(self) -> Answers:
        return self.find_answers

    @property
    def answer_values(self) -> Sequence[int]:
        return (self.task.values,)

    def scored_tokens(self, tokens: np.ndarray) -> int:
        """Return how many answers whole sequences `[S * N]` have."""
        # Reports read this module without torch.
        import torch

        tokens_SN = torch.from_numpy(tokens.reshape(-1, self.task.length)).long()
        position_SA = self.find_answers(tokens_SN).position_BA
        return int((position_SA >= 0).sum())

    def filled(self, tokens: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Return a sequence, uint16, with a filler at each token that is negative.

        Args:
            numbers: random numbers, one for each free position at least.
        """
        drawn = numbers % self.task.fillers
        filler = self.keys + self.task.values + drawn.astype(np.int64)
        is_free = tokens < 0
        tokens[is_free] = filler[: is_free.sum()]
        return tokens.astype(np.uint16)

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
        digest = hashlib.sha256(json.dumps([self.version, self.settings]).encode())
        for tokens in self.held_out.values():
            digest.update(tokens.astype("<u2").tobytes())
        return digest.hexdigest()


def is_same_task(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two descriptions of stores are of one task, whose sequences may differ in length."""
    if one["name"] not in MADE or one["name"] != other["name"]:
        return False
    settings = []
    for description in (one, other):
        source = description["source"]
        settings.append({key: source[key] for key in source if key not in ANY_LENGTH})
    return settings[0] == settings[1]


def hashed(header: bytes, count: int) -> np.ndarray:
    """Return `count` 64-bit integers that only `header` determines."""
    return np.frombuffer(hashlib.shake_256(header).digest(8 * count), dtype="<u8")


def chance_of(answer_values: Sequence[int]) -> float:
    """Return the accuracy of guesses, each among as many values as its answer may have."""
    return sum(1 / values for values in answer_values) / len(answer_values)


def chance_bits(answer_values: Sequence[int]) -> float:
    """Return the bits of an answer under such guesses."""
    return sum(math.log2(values) for values in answer_values) / len(answer_values)
