"""The batches of a run for Lightning: training from any step on, and windows of the held-out split.

Training batches have no state: item i of the global batch of step s is a pure function of (seed, s, i). There is
nothing to save and nothing to restore; ranks, micro-batches and workers slice the same sequence of items.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from struct import pack
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from rtx.data.catalog import Store
from rtx.data.recall import RecallStore
from rtx.errors import UserError
from rtx.evaluation.protocol import spans
from rtx.evaluation.protocols import Window, windows
from rtx.evaluation.scores import equal_batches, read_windows, sample_windows
from rtx.settings.compose import flat, to_dict
from rtx.settings.schema import Config

ROUNDS, PHASE, COIN = (
    6,
    6,
    7,
)  # what a draw is for: a round of the permutation (below ROUNDS), a phase or a coin


def permuted(index: int, size: int, key: bytes) -> int:
    """Return where the permutation of 0..size-1 that `key` names sends `index`, on every machine alike.

    A Feistel network over pairs (left, right) of digits 0..side-1, side * side >= size; a result beyond `size` is sent
    through again until it falls inside (cycle-walking), which keeps it a permutation.
    """
    side = math.isqrt(size - 1) + 1
    while True:
        left, right = divmod(index, side)
        for turn in range(ROUNDS):
            left, right = right, (left + draw(key, turn, right)) % side
        index = left * side + right
        if index < size:
            return index


def draw(key: bytes, purpose: int, value: int) -> int:
    """Return a 64-bit number that is the same on every machine: a keyed hash, not a generator."""
    return int.from_bytes(
        blake2b(pack("<QQ", purpose, value), key=key, digest_size=8).digest(), "little"
    )


class MadeItems:
    """Sequences to train on, by their number g = step * batch_size + i, from `make(seed, g)`, which returns `[N]`."""

    def __init__(self, make: Callable[[int, int], np.ndarray], seed: int, batch_size: int) -> None:
        self.make, self.seed, self.batch_size = make, seed, batch_size

    def units(self, index: int) -> np.ndarray:
        """Return sequence `index` as it is kept, unsigned integers `[N]`."""
        return self.make(self.seed, index)

    def __getitem__(self, index: int) -> Tensor:
        return torch.from_numpy(self.units(index).astype(np.int64))


class TrainingItems(MadeItems):
    """Windows of N = `length` units of a training split, unsigned integers `[units]`; `whole`: each is one image.

    An epoch visits windows side by side in the order of a keyed permutation; of text as many as fit whatever the phase
    of their grid, which is drawn for each epoch. A memory map is opened by its path in another process.
    """

    def __init__(
        self, tokens: np.ndarray, length: int, seed: int, batch_size: int, whole: bool = False
    ) -> None:
        self.seed, self.batch_size = seed, batch_size
        assert 1 <= length <= len(tokens), (length, len(tokens))
        assert not whole or len(tokens) % length == 0, (
            f"{len(tokens)} units are not whole images of {length}"
        )
        self.path = tokens.filename if isinstance(tokens, np.memmap) else None
        self.tokens = np.asarray(
            tokens
        )  # a memory map stays one, and slices faster without its wrapper
        self.length, self.whole = length, whole
        self.per_epoch = (
            len(tokens) // length if whole else max(1, (len(tokens) - length + 1) // length)
        )

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
        """Return the unit of the split at which item `index` starts; every phase 0..N-1 of the grid is as likely."""
        epoch, slot = divmod(index, self.per_epoch)
        key, offset = pack("<QQ", self.seed, epoch), 0
        if not self.whole:
            spare = len(self.tokens) - self.per_epoch * self.length
            offset = draw(key, PHASE, 0) % min(self.length, spare + 1)
            if (
                offset + self.length <= spare
            ):  # room for a window more: a coin says which end goes without
                offset += self.length * (draw(key, COIN, 0) % 2)
        return offset + permuted(slot, self.per_epoch, key) * self.length


class StreamItems(TrainingItems):
    """Segments of `batch_size` parallel streams: item i of a step goes on where item i of the step before ended.

    The text is a ring of as many whole segments as every stream can have; the seed says where in it the first stream
    begins, and which of the few units left over stand before the ring. Nothing else is drawn.
    """

    def __init__(self, tokens: np.ndarray, length: int, seed: int, batch_size: int) -> None:
        super().__init__(tokens, length, seed, batch_size)
        self.segments = len(tokens) // (length * batch_size)  # of each stream
        assert self.segments, (len(tokens), length, batch_size)
        self.per_epoch, key = self.segments * batch_size, pack("<QQ", seed, 0)
        self.offset = draw(key, PHASE, 0) % (len(tokens) - self.per_epoch * length + 1)
        self.turn = draw(key, COIN, 0) % self.per_epoch

    def start(self, index: int) -> int:
        step, stream = divmod(index, self.batch_size)
        return (
            self.offset + (self.turn + stream * self.segments + step) % self.per_epoch * self.length
        )


class MicroBatches(Dataset[Tensor]):
    """Runs of `size` items by the number of the first: ids `[size, N]`, in as few bytes as they are kept."""

    def __init__(self, items: MadeItems, size: int) -> None:
        self.items, self.size = items, size

    def __getitem__(self, first: int) -> Tensor:
        return torch.from_numpy(
            np.stack([self.items.units(index) for index in range(first, first + self.size)])
        )


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

    Micro-batch j of all ranks together holds the j-th run of `world * micro_batch` items, so each step has the same
    items on any number of devices; unset, `micro_batch` is all of a rank's share. `options` are those of `DataLoader`.
    """
    size, whole = micro_batch or items.batch_size // world, items.batch_size
    assert whole % (world * size) == 0, (
        f"a batch of {whole} cannot be cut for {world} ranks into {size}"
    )
    firsts = range(first_step * whole + rank * size, stop_step * whole, world * size)
    seeds = torch.Generator().manual_seed(
        items.seed
    )  # of workers: the global stream, for dropout, is left alone
    return DataLoader(
        MicroBatches(items, size), batch_size=None, sampler=firsts, generator=seeds, **options
    )


