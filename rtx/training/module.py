"""The LightningModule: one optimizer step (forward, backward, clipping, optimizer, centroids) and validation."""

import math
import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from rtx.attention.centroid_update import moved
from rtx.attention.centroids import after_step, all_centroids, layers_by_rule, stacked
from rtx.attention.room import make_room
from rtx.data.datamodule import MicroBatches
from rtx.errors import UserError, shorten
from rtx.evaluation.protocols import local_reach
from rtx.evaluation.scores import Answers, joined, score_batch
from rtx.model.compiling import compile_loss
from rtx.model.memory import Memory
from rtx.model.transformer import Transformer
from rtx.settings.devices import precision_on
from rtx.settings.identity import ranks_must_agree
from rtx.settings.schema import Config, OptimizerConfig, flat
from rtx.training.adafactor import Adafactor
from rtx.training.checkpoint import FORMAT, renumbered, tensor_problem, with_current_names
from rtx.training.cuda_graphs import RecordedLoss, statistics_of, without_cast_cache
from rtx.training.distributed import Ranks, is_part, shard, whole


def build_model(
    config: Config, vocabulary: int, first_N: Callable[[], Tensor] | None
) -> Transformer:
    """Return the model of a configuration with its first weights.

    `first_N` gives what routing.init=data and probed keys read. Raises `UserError` for a tensor, of a pattern that
    the user has written, which no checkpoint may hold.
    """
    seed_everything(config.seed)
    model = Transformer(config, vocabulary)
    check_savable(model)
    if first_N and (config.routing.init == "data" or config.routing.selection == "probed"):
        initialise_from_data(model, first_N()[None])
    return model


@torch.no_grad()
def initialise_from_data(model: nn.Module, tokens_BN: Tensor) -> None:
    """Start the centroids of all layers at vectors of one training sequence, on every rank alike.

    The loss of the sequence is computed once, without dropout; the centroids of a layer start as it reaches them.
    Those that it does not reach, or reaches with padding alone, start at the next training batch.
    """
    was_training = model.training
    model.eval()
    for centroids in all_centroids(model):
        centroids.seed_with_next = True
        centroids.train()
    model.loss(tokens_BN[:1])  # type: ignore[operator]
    model.train(was_training)


def check_savable(model: nn.Module) -> None:
    """Raise `UserError` for a tensor that no reader of a checkpoint would take."""
    way_out = "keep it contiguous and real, or register it with persistent=False"
    for name, tensor in model.state_dict().items():
        if problem := tensor_problem(tensor):
            raise UserError(f"{name} is {problem}, which no checkpoint holds: {way_out}")


def training_loss(
    model: Transformer, config: Config, answers: Answers | None
) -> Callable[..., Any]:
    """Return the method of a model that gives what training minimises."""
    if answers is not None:
        return model.answers
    return model.fused_loss if config.hardware.loss == "liger" else model.loss


