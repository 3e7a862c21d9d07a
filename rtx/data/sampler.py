"""Training batches without state: item i of the global batch of step s is a pure function of (seed, s, i).

An epoch cuts the text into as many windows as fit whatever the phase of the grid, shifts the grid by a phase drawn for
that epoch, and visits the windows in the order of a keyed permutation. An image is never cut: for images the grid stays
where it is, and an epoch visits every image once. There is nothing to save and nothing to restore; ranks, micro-batches
and workers slice the same sequence of items.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from struct import pack
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from rtx.data.permutation import ROUNDS, draw, permuted

PHASE, COIN = ROUNDS, ROUNDS + 1  # what a draw is for; below ROUNDS: a round of the permutation


class Items(Dataset[torch.Tensor]):
    """Sequences to train on, by their number g = step * batch_size + i.

    Args:
        seed: the run's seed.
        batch_size: sequences of the global batch, over all ranks and micro-batches.
    """

    def __init__(self, seed: int, batch_size: int) -> None:
        assert batch_size >= 1, batch_size
        self.seed, self.batch_size = seed, batch_size

    def units(self, index: int) -> np.ndarray:
        """Return sequence `index`, unsigned integers `[N]`."""
        raise NotImplementedError

    def item(self, step: int, i: int) -> torch.Tensor:
        """Return item `i` of the global batch of step `step` (from 0): int64 `[N]`."""
        assert 0 <= i < self.batch_size, (i, self.batch_size)
        return self[step * self.batch_size + i]

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(self.units(index).astype(np.int64))

    def __getitems__(self, indices: Sequence[int]) -> torch.Tensor:
        """Return several sequences as the loader asks for them: `[B, N]`, in as few bytes as they are kept."""
        return torch.from_numpy(np.stack([self.units(index) for index in indices]))


class TrainingItems(Items):
    """Windows of a training split.

    Args:
        tokens: the split, unsigned integers `[units]`; a memory map is opened by its path in another process.
        length: units of a sequence, N; at most `len(tokens)`.
        seed: the run's seed.
        batch_size: sequences of the global batch, over all ranks and micro-batches.
        whole: a sequence is one image: an epoch visits each of `len(tokens) / length` images exactly once.
    """

    def __init__(self, tokens: np.ndarray, length: int, seed: int, batch_size: int, whole: bool = False) -> None:
        super().__init__(seed, batch_size)
        assert 1 <= length <= len(tokens), (length, len(tokens))
        assert not whole or len(tokens) % length == 0, f"{len(tokens)} units are not whole images of {length}"
        self.path = tokens.filename if isinstance(tokens, np.memmap) else None
        self.tokens = np.asarray(tokens)  # a memory map stays one, and slices faster without its wrapper
        self.length, self.whole = length, whole
        self.per_epoch = len(tokens) // length if whole else max(1, (len(tokens) - length + 1) // length)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, **({"tokens": self.tokens.dtype} if self.path else {})}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.path:
            self.tokens = np.asarray(np.memmap(self.path, state["tokens"], mode="r"))

    def units(self, index: int) -> np.ndarray:
        start = self.start(index)
        return self.tokens[start : start + self.length]

    def start(self, index: int) -> int:
        """Return the unit of the split at which item `index` starts."""
        epoch, slot = divmod(index, self.per_epoch)
        key = pack("<QQ", self.seed, epoch)
        offset = 0 if self.whole else self._offset(key)
        return offset + permuted(slot, self.per_epoch, key) * self.length

    def _offset(self, key: bytes) -> int:
        """Return where the grid of an epoch starts: every phase 0..N-1 is as likely, so every cut of the text is.

        Where a phase leaves room for a whole window more, a coin decides which end of the text goes without.
        """
        spare = len(self.tokens) - self.per_epoch * self.length
        offset = draw(key, PHASE, 0) % min(self.length, spare + 1)
        if offset + self.length <= spare:
            offset += self.length * (draw(key, COIN, 0) % 2)
        return offset


class MadeItems(Items):
    """Sequences that a task makes from (seed, g) alone: `make(seed, g)` returns integers `[N]`."""

    def __init__(self, make: Callable[[int, int], np.ndarray], seed: int, batch_size: int) -> None:
        super().__init__(seed, batch_size)
        self.make = make

    def units(self, index: int) -> np.ndarray:
        return self.make(self.seed, index)


class StepBatches(Sampler[list[int]]):
    """The micro-batches of one rank, step by step, as lists of numbers of items (a `batch_sampler`).

    Yields `batch_size / (world * micro_batch)` micro-batches for each step of `range(first_step, stop_step)`.
    Micro-batch j of all ranks together holds the j-th run of `world * micro_batch` items, so over ranks and
    micro-batches each step has the same items on any number of devices. Unset, `micro_batch` is all of a rank's share;
    `batch_size` must be a multiple of `world * micro_batch`.
    """

    def __init__(
        self,
        first_step: int,
        stop_step: int,
        batch_size: int,
        rank: int = 0,
        world: int = 1,
        micro_batch: int | None = None,
    ) -> None:
        micro_batch = micro_batch or batch_size // world
        assert 0 <= rank < world and micro_batch >= 1 and batch_size % (world * micro_batch) == 0, (
            f"a batch of {batch_size} cannot be cut into micro-batches of {micro_batch} for {world} ranks"
        )
        self.steps, self.batch_size = range(first_step, stop_step), batch_size
        self.rank, self.world, self.micro_batch = rank, world, micro_batch

    def __len__(self) -> int:
        return len(self.steps) * (self.batch_size // (self.world * self.micro_batch))

    def __iter__(self) -> Iterator[list[int]]:
        for step in self.steps:
            for offset in range(self.rank * self.micro_batch, self.batch_size, self.world * self.micro_batch):
                first = step * self.batch_size + offset
                yield list(range(first, first + self.micro_batch))


def training_batches(
    items: Items,
    first_step: int,
    stop_step: int,
    rank: int = 0,
    world: int = 1,
    micro_batch: int | None = None,
    **options: Any,
) -> DataLoader[torch.Tensor]:
    """Return a loader of the micro-batches `[micro_batch, N]` of steps first_step..stop_step-1 for one rank.

    Unsigned, as small as they are kept; the order is the same for any number of workers. The loader draws its workers'
    seeds from a generator of its own: torch's global stream, which dropout uses and a checkpoint restores, is left
    alone. Lightning must not put its own sampler in the place of this one: Trainer(use_distributed_sampler=False).

    Args:
        options: of `DataLoader`: num_workers, pin_memory, worker_init_fn.
    """
    batches = StepBatches(first_step, stop_step, items.batch_size, rank, world, micro_batch)
    generator = torch.Generator().manual_seed(items.seed)
    return DataLoader(items, batch_sampler=batches, generator=generator, collate_fn=as_it_is, **options)


def as_it_is(batch: Any) -> Any:
    """Return what `__getitems__` made."""
    return batch
