"""Which sequences a training step reads.

A sampler is a pure function: sequence i of the global batch of step s has the number
`s * batch_size + i`, and the seed and this number alone determine its tokens. A sampler has no
state to save or restore. Ranks, micro-batches and workers read parts of the same numbering.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from struct import pack
from typing import Any, Protocol

import numpy as np

from rtx.disk import open_inside

ROUNDS = 6
"""Rounds of the Feistel network; a round's number is the purpose of its draws."""
PHASE = 6
"""The purpose of a draw: where the windows of an epoch start."""
COIN = 7
"""The purpose of a draw: one of two choices, or the stream that is first in a ring."""


class Sampler(Protocol):
    """Sequences to train on, by number."""

    seed: int
    batch_size: int

    def sequence(self, index: int) -> np.ndarray:
        """Return the token ids of sequence `index`, unsigned integers `[N]`.

        With documents, `with_documents` of them, `[2, N]`.
        """
        ...


def with_documents(tokens: np.ndarray, starts: np.ndarray, first: int, stop: int) -> np.ndarray:
    """Return the tokens of a split from `first` to `stop` - 1, and where their documents start.

    The result is int32 `[2, N]`. Its second row has for each token the position of the first token
    of its document, counted from `first`; 0 for a document that began before.

    Args:
        tokens: the split.
        starts: where its documents start, ascending.
    """
    inside = starts[np.searchsorted(starts, first, side="right") : np.searchsorted(starts, stop)]
    sequence = np.zeros((2, stop - first), dtype=np.int32)
    sequence[0] = tokens[first:stop]
    position = inside - first
    sequence[1, position] = position
    np.maximum.accumulate(sequence[1], out=sequence[1])
    return sequence


class SyntheticSampler:
    """Sequences that `generate(seed, index)` computes; it returns unsigned integers `[N]`."""

    def __init__(
        self,
        generate: Callable[[int, int], np.ndarray],
        seed: int,
        batch_size: int,
    ) -> None:
        self.generate = generate
        self.seed = seed
        self.batch_size = batch_size

    def sequence(self, index: int) -> np.ndarray:
        return self.generate(self.seed, index)


