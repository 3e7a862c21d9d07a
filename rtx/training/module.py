"""The LightningModule of training. It takes the optimizer steps, and scores the validation split.

Shapes: B sequences or windows, N tokens of each, K windows of a split, X columns of a window's
score.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor

from rtx.attention.centroids import after_step, all_centroids
from rtx.data.store import Answers
from rtx.evaluation.scores import joined, score_batch
from rtx.model.memory import Memory
from rtx.model.transformer import Transformer
from rtx.settings.derived import local_reach
from rtx.settings.identity import ranks_must_agree
from rtx.settings.schema import Config, flat
from rtx.sharded import is_sharded
from rtx.training.checkpoint import FORMAT
from rtx.training.distributed import Ranks, shard
from rtx.training.hardware import Hardware
from rtx.training.optimizers import (
    build_optimizer,
    clip_gradients,
    learning_rate,
    set_learning_rate,
)
from rtx.training.passes import Objective, Passes


class TrainingModule(pl.LightningModule):
    """A model with its optimizer.

    `take_step` is the optimizer step. It needs no Trainer: benchmarks and tests call it as well.

    Args:
        answers: returns the positions of answers, if the model predicts only answers; None: it
            predicts all tokens.
        metadata: entries that are added to every checkpoint: `config` and `data`.
    """

    def __init__(
        self,
        model: Transformer,
        config: Config,
        hardware: Hardware,
        answers: Answers | None = None,
        ranks: Ranks | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        # With manual optimization, `training_step` runs the backward pass and the optimizer.
        self.automatic_optimization = False
        self.model = model
        self.config = config
        self.hardware = hardware
        self.answers = answers
        self.ranks = ranks or Ranks(0, 1)
        self.metadata = dict(metadata or {})
        self.passes = Passes(model, config, hardware, answers)
        self.has_trainer = False
        self.sums = torch.zeros(3, dtype=torch.float64)
        """Sums over the micro-batches since the last row of metrics: mean nats, share of right
        answers, and 1 (so the third sum is their number)."""
        self.norm = torch.tensor(float("nan"))
        """The gradient norm of the last step, before clipping."""
        for centroids in all_centroids(model):
            # A step may have any number of micro-batches.
            centroids.warns = False
        self.memories: list[Memory] = []
        """The memory of each micro-batch, carried from step to step; empty without `model.memory`.
        """
        self.scored: list[Tensor] = []
        """A tensor for each batch that this rank has scored in this validation, float64
        `[B, 1 + X]`. The first column has the numbers of the windows, the others their scores."""
        self.score: Any = None
        """The `Score` of the last validation, the same on all ranks."""
        self.reach = local_reach(config)
        """How many tokens back stacked local heads read; None: far repeats are not counted."""

    def training_step(self, micro_batches: Sequence[Tensor], batch_idx: int) -> None:
        """Take the next step. Lightning calls this once a step, with all its micro-batches."""
        self.take_step(micro_batches, self.optimizers(), self.global_step + 1)

    def take_step(self, micro_batches: Sequence[Tensor], optimizer: Any, step: int) -> None:
        """Take an optimizer step. Weights and centroids change nowhere else.

        Args:
            micro_batches: the tokens of this process, each `[B, N]` on the model's device, or with
                documents `[B, 2, N]`, see `tokens_and_documents`.
            step: the number of the step, counted from 1.
        """
        count = len(micro_batches)
        for index, micro_batch in enumerate(micro_batches):
            objective = self.passes(micro_batch.long(), self.memory(index))
            loss = objective.loss / count
            is_last = index + 1 == count
            self.backward_pass(loss, is_last)
            self.note(objective)
        self.norm = clip_gradients(self.model, self.config.trainer.clip)
        set_learning_rate(optimizer, learning_rate(self.config, step))
        optimizer.step()
        # Gradients are freed before the next forward pass, which can then use their memory.
        optimizer.zero_grad()
        after_step(self.model, self.passes.move)

    def memory(self, index: int) -> Memory | None:
        """Return the memory of a micro-batch; None if the model has no memory."""
        if not self.config.model.memory:
            return None
        while len(self.memories) <= index:
            self.memories.append(Memory(self.config.model))
        return self.memories[index]

    def backward_pass(self, loss: Tensor, is_last: bool) -> None:
        """Add the gradient of a micro-batch to the gradient of the step.

        Processes average their gradients only in the last backward pass of a step.
        """
        if not self.has_trainer:
            loss.backward()
            return
        strategy = self.trainer.strategy
        if isinstance(strategy, ParallelStrategy) and not is_last:
            with strategy.block_backward_sync():
                self.manual_backward(loss)
        else:
            self.manual_backward(loss)

    def note(self, objective: Objective) -> None:
        """Add the nats and the right answers of a micro-batch to `sums`."""
        one = torch.ones_like(objective.right)
        figures = torch.stack([objective.nats.detach(), objective.right, one])
        self.sums = self.sums.to(figures.device) + figures

    def setup(self, stage: str) -> None:
        """Raise `UserError` unless all ranks begin with the same data, configuration and step."""
        self.has_trainer = True
        self.ranks.connect()
        data = self.metadata.get("data", {})
        start: dict[str, Any] = {"data": data.get("fingerprint")}
        config = self.metadata.get("config", {})
        for key, value in flat(config).items():
            if ranks_must_agree(key):
                start[key] = value
        datamodule: Any = getattr(self.trainer, "datamodule", None)
        start["step"] = getattr(datamodule, "step", None)
        self.ranks.compare(start)

    def configure_model(self) -> None:
        """Convert the parameters to their dtype, and with hardware=fsdp shard them."""
        self.passes.precision.convert_module(self)
        already_sharded = any(is_sharded(parameter) for parameter in self.model.parameters())
        if self.device_mesh is not None and not already_sharded:
            shard(self.model, self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return build_optimizer(self.model, self.config.optimizer)

    def validation_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> None:
        """Score a batch of windows.

        A batch contains the tokens of the windows as a micro-batch does, how many tokens of each
        precede the first scored token `[B]`, and the number of each window `[B]`. Number -1 marks
        padding: its score is dropped, because another rank scores that window.
        """
        units, skipped_B, number_B = batch
        scored_BX = score_batch(self.model, (units, skipped_B), self.answers, self.reach)
        number_B = number_B.cpu()
        numbered = torch.cat([number_B[:, None], scored_BX], dim=1)
        is_window_B = number_B >= 0
        self.scored.append(numbered[is_window_B])

    def on_validation_epoch_end(self) -> None:
        """Join the windows of all ranks into one score, the same for any number of ranks."""
        # A rank that scored no batch contributes an empty list.
        parts_here = []
        if self.scored:
            parts_here.append(torch.cat(self.scored).numpy())
        self.scored = []
        parts = []
        for parts_of_rank in self.ranks.gather(parts_here):
            parts += parts_of_rank
        all_KX = np.concatenate(parts)
        order_K = np.argsort(all_KX[:, 0])
        all_KX = all_KX[order_K]
        assert np.array_equal(all_KX[:, 0], np.arange(len(all_KX))), "each window once"
        self.score = joined(all_KX[:, 1:], self.answers)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the entries that other commands read, and remove the state of Lightning's loops.

        That state follows from the step.
        """
        del checkpoint["loops"]
        tensors = checkpoint.pop("state_dict")
        model = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        checkpoint["format"] = FORMAT
        checkpoint["step"] = self.global_step
        checkpoint["model"] = model
        checkpoint.update(self.metadata)

    def first_micro_batch(self) -> Tensor:
        """Return the first micro-batch of the run, on the model's device."""
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        return data.first_micro_batch().to(self.device).long()
