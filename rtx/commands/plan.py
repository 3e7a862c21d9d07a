"""`rtx plan`: what a run would cost, and whether it fits into this machine; nothing is read, allocated or run."""

from __future__ import annotations

import textwrap

import torch

from rtx.analysis.cost import Cost, cost
from rtx.analysis.footprint import footprint
from rtx.analysis.switches import fitting, micro_batch
from rtx.compose import compose
from rtx.config import CLUSTERED, SPREAD, Config, DataConfig, base_patterns
from rtx.data.catalog import vocabulary_size
from rtx.sets import IMAGE_SETS
from rtx.training.memory import device_memory
from rtx.training.progress import peak_memory
from rtx.wording import plural

RATES = {"1 TFLOP/s": 1e12, "100 TFLOP/s": 1e14}
"""Rates that the time is given for: what a run really reaches is for a benchmark to say."""


WIDTH, INDENT = 80, 12
"""Columns of a line, and of the space in front of what continues it."""


def main(arguments: list[str]) -> int:
    """Run `rtx plan <overrides>`."""
    config = compose(arguments)
    for line in report(config, cost(config, vocabulary_size(config.data))):
        print(textwrap.fill(line, WIDTH, subsequent_indent=" " * INDENT, break_on_hyphens=False))
    return 0


def report(config: Config, total: Cost) -> list[str]:
    """Return the lines of the plan, each beginning with a word of its own or with spaces."""
    model, routing, data, trainer = config.model, config.routing, config.data, config.trainer
    routed = routing.layers * routing.heads
    micro, known = micro_batch(config), vocabulary_size(data)
    used = footprint(config, total, micro, known)
    units = trainer.batch_size * data.length
    lines = [
        f"model       {model.name}: {plural(model.layers, 'layer')}, {plural(model.heads, 'head')}, "
        f"width {model.hidden}, {model.positions} positions",
        f"sequence    N = {data.length:,} {data.name} {units_of(data)}; "
        f"{model.base} heads" + (f" with a window of {model.window:,}" if "local" in base_patterns(model) else ""),
    ]
    if routed:
        lines.append(
            f"routing     {plural(routing.heads, 'head')} in each of the top {plural(routing.layers, 'layer')}, "
            f"selection={routing.selection}, {read_by(config)}"
        )
    lines += [
        f"parameters  {total.parameters:,} ({total.embedding_parameters:,} of them embedding and output)",
        f"operations  {short(total.forward)}FLOP a sequence forward: dense {share(total.dense, total)}, "
        f"attention {share(total.attention, total)}, selection {share(total.selection, total)}",
        f"            attention with every head full: {short(total.full_attention)}FLOP, "
        f"{total.full_attention / (total.attention + total.selection):.1f} times as much",
        f"step        {plural(trainer.batch_size, 'sequence')}, {units:,} units, {short(total.step(config))}FLOP "
        f"({processes(config)}, {plural(micro, 'sequence')} at a time)",
        f"memory      about {gib(sum(used.values()))} a device: "
        + ", ".join(f"{name} {gib(size)}" for name, size in used.items()),
        *fit_lines(config, sum(used.values()), known),
        f"run         {plural(trainer.steps, 'step')}, {units * trainer.steps:,} units, "
        f"{short(total.step(config) * trainer.steps)}FLOP: "
        + ", ".join(f"{duration(total.step(config) * trainer.steps / rate)} at {name}" for name, rate in RATES.items()),
    ]
    return lines


def read_by(config: Config) -> str:
    """Return what routing heads read, in words."""
    routing = config.routing
    if routing.selection in CLUSTERED:
        return f"C = {routing.clusters:,} clusters of W = {routing.window:,}"
    blocks = f" in blocks of {routing.block:,}" if routing.selection.startswith("blocks") else ""
    return f"W = {routing.window:,} keys of a query{blocks}"


def fit_lines(config: Config, needed: float, known: int) -> list[str]:
    """Return whether the peak fits into the memory of this machine, and where not, which switches would make it fit.

    Args:
        config: the resolved configuration.
        needed: the peak, in bytes.
        known: the number of different units.
    """
    memory = device_memory(config)
    if memory is None:
        return ["fit         hardware=gpu, and this machine has none to compare with"]
    # What the program takes before the run is the process's on a CPU; a GPU does not hold it.
    program = 0 if config.hardware.name != "cpu" and torch.cuda.device_count() else peak_memory()
    beside = f", of which rtx takes {gib(program)} for itself" if program else ""
    head = f"fit         this machine has {gib(memory)} for it{beside}: it "
    if needed + program <= memory:
        return [head + "fits"]
    found = fitting(config, known, memory - program)
    if not found:
        return [head + "does not fit, nor would it with every switch: fewer layers, a smaller width or data.length"]
    return [
        head + "does not fit, but would with" + (" one of" if len(found) > 1 else ""),
        *(f"            {switch.words}: {gib(switch.peak)}" for switch in found),
    ]


def units_of(data: DataConfig) -> str:
    """Return what the sequences of a data set are counted in."""
    if data.name == "recall":
        return "units"
    if data.name in IMAGE_SETS:
        return "sub-pixels"
    return {"words": "words", "sentencepiece": "subwords"}.get(data.tokenizer, "bytes")


def processes(config: Config) -> str:
    """Return how many devices share a step, as far as the configuration says."""
    devices = (config.hardware.devices or 1) * config.hardware.nodes
    if config.hardware.name in SPREAD and config.hardware.devices is None:
        return f"{plural(devices, 'process')} (hardware.devices unset)"
    return plural(devices, "device")


def duration(seconds: float) -> str:
    """Return a time in the largest unit of which there are two."""
    for unit, size in (("years", 31_557_600), ("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * size:
            number = seconds / size
            return (
                f"{number:.1f} {unit}"
                if number < 1_000
                else f"{number:.1e} {unit}".replace("e+0", "e").replace("e+", "e")
            )
    return f"{seconds:.1f} seconds" if seconds >= 0.1 else "under 0.1 seconds"


def share(part: float, total: Cost) -> str:
    """Return a part of the forward operations in percent."""
    return f"{100 * part / total.forward:.0f}%"


def short(number: float) -> str:
    """Return a number with a decimal prefix: 1.2 T."""
    for prefix, size in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if number >= size:
            return f"{number / size:.3g} {prefix}"
    return f"{number:.3g} "


def gib(size: float) -> str:
    """Return bytes as GiB, or MiB where that is small."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