class ShuffledWindows:
    """Windows of `length` tokens of a split, in a new random order in each epoch.

    Windows of an epoch are adjacent. Their order is a keyed permutation. In text, the first one
    starts at a phase drawn for each epoch, and an epoch has as many windows as fit at any phase.
    With `aligned`, every window starts at a multiple of `length` (an image each).

    Args:
        starts: where documents start, if sequences are to have them, see `Sampler`.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        length: int,
        seed: int,
        batch_size: int,
        aligned: bool = False,
        starts: np.ndarray | None = None,
    ) -> None:
        total = len(tokens)
        assert 1 <= length <= total, (length, total)
        assert not aligned or total % length == 0, f"{total} tokens are no multiple of {length}"
        self.tokens = TokenArray(tokens)
        self.length = length
        self.seed = seed
        self.batch_size = batch_size
        self.aligned = aligned
        self.starts = starts
        if aligned:
            self.per_epoch = total // length
        else:
            self.per_epoch = max(1, (total - length + 1) // length)

    def sequence(self, index: int) -> np.ndarray:
        start = self.start(index)
        if self.starts is None:
            return self.tokens.read(start, self.length)
        stop = start + self.length
        return with_documents(self.tokens.tokens, self.starts, start, stop)

    def start(self, index: int) -> int:
        """Return the position in the split at which sequence `index` starts."""
        epoch, slot = divmod(index, self.per_epoch)
        key = pack("<QQ", self.seed, epoch)
        window = permuted(slot, self.per_epoch, key)
        return self.offset(key) + window * self.length

    def offset(self, key: bytes) -> int:
        """Return the start of the first window of an epoch; every phase 0..N-1 is as likely."""
        if self.aligned:
            return 0
        spare = len(self.tokens) - self.per_epoch * self.length
        offset = draw(key, PHASE, 0) % min(self.length, spare + 1)
        is_room_for_one_more = offset + self.length <= spare
        if is_room_for_one_more:
            # The coin decides which end of the split no window of this epoch reads.
            offset += self.length * (draw(key, COIN, 0) % 2)
        return offset


class FirstBatches:
    """The sequences of the first `batches` batches of a sampler, again and again."""

    def __init__(self, sampler: Sampler, batches: int) -> None:
        self.sampler = sampler
        self.seed = sampler.seed
        self.batch_size = sampler.batch_size
        self.count = batches * sampler.batch_size

    def sequence(self, index: int) -> np.ndarray:
        return self.sampler.sequence(index % self.count)


class ContiguousStreams:
    """Segments of `batch_size` parallel streams, for models with a memory.

    Sequence i of a step starts where sequence i of the step before ended. The streams read a ring
    of whole segments. The seed draws where in the ring the first stream starts, and which of the
    remaining tokens precede the ring. Nothing else is random.
    """

    def __init__(self, tokens: np.ndarray, length: int, seed: int, batch_size: int) -> None:
        total = len(tokens)
        self.tokens = TokenArray(tokens)
        self.length = length
        self.seed = seed
        self.batch_size = batch_size
        self.segments_per_stream = total // (length * batch_size)
        assert self.segments_per_stream >= 1, (total, length, batch_size)
        self.segments = self.segments_per_stream * batch_size
        key = pack("<QQ", seed, 0)
        spare = total - self.segments * length
        self.offset = draw(key, PHASE, 0) % (spare + 1)
        self.turn = draw(key, COIN, 0) % self.segments

    def sequence(self, index: int) -> np.ndarray:
        return self.tokens.read(self.start(index), self.length)

    def start(self, index: int) -> int:
        """Return the position in the split at which sequence `index` starts."""
        step, stream = divmod(index, self.batch_size)
        segment = self.turn + stream * self.segments_per_stream + step
        return self.offset + segment % self.segments * self.length


class TokenArray:
    """The token ids of a split. The pickle of a memory map contains its path instead of the ids."""

    def __init__(self, tokens: np.ndarray) -> None:
        self.path = tokens.filename if isinstance(tokens, np.memmap) else None
        # This stays a memory map; slices are faster without numpy's wrapper.
        self.tokens = np.asarray(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, start: int, length: int) -> np.ndarray:
        """Return `length` token ids from position `start` on."""
        return self.tokens[start : start + length]

    def __getstate__(self) -> dict[str, Any]:
        if self.path is None:
            return {"path": None, "tokens": self.tokens}
        return {"path": self.path, "dtype": self.tokens.dtype}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.path = state["path"]
        if self.path is None:
            self.tokens = state["tokens"]
        else:
            path = Path(self.path)
            with open_inside(path.parent, path.name) as file:
                # by path: an open file
                self.tokens = np.asarray(np.memmap(file, state["dtype"], mode="r"))


def permuted(index: int, size: int, key: bytes) -> int:
    """Return the place of `index` in the permutation of 0..size-1 named `key`.

    It is the same on every machine: a Feistel network over pairs (left, right) of digits
    0..side-1 with side * side >= size. A result of at least `size` is permuted again until it is
    smaller (cycle-walking), which keeps the mapping a permutation.
    """
    side = math.isqrt(size - 1) + 1
    while True:
        left, right = divmod(index, side)
        for turn in range(ROUNDS):
            mixed = (left + draw(key, turn, right)) % side
            left = right
            right = mixed
        index = left * side + right
        if index < size:
            return index


def draw(key: bytes, purpose: int, value: int) -> int:
    """Return a 64-bit number that is the same on every machine: a keyed hash of the arguments."""
    message = pack("<QQ", purpose, value)
    digest = blake2b(message, key=key, digest_size=8).digest()
    return int.from_bytes(digest, "little")
