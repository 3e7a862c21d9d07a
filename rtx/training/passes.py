"""The forward pass of training: its arithmetic, what it minimises, and how it runs: eager, compiled
or recorded.

Shapes: B sequences of a micro-batch, N tokens of each, A answers of each at the most.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rtx.attention.capacity import raise_capacities
from rtx.attention.centroids import all_centroids, layers_by_rule, moved, stacked
from rtx.data.store import Answers
from rtx.data.windows import tokens_and_documents
from rtx.errors import UserError, shorten
from rtx.model.compiling import compile_loss
from rtx.model.memory import Memory
from rtx.model.transformer import Transformer
from rtx.settings.requirements import precision_on
from rtx.settings.schema import Config
from rtx.training.cuda_graphs import RecordedLoss, statistics_of, without_cast_cache
from rtx.training.hardware import Hardware
from rtx.training.lightning_plugins import ForwardPrecision


class Objective(NamedTuple):
    """What a forward pass returns for its micro-batch; all are scalars on the device."""

    nats: Tensor
    """Mean nats of what is predicted."""
    right: Tensor
    """The share of right answers; 0 where all tokens are predicted."""
    auxiliary: Tensor
    """The auxiliary losses of the model."""

    @property
    def loss(self) -> Tensor:
        """What training minimises."""
        return self.nats + self.auxiliary


class Passes:
    """The forward passes of a model in training.

    Args:
        hardware: has whether to compile the loss, and whether to record its passes.
        answers: returns the positions of answers, if only they are predicted; None: all tokens are.
    """

    def __init__(
        self, model: Transformer, config: Config, hardware: Hardware, answers: Answers | None = None
    ) -> None:
        self.model = model
        self.config = config
        self.hardware = hardware
        self.answers = answers
        self.precision = ForwardPrecision(hardware.precision, hardware.torch_device)
        self.compiled = hardware.compile
        # Recorded passes have fixed shapes, but the number of answers differs between batches.
        self.recorded = hardware.graphs and answers is None
        self.move: Any = moved
        """The function that moves centroids after a step."""
        self.first_BN: Tensor | None = None
        """The micro-batch with which the loss is compiled and recorded; set by `prepare`."""
        self.loss: Callable[..., Any] = self.eager_loss()
        if self.compiled:
            self.loss = compile_loss(model, self.loss)
        self.loss = self.with_autocast(self.loss)

    def __call__(self, units: Tensor, memory: Memory | None = None) -> Objective:
        """Compute the loss of a micro-batch.

        Args:
            units: its tokens `[B, N]`, or with documents what `tokens_and_documents` divides.
            memory: that of its streams.
        """
        tokens_BN, first_BN = tokens_and_documents(units)
        with self.precision.forward_context():
            if self.answers is not None:
                return self.objective_of_answers(tokens_BN, self.answers)
            options: dict[str, Any] = {} if memory is None else {"memory": memory}
            if first_BN is not None:
                options["first_BN"] = first_BN
            nats_BN, auxiliary = self.loss(tokens_BN, **options)
            return Objective(nats_BN.mean(), nats_BN.new_zeros(()), auxiliary)

    def objective_of_answers(self, tokens_BN: Tensor, answers: Answers) -> Objective:
        """Return the loss of the answers alone.

        All sequences have the same weight, whatever their number of answers: otherwise the gradient
        of a step would depend on how micro-batches divide it.
        """
        at_BA = answers(tokens_BN).position_BA
        nats_BA, right_BA, auxiliary = self.loss(tokens_BN, at_BA)
        weight_B1 = at_BA.shape[1] / (at_BA >= 0).sum(1, keepdim=True)
        nats = (nats_BA * weight_B1).mean()
        right = (right_BA * weight_B1.double()).mean()
        return Objective(nats, right, auxiliary)

    def eager_loss(self) -> Callable[..., Any]:
        """Return the method of the model that computes its loss, neither compiled nor recorded."""
        if self.answers is not None:
            return self.model.answers
        if self.config.hardware.loss == "liger":
            return self.model.fused_loss
        return self.model.loss

    def with_autocast(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        """Return the loss with `without_cast_cache` if passes are to be recorded, else as it is."""
        if not self.recorded:
            return loss
        is_mixed = precision_on(self.config.hardware, gpu=True) == "bf16"
        return without_cast_cache(loss, torch.bfloat16 if is_mixed else None)

    def prepare(self, tokens_BN: Tensor) -> str:
        """Compile the loss and record its passes, if the run does so, and return a line on it.

        Weights, statistics and random streams are left as they were.

        Args:
            tokens_BN: a micro-batch of the run.
        """
        self.first_BN = tokens_BN
        # The passes below are dropped: they must not initialise centroids.
        if any(centroids.seed_with_next for centroids in all_centroids(self.model)):
            waits = "not recorded as CUDA graphs: centroids start at the first batch"
            return f"hardware.graphs: {waits}" if self.recorded else ""
        lines = [self.compile_now(), self.record_now()]
        return "; ".join(line for line in lines if line)

    def compile_now(self) -> str:
        """Compile the loss by a pass whose results are dropped, if requested; return a line on it.

        If that fails, hardware.compile=auto goes on eagerly, and true raises the error.
        """
        if not self.compiled:
            return ""
        began = time.monotonic()
        try:
            self.drop_one_pass()
            self.compile_move()
        # The compiler, its kernels or torch, which lacks memory, may raise anything.
        except Exception as error:
            if self.config.hardware.compile is True:
                raise
            self.run_eagerly()
            reason = shorten(repr(error), 200)
            return f"hardware.compile=auto: not compiled, {reason}; the model runs eagerly"
        finally:
            for numbers in statistics_of(self.model):
                numbers.zero_()
        return f"compiled in {time.monotonic() - began:.0f} s"

    def drop_one_pass(self) -> None:
        """Compute a gradient of the first micro-batch, which compiles the loss, and drop it."""
        assert self.first_BN is not None
        weights = [weight for weight in self.model.parameters() if weight.requires_grad]
        devices = [self.first_BN.device] if self.first_BN.is_cuda else []
        loss = self.loss
        with torch.random.fork_rng(devices):
            # An eager pass first: it builds the tables that depend on shapes alone.
            self.loss = self.eager_loss()
            with torch.no_grad():
                self(self.first_BN)
            self.loss = loss
            objective = self(self.first_BN)
            # backward() would call the hooks of DDP.
            torch.autograd.grad(objective.loss, weights, allow_unused=True)

    def compile_move(self) -> None:
        """On a GPU, compile the function that moves centroids, by a call that changes nothing."""
        assert self.first_BN is not None
        if not self.first_BN.is_cuda:
            return
        self.move = torch.compile(moved, dynamic=False)
        with torch.no_grad():
            for rule, layers in layers_by_rule(self.model).items():
                self.move(rule, *stacked(layers))
        torch.cuda.synchronize(self.first_BN.device)

    def run_eagerly(self) -> None:
        """Drop what is compiled."""
        self.compiled = False
        self.loss = self.with_autocast(self.eager_loss())
        self.move = moved
        torch.compiler.reset()

    def record_now(self) -> str:
        """Record the passes as CUDA graphs, if requested, and return a line on it.

        If that fails, hardware.graphs=auto goes on without; hardware.graphs=true raises the error.
        """
        self.check_recordable()
        if not self.recorded:
            return ""
        assert self.first_BN is not None
        if isinstance(self.loss, RecordedLoss):
            # This frees the memory of the recorded passes.
            self.loss = self.loss.loss
        try:
            self.loss = RecordedLoss(self.model, self.loss, self.first_BN)
        except RuntimeError as error:
            if self.config.hardware.graphs is True:
                raise
            self.recorded = False
            return f"hardware.graphs=auto: not recorded as CUDA graphs, {shorten(repr(error), 200)}"
        return "recorded as CUDA graphs"

    def check_recordable(self) -> None:
        """Turn recording off where a step has several passes; `UserError` for hardware.graphs=true.

        A recorded backward pass overwrites the gradients of the pass before instead of adding.
        """
        passes = self.hardware.accumulate
        if not self.recorded or passes == 1:
            return
        self.recorded = False
        if self.config.hardware.graphs is True:
            needs = f"one forward pass a step, not {passes}"
            raise UserError(f"hardware.graphs=true needs {needs}: raise trainer.micro_batch_size")

    def raise_capacities(self) -> list[str]:
        """Enlarge the lists of members that were too short, and return lines on it.

        That changes the shapes of the passes, so they are recorded again.
        """
        lines = raise_capacities(self.model)
        if lines:
            lines.append(self.record_now())
        return [line for line in lines if line]
