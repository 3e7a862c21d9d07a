"""Associative recall: key-value pairs, filler, and the keys asked again; made when it is asked for, nothing on disk.

A sequence of N units holds P keys, each before its value; filler; the keys once more in random order, each before its
value. Values are drawn independently, so that only the pair tells an answer; only the A = P answers count. S sequences.
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

FORMAT = 1  # version of how a sequence is made from its number
TRAIN, VALID, TEST = 0, 1, 2
HELD_OUT = {"valid": VALID, "test": TEST}


@dataclass(frozen=True)
class RecallStore:
    """What stands in the place of a token store: an endless training split, and two fixed held-out ones `[S * N]`."""

    task: DataConfig  # length (N), pairs (P), keys, values, fillers and sequences (S)
    name, unit, image = "recall", "answer", None
    stamps: ClassVar[dict[str, Any]] = {}

    @property
    def vocabulary(self) -> int:
        """Number of different units: keys first, then values, then fillers."""
        return self.task.keys + self.task.values + self.task.fillers

    @cached_property
    def answers(self) -> np.ndarray:
        """Positions of the answers in each sequence, `[A]`: every other one of the last 2 P, the last included."""
        return np.arange(self.task.length - 2 * self.task.pairs + 1, self.task.length, 2)

    def sequence(self, seed: int, index: int, split: int = TRAIN) -> np.ndarray:
        """Return sequence `index` of a split, uint16 `[N]`: a pure function of the arguments on every machine."""
        task = self.task
        sizes = (task.keys, task.pairs, task.pairs, task.length - 4 * task.pairs)
        drawn = hashlib.shake_256(pack("<QQQQ", FORMAT, split, seed, index)).digest(8 * sum(sizes))
        key, value, order, noise = np.split(np.frombuffer(drawn, dtype="<u8"), np.cumsum(sizes)[:-1])
        kept = key.argsort(kind="stable")[: task.pairs]
        pairs = np.stack([kept, task.keys + (value % task.values).astype(np.int64)], axis=1)
        noise = task.keys + task.values + (noise % task.fillers).astype(np.int64)
        asked = pairs[order.argsort(kind="stable")]
        return np.concatenate([pairs.ravel(), noise, asked.ravel()]).astype(np.uint16)

    def split(self, name: str) -> np.ndarray:
        """Return the units of split valid or test, uint16 `[S * N]`; raises UserError for train, which has no end."""
        if name not in HELD_OUT:
            raise UserError(f"data=recall has no {name} split to read; one of {', '.join(HELD_OUT)}")
        return self.held_out[name]

    @cached_property
    def held_out(self) -> dict[str, np.ndarray]:
        """Both held-out splits, the same for every run."""
        numbers = range(self.task.sequences)
        return {name: np.concatenate([self.sequence(0, s, split) for s in numbers]) for name, split in HELD_OUT.items()}

    @property
    def settings(self) -> dict[str, int]:
        """What the sequences are made by."""
        return {key: getattr(self.task, key) for key in ("length", "pairs", "keys", "values", "fillers", "sequences")}

    def describe(self) -> dict[str, Any]:
        """Return what a run records of its data, as JSON values."""
        said = {"name": self.name, "unit": self.unit, "vocabulary": self.vocabulary, "fingerprint": self.fingerprint}
        splits = {name: len(tokens) for name, tokens in self.held_out.items()}
        source = {"place": "made as it is asked for", **self.settings}
        return {**said, "splits": splits, "source": source, "stamps": self.stamps, "tokenizer": None, "folder": None}

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over the settings and the held-out sequences: equal means the same data."""
        digest = hashlib.sha256(json.dumps([FORMAT, self.settings]).encode())
        for tokens in self.held_out.values():
            digest.update(tokens.astype("<u2").tobytes())
        return digest.hexdigest()