class TrainingModule(pl.LightningModule):
    """The model with its optimizer; what a checkpoint holds of it, and the score of a validation.

    `answers`: finds the units that alone count; None: all do. `facts`: the `config` and `data` of every checkpoint.
    `compiled`: whether torch.compile is to compile the loss. `recorded`: whether its passes are to be CUDA graphs.
    """

    def __init__(
        self,
        model: Transformer,
        config: Config,
        answers: Any = None,
        ranks: Ranks | None = None,
        facts: Any = None,
        compiled: bool = False,
        recorded: bool = False,
    ) -> None:
        super().__init__()
        self.model, self.config = model, config
        self.ranks, self.facts = ranks or Ranks(0, 1), dict(facts or {})
        # Mean nats and share of right answers, summed over the forward passes since the last row; their number.
        self.sums = torch.zeros(3, dtype=torch.float64)
        self.norm = torch.tensor(math.nan)  # of the whole gradient of the last step
        self.memories: list[
            Memory
        ] = []  # of this rank's streams, by the micro-batch of a step they are in
        # Of each batch of a validation: the numbers of its windows, and what `score_batch` gives, float64 `[B, 1 + X]`.
        self.scored: list[Tensor] = []
        self.score: Any = None  # `Score` of the last validation, the same on all ranks
        self.answers: Answers | None = answers
        self.reach = local_reach(config)
        self.loss: Callable[..., Any] = training_loss(model, config, answers)
        self.move = moved
        self.compiled = compiled
        self.recorded = recorded and answers is None  # the answers of a batch may be of any number
        if compiled:
            self.loss = compile_loss(model, self.loss)
        if self.recorded:
            self.loss = without_cast_cache(self.loss, self.autocast_type())

    def setup(self, stage: str) -> None:
        """Open the channel between the ranks, and compare what they begin with, before they have one model."""
        self.ranks.connect()
        config = flat(self.facts.get("config", {}))
        begins = {key: value for key, value in config.items() if ranks_must_agree(key)}
        step = getattr(getattr(self.trainer, "datamodule", None), "step", None)
        self.ranks.compare(
            {"step": step, "data": self.facts.get("data", {}).get("fingerprint"), **begins}
        )

    def configure_model(self) -> None:
        """Give the parameters their type, and share them out (hardware=fsdp), before a checkpoint is loaded."""
        self.trainer.precision_plugin.convert_module(self)
        if self.device_mesh is not None and not any(
            is_part(parameter) for parameter in self.model.parameters()
        ):
            shard(self.model, self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return build_optimizer(self.model, self.config.optimizer)

    def training_step(self, tokens_BN: Tensor, batch_idx: int) -> Tensor:
        given: dict[str, Any] = (
            {"memory": self.memory(batch_idx)} if self.config.model.memory else {}
        )
        mean, share, auxiliary = self.minimised(tokens_BN, **given)
        self.sums = self.sums.to(mean.device) + torch.stack(
            [mean.detach(), share, torch.ones_like(share)]
        )
        return mean + auxiliary

    def minimised(self, tokens_BN: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return the mean nats of a micro-batch, its share of right answers (else 0), and the auxiliary loss."""
        if self.answers is None:
            nats_BN, auxiliary = self.loss(tokens_BN, **options)
            return nats_BN.mean(), nats_BN.new_zeros(()), auxiliary
        # Sequences count alike, however many answers they have: a step is then the same in parts.
        at_BA, _ = self.answers(tokens_BN)
        nats_BA, right_BA, auxiliary = self.loss(tokens_BN, at_BA)
        weight_B1 = at_BA.shape[1] / (at_BA >= 0).sum(1, keepdim=True)
        return (nats_BA * weight_B1).mean(), (right_BA * weight_B1.double()).mean(), auxiliary

    def prepare_passes(self) -> str:
        """Compile the loss and record its passes as CUDA graphs, if the run does so, and return a line on it.

        Weights, statistics and random streams are left as they were.
        """
        # Centroids that start at the first batch would start at a pass that is dropped: the first step compiles.
        if any(centroids.seed_with_next for centroids in all_centroids(self.model)):
            waits = "not recorded as CUDA graphs: centroids start at the first batch"
            return f"hardware.graphs: {waits}" if self.recorded else ""
        lines = [self.compile_now(), self.record_now()]
        return "; ".join(line for line in lines if line)

    def compile_now(self) -> str:
        """Compile what is to be compiled, by one pass whose results are dropped, and return a line on it.

        Where the compiler fails or memory runs out, the model runs eagerly with `hardware.compile=auto`; with `true`
        the error is raised.
        """
        if not self.compiled:
            return ""
        began = time.monotonic()
        try:
            self.pass_once()
            self.compile_move()
        except Exception as error:  # of the compiler, of its kernels, or for want of memory
            if self.config.hardware.compile is True:
                raise
            self.run_eagerly()
            return f"hardware.compile=auto: not compiled, {shorten(repr(error), 200)}; the model runs eagerly"
        finally:
            for numbers in statistics_of(self.model):
                numbers.zero_()
        return f"compiled in {time.monotonic() - began:.0f} s"

    def run_eagerly(self) -> None:
        """Give up what is compiled."""
        self.loss = training_loss(self.model, self.config, self.answers)
        if self.recorded:
            self.loss = without_cast_cache(self.loss, self.autocast_type())
        self.move = moved
        self.compiled = False
        torch.compiler.reset()

    def record_now(self) -> str:
        """Record the passes as CUDA graphs, if they are to be, and return a line on it.

        Where they cannot be recorded, kernels are started one by one with `hardware.graphs=auto`; with `true` the error
        is raised.
        """
        parts = self.trainer.accumulate_grad_batches
        if self.recorded and parts > 1:
            # A replayed backward pass overwrites the gradients of the one before, to which it should add.
            self.recorded = False
            if self.config.hardware.graphs is True:
                need = f"one forward pass a step, not {parts}"
                raise UserError(
                    f"hardware.graphs=true needs {need}: raise trainer.micro_batch_size"
                )
        if not self.recorded:
            return ""
        if isinstance(self.loss, RecordedLoss):
            self.loss = self.loss.loss  # frees the memory of what was recorded
        try:
            self.loss = RecordedLoss(self.model, self.loss, self.first_tokens())
        except RuntimeError as error:
            if self.config.hardware.graphs is True:
                raise
            self.recorded = False
            return f"hardware.graphs=auto: not recorded as CUDA graphs, {shorten(repr(error), 200)}"
        return "recorded as CUDA graphs"

    def make_room(self) -> list[str]:
        """Give more room to lists that have lacked it, and return lines on it.

        The passes have other shapes then, and are recorded again.
        """
        lines = make_room(self.model)
        if lines and (line := self.record_now()):
            lines.append(line)
        return lines

    def autocast_type(self) -> torch.dtype | None:
        """Return the type to which autocast casts on a GPU; None without autocast."""
        return torch.bfloat16 if precision_on(self.config.hardware, gpu=True) == "bf16" else None

    def first_tokens(self) -> Tensor:
        """Return the first micro-batch."""
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        return (
            MicroBatches(data.sampler, data.loader.get("micro_batch") or 1)[0]
            .to(self.device)
            .long()
        )

    def pass_once(self) -> None:
        """Compute a gradient of the first micro-batch, which compiles the loss, and drop it."""
        tokens_BN = self.first_tokens()
        weights = [weight for weight in self.parameters() if weight.requires_grad]
        devices = [self.device] if self.device.type == "cuda" else []
        loss = self.loss
        with torch.random.fork_rng(devices), self.trainer.precision_plugin.train_step_context():
            # What follows from shapes alone has to exist before the loss is compiled: an eager pass makes it.
            self.loss = training_loss(self.model, self.config, self.answers)
            with torch.no_grad():
                self.minimised(tokens_BN)
            self.loss = loss
            mean, _, auxiliary = self.minimised(tokens_BN)
            # Not backward(), which would call the hooks of DDP.
            torch.autograd.grad(mean + auxiliary, weights, allow_unused=True)

    def compile_move(self) -> None:
        """Compile, on a GPU, the function that moves centroids, by one call whose results are dropped."""
        if self.device.type != "cuda":
            return
        self.move = torch.compile(moved, dynamic=False)
        with torch.no_grad():
            for rule, layers in layers_by_rule(self.model).items():
                self.move(rule, *stacked(layers))
        torch.cuda.synchronize(self.device)

    def memory(self, batch_idx: int) -> Memory:
        """Return what the streams of a micro-batch have kept, empty at the start of a run."""
        parts = self.trainer.accumulate_grad_batches
        self.memories = self.memories or [Memory(self.config.model) for _ in range(parts)]
        return self.memories[batch_idx % parts]

    def kept_memory(self) -> list[Tensor]:
        """Return the last units, and what each layer keeps, of this rank's streams, `[micro-batches, B, ...]`."""
        kept = zip(
            *([own.last_B, *own.layers, *own.compressed] for own in self.memories), strict=True
        )
        return [torch.stack(parts).cpu() for parts in kept]  # type: ignore[arg-type]

    def restore_memory(self, kept: list[list[Tensor]]) -> None:
        """Take this rank's share of what all ranks had kept, of whatever number and size their micro-batches were."""
        streams = [torch.stack(parts, dim=1).flatten(0, 2) for parts in zip(*kept, strict=True)]
        parts = self.trainer.accumulate_grad_batches
        for part in range(parts if streams else 0):
            size, share = (
                len(streams[0]) // (parts * self.ranks.world),
                part * self.ranks.world + self.ranks.rank,
            )
            own = slice(share * size, (share + 1) * size)
            memory, layers = Memory(self.config.model), self.config.model.layers
            memory.last_B, *kept_here = (stream[own].to(self.device) for stream in streams)
            memory.layers, memory.compressed = kept_here[:layers], kept_here[layers:]
            self.memories.append(memory)

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        """Measure the norm of the whole gradient, and scale the gradient down to `trainer.clip`."""
        self.norm = whole(
            get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])
        )
        if self.config.trainer.clip:
            clip_grads_with_norm_(self.model.parameters(), self.config.trainer.clip, self.norm)

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        """Take one step at its learning rate, then move the centroids: once per optimizer step."""
        set_learning_rate(optimizer.optimizer, learning_rate(self.config, self.global_step + 1))
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        optimizer.zero_grad()  # nobody reads them any more; Lightning would keep them through the next forward pass
        after_step(self.model, self.move)

    def validation_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> None:
        """Score windows: ids, units before the first that counts, their numbers (-1: scored by another rank)."""
        tokens_BN, skipped_B, number_B = batch
        scored_BX = score_batch(self.model, (tokens_BN, skipped_B), self.answers, self.reach)
        number_B = number_B.cpu()
        self.scored.append(torch.cat([number_B[:, None], scored_BX], dim=1)[number_B >= 0])

    def on_validation_epoch_end(self) -> None:
        """Join the ranks' windows in their order into one score, the same on any number of ranks."""
        own = [torch.cat(self.scored).numpy()] if self.scored else []
        all_KX = np.concatenate([part for parts in self.ranks.gather(own) for part in parts])
        all_KX = all_KX[np.argsort(all_KX[:, 0])]
        assert np.array_equal(all_KX[:, 0], np.arange(len(all_KX))), "each window once"
        self.score, self.scored = joined(all_KX[:, 1:], self.answers), []

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what other commands read, and leave out the loops' counters: they follow from the step."""
        del checkpoint["loops"]
        model = {
            name.removeprefix("model."): tensor
            for name, tensor in checkpoint.pop("state_dict").items()
        }
        checkpoint.update(
            {"format": FORMAT, "step": self.global_step, "model": model, **self.facts}
        )

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Set the counters of Lightning's loops: its own count micro-batches, which may have another size now.

        Tensors of older checkpoints, and what the optimizer saved for them, get their current names and numbers.
        """
        tensors = with_current_names(checkpoint["model"], self.model.state_dict())
        checkpoint["state_dict"] = {f"model.{name}": tensor for name, tensor in tensors.items()}
        for state in checkpoint["optimizer_states"]:
            state["state"] = renumbered(state["state"], tensors, decaying_and_exempt(self.model))
        loop, step = self.trainer.fit_loop.epoch_loop, checkpoint["step"]
        loop.batch_progress.total.ready = step * self.trainer.accumulate_grad_batches
        loop.automatic_optimization.optim_progress.optimizer.step.total.completed = step


def learning_rate(config: Config, step: int) -> float:
    """Return the learning rate of step `step`, from 1 on: a pure function, so that no scheduler has a state to lose.

    Linear warm-up to `optimizer.lr`, then peak * sqrt(warmup / step) (rsqrt, as the paper), a cosine that ends at a
    tenth of the peak at `trainer.steps`, or the peak throughout (constant).
    """
    assert step >= 1
    peak, warmup, schedule = config.optimizer.lr, config.optimizer.warmup, config.optimizer.schedule
    if step < warmup:
        return peak * step / warmup
    share = min(1.0, (step - warmup) / max(1, config.trainer.steps - warmup))
    cosine = 0.1 + 0.45 * (1.0 + math.cos(math.pi * share))
    return peak * {"rsqrt": math.sqrt(warmup / step), "cosine": cosine, "constant": 1.0}[schedule]


def decaying_and_exempt(
    model: nn.Module,
) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    """Return the parameters whose weights decay, and the others, by their names."""
    linear = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    decaying: dict[str, nn.Parameter] = {}
    exempt: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        is_matrix = id(parameter) in linear or name.rpartition(".")[2] == "output_VS"
        group = decaying if is_matrix else exempt
        group[name] = parameter
    return decaying, exempt


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Return the optimizer that `config` names; its learning rate must be set before each step.

    The weights of linear layers decay, and `output_VS` where it is not the embedding table; all else does not.
    Adafactor is torch's (`rtx.training.adafactor`). Two things differ from Shazeer and Stern (2018): the step size
    is min(lr, 1 / sqrt(step)), and means of squares are at least 1e-18, where they add 1e-30 to each square. torch's
    default of 1e-7 would hide the gradients of large models.
    """
    decaying, exempt = decaying_and_exempt(model)
    groups = [
        {"params": list(decaying.values()), "weight_decay": config.weight_decay},
        {"params": list(exempt.values()), "weight_decay": 0.0},
    ]
    if config.name == "adafactor":
        return Adafactor(groups, lr=config.lr, beta2_decay=-0.8, eps=(1e-18, 1e-3), d=1.0)
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[config.name]
    return kind(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def seed_everything(seed: int, rank: int = 0) -> None:
    """Seed torch (all devices), the only source of random numbers here; every rank draws weights with `rank=0`."""
    torch.manual_seed(int(np.random.SeedSequence([seed, rank]).generate_state(1)[0]))
