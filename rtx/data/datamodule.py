"""The data of a run for Lightning: training batches from any step on, and held-out windows."""

import itertools
import time
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from rtx.data.batches import (
    MicroBatches,
    WindowBatches,
    token_ids,
    training_batches,
    training_sampler,
)
from rtx.data.store import Store
from rtx.data.windows import sample_windows, windows
from rtx.settings.derived import spans
from rtx.settings.schema import Config, flat, to_dict


class RtxDataModule(pl.LightningDataModule):
    """The data of a run from `step` on.

    `seconds` is the time spent waiting for training batches. `windows` are those of the final
    score. `loader` are options of `training_batches`: `rank`, `world` and `micro_batch` of this
    process, and those of `DataLoader`.
    """

    def __init__(self, config: Config, store: Store, *, step: int = 0, **loader: Any) -> None:
        super().__init__()
        self.config = config
        self.step = step
        self.seconds = 0.0
        self.loader = loader
        self.sampler = training_sampler(config, store)
        self.held_out = store.split("valid")
        self.starts = store.document_starts("valid", config.data)
        length, stride = spans(flat(to_dict(config)))
        self.windows = windows(len(self.held_out), length, stride)

    def first_sequence(self) -> Tensor:
        """Return the first training sequence of the run, int64 `[N]`."""
        return token_ids(self.sampler, 0)

    def first_micro_batch(self) -> Tensor:
        """Return the first micro-batch of the run, see `MicroBatches`."""
        return MicroBatches(self.sampler, self.loader.get("micro_batch") or 1)[0]

    def train_dataloader(self) -> Iterator[list[Tensor]]:
        """Yield, for each remaining step, this rank's micro-batches; `seconds` counts the waiting.

        The type of their token ids is that of the store.
        """
        stop = max(self.step, self.config.trainer.steps)
        batches = iter(training_batches(self.sampler, self.step, stop, **self.loader))
        share = self.config.trainer.batch_size // self.loader.get("world", 1)
        passes = share // (self.loader.get("micro_batch") or share)
        for _ in range(self.step, stop):
            began = time.perf_counter()
            micro_batches = list(itertools.islice(batches, passes))
            self.seconds += time.perf_counter() - began
            yield micro_batches

    def val_dataloader(self, count: int | None = None) -> WindowBatches:
        """Return this rank's windows of a validation, or of `count` windows of the split."""
        chosen = sample_windows(self.windows, count or self.config.trainer.val_windows)
        rank = self.loader.get("rank", 0)
        world = self.loader.get("world", 1)
        return WindowBatches(self.held_out, chosen, rank, world, self.starts)
