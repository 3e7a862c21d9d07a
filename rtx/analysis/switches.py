"""Which switches would make a run fit into a memory, and what each leaves of its peak."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

from rtx.analysis.cost import cost
from rtx.analysis.footprint import devices, footprint
from rtx.checks import resolve
from rtx.config import Config
from rtx.errors import UserError
from rtx.keys import options

MORE_PARTS = (4, 16, 64)
"""Parts of the feed-forward layers that are thought of."""

MOST_SHARDS = 64
"""Devices up to which sharing the weights out is thought of."""


class Switch(NamedTuple):
    """Overrides, and the peak of one device with them."""

    words: str
    peak: float


def micro_batch(config: Config) -> int:
    """Return the sequences of a forward pass on each device."""
    return config.trainer.micro_batch_size or max(1, config.trainer.batch_size // devices(config))


def peak(config: Config, vocabulary: int) -> float:
    """Return the most bytes that training steps hold on one device."""
    return sum(footprint(config, cost(config, vocabulary), micro_batch(config), vocabulary).values())


def fitting(config: Config, vocabulary: int, room: float) -> list[Switch]:
    """Return the switches that bring the peak to `room` bytes or less, each by itself.

    Where none does it by itself: as many of them together as it takes, or no switch where all together are too few.
    """
    alone = []
    for ladder in LADDERS:
        for words, changed in ladder(config):
            if (size := peak(changed, vocabulary)) <= room:
                alone.append(Switch(words, size))
                break
    if alone:
        return alone
    words, changed = [], config
    for ladder in LADDERS:
        steps = list(ladder(changed))
        if steps:
            word, changed = steps[-1]
            words.append(word)
            if (size := peak(changed, vocabulary)) <= room:
                return [Switch(" ".join(words), size)]
    return []


def smaller_batches(config: Config) -> Iterator[tuple[str, Config]]:
    """Yield smaller micro-batches; the step stays the same."""
    now, share = micro_batch(config), config.trainer.batch_size // devices(config)
    for size in range(now - 1, 0, -1):
        if share % size == 0:
            yield f"trainer.micro_batch_size={size}", changed(config, "trainer", micro_batch_size=size)


def recomputed(config: Config) -> Iterator[tuple[str, Config]]:
    """Yield recomputation; the step stays the same and takes about a third longer."""
    if not config.model.recompute:
        yield "model.recompute=true", changed(config, "model", recompute=True)


def in_parts(config: Config) -> Iterator[tuple[str, Config]]:
    """Yield feed-forward layers in more parts; the step stays the same, and their products are taken once more."""
    for parts in MORE_PARTS:
        if parts > config.model.ffn_parts:
            yield f"model.ffn_parts={parts}", changed(config, "model", ffn_parts=parts)


def narrowed(config: Config) -> Iterator[tuple[str, Config]]:
    """Yield narrower arithmetic."""
    if config.hardware.precision != "bf16":
        yield "hardware.precision=bf16", changed(config, "hardware", precision="bf16")


def factored(config: Config) -> Iterator[tuple[str, Config]]:
    """Yield the optimizer with hardly any state."""
    if config.optimizer.name != "adafactor":
        yield "optimizer=adafactor", changed(config, "optimizer", name="adafactor")


def shared_out(config: Config) -> Iterator[tuple[str, Config]]:
    """Yield weights, gradients and state shared out over more and more devices, where rtx can."""
    count = 2
    while "fsdp" in options("hardware") and count <= MOST_SHARDS:
        wider = changed(config, "hardware", name="fsdp", devices=count)
        if count > devices(config) and config.trainer.batch_size % (count * micro_batch(wider)) == 0 and sound(wider):
            yield f"hardware=fsdp hardware.devices={count}", wider
        count *= 2


def sound(config: Config) -> bool:
    """Tell whether the values of a configuration fit together."""
    try:
        resolve(config)
    except UserError:
        return False
    return True


def changed(config: Config, section: str, **values: Any) -> Config:
    """Return a configuration with other values in a section."""
    return dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **values)})


LADDERS = (smaller_batches, recomputed, in_parts, narrowed, factored, shared_out)
"""Each kind of switch, in the order in which several are thrown together; it yields what changes least first."""
