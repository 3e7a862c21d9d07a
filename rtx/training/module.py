"""The LightningModule: one optimizer step (forward, backward, clipping, optimizer, centroids) and validation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from rtx.attention.centroids import after_step, initialise_from_data
from rtx.compose import flat
from rtx.config import Config
from rtx.errors import RunFailed
from rtx.evaluation.scores import Score, score_batch
from rtx.model.transformer import Transformer, compile_loss
from rtx.training.checkpoint import FORMAT
from rtx.training.distributed import Ranks
from rtx.training.memory import out_of_memory
from rtx.training.optimizers import build_optimizer, learning_rate, set_learning_rate
from rtx.training.rng import seed_everything
from rtx.training.sharding import is_part, shard, whole

OWN_PLACES = ("data.path", "data.verify", "data.processes", "hardware.workers", "logger.", "name")
"""What may differ between the processes of a run."""


def build_model(config: Config, vocabulary: int, first_N: Callable[[], Tensor] | None) -> Transformer:
    """Return the model of a configuration, for a number of different units, with its first weights, on every rank.

    `first_N` returns the first training sequence, ids `[N]`, which routing.init=data reads; None: the weights are to be
    replaced anyway.
    """
    seed_everything(config.seed)
    model = Transformer(config, vocabulary)
    if first_N and config.routing.init == "data":
        initialise_from_data(model, first_N()[None])
    return model


class StepRecord(NamedTuple):
    """A finished step whose numbers are still on the device: mean nats and right answers of its forward passes."""

    step: int
    losses: Tensor
    norm: Tensor
    right: Tensor | None


class TrainingModule(pl.LightningModule):
    """The model with its optimizer; what a checkpoint holds of it, and the score of a validation.

    Args:
        model: has `loss(tokens_BN) -> (nats_BN, auxiliary)`, or with answers
            `answers(tokens_BN, at_A) -> (nats_BA, right_BA, auxiliary)`; both take `prefix`.
        config: the resolved configuration.
        answers: positions `[A]` of each sequence whose units alone count; None: all of them.
        ranks: the processes of the run.
        facts: what else every checkpoint holds: `config` and `data` as plain values.
    """

    at_A: Tensor | None

    def __init__(
        self, model: nn.Module, config: Config, answers: Any = None, ranks: Ranks | None = None, facts: Any = None
    ) -> None:
        super().__init__()
        self.model, self.config = model, config
        self.ranks, self.facts = ranks or Ranks(0, 1), dict(facts or {})
        # Mean nats and share of right answers, summed in float64 over the forward passes since the last row.
        self.sums = {"nats": 0.0, "right": 0.0, "passes": 0}
        self.bits = self.norm = math.nan  # of the last step that was read back
        self.step_losses: list[Tensor] = []
        self.step_right: list[Tensor] = []
        self.unread: list[StepRecord] = []
        # Of each batch of a validation: number, units, nats and right answers of its windows, float64 `[B, 4]`.
        self.scored: list[Tensor] = []
        self.score: Score | None = None  # of the last validation, the same on all ranks
        self.register_buffer("at_A", None if answers is None else torch.from_numpy(answers), persistent=False)
        self.loss: Callable[..., tuple[Tensor, ...]] = model.loss if answers is None else model.answers  # type: ignore[assignment]
        if config.hardware.compile:
            self.loss = compile_loss(model, self.loss)

    def setup(self, stage: str) -> None:
        """Open the channel between the ranks, and compare what they begin with, before they have one model."""
        self.ranks.connect()
        values = flat(self.facts.get("config", {}))
        begins = {key: value for key, value in values.items() if not key.startswith(OWN_PLACES)}
        step = getattr(getattr(self.trainer, "datamodule", None), "step", None)
        fingerprint = self.facts.get("data", {}).get("fingerprint")
        self.ranks.compare({"the checkpoint's step": step, "the data's fingerprint": fingerprint, **begins})

    def configure_model(self) -> None:
        """Give the parameters their type, and share them out (hardware=fsdp), before a checkpoint is loaded."""
        self.trainer.precision_plugin.convert_module(self)
        if self.device_mesh is not None and not any(is_part(parameter) for parameter in self.model.parameters()):
            shard(self.model, self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return build_optimizer(self.model, self.config.optimizer)

    def training_step(self, tokens_BN: Tensor, batch_idx: int) -> Tensor:
        if self.at_A is None:
            nats_BN, auxiliary = self.loss(tokens_BN)
        else:
            nats_BN, right_BA, auxiliary = self.loss(tokens_BN, self.at_A)
            self.step_right.append(right_BA.float().mean())
        mean = nats_BN.mean()
        self.step_losses.append(mean.detach())
        return mean + auxiliary

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Measure the norm of the whole gradient, and scale the gradient down to `trainer.clip`."""
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        norm = whole(get_total_norm([p.grad for p in parameters if p.grad is not None]))
        if self.config.trainer.clip:
            clip_grads_with_norm_(parameters, self.config.trainer.clip, norm)
        right = torch.stack(self.step_right) if self.step_right else None
        self.unread.append(StepRecord(self.global_step + 1, torch.stack(self.step_losses), norm, right))
        self.step_losses, self.step_right = [], []

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        """Take one step at its learning rate, then move the centroids: once per optimizer step."""
        set_learning_rate(optimizer.optimizer, learning_rate(self.config, self.global_step + 1))
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        optimizer.zero_grad()  # nobody reads them any more; Lightning would keep them through the next forward pass
        after_step(self.model)

    def read_back(self) -> str:
        """Wait for the device, fold the unread steps into the sums, and return which loss or gradient is not finite."""
        records, self.unread = self.unread, []
        for step, losses, norm, right in records:
            losses, self.norm = losses.double().cpu(), float(norm)
            self.bits = float(losses.mean()) / math.log(2)
            if not (bool(torch.isfinite(losses).all()) and math.isfinite(self.norm)):
                nats = float(losses.mean())
                what = f"norm of the gradient is {self.norm}" if math.isfinite(nats) else f"loss is {nats}"
                return f"step {step}: the {what} at learning rate {learning_rate(self.config, step):g}"
            for loss in losses.tolist():
                self.sums["nats"] += loss
            self.sums["right"] += 0.0 if right is None else float(right.double().sum())
            self.sums["passes"] += len(losses)
        return ""

    def on_validation_epoch_start(self) -> None:
        self.scored = []

    def validation_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> None:
        """Score windows of equal length: ids `[B, N]`, units before the first that counts `[B]`, their numbers `[B]`.

        A number of -1 marks a window that another rank scores: it keeps this one in step (`WindowBatches`). Memory that
        runs out is `RunFailed`: smaller micro-batches would not help here.
        """
        tokens_BN, skipped_B, number_B = batch
        try:
            scored_B3, number_B = score_batch(self.model, tokens_BN, skipped_B, self.at_A), number_B.cpu()
        except (RuntimeError, MemoryError) as error:
            if reason := out_of_memory(error):
                raise RunFailed(reason) from error
            raise
        self.scored.append(torch.cat([number_B[:, None], scored_B3], dim=1)[number_B >= 0])

    def on_validation_epoch_end(self) -> None:
        """Join the ranks' windows in their order into one score, the same on any number of ranks."""
        own_K4 = torch.cat(self.scored).numpy() if self.scored else np.zeros((0, 4))
        all_K4 = np.concatenate(self.ranks.gather(own_K4))
        number_K, units_K, nats_K, right_K = all_K4[np.argsort(all_K4[:, 0])].T
        assert np.array_equal(number_K, np.arange(len(number_K))), "each window once"
        self.score, self.scored = Score(units_K, nats_K, None if self.at_A is None else right_K), []

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what other commands read; the loops' counters are left out: they follow from the step."""
        weights = checkpoint.pop("state_dict")
        del checkpoint["loops"]
        model = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
        checkpoint.update({"format": FORMAT, "step": self.global_step, "model": model, **self.facts})

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {f"model.{name}": tensor for name, tensor in checkpoint["model"].items()}
        checkpoint["loops"] = {"fit_loop": loop_state(checkpoint["step"], self.trainer.accumulate_grad_batches)}


def loop_state(step: int, accumulate: int) -> dict[str, Any]:
    """Return the counters of Lightning's loops after a step whose validation, if one was due, is done.

    Lightning's own would count micro-batches, of which a resumed run may have another number, and would skip a
    validation that a signal has put off. The keys are those of `FitLoop.state_dict`.
    """

    def counted(number: int, *names: str) -> dict[str, Any]:
        return {name: dict.fromkeys(names, number) for name in ("total", "current")}

    began = {"ready": 1, "started": 1, "processed": 0, "completed": 0}
    batches = counted(step * accumulate, "ready", "started", "processed", "completed")
    optimizer = {
        "step": counted(step, "ready", "completed"),
        "zero_grad": counted(step, "ready", "started", "completed"),
    }
    return {
        "epoch_progress": {"total": began, "current": dict(began)},
        "epoch_loop.batch_progress": {**batches, "is_last_batch": False},
        "epoch_loop.automatic_optimization.optim_progress": {"optimizer": optimizer},
    }
