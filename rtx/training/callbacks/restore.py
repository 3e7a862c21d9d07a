"""Going on from a checkpoint."""

from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import Callback, Trainer
from torch.optim import Optimizer

from rtx.training.checkpoint import (
    Checkpoint,
    read_checkpoint,
    renumbered,
    resuming_from,
    with_current_callbacks,
    with_current_names,
)
from rtx.training.module import TrainingModule
from rtx.training.optimizers import (
    check_moments,
    learning_rate,
    parameter_groups,
    set_learning_rate,
)
from rtx.training.session import Session


class Restore(Callback):
    """Restores weights, optimizer, number of steps, and the states of the other callbacks."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def on_fit_start(self, trainer: Trainer, module: Any) -> None:
        if self.session.start:
            with resuming_from(self.session.start):
                restore(trainer, module, read_checkpoint(self.session.start["path"]))


class PendingValidation(Callback):
    """Validates before the first step, if the run was stopped when a validation was due."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        step = trainer.global_step
        is_due = trainer.should_stop or step % self.session.config.trainer.val_every == 0
        if step and is_due:
            # Lightning has no hook that validates: this is how its own loop runs a validation.
            trainer.validating = True
            trainer.fit_loop.epoch_loop.val_loop.run()
            trainer.training = True


def restore(trainer: Trainer, module: TrainingModule, checkpoint: Checkpoint) -> None:
    """Restore trainer, module and callbacks from a checkpoint, even of an older version."""
    tensors = with_current_names(checkpoint["model"], module.model.state_dict())
    checkpoint["state_dict"] = {f"model.{name}": tensor for name, tensor in tensors.items()}
    groups = parameter_groups(module.model, module.config.optimizer.name)
    for state, optimizer in zip(checkpoint["optimizer_states"], trainer.optimizers, strict=True):
        state["state"] = renumbered(state["state"], tensors, groups)
        state["param_groups"] = with_options_of(optimizer, state["param_groups"])
    trainer.strategy.load_model_state_dict(checkpoint)
    trainer.strategy.load_optimizer_state_dict(checkpoint)
    # A run that has nothing left to do saves the rate of its last step, as it did before.
    rate = learning_rate(module.config, max(1, checkpoint["step"]))
    for optimizer in trainer.optimizers:
        check_moments(optimizer)
        set_learning_rate(optimizer, rate)
    states = with_current_callbacks(checkpoint["callbacks"])
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if callback.state_key in states:
            callback.load_state_dict(states[callback.state_key])
    set_steps(trainer, checkpoint["step"])


def with_options_of(
    optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the parameter groups of a checkpoint with the options of an optimizer of today.

    Options follow from the configuration, which a resume cannot change here, so those in the
    checkpoint are not read.
    """
    current = []
    for group, here in zip(groups, optimizer.param_groups, strict=True):
        options = {name: value for name, value in here.items() if name != "params"}
        current.append({**group, **options})
    return current


def set_steps(trainer: Trainer, step: int) -> None:
    """Set the number of steps that have been taken.

    Lightning counts batches and optimizer steps apart. A batch is a step here, so both numbers
    follow from the step, and checkpoints hold no state of loops. There is no public method for it.
    """
    loop = trainer.fit_loop.epoch_loop
    loop.batch_progress.total.ready = step
    loop.manual_optimization.optim_step_progress.total.completed = step
