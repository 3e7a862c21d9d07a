"""`rtx plan`: what a run would cost; nothing is read, allocated or run."""

from __future__ import annotations

from rtx.analysis.cost import Cost, cost, memory
from rtx.compose import compose
from rtx.config import Config

BYTES = 256
"""Vocabulary of every data set that is read as bytes."""

RATES = {"1 TFLOP/s": 1e12, "100 TFLOP/s": 1e14}
"""Rates that the time is given for: what a run really reaches is for a benchmark to say."""


def main(arguments: list[str]) -> int:
    """Run `rtx plan <overrides>`."""
    config = compose(arguments)
    print("\n".join(report(config, cost(config, BYTES))))
    return 0


def report(config: Config, total: Cost) -> list[str]:
    """Return the lines of the plan."""
    model, routing, data, trainer = config.model, config.routing, config.data, config.trainer
    devices = (config.hardware.devices or 1) * config.hardware.nodes
    micro = trainer.micro_batch_size or max(1, trainer.batch_size // devices)
    routed = routing.layers * routing.heads
    used = memory(config, total, micro, BYTES)
    units = trainer.batch_size * data.length
    lines = [
        f"model       {model.name}: {model.layers} layers, {model.heads} heads, width {model.hidden}, "
        f"{model.positions} positions",
        f"sequence    N = {data.length:,} {data.name} bytes; {model.base} heads"
        + (f" with a window of {model.window:,}" if model.base == "local" else ""),
    ]
    if routed:
        lines.append(
            f"routing     {routing.heads} heads in each of the top {routing.layers} layers, "
            f"selection={routing.selection}, C = {routing.clusters:,} clusters of W = {routing.window:,}"
        )
    lines += [
        f"parameters  {total.parameters:,} ({total.embedding_parameters:,} of them embedding and output)",
        f"operations  {short(total.forward)}FLOP a sequence forward: dense {share(total.dense, total)}, "
        f"attention {share(total.attention, total)}, selection {share(total.selection, total)}",
        f"            attention with every head full: {short(total.full_attention)}FLOP, "
        f"{total.full_attention / (total.attention + total.selection):.1f} times as much",
        f"step        {trainer.batch_size} sequences, {units:,} units, {short(total.step(config))}FLOP "
        f"({devices} device(s), {micro} sequence(s) at a time)",
        f"memory      about {gib(sum(used.values()))} a device: "
        + ", ".join(f"{name} {gib(size)}" for name, size in used.items()),
        f"run         {trainer.steps:,} steps, {units * trainer.steps:,} units, "
        f"{short(total.step(config) * trainer.steps)}FLOP: "
        + ", ".join(f"{hours(total, config, rate)} at {name}" for name, rate in RATES.items()),
    ]
    return lines


def hours(total: Cost, config: Config, rate: float) -> str:
    """Return the time of the whole run at a rate of operations per second."""
    seconds = total.step(config) * config.trainer.steps / rate
    for unit, size in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:,.1f} seconds"


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
