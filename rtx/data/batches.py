"""Batches of token ids: for training, from any step on; for scoring, of windows of a split.

Training batches come from a sampler (`rtx.data.sampler`), a pure function of seed, step and index.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from rtx.data.sampler import FirstBatches, Sampler
from rtx.data.store import Store
from rtx.data.windows import Window, batches_by_length, read_windows, tokens_and_documents
from rtx.settings.schema import Config

SCORED_ELSEWHERE = -1
"""In place of the index of a window that another rank scores."""


def training_sampler(config: Config, store: Store) -> Sampler:
    """Return the sampler of the training sequences of a run.

    With trainer.overfit_batches it has the first batches alone.
    """
    sampler: Sampler = store.training_sampler(config)
    if config.trainer.overfit_batches:
        return FirstBatches(sampler, config.trainer.overfit_batches)
    return sampler


def token_ids(sampler: Sampler, index: int) -> Tensor:
    """Return the token ids of a training sequence, int64 `[N]`."""
    sequence = torch.from_numpy(sampler.sequence(index).astype(np.int64))
    tokens_1N, _ = tokens_and_documents(sequence[None])
    return tokens_1N[0]


class MicroBatches(Dataset[Tensor]):
    """A dataset whose item `first` has the `size` sequences from `first` on: ids `[size, N]`.

    The ids are of the type that the store has, which is copied to the device in few bytes. With
    documents each sequence has two rows of int32, see `tokens_and_documents`.
    """

    def __init__(self, sampler: Sampler, size: int) -> None:
        self.sampler = sampler
        self.size = size

    def __getitem__(self, first: int) -> Tensor:
        numbers = range(first, first + self.size)
        sequences = [self.sampler.sequence(index) for index in numbers]
        return torch.from_numpy(np.stack(sequences))


def training_batches(
    sampler: Sampler,
    first_step: int,
    stop_step: int,
    rank: int = 0,
    world: int = 1,
    micro_batch: int | None = None,
    **options: Any,
) -> DataLoader[Tensor]:
    """Return a loader of one rank's micro-batches `[micro_batch, N]` of a range of steps.

    The j-th micro-batches of all ranks together have the j-th block of `world * micro_batch`
    sequences, so that a step has the same sequences on any number of devices.

    Args:
        first_step, stop_step: the range; `stop_step` is the first step after it.
        micro_batch: sequences of a micro-batch, by default a rank's share of a batch.
        options: those of `DataLoader`.
    """
    batch_size = sampler.batch_size
    size = micro_batch or batch_size // world
    assert batch_size % (world * size) == 0, (
        f"a batch of {batch_size} cannot be cut for {world} ranks into micro-batches of {size}"
    )
    start = first_step * batch_size + rank * size
    firsts = range(start, stop_step * batch_size, world * size)
    # By default DataLoader would draw the seed of workers from the stream that dropout uses.
    seeds = torch.Generator().manual_seed(sampler.seed)
    batches = MicroBatches(sampler, size)
    return DataLoader(batches, batch_size=None, sampler=firsts, generator=seeds, **options)


class WindowBatches:
    """Batches of windows of a split, for one rank. The windows of a batch have equal length.

    Yields three int64 tensors: ids `[B, N]` (with documents see `tokens_and_documents`); how many
    of the first tokens of each window are context, and not scored, `[B]`; and the index of each
    window in `chosen`, `[B]`. A rank without a batch in the last turn repeats the last batch with
    indices SCORED_ELSEWHERE, because under FSDP all ranks take part in every pass.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        chosen: Sequence[Window],
        rank: int = 0,
        world: int = 1,
        starts: np.ndarray | None = None,
    ) -> None:
        self.tokens = tokens
        self.starts = starts
        self.chosen = chosen
        self.rank = rank
        self.world = world
        self.batches = batches_by_length(chosen, None)

    def __len__(self) -> int:
        return -(-len(self.batches) // self.world)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        last = len(self.batches) - 1
        for turn in range(self.rank, len(self) * self.world, self.world):
            numbers = self.batches[min(turn, last)]
            here = [self.chosen[k] for k in numbers]
            units, skipped_B = read_windows(self.tokens, here, self.starts)
            if turn > last:
                numbers = [SCORED_ELSEWHERE] * len(numbers)
            yield units, skipped_B, torch.tensor(numbers)
