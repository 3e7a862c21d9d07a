"""Section `steps`: whole steps (forward, backward, clipping, optimizer, centroids).

Every model stands beside the same one with full heads alone, and with local heads alone. It runs
eagerly, compiled, with its passes recorded as CUDA graphs, or as `rtx train` runs it: compiled, and
its passes recorded.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rtx.analysis.cost import cost
from rtx.analysis.footprint import footprint
from rtx.analysis.micro_batch import with_choice
from rtx.analysis.speed import meter
from rtx.settings.compose import compose
from rtx.settings.requirements import precision_on
from rtx.settings.schema import Config
from rtx.training.hardware import resolve_hardware
from rtx.training.module import TrainingModule
from rtx.training.optimizers import build_optimizer
from rtx.training.start import build_model

from .journal import Found, Row, turn

VOCABULARY = 256
EAGER = "eager"
COMPILED = "compiled"
GRAPHS = "graphs"
"""Eager passes, recorded as CUDA graphs."""
RECORDED = "recorded"
"""Compiled passes, recorded as CUDA graphs."""
WARM_UP = 3
SECONDS = 1.5
"""How long steps are timed."""
MOST_STEPS = 60
"""How many steps are timed at the most."""
STEPS_WITHOUT_WAIT = 3
ROUTED = ("causal", "topk", "probed")
ALONE = ("full", "local")
HEADS = (*ROUTED, *ALONE)


class Variant(NamedTuple):
    """A model: its base (6x512 or a preset), its heads, its length, and sequences of a step."""

    base: str
    heads: str
    length: int
    batch: int = 1
    dropout: bool = True
    """Whether the preset's dropout stays."""

    @property
    def key(self) -> str:
        return f"{self.base}/{self.heads}/{self.length}"

    def words(self, device: str) -> list[str]:
        """Return the overrides of `rtx train` that describe it."""
        words = [
            "data=text",
            "data.path=.",
            f"data.length={self.length}",
            f"trainer.batch_size={self.batch}",
        ]
        words += [
            f"trainer.micro_batch_size={self.batch}",
            f"hardware={device}",
            "model.recompute=false",
        ]
        words += sizes_of(self) if self.base in SIZES else [f"model={self.base}"]
        if self.heads in ALONE:
            words += [f"model.base={self.heads}", "routing.heads=0"]
        else:
            words.append(f"routing={self.heads}")
        if not self.dropout:
            words += [f"model.{name}=0" for name in ("dropout", "attention_dropout", "ffn_dropout")]
        return words


SIZES = {
    "6x512": (6, 512, 256, 8),
    "12x512": (12, 512, 256, 8),
    "12x1024": (12, 1024, 256, 16),
    "2x128": (2, 128, 64, 2),
}
"""Layers, width, window and heads of models that are no preset."""
SMALL = {
    heads: Variant("2x128", heads, 512, dropout=False)
    for heads in (*ROUTED, "nearest", "random", *ALONE)
}
"""Models for checks, with heads of 64 units."""
PROBED_CLUSTERS = 4
"""How many clusters probed keys have for each of the other selections."""
TINY = {"base": "2x128", "length": 64}
"""What every model is in a dry run."""


