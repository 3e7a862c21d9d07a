"""The LightningModule: one optimizer step from top to bottom, and the scoring of a validation.

Shapes: B sequences or windows, N tokens of each, K windows of a split, X figures of a window.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor

from rtx.attention.centroids import after_step
from rtx.evaluation.far_repeats import local_reach
from rtx.evaluation.scores import Answers, joined, score_batch
from rtx.model.memory import Memory
from rtx.model.transformer import Transformer
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
        answers: returns the positions of answers, if only they are predicted; None: all tokens are.
        metadata: the `config` and the `data` that every checkpoint holds.
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
        # Manual optimization: Lightning leaves backward pass and optimizer to `training_step`.
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
        """Sums over the forward passes since the last row: mean nats, accuracy, their number."""
        self.norm = torch.tensor(float("nan"))
        """The norm of the gradient of the last step, before clipping."""
        self.memories: list[Memory] = []
        """The memory of each micro-batch of a step (recurrent models); it lasts over steps."""
        self.scored: list[Tensor] = []
        """In a validation: number and figures of windows so far, float64 `[B, 1 + X]` a batch."""
        self.score: Any = None
        """The `Score` of the last validation, the same on all ranks."""
        self.reach = local_reach(config)

    def training_step(self, micro_batches: Sequence[Tensor], batch_idx: int) -> None:
        """Take the next step; Lightning calls this with a batch for each step."""
        self.take_step(micro_batches, self.optimizers(), self.global_step + 1)

    def take_step(self, micro_batches: Sequence[Tensor], optimizer: Any, step: int) -> None:
        """Take an optimizer step: all that changes weights and centroids is here.

        Args:
            micro_batches: the tokens of this process, each `[B, N]` on the model's device.
            step: the number of the step, from 1 on.
        """
        for index, tokens_BN in enumerate(micro_batches):
            objective = self.passes(tokens_BN.long(), self.memory(index))
            loss = objective.loss / len(micro_batches)
            self.backward_pass(loss, is_last=index + 1 == len(micro_batches))
            self.note(objective)
        self.norm = clip_gradients(self.model, self.config.trainer.clip)
        set_learning_rate(optimizer, learning_rate(self.config, step))
        optimizer.step()
        # Freed here, so that the next forward pass can use their memory.
        optimizer.zero_grad()
        after_step(self.model, self.passes.move)

    def memory(self, index: int) -> Memory | None:
        """Return the memory of a micro-batch; None where the model has none."""
        if not self.config.model.memory:
            return None
        while len(self.memories) <= index:
            self.memories.append(Memory(self.config.model))
        return self.memories[index]

    def backward_pass(self, loss: Tensor, is_last: bool) -> None:
        """Add the gradient of a micro-batch to that of the step.

        Several processes average their gradients in the last backward pass of a step alone.
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
        """Add the loss of a micro-batch to the sums for the next row."""
        one = torch.ones_like(objective.right)
        figures = torch.stack([objective.nats.detach(), objective.right, one])
        self.sums = self.sums.to(figures.device) + figures

    def setup(self, stage: str) -> None:
        """Raise `UserError` unless all ranks begin with the same data, configuration and step."""
        self.has_trainer = True
        self.ranks.connect()
        start: dict[str, Any] = {"data": self.metadata.get("data", {}).get("fingerprint")}
        for key, value in flat(self.metadata.get("config", {})).items():
            if ranks_must_agree(key):
                start[key] = value
        data: Any = getattr(self.trainer, "datamodule", None)
        start["step"] = getattr(data, "step", None)
        self.ranks.compare(start)

    def configure_model(self) -> None:
        """Give the parameters their type, and shard them with hardware=fsdp."""
        self.passes.arithmetic.convert_module(self)
        is_done = any(is_sharded(parameter) for parameter in self.model.parameters())
        if self.device_mesh is not None and not is_done:
            shard(self.model, self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return build_optimizer(self.model, self.config.optimizer)

    def validation_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> None:
        """Score a batch of windows.

        A batch has their tokens `[B, N]`, the number of tokens before the first scored one `[B]`,
        and the numbers of the windows `[B]`, -1 for padding: another rank scores that window.
        """
        tokens_BN, skipped_B, number_B = batch
        scored_BX = score_batch(self.model, (tokens_BN, skipped_B), self.answers, self.reach)
        number_B = number_B.cpu()
        scored = torch.cat([number_B[:, None], scored_BX], dim=1)
        self.scored.append(scored[number_B >= 0])

    def on_validation_epoch_end(self) -> None:
        """Join the windows of all ranks into one score, the same for any number of ranks."""
        scored_here = [torch.cat(self.scored).numpy()] if self.scored else []
        self.scored = []
        scored = [part for parts in self.ranks.gather(scored_here) for part in parts]
        all_KX = np.concatenate(scored)
        all_KX = all_KX[np.argsort(all_KX[:, 0])]
        assert np.array_equal(all_KX[:, 0], np.arange(len(all_KX))), "each window once"
        self.score = joined(all_KX[:, 1:], self.answers)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what other commands read; drop the state of loops, which follows from the step."""
        del checkpoint["loops"]
        tensors = checkpoint.pop("state_dict")
        model = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        checkpoint |= {"format": FORMAT, "step": self.global_step, "model": model, **self.metadata}

    def first_micro_batch(self) -> Tensor:
        """Return the first micro-batch of the run, on the model's device."""
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        return data.first_micro_batch().to(self.device).long()
