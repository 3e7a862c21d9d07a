"""Training batches without state: item i of the global batch of step s is a pure function of (seed, s, i).

An epoch cuts the text into as many windows as fit whatever the phase of the grid, shifts the grid by a phase drawn for
that epoch, and visits the windows in the order of a keyed permutation. An image is never cut: for images the grid stays
where it is, and an epoch visits every image once. There is nothing to save and nothing to restore; ranks, micro-batches
and workers slice the same sequence of items.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import pack
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from rtx.data.permutation import ROUNDS, draw, permuted

PHASE, COIN = ROUNDS, ROUNDS + 1  # what a draw is for; below ROUNDS: a round of the permutation


class MadeItems:
    """Sequences to train on, by their number g = step * batch_size + i, from `make(seed, g)`, which returns `[N]`.

    `batch_size`: sequences of the global batch, over all ranks and micro-batches.
    """

    def __init__(self, make: Callable[[int, int], np.ndarray], seed: int, batch_size: int) -> None:
        self.make, self.seed, self.batch_size = make, seed, batch_size

    def units(self, index: int) -> np.ndarray:
        """Return sequence `index` as it is kept, unsigned integers `[N]`."""
        return self.make(self.seed, index)

    def item(self, step: int, i: int) -> Tensor:
        """Return item `i` of the global batch of step `step` (from 0): int64 `[N]`."""
        return self[step * self.batch_size + i]

    def __getitem__(self, index: int) -> Tensor:
        return torch.from_numpy(self.units(index).astype(np.int64))


class TrainingItems(MadeItems):
    """Windows of N = `length` units of a training split, unsigned integers `[units]`.

    A memory map is opened by its path in another process. `whole`: a sequence is one image.
    """

    def __init__(self, tokens: np.ndarray, length: int, seed: int, batch_size: int, whole: bool = False) -> None:
        self.seed, self.batch_size = seed, batch_size
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
        """Return the unit of the split at which item `index` starts.

        Every phase 0..N-1 of the grid is as likely, so every cut of the text is. Where a phase leaves room for a whole
        window more, a coin decides which end of the text goes without.
        """
        epoch, slot = divmod(index, self.per_epoch)
        key, offset = pack("<QQ", self.seed, epoch), 0
        if not self.whole:
            spare = len(self.tokens) - self.per_epoch * self.length
            offset = draw(key, PHASE, 0) % min(self.length, spare + 1)
            if offset + self.length <= spare:
                offset += self.length * (draw(key, COIN, 0) % 2)
        return offset + permuted(slot, self.per_epoch, key) * self.length


class MicroBatches(Dataset[Tensor]):
    """Runs of `size` items: ids `[size, N]`, in as few bytes as they are kept."""

    def __init__(self, items: MadeItems, firsts: range, size: int) -> None:
        self.items, self.firsts, self.size = items, firsts, size

    def __len__(self) -> int:
        return len(self.firsts)

    def __getitem__(self, number: int) -> Tensor:
        first = self.firsts[number]
        return torch.from_numpy(np.stack([self.items.units(index) for index in range(first, first + self.size)]))


def training_batches(
    items: MadeItems,
    first_step: int,
    stop_step: int,
    rank: int = 0,
    world: int = 1,
    micro_batch: int | None = None,
    **options: Any,
) -> DataLoader[Tensor]:
    """Return a loader of the micro-batches `[micro_batch, N]` of steps first_step..stop_step-1 for one rank.

    Micro-batch j of all ranks together holds the j-th run of `world * micro_batch` items, so over ranks and
    micro-batches each step has the same items on any number of devices. Unset, `micro_batch` is all of a rank's share.
    Workers' seeds come from a generator of the loader's own: torch's global stream, which dropout uses and a checkpoint
    restores, is left alone.

    Args:
        options: of `DataLoader`: num_workers, pin_memory, worker_init_fn.
    """
    size, whole = micro_batch or items.batch_size // world, items.batch_size
    assert whole % (world * size) == 0, f"a batch of {whole} cannot be cut for {world} ranks into {size}"
    batches = MicroBatches(items, range(first_step * whole + rank * size, stop_step * whole, world * size), size)
    return DataLoader(batches, batch_size=None, generator=torch.Generator().manual_seed(items.seed), **options)