def sizes_of(variant: Variant) -> list[str]:
    """Return the overrides for the sizes of a model that is no preset."""
    layers, width, window, heads = SIZES[variant.base]
    window = min(window, variant.length // 4)
    words = ["model=tiny", "optimizer=adamw", f"model.layers={layers}", f"model.hidden={width}"]
    words += [f"model.heads={heads}", f"model.ffn_hidden={4 * width}", f"model.window={window}"]
    if variant.heads in ALONE:
        return words
    clusters = variant.length // window
    if variant.heads == "probed":
        # Finer clusters than those of the other selections, and as many keys a query in all.
        clusters *= PROBED_CLUSTERS
    words += [f"routing.layers={layers}", f"routing.heads={heads // 2}", f"routing.window={window}"]
    return [*words, f"routing.clusters={clusters}"]


def rows(dry: bool) -> list[Row]:
    """Return the rows of this section, those of the goals first."""
    found = [(Variant("6x512", heads, 8192), EAGER) for heads in HEADS]
    found += [(Variant("6x512", heads, 8192), RECORDED) for heads in HEADS]
    found += [(Variant("rt12", heads, 8192, 2), RECORDED) for heads in ROUTED]
    found += [(Variant("6x512", heads, 32_768), RECORDED) for heads in HEADS]
    found += [(Variant("6x512", heads, 65_536), RECORDED) for heads in HEADS]
    found += [(Variant("rt24", heads, 8192), RECORDED) for heads in ("causal", "full", "topk")]
    found += [(Variant("6x512", heads, 8192), GRAPHS) for heads in HEADS]
    found += [(Variant("rt24", heads, 8192), GRAPHS) for heads in ("causal", "full", "topk")]
    found += [(Variant("6x512", heads, 8192), COMPILED) for heads in HEADS]
    found += [(Variant("6x512", heads, 32_768), EAGER) for heads in HEADS]
    found += [(Variant("6x512", heads, 65_536), EAGER) for heads in HEADS]
    found += [(Variant("rt12", heads, 8192, 2), RECORDED) for heads in ("full", "local")]
    found += [(Variant("rt12", heads, 8192, 2), EAGER) for heads in HEADS]
    found += [(Variant("rt24", "local", 8192), RECORDED)]
    found += [(Variant("rt24", heads, 8192), EAGER) for heads in HEADS]
    return [step_row(variant, how, dry) for variant, how in found]


def step_row(variant: Variant, how: str, dry: bool) -> Row:
    """Return the row of a model; only the smallest runs without CUDA."""
    is_large = variant.base not in SIZES or variant.length > 8192
    measure = functools.partial(measure_steps, variant, how, dry)
    return Row(f"steps/{variant.key}/{how}", measure, needs_cuda=how != EAGER or is_large)


class Stepper:
    """A model that takes training steps as `rtx train` does, in bfloat16 mixed precision on a GPU.

    Args:
        how: EAGER, COMPILED (the loss, and the movement of centroids), GRAPHS or RECORDED.
        dry: on the CPU, the smallest model with a short sequence.
    """

    def __init__(self, variant: Variant, how: str, dry: bool) -> None:
        self.device = "cpu" if dry else "cuda"
        variant = variant._replace(**TINY) if dry else variant
        self.variant = variant
        self.config = composed(variant, dry)
        hardware = dataclasses.replace(
            resolve_hardware(self.config),
            compile=how in (COMPILED, RECORDED),
            graphs=how in (GRAPHS, RECORDED),
        )
        model = build_model(self.config, VOCABULARY, None).to(self.device).train()
        self.module = TrainingModule(model, self.config, hardware)
        self.optimizer = build_optimizer(model, self.config.optimizer)
        generator = torch.Generator().manual_seed(0)
        shape = (variant.batch, variant.length)
        tokens_BN = torch.randint(0, VOCABULARY, shape, generator=generator)
        self.tokens_BN = tokens_BN.to(self.device)
        self.module.passes.prepare(self.tokens_BN)

    @property
    def model(self) -> nn.Module:
        return self.module.model

    def backward(self) -> Tensor:
        """Compute the gradients, and return the loss."""
        objective = self.module.passes(self.tokens_BN)
        objective.loss.backward()
        return objective.loss.detach()

    def step(self) -> Tensor:
        """Take a step, at the learning rate of step 100, and return its mean nats."""
        self.module.sums.zero_()
        self.module.take_step([self.tokens_BN], self.optimizer, 100)
        return self.module.sums[0].clone()


def composed(variant: Variant, dry: bool) -> Config:
    """Return the configuration of a model, with its micro-batch."""
    config = compose(variant.words("cpu" if dry else "gpu"))
    return with_choice(config, variant.batch, False)


def measure_steps(variant: Variant, how: str, dry: bool) -> Found:
    """Time the steps of a model."""
    began = time.monotonic()
    stepper = Stepper(variant, how, dry)
    for _ in range(1 if dry else WARM_UP):
        stepper.step()
    synchronize(stepper.device)
    warm = time.monotonic() - began
    if not dry:
        torch.cuda.reset_peak_memory_stats()
    ms, losses = timed_steps(stepper, 1 if dry else MOST_STEPS)
    found = {
        "ms": round(ms, 3),
        "warm_up_seconds": round(warm, 1),
        "loss": losses[-1],
        "batch": variant.batch,
    }
    return found | rates(stepper, ms) | memory(stepper, how)


def timed_steps(stepper: Stepper, most: int) -> tuple[float, list[float]]:
    """Return losses, and the median of mean milliseconds of a few steps without a wait."""
    losses = []
    times = []
    with turn():
        began = time.perf_counter()
        while len(losses) < most and (not losses or time.perf_counter() - began < SECONDS):
            synchronize(stepper.device)
            begin = time.perf_counter()
            losses += [stepper.step() for _ in range(STEPS_WITHOUT_WAIT)]
            synchronize(stepper.device)
            times.append(1e3 * (time.perf_counter() - begin) / STEPS_WITHOUT_WAIT)
    return statistics.median(times), [float(loss) for loss in losses]


def rates(stepper: Stepper, ms: float) -> Found:
    """Return units a second, and the share of the chip's peak."""
    variant = stepper.variant
    config = stepper.config
    name = torch.cuda.get_device_name() if stepper.device == "cuda" else None
    per_second = 1e3 * variant.batch * variant.length / ms
    precision = precision_on(config.hardware, stepper.device == "cuda")
    share = meter(config, cost(config, VOCABULARY), name, precision).share(per_second)
    return {
        "units_per_second": round(per_second),
        "mfu": None if share is None else round(share, 4),
    }


def memory(stepper: Stepper, how: str) -> Found:
    """Return the bytes that the plan counts, and the peak of the GPU's allocations.

    Recorded passes have no such peak: their tensors lie in a pool that no longer counts as
    allocated.
    """
    config = stepper.config
    batch = stepper.variant.batch
    planned = sum(footprint(config, cost(config, VOCABULARY), batch, VOCABULARY).values())
    if stepper.device == "cpu" or how in (GRAPHS, RECORDED):
        return {"plan_bytes": round(planned)}
    return {"plan_bytes": round(planned), "peak_bytes": torch.cuda.max_memory_allocated()}


def synchronize(device: str) -> None:
    """Wait for the GPU, where there is one."""
    if device == "cuda":
        torch.cuda.synchronize()
