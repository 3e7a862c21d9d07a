"""The batches of a run for Lightning: training from any step on, and windows of the held-out split."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor

from rtx.compose import flat, to_dict
from rtx.config import Config
from rtx.data.catalog import Store, data_root, open_data
from rtx.data.recall import RecallStore
from rtx.data.sampler import MadeItems, StreamItems, TrainingItems, training_batches
from rtx.errors import UserError
from rtx.evaluation.protocols import Window, spans, windows
from rtx.evaluation.scores import equal_batches, read_windows, sample_windows


class RtxDataModule(pl.LightningDataModule):
    """The data of a run: `step` steps are taken, `seconds` waited for batches; unset, `setup` opens the `store`.

    `loader` are options of `training_batches`: `rank`, `world` and `micro_batch` of this process, and a DataLoader's.
    """

    def __init__(self, config: Config, store: Store | None = None, *, step: int = 0, **loader: Any) -> None:
        super().__init__()
        self.config, self.store, self.step, self.seconds, self.loader = config, store, step, 0.0, loader
        self.rank, self.world = loader.get("rank", 0), loader.get("world", 1)
        if store is not None:
            self.setup()

    def prepare_data(self) -> None:
        """Prepare the store where it is missing; Lightning calls it in one process a node."""
        if self.store is None:
            open_data(self.config.data, data_root())

    def setup(self, stage: str = "fit") -> None:
        """Open the store; `windows` are those of the closing score, which cover the held-out split."""
        self.store = store = self.store or open_data(self.config.data, data_root())
        self.items, self.held_out = training_items(self.config, store), store.split("valid")
        self.windows = windows(len(self.held_out), *spans(flat(to_dict(self.config))))

    def train_dataloader(self) -> Iterator[Tensor]:
        """Yield this rank's micro-batches of the steps that are left; waiting for them is timed."""
        last, workers = max(self.step, self.config.trainer.steps), self.config.hardware.workers
        began = time.perf_counter()
        for batch in training_batches(self.items, self.step, last, num_workers=workers, **self.loader):
            self.seconds += time.perf_counter() - began
            yield batch
            began = time.perf_counter()

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Widen training ids, which travel as small as they are kept, once they are on the device."""
        return batch.long() if isinstance(batch, Tensor) else batch

    def val_dataloader(self, count: int | None = None) -> WindowBatches:
        """Return this rank's windows of a validation during training, or `count` ones of the held-out split."""
        chosen = sample_windows(self.windows, count or self.config.trainer.val_windows)
        return WindowBatches(self.held_out, chosen, self.rank, self.world)


def training_items(config: Config, store: Store) -> MadeItems:
    """Return the sequences to train on, by their number."""
    if isinstance(store, RecallStore):
        return MadeItems(store.sequence, config.seed, config.trainer.batch_size)
    tokens, whole, streams = store.split("train"), store.image is not None, config.trainer.batch_size
    if whole or config.model.base != "recurrent":  # without a memory, too: two runs may then differ by it alone
        return TrainingItems(tokens, config.data.length, config.seed, streams, whole)
    if streams * config.data.length > len(tokens):
        wanted = f"{streams} streams of at least data.length={config.data.length} units"
        raise UserError(f"trainer.batch_size={streams}: expected {wanted}, found {len(tokens):,} in the training split")
    if config.model.memory > (most := len(tokens) // streams):
        raise UserError(f"model.memory={config.model.memory} must be at most {most:,}, the units of a stream of text")
    return StreamItems(tokens, config.data.length, config.seed, streams)


class WindowBatches:
    """Windows of a split in batches of equal length, dealt out to the ranks: every window is scored by one of them.

    Yields ids `[B, N]`, the units of each window before the first that counts `[B]`, its number `[B]`; int64. A rank
    without a batch in the last turn takes the last one again, number -1: under FSDP every pass needs all ranks.
    """

    def __init__(self, tokens: np.ndarray, chosen: Sequence[Window], rank: int = 0, world: int = 1) -> None:
        self.tokens, self.chosen, self.rank, self.world = tokens, chosen, rank, world
        self.batches = equal_batches(chosen, None)

    def __len__(self) -> int:
        return -(-len(self.batches) // self.world)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for own in range(self.rank, len(self) * self.world, self.world):
            numbers = self.batches[min(own, len(self.batches) - 1)]
            read = read_windows(self.tokens, [self.chosen[number] for number in numbers])
            yield *read, torch.tensor(numbers if own < len(self.batches) else [-1] * len(numbers))
