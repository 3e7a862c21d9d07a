"""Which micro-batch a device holds, by the plan's count of bytes: what `auto` stands for in its two keys.

trainer.micro_batch_size and model.recompute change a step's result by rounding alone. A small micro-batch costs little
time, recomputation about a third: blocks are recomputed only where not even one sequence fits without.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from rtx.analysis.cost import cost
from rtx.analysis.footprint import footprint, on_gpu
from rtx.config import Config, precision_on

FILLED, FILLED_CPU = 0.85, 0.5
"""Part of a GPU's or a machine's memory that a run is planned to fill: the rest is for what the plan does not count (a
GPU's context; the program, and holes in the heap, by which a CPU's process takes up to 1.7 times the plan)."""


class Choice(NamedTuple):
    """Values of the two keys, and what they lead to on one device."""

    micro_batch_size: int
    recompute: bool
    peak: float
    """Bytes at the fullest moment of a step."""
    fits: bool


def choose_micro_batch(config: Config, vocabulary: int, device_bytes: float, world: int = 1) -> Choice:
    """Return the largest micro-batch that fits one of `world` devices; where none does, the smallest, recomputed.

    Of the two keys of the resolved configuration only what is `auto` is chosen.
    """
    config = dataclasses.replace(config, hardware=dataclasses.replace(config.hardware, devices=world, nodes=1))
    room = (FILLED if on_gpu(config) else FILLED_CPU) * device_bytes
    total, choice = cost(config, vocabulary), None
    for recompute in (False, True) if config.model.recompute == "auto" else (config.model.recompute is True,):
        for size in micro_batch_sizes(config, world):
            peak = sum(footprint(with_choice(config, size, recompute), total, size, vocabulary).values())
            choice = Choice(size, recompute, peak, peak <= room)
            if choice.fits:
                return choice
    assert choice is not None
    return choice


def micro_batch_sizes(config: Config, world: int) -> list[int]:
    """Return the micro-batches that a device's share of the batch can be cut into, the largest first."""
    if isinstance(size := config.trainer.micro_batch_size, int):
        return [size]
    share = config.trainer.batch_size // world
    return [size for size in range(share, 0, -1) if share % size == 0]


def with_choice(config: Config, micro_batch_size: int, recompute: bool) -> Config:
    """Return a configuration with these values of the two keys."""
    trainer = dataclasses.replace(config.trainer, micro_batch_size=micro_batch_size)
    return dataclasses.replace(config, trainer=trainer, model=dataclasses.replace(config.model, recompute=recompute))


def fit_to_device(config: Config, vocabulary: int, device_bytes: float, world: int = 1) -> tuple[Config, str]:
    """Return a configuration in which neither of the two keys is `auto`, and a line that says what was chosen, if any.

    Arguments as of `choose_micro_batch`.
    """
    if "auto" not in (config.trainer.micro_batch_size, config.model.recompute):
        return config, ""
    size, recompute, peak, fits = choose_micro_batch(config, vocabulary, device_bytes, world)
    used = f"about {peak / 2**30:.1f} of {device_bytes / 2**30:.1f} GiB, by rtx plan"
    if not fits:
        used += "; should it not fit: optimizer=adafactor, model.ffn_parts=16, hardware=fsdp or a smaller data.length"
    precision = f"hardware.precision={precision_on(config.hardware, on_gpu(config))}"
    line = f"auto: {precision} trainer.micro_batch_size={size} model.recompute={str(recompute).lower()}: {used}"
    return with_choice(config, size, recompute), line


def with_less_memory(config: Config, asked: Config) -> Config | None:
    """Return the configuration of the same steps to go on with when memory has run out, or None where there is none.

    The micro-batch is halved, to the next size that divides the batch; one of a single sequence gets recomputed blocks.

    Args:
        config: what ran out of memory, with neither key `auto`.
        asked: the configuration as it was composed, for one device: only what is `auto` there may change.
    """
    now, recompute = config.trainer.micro_batch_size, config.model.recompute is True
    assert isinstance(now, int)
    if smaller := [size for size in micro_batch_sizes(asked, 1) if size <= now // 2]:
        return with_choice(config, smaller[0], recompute)
    return with_choice(config, now, True) if asked.model.recompute == "auto" and not recompute else None
