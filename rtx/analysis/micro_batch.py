"""Which micro-batch fits a device, and whether blocks are recomputed for it."""

import math
from typing import NamedTuple

from rtx.analysis.cost import Cost, cost
from rtx.analysis.footprint import footprint
from rtx.analysis.planned_device import on_gpu
from rtx.settings.requirements import precision_on
from rtx.settings.schema import Config, with_values

FILLED = 0.85
"""Share of a GPU's memory that a run is planned to fill; the rest is for its context, and for
what the plan does not count."""
FILLED_CPU = 0.4
"""Share of a machine's memory. The process of a CPU takes up to 2.3 times the plan, by holes in the
heap and the program itself."""


class Fit(NamedTuple):
    """Values of the two keys that a device's memory decides."""

    micro_batch_size: int
    recompute: bool
    peak: float
    """Bytes at the fullest moment of a step on one device."""
    fits: bool


def choose_micro_batch(
    config: Config,
    vocabulary: int,
    device_bytes: float,
    world: int = 1,
    total: Cost | None = None,
) -> Fit:
    """Return the largest micro-batch that fits one of `world` devices.

    If none fits, return the smallest one, with recomputed blocks. Of trainer.micro_batch_size and
    model.recompute only what is `auto` is chosen; both change a step's result by rounding alone. A
    small micro-batch costs little time, recomputation about a third, so it comes last.

    `total`: the cost of the configuration, which hardware, micro-batch and recomputation do not
    change; None: computed here.
    """
    config = with_values(config, {"hardware.devices": world, "hardware.nodes": 1})
    filled = FILLED_CPU
    if on_gpu(config):
        filled = FILLED
    room = filled * device_bytes
    total = total or cost(config, vocabulary)
    choices = (config.model.recompute is True,)
    if config.model.recompute == "auto":
        choices = (False, True)
    fits: list[Fit] = []
    for recompute in choices:
        for size in micro_batch_sizes(config, world):
            tried = with_choice(config, size, recompute)
            peak = sum(footprint(tried, total, size, vocabulary).values())
            fits.append(Fit(size, recompute, peak, peak <= room))
            if fits[-1].fits:
                return fits[-1]
    return fits[-1]


def micro_batch_sizes(config: Config, world: int) -> list[int]:
    """Return the sizes into which a device's share of the batch can be cut, the largest first."""
    size = config.trainer.micro_batch_size
    if isinstance(size, int):
        return [size]
    share = config.trainer.batch_size // world
    divisors = set()
    for divisor in range(1, math.isqrt(share) + 1):
        if share % divisor == 0:
            divisors |= {divisor, share // divisor}
    return sorted(divisors, reverse=True)


def with_choice(config: Config, micro_batch_size: int, recompute: bool) -> Config:
    """Return a configuration with these values of the two keys."""
    values = {"trainer.micro_batch_size": micro_batch_size, "model.recompute": recompute}
    return with_values(config, values)


def fit_to_device(
    config: Config,
    vocabulary: int,
    device_bytes: float,
    world: int = 1,
    total: Cost | None = None,
) -> tuple[Config, str]:
    """Return a configuration with the choices of `choose_micro_batch`; `total`: as there.

    The second result is a line for the user: what was chosen, or that it may not fit; else "".
    """
    fit = choose_micro_batch(config, vocabulary, device_bytes, world, total)
    fitted = with_choice(config, fit.micro_batch_size, fit.recompute)
    choice = f"hardware.precision={precision_on(config.hardware, on_gpu(config))}"
    choice += f" trainer.micro_batch_size={fit.micro_batch_size}"
    choice += f" model.recompute={str(fit.recompute).lower()}"
    memory = f"{fit.peak / 2**30:.1f} of {device_bytes / 2**30:.1f} GiB"
    used = f"about {memory}, by rtx plan"
    if not fit.fits:
        less = "optimizer=adafactor, model.ffn_parts=16, hardware=fsdp or a smaller data.length"
        warning = f"warning: may not fit: {choice} takes {used}, which leaves too little"
        return fitted, f"{warning}; less is needed with {less}"
    if "auto" in (config.trainer.micro_batch_size, config.model.recompute):
        return fitted, f"auto: {choice}: {used}"
    return fitted, ""


def with_less_memory(config: Config, composed: Config) -> Config | None:
    """Return a configuration of the same steps in less memory, or None if there is none.

    The micro-batch is halved, to the next size that divides the batch. With a single sequence,
    blocks are recomputed.

    Args:
        composed: the configuration before `auto` was replaced, for one device: nothing but what is
            `auto` in it may change.
    """
    size = config.trainer.micro_batch_size
    assert isinstance(size, int)
    recompute = config.model.recompute is True
    for smaller in micro_batch_sizes(composed, 1):
        if smaller <= size // 2:
            return with_choice(config, smaller, recompute)
    if composed.model.recompute == "auto" and not recompute:
        return with_choice(config, size, True)
    return None