class RtxDataModule(pl.LightningDataModule):
    """The data of a run from `step` on; `seconds` were waited for batches, `windows` are those of the closing score.

    `loader` are options of `training_batches`: `rank`, `world` and `micro_batch` of this process, and a DataLoader's.
    """

    def __init__(self, config: Config, store: Store, *, step: int = 0, **loader: Any) -> None:
        super().__init__()
        self.config, self.step, self.seconds, self.loader = config, step, 0.0, loader
        self.items, self.held_out = training_items(config, store), store.split("valid")
        self.windows = windows(len(self.held_out), *spans(flat(to_dict(config))))

    def train_dataloader(self) -> Iterator[Tensor]:
        """Yield this rank's micro-batches of the steps that are left; waiting for them is timed."""
        last = max(self.step, self.config.trainer.steps)
        began = time.perf_counter()
        for batch in training_batches(self.items, self.step, last, **self.loader):
            self.seconds += time.perf_counter() - began
            yield batch
            began = time.perf_counter()

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Widen training ids, which travel as small as they are kept, once they are on the device."""
        return batch.long() if isinstance(batch, Tensor) else batch

    def val_dataloader(self, count: int | None = None) -> WindowBatches:
        """Return this rank's windows of a validation during training, or `count` ones of the held-out split."""
        chosen = sample_windows(self.windows, count or self.config.trainer.val_windows)
        return WindowBatches(
            self.held_out, chosen, self.loader.get("rank", 0), self.loader.get("world", 1)
        )


def training_items(config: Config, store: Store) -> MadeItems:
    """Return the sequences to train on, by their number."""
    if isinstance(store, RecallStore):
        return MadeItems(store.sequence, config.seed, config.trainer.batch_size)
    tokens, whole, streams = (
        store.split("train"),
        store.image is not None,
        config.trainer.batch_size,
    )
    if (
        whole or config.model.base != "recurrent"
    ):  # without a memory, too: two runs may then differ by it alone
        return TrainingItems(tokens, config.data.length, config.seed, streams, whole)
    if streams * config.data.length > len(tokens):
        wanted = f"{streams} streams of at least data.length={config.data.length} units"
        raise UserError(
            f"trainer.batch_size={streams}: expected {wanted}, found {len(tokens):,} in the training split"
        )
    if config.model.memory > (most := len(tokens) // streams):
        raise UserError(
            f"model.memory={config.model.memory} must be at most {most:,}, the units of a stream of text"
        )
    return StreamItems(tokens, config.data.length, config.seed, streams)


class WindowBatches:
    """Windows of a split in batches of equal length, dealt out to the ranks: every window is scored by one of them.

    Yields ids `[B, N]`, the units of each window before the first that counts `[B]`, its number `[B]`; int64. A rank
    without a batch in the last turn takes the last one again, number -1: under FSDP every pass needs all ranks.
    """

    def __init__(
        self, tokens: np.ndarray, chosen: Sequence[Window], rank: int = 0, world: int = 1
    ) -> None:
        self.tokens, self.chosen, self.rank, self.world = tokens, chosen, rank, world
        self.batches = equal_batches(chosen, None)

    def __len__(self) -> int:
        return -(-len(self.batches) // self.world)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for own in range(self.rank, len(self) * self.world, self.world):
            numbers = self.batches[min(own, len(self.batches) - 1)]
            read = read_windows(self.tokens, [self.chosen[number] for number in numbers])
            yield *read, torch.tensor(numbers if own < len(self.batches) else [-1] * len(numbers))
