"""The batches of a run for Lightning: training from any step on, and windows of the held-out split.

Batches have no state to lose: item i of step s follows from (seed, s, i), so a resumed run begins at its step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from rtx.config import Config
from rtx.data.catalog import Store, data_root, open_data
from rtx.data.recall import RecallStore
from rtx.data.sampler import Items, MadeItems, TrainingItems, training_batches
from rtx.evaluation.protocols import Window, Windows, windows
from rtx.evaluation.scores import equal_batches, read_windows, sample_windows
from rtx.training.hardware import Hardware
from rtx.training.signals import ignore_signals


class RtxDataModule(pl.LightningDataModule):
    """The data of a run, of which `step` steps have been taken.

    Args:
        config: the resolved configuration.
        hardware: what it means on this machine.
        store: the data; unset: opened by `setup`, prepared before by one process a node.
    """

    store: Store
    """The data: sizes, unit, vocabulary, stamps of the protocol."""
    items: Items
    windows: Windows
    """The windows of the closing score, which cover the held-out split."""

    def __init__(self, config: Config, hardware: Hardware, store: Store | None = None) -> None:
        super().__init__()
        self.config, self.hardware, self.step = config, hardware, 0
        self.batches: Batches | None = None
        """The training batches, once Lightning has asked for them."""
        if store is not None:
            self.take(store)

    def prepare_data(self) -> None:
        """Prepare the store where it is missing; Lightning calls it in one process a node."""
        if not hasattr(self, "store"):
            open_data(self.config.data, data_root())

    def setup(self, stage: str = "fit") -> None:
        """Open the store."""
        if not hasattr(self, "store"):
            self.take(open_data(self.config.data, data_root()))

    def take(self, store: Store) -> None:
        """Take an open store."""
        self.store, self.items = store, training_items(self.config, store)
        self.held_out = store.split("valid")
        self.windows = windows(len(self.held_out), self.config.data.length, self.config.trainer.val_stride)
        self.few_windows = sample_windows(self.windows, self.config.trainer.val_windows)

    def state_dict(self) -> dict[str, Any]:
        """Return the step that comes next."""
        return {"step": self.trainer.global_step if self.trainer else self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a step."""
        self.step = state_dict["step"]

    def train_dataloader(self) -> Batches:
        """Return this rank's micro-batches of the steps that are left."""
        hardware, stop = self.hardware, max(self.step, self.config.trainer.steps)
        loader = training_batches(
            *(self.items, self.step, stop, hardware.rank, hardware.world, hardware.micro_batch_size),
            num_workers=self.config.hardware.workers,
            pin_memory=hardware.accelerator == "gpu",
            worker_init_fn=loader_process_starts,
        )
        self.batches = Batches(loader)
        return self.batches

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Widen training ids, which travel as small as they are kept, once they are on the device."""
        return batch.long() if isinstance(batch, Tensor) else batch

    @property
    def seconds(self) -> float:
        """Seconds that this process has waited for training batches."""
        return self.batches.seconds if self.batches else 0.0

    def val_dataloader(self) -> WindowBatches:
        """Return this rank's windows of a validation during training."""
        return self.window_batches(self.few_windows)

    def whole_split(self) -> WindowBatches:
        """Return this rank's windows of the whole held-out split."""
        return self.window_batches(self.windows)

    def window_batches(self, chosen: Sequence[Window]) -> WindowBatches:
        """Return this rank's share of some windows of the held-out split."""
        return WindowBatches(self.held_out, chosen, self.hardware.rank, self.hardware.world)


def training_items(config: Config, store: Store) -> Items:
    """Return the sequences to train on, by their number."""
    if isinstance(store, RecallStore):
        return MadeItems(store.sequence, config.seed, config.trainer.batch_size)
    whole = store.image is not None
    return TrainingItems(store.split("train"), config.data.length, config.seed, config.trainer.batch_size, whole)


class Batches:
    """A loader whose waiting time is measured.

    It tells no length: Lightning would hold the batches that are left against those that were ever taken.
    """

    def __init__(self, loader: DataLoader[Tensor]) -> None:
        self.loader = loader
        self.seconds = 0.0
        """Time spent waiting for batches so far."""

    def __iter__(self) -> Iterator[Tensor]:
        batches = iter(self.loader)
        while True:
            began = time.perf_counter()
            batch = next(batches, None)
            self.seconds += time.perf_counter() - began
            if batch is None:
                return
            yield batch


class WindowBatches:
    """Windows of a split in batches of equal length, dealt out to the ranks: every window is scored by one of them.

    Yields ids `[B, N]`, the units of each window before the first that counts `[B]`, and the number of each window
    `[B]`; int64. Every rank yields as many batches: one without a batch of its own in the last turn takes the last one
    again, with the number -1, because where parameters are shared out (hardware=fsdp) every pass needs all ranks.

    Args:
        tokens: the split, unsigned integers `[units]`.
        chosen: its windows.
        rank: this process among `world`.
    """

    def __init__(self, tokens: np.ndarray, chosen: Sequence[Window], rank: int = 0, world: int = 1) -> None:
        self.tokens, self.chosen, self.rank, self.world = tokens, chosen, rank, world
        self.batches = equal_batches(chosen, None)

    def __len__(self) -> int:
        return -(-len(self.batches) // self.world)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for turn in range(0, len(self.batches), self.world):
            own = turn + self.rank
            yield self.batch(min(own, len(self.batches) - 1), own < len(self.batches))

    def batch(self, at: int, counts: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return a batch; its windows are numbered only if they count."""
        numbers = self.batches[at]
        read = read_windows(self.tokens, [self.chosen[number] for number in numbers])
        return (*read, torch.tensor(numbers if counts else [-1] * len(numbers)))


def loader_process_starts(worker: int) -> None:
    """Prepare a loader process (`worker_init_fn`): one thread, and deaf to signals meant for the training process."""
    ignore_signals()
    torch.set_num_threads(1)
