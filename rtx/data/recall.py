"""Recall tasks: keys and their values, filler, and the keys asked again; made when asked for, nothing on disk.

A sequence of N units tells each of its keys before its value, and asks it once more, again before its value: the
answer. Values are drawn independently, so that only the pair tells an answer; only answers count, A = P at the most.

recall: P pairs at the start, filler, and the P keys in random order at the end. All others have P, P / 2 or P / 4.
mqar: pairs at the start; questions at places drawn without replacement behind P pairs and D units (Arora et al. 2024).
induction: pairs, too, at places drawn evenly, each question at least D units behind its pair.
copy: one key, the marker, before a string of values in place of one; the string again at a place drawn as mqar's are.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from struct import pack
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from rtx.errors import UserError
from rtx.settings.schema import DataConfig

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = 1  # version of how a sequence is made from its number
TRAIN, VALID, TEST = 0, 1, 2
HELD_OUT = {"valid": VALID, "test": TEST}
POWER = 0.01  # the a of data.gaps=power, as in Zoology's own settings


@dataclass(frozen=True)
class RecallStore:
    """What stands in the place of a token store: an endless training split, and two fixed held-out ones `[S * N]`."""

    task: DataConfig  # length (N), pairs (P), distance (D), keys, values, fillers and sequences (S)
    unit, image = "answer", None
    stamps: ClassVar[dict[str, Any]] = {}

    @property
    def name(self) -> str:
        return self.task.name

    @property
    def vocabulary(self) -> int:
        """Number of different units: keys first, then values, then fillers."""
        return self.task.keys + self.task.values + self.task.fillers

    def answers(self, tokens_BN: Tensor) -> tuple[Tensor, Tensor]:
        """Return the positions of the answers of sequences, ascending, `[B, A]`, and how far back each was told.

        An answer is a value whose nearest key before it has stood before; behind the last of a sequence are -1 and 0.
        """
        import torch  # here: reports read this module without it

        N, keys = tokens_BN.shape[1], self.task.keys
        place_BN = torch.arange(N, device=tokens_BN.device).expand_as(tokens_BN)
        asked_BN = torch.where(tokens_BN < keys, place_BN, -1).cummax(1).values
        first_BK = torch.full((len(tokens_BN), keys + 1), N, device=tokens_BN.device)
        first_BK = first_BK.scatter_reduce(1, tokens_BN.clamp(max=keys), place_BN, "amin")
        back_BN = asked_BN - first_BK.gather(
            1, tokens_BN.gather(1, asked_BN.clamp(min=0)).clamp(max=keys)
        )
        is_value_BN = (tokens_BN >= keys) & (tokens_BN < keys + self.task.values)
        at_BA = (
            torch.where(is_value_BN & (back_BN > 0), place_BN, N)
            .sort(1)
            .values[:, : self.task.pairs]
        )
        return torch.where(at_BA < N, at_BA, -1), back_BN.gather(
            1, at_BA.clamp(max=N - 1)
        ).masked_fill(at_BA == N, 0)

    def scored(self, tokens: np.ndarray) -> int:
        """Return how many answers whole sequences `[S * N]` have: the units that a score is over."""
        import torch

        return int(
            (
                self.answers(torch.from_numpy(tokens.reshape(-1, self.task.length)).long())[0] >= 0
            ).sum()
        )

    def sequence(self, seed: int, index: int, split: int = TRAIN) -> np.ndarray:
        """Return sequence `index` of a split, uint16 `[N]`: a pure function of the arguments on every machine."""
        task, recall = self.task, self.name == "recall"
        more = (
            (task.pairs, task.length - 4 * task.pairs, 0)
            if recall
            else (task.length, task.length, 1)
        )
        sizes = (task.keys, task.pairs, *more)
        header = pack("<QQQQ", FORMAT, split, seed, index)
        key, value, place, noise, count = np.split(
            hashed(header, sum(sizes)), np.cumsum(sizes)[:-1]
        )
        pairs = task.pairs if recall else max(1, task.pairs >> int(count[0] % 3))
        rows = 1 if self.name == "copy" else pairs
        kept = key.argsort(kind="stable")[:rows, None]
        values = task.keys + (value[:pairs] % task.values).astype(np.int64).reshape(rows, -1)
        entries = np.concatenate([kept, values], axis=1)
        starts = (
            self.spread(header, pairs)
            if self.name == "induction"
            else self.starts(place, *entries.shape)
        )
        units = np.full(task.length, -1)
        units[starts[..., None] + np.arange(entries.shape[1])] = entries
        filler = task.keys + task.values + (noise % task.fillers).astype(np.int64)
        units[units < 0] = filler[: (units < 0).sum()]
        return units.astype(np.uint16)

    def starts(self, place: np.ndarray, rows: int, width: int) -> np.ndarray:
        """Return where each of some entries of `width` units is told, one behind the other, and asked: `[2, rows]`."""
        task, told = self.task, np.arange(rows) * width
        if self.name == "recall":
            return np.stack(
                [told, task.length - rows * width + place.argsort(kind="stable").argsort() * width]
            )
        longest, step = (task.pairs + 1, 1) if self.name == "copy" else (2 * task.pairs, 2)
        room = np.arange(longest + task.distance, task.length - width + 1, step)
        order = place[: len(room)]
        if (
            task.gaps == "power"
        ):  # the least of exponential variables: as drawn one after the other by such weights
            order = -np.log((order + 0.5) / 2**64) * np.arange(1, len(room) + 1) ** (1 - POWER)
        return np.stack([told, room[order.argsort(kind="stable")[:rows]]])

    def spread(self, header: bytes, pairs: int) -> np.ndarray:
        """Return places drawn evenly of pairs and of their questions, at least D units behind: `[2, pairs]`."""
        cells, least = self.task.length // 2, max(1, -(-self.task.distance // 2))
        found, drawn = list[int](), 64 * pairs
        while len(found) < 2 * pairs:  # so few pairs are allowed that some place is always free
            told, asked = np.divmod(
                (hashed(header + b"places", drawn) % cells**2).astype(np.int64), cells
            )
            found, fits, drawn = [], asked - told >= least, 2 * drawn
            for pair in zip(told[fits].tolist(), asked[fits].tolist(), strict=True):
                found += pair if len(found) < 2 * pairs and not {*pair}.intersection(found) else ()
        return 2 * np.array(found).reshape(pairs, 2).T

    def split(self, name: str) -> np.ndarray:
        """Return the units of split valid or test, uint16 `[S * N]`; raises UserError for train, which has no end."""
        if name not in HELD_OUT:
            raise UserError(
                f"data={self.name} has no {name} split to read; one of {', '.join(HELD_OUT)}"
            )
        return self.held_out[name]

    @cached_property
    def held_out(self) -> dict[str, np.ndarray]:
        """Both held-out splits, the same for every run."""
        numbers = range(self.task.sequences)
        return {
            name: np.concatenate([self.sequence(0, s, split) for s in numbers])
            for name, split in HELD_OUT.items()
        }

    @property
    def settings(self) -> dict[str, Any]:
        """What the sequences are made by."""
        names = "length pairs keys values fillers sequences" + " name distance gaps" * (
            self.name != "recall"
        )
        return {key: getattr(self.task, key) for key in names.split()}

    def describe(self) -> dict[str, Any]:
        """Return what a run records of its data, as JSON values."""
        said = {
            "name": self.name,
            "unit": self.unit,
            "vocabulary": self.vocabulary,
            "fingerprint": self.fingerprint,
        }
        splits = {name: len(tokens) for name, tokens in self.held_out.items()}
        source = {"place": "made as it is asked for", **self.settings}
        return {
            **said,
            "splits": splits,
            "source": source,
            "stamps": self.stamps,
            "tokenizer": None,
            "folder": None,
        }

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over the settings and the held-out sequences: equal means the same data."""
        digest = hashlib.sha256(json.dumps([FORMAT, self.settings]).encode())
        for tokens in self.held_out.values():
            digest.update(tokens.astype("<u2").tobytes())
        return digest.hexdigest()


def hashed(header: bytes, count: int) -> np.ndarray:
    return np.frombuffer(hashlib.shake_256(header).digest(8 * count), dtype="<u8")
