"""Associative recall: key-value pairs, filler, and the keys asked again; made when it is asked for, nothing on disk.

A sequence of N units holds P different keys, each before its value; then filler; then the P keys once more in random
order, each before its value. Keys, values and fillers have units of their own, and values are drawn independently, so
that nothing but the pair itself tells an answer: who cannot reach the pairs is right once in as many times as there are
values. Only the P answers are scored and trained on. All else is noise of a likelihood that is known beforehand.

Shapes: N units of a sequence, S sequences of a split, A = P answers of a sequence.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from struct import pack
from typing import Any, ClassVar

import numpy as np

from rtx.config import DataConfig
from rtx.errors import UserError

FORMAT = 1
"""Version of how a sequence is made from its number."""

TRAIN, VALID, TEST = 0, 1, 2
HELD_OUT = {"valid": VALID, "test": TEST}
HELD_OUT_SEED = 0
"""The held-out splits are the same for every run."""


@dataclass(frozen=True)
class RecallStore:
    """What stands in the place of a token store: an endless training split, and two held-out ones of fixed sequences.

    Held-out splits are unsigned integers `[S * N]`, sequence behind sequence.
    """

    task: DataConfig
    """Reads length (N), pairs (P), keys, values, fillers and sequences (S)."""

    name = "recall"
    unit = "answer"
    """What is counted and scored, in words."""
    image = None
    stamps: ClassVar[dict[str, Any]] = {}

    @property
    def vocabulary(self) -> int:
        """Number of different units: keys first, then values, then fillers."""
        return vocabulary(self.task)

    @cached_property
    def answers(self) -> np.ndarray:
        """Positions of the answers in each sequence, `[A]`: every other one of the last 2 P, the last included."""
        return np.arange(self.task.length - 2 * self.task.pairs + 1, self.task.length, 2)

    @property
    def chance(self) -> float:
        """Share of right answers of who knows the values and nothing of the pairs."""
        return 1 / self.task.values

    def sequence(self, seed: int, index: int, split: int = TRAIN) -> np.ndarray:
        """Return sequence `index` of a split, uint16 `[N]`: a pure function of the arguments on every machine."""
        task = self.task
        filler = task.length - 4 * task.pairs
        sizes = (task.keys, task.pairs, task.pairs, filler)
        key, value, order, noise = np.split(draws(sum(sizes), split, seed, index), np.cumsum(sizes)[:-1])
        pairs = np.empty((task.pairs, 2), dtype=np.uint16)
        pairs[:, 0] = key.argsort(kind="stable")[: task.pairs]
        pairs[:, 1] = task.keys + value % task.values
        asked = pairs[order.argsort(kind="stable")]
        noise = (task.keys + task.values + noise % task.fillers).astype(np.uint16)
        return np.concatenate([pairs.ravel(), noise, asked.ravel()])

    def split(self, name: str) -> np.ndarray:
        """Return the units of split valid or test, uint16 `[S * N]`.

        Raises:
            UserError: the training split, which has no end.
        """
        if name not in HELD_OUT:
            raise UserError(
                f"data=recall has no {name} split to read, its training sequences are made as they are asked for; "
                f"one of {', '.join(HELD_OUT)}"
            )
        return self.held_out[name]

    @cached_property
    def held_out(self) -> dict[str, np.ndarray]:
        """Both held-out splits."""
        return {
            name: np.concatenate([self.sequence(HELD_OUT_SEED, s, split) for s in range(self.task.sequences)])
            for name, split in HELD_OUT.items()
        }

    def count(self, name: str) -> int:
        """Return how many answers a split has."""
        return len(self.split(name)) // self.task.length * len(self.answers)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over the settings and the held-out sequences: equal means the same data."""
        digest = hashlib.sha256(json.dumps([FORMAT, self.settings]).encode())
        for tokens in self.held_out.values():
            digest.update(tokens.astype("<u2").tobytes())
        return digest.hexdigest()

    @property
    def settings(self) -> dict[str, int]:
        """What the sequences are made by."""
        return {key: getattr(self.task, key) for key in ("length", "pairs", "keys", "values", "fillers", "sequences")}

    def describe(self) -> dict[str, Any]:
        """Return what a run records of its data, as JSON values."""
        return {
            "name": self.name,
            "fingerprint": self.fingerprint,
            "tokenizer": None,
            "vocabulary": self.vocabulary,
            "unit": self.unit,
            "splits": {name: len(tokens) for name, tokens in self.held_out.items()},
            "stamps": self.stamps,
            "source": {"place": "made as it is asked for", **self.settings},
            "folder": None,
        }


def vocabulary(task: DataConfig) -> int:
    """Return the number of different units of a task."""
    return task.keys + task.values + task.fillers


def draws(count: int, split: int, seed: int, index: int) -> np.ndarray:
    """Return 64-bit numbers, uint64 `[count]`, the same on every machine: an extendable hash, not a generator."""
    text = hashlib.shake_256(pack("<QQQQ", FORMAT, split, seed, index)).digest(8 * count)
    return np.frombuffer(text, dtype="<u8").astype(np.uint64)
