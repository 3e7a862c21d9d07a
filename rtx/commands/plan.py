"""`rtx plan`: what a run would cost, and whether it fits into this machine; nothing is read, allocated or run."""

from __future__ import annotations

import textwrap

import torch

from rtx.analysis.cost import cost
from rtx.analysis.fitting import choose_micro_batch, with_choice
from rtx.analysis.footprint import devices, footprint
from rtx.compose import compose, with_values
from rtx.config import CLUSTERED, SPREAD, Config, base_patterns
from rtx.data.catalog import vocabulary_size
from rtx.data.sets import IMAGE_SETS
from rtx.training.memory import device_memory
from rtx.wording import plural

RATES = {"1 TFLOP/s": 1e12, "100 TFLOP/s": 1e14}
"""Rates that the time is given for: what a run really reaches is for a benchmark to say."""

GPUS = (16, 24, 80)
"""Sizes of the GPUs that a plan is made for, in GiB."""

LESS = "less is needed with optimizer=adafactor, model.ffn_parts=16, hardware=fsdp or a smaller data.length"
"""What helps where no micro-batch does."""

WIDTH, INDENT = 80, 12
"""Columns of a line, and of the space in front of what continues it."""


def main(arguments: list[str]) -> int:
    """Run `rtx plan <overrides>`."""
    for line in report(compose(arguments)):
        print(textwrap.fill(line, WIDTH, subsequent_indent=" " * INDENT, break_on_hyphens=False))
    return 0


def report(asked: Config) -> list[str]:
    """Return the lines of the plan, each beginning with a word of its own or with spaces."""
    model, routing, data, trainer = asked.model, asked.routing, asked.data, asked.trainer
    known = vocabulary_size(data)
    total = cost(asked, known)
    chosen = choose_micro_batch(asked, known, device_memory(asked) or GPUS[-1] * 2**30, devices(asked))
    micro, config = chosen.micro_batch_size, with_choice(asked, chosen.micro_batch_size, chosen.recompute)
    used, units, step = footprint(config, total, micro, known), trainer.batch_size * data.length, total.step(config)
    window = f" with a window of {model.window:,}" if "local" in base_patterns(model) else ""
    parts = {"dense": total.dense, "attention": total.attention, "selection": total.selection}
    shares = ", ".join(f"{name} {100 * part / total.forward:.0f}%" for name, part in parts.items())
    times = ", ".join(f"{duration(step * trainer.steps / rate)} at {name}" for name, rate in RATES.items())
    routed = (
        f"routing     {plural(routing.heads, 'head')} in each of the top {plural(routing.layers, 'layer')}, "
        f"selection={routing.selection}, {read_by(config)}"
    )
    return [
        f"model       {model.name}: {plural(model.layers, 'layer')}, {plural(model.heads, 'head')}, "
        f"width {model.hidden}, {model.positions} positions",
        f"sequence    N = {data.length:,} {data.name} {units_of(config)}; {model.base} heads{window}",
        *[routed] * bool(routing.layers * routing.heads),
        f"parameters  {total.parameters:,} ({total.embedding_parameters:,} of them embedding and output)",
        f"operations  {short(total.forward)}FLOP a sequence forward: {shares}",
        f"            attention with every head full: {short(total.full_attention)}FLOP, "
        f"{total.full_attention / (total.attention + total.selection):.1f} times as much",
        f"step        {plural(trainer.batch_size, 'sequence')}, {units:,} units, {short(step)}FLOP "
        f"({processes(config)}, {plural(micro, 'sequence')} at a time{', recomputed' if chosen.recompute else ''})",
        f"memory      about {gib(sum(used.values()))} a device: "
        + ", ".join(f"{name} {gib(size)}" for name, size in used.items()),
        *fit_lines(asked, known),
        f"run         {plural(trainer.steps, 'step')}, {units * trainer.steps:,} units, "
        f"{short(step * trainer.steps)}FLOP: {times}",
    ]


def read_by(config: Config) -> str:
    """Return what routing heads read, in words."""
    routing = config.routing
    if routing.selection in CLUSTERED:
        return f"C = {routing.clusters:,} clusters of W = {routing.window:,}"
    blocks = f" in blocks of {routing.block:,}" if routing.selection.startswith("blocks") else ""
    return f"W = {routing.window:,} keys of a query{blocks}"


def fit_lines(config: Config, known: int) -> list[str]:
    """Return what `auto` takes, or whether what is asked for fits, on GPUs of the usual sizes and on this machine."""
    world, gpus = devices(config), torch.cuda.device_count()
    lines = []
    if config.hardware.name != "cpu" and (gpus or config.hardware.name != "fsdp"):
        planned = config if gpus else with_values(config, {"hardware.name": "gpu"})
        lines = [f"a GPU of {size} GiB: {choice_words(planned, known, size * 2**30, world)}" for size in GPUS]
    if memory := device_memory(config):
        lines.append(f"this machine ({gib(memory)}): {choice_words(config, known, memory, world)}")
    return [("" if place else "fit").ljust(INDENT) + line for place, line in enumerate(lines)]


def choice_words(config: Config, known: int, memory: int, world: int) -> str:
    """Return which micro-batch a device of so much memory would be given, and its peak, or that nothing fits."""
    size, recompute, peak, fits = choose_micro_batch(config, known, memory, world)
    what = f"{plural(size, 'sequence')} at a time{', recomputed' if recompute else ''}, {gib(peak)}"
    return what if fits else f"does not fit ({what}); {LESS}"


def units_of(config: Config) -> str:
    """Return what the sequences of a data set are counted in."""
    usual = {"recall": "units", **dict.fromkeys(IMAGE_SETS, "sub-pixels")}
    return usual.get(config.data.name) or {"bytes": "bytes", "words": "words"}.get(config.data.tokenizer, "subwords")


def processes(config: Config) -> str:
    """Return how many devices share a step, as far as the configuration says."""
    devices = (config.hardware.devices or 1) * config.hardware.nodes
    if config.hardware.name in SPREAD and config.hardware.devices is None:
        return f"{plural(devices, 'process')} (hardware.devices unset)"
    return plural(devices, "device")


def duration(seconds: float) -> str:
    """Return a time in the largest unit of which there are two."""
    for unit, size in (("years", 31_557_600), ("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if (number := seconds / size) >= 2:
            return f"{number:,.1f} {unit}" if number < 1e6 else f"{number:.1e} {unit}"
    return f"{seconds:.1f} seconds" if seconds >= 0.1 else "under 0.1 seconds"


def short(number: float) -> str:
    """Return a number with a decimal prefix: 1.2 T."""
    for prefix, size in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if number >= size:
            return f"{number / size:.3g} {prefix}"
    return f"{number:.3g} "


def gib(size: float) -> str:
    """Return bytes as GiB, or MiB where that is small."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
