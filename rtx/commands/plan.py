"""`rtx plan`: what a run would cost, by what a GPU computes it, and whether it fits; nothing is
read or run.
"""

import textwrap

import torch

from rtx.analysis.cost import Cost, cost
from rtx.analysis.engines import META, attention_line, gpu_here
from rtx.analysis.footprint import footprint
from rtx.analysis.micro_batch import choose_micro_batch, with_choice
from rtx.analysis.planned_device import devices, on_gpu
from rtx.analysis.speed import expected_step, rates
from rtx.cli.help import prose_width
from rtx.cli.request import Request
from rtx.data.catalog import vocabulary_size
from rtx.errors import plural
from rtx.evaluation.protocol import sees_future
from rtx.report.summary import heads_phrase
from rtx.settings.devices import precision_on
from rtx.settings.schema import Config, flat, to_dict, with_values
from rtx.training.hardware import device_memory

GIB, TERA = 2**30, 1e12
GPUS = (16, 24, 80)  # sizes of the GPUs that a plan is made for, in GiB


def main(request: Request) -> int:
    """Run `rtx plan <overrides>`."""
    config = request.config
    memory = request.options.memory
    vocabulary = vocabulary_size(config.data)
    world = devices(config)
    width = prose_width()
    lines = cost_lines(config, vocabulary, world, memory)
    lines += fit_lines(config, vocabulary, world, memory)
    for line in lines:
        print(textwrap.fill(line, width, subsequent_indent=" " * 12, break_on_hyphens=False))
    return 0


def cost_lines(asked: Config, known: int, world: int, memory: float | None) -> list[str]:
    """Return what a run costs, with the micro-batch for `memory` GiB, or else this machine, or a
    GPU of 80 GiB.
    """
    trainer, total, room = asked.trainer, cost(asked, known), (memory or 0) * GIB
    micro, recompute, *_ = choose_micro_batch(
        asked, known, room or device_memory(asked) or GPUS[-1] * GIB, world
    )
    config, units = with_choice(asked, micro, recompute), trainer.batch_size * asked.data.length
    used, step = footprint(config, total, micro, known), total.step(config) / TERA
    parts = {"dense": total.dense, "attention": total.attention, "selection": total.selection}
    shares = ", ".join(f"{name} {100 * part / total.forward:.0f}%" for name, part in parts.items())
    sizes = ", ".join(f"{name} {size_text(size)}" for name, size in used.items())
    return [
        f"model       {asked.model.name}: {plural(asked.model.layers, 'layer')}, {asked.model.base} heads; "
        f"{routing_phrase(asked)}; "
        f"N = {asked.data.length:,} units of {asked.data.name}"
        + f", with a memory of {asked.model.memory:,}" * bool(asked.model.memory)
        + f" and {asked.model.compressed:,} compressed" * bool(asked.model.compressed),
        f"parameters  {total.parameters:,} ({total.embedding_parameters:,} of them embedding and output)",
        f"operations  {total.forward / TERA:,.3g} TFLOP a sequence forward: {shares}; the attention would be "
        f"{total.full_attention / (total.attention + total.selection):.1f} times as much with every head full",
        f"step        {plural(trainer.batch_size, 'sequence')}, {units:,} units, {step:,.3g} TFLOP "
        f"({plural(world, 'device')}, {plural(micro, 'sequence')} at a time{', recomputed' * recompute})",
        f"run         {plural(trainer.steps, 'step')}, {units * trainer.steps:,} units, {step * trainer.steps:,.3g} "
        f"TFLOP: {time_text(step * trainer.steps / 100)} at 100 TFLOP/s",
        f"memory      about {size_text(sum(used.values()))} a device: {sizes}",
        *attention_lines(asked, memory),
        *speed_lines(asked, total, known, world),
    ]


def attention_lines(config: Config, memory: float | None) -> list[str]:
    """Return by which engines a GPU computes attention: one of `memory` GiB, or asked for, or of
    this machine.
    """
    if memory and config.hardware.name in ("auto", "ddp"):
        config = with_values(config, {"hardware.name": "gpu"})
    if not on_gpu(config):
        return []
    return [f"attention   {attention_line(config, META if memory else gpu_here())}"]


def speed_lines(asked: Config, total: Cost, vocabulary: int, world: int) -> list[str]:
    """Return how long a step is expected to take on the GPU of the roofline, and that this is no
    measurement.
    """
    planned = (
        with_values(asked, {"hardware.name": "gpu"})
        if asked.hardware.name in ("auto", "cpu")
        else asked
    )
    micro, recompute, *_ = choose_micro_batch(planned, vocabulary, GPUS[-1] * GIB, world)
    config = with_choice(planned, micro, recompute)
    expected = expected_step(config, total, micro, vocabulary, world)
    if expected is None:
        return []
    known, units = rates()["roofline"], config.trainer.batch_size * config.data.length
    how = "by rates measured there" if known["measured"] else "predicted, not measured"
    parts = {
        "products": expected.products,
        "memory": expected.traffic,
        "launches": expected.launches,
    }
    shares = ", ".join(f"{name} {1e3 * seconds:,.3g} ms" for name, seconds in parts.items())
    where = known["name"] if world == 1 else f"{world} devices like {known['name']}"
    return [
        f"speed       about {1e3 * expected.step:,.3g} ms a step, {units / expected.step:,.0f} units/s on {where} in "
        f"{precision_on(config.hardware, gpu=True)}, {how}: products and memory, or launches if longer ({shares})"
    ]


def routing_phrase(config: Config) -> str:
    """Return how many heads route, by which selection, and whether it sees the future."""
    phrase = heads_phrase(config)
    if config.routing.heads and config.routing.layers:
        phrase = f"routing={config.routing.selection}: {phrase}"
    if sees_future(flat(to_dict(config))):
        phrase += ", which see the future"
    return phrase


def fit_lines(config: Config, known: int, world: int, asked: float | None) -> list[str]:
    """Return what `auto` takes, or whether what is asked for fits, in `asked` GiB, or usual GPUs
    and this machine.
    """
    gpus, memory, places = torch.cuda.device_count(), device_memory(config), []
    if config.hardware.name != "cpu" and (gpus or config.hardware.name != "fsdp"):
        planned = config if gpus else with_values(config, {"hardware.name": "gpu"})
        places = [
            (f"a GPU of {size:g} GiB", planned, size * GIB)
            for size in ((asked,) if asked else GPUS)
        ]
    if asked:
        places = places or [(f"a machine of {asked:g} GiB", config, asked * GIB)]
    elif memory:
        places.append((f"this machine ({memory / GIB:.1f} GiB)", config, memory))
    lines = []
    for place, planned, room in places:
        micro, recompute, peak, fits = choose_micro_batch(planned, known, room, world)
        what = (
            f"{plural(micro, 'sequence')} at a time{', recomputed' * recompute}, {size_text(peak)}"
        )
        less = "less is needed with optimizer=adafactor, model.ffn_parts=16, hardware=fsdp or a smaller data.length"
        lines.append(
            f"{'' if lines else 'what fits':<12}{place}: {what if fits else f'does not fit ({what}); {less}'}"
        )
    return lines


def size_text(size: float) -> str:
    """Return a number of bytes in GiB, or in MiB or KiB where it is less than one."""
    if size >= GIB:
        return f"{size / GIB:.2f} GiB"
    if size >= 2**20 or not size:
        return f"{size / 2**20:.0f} MiB"
    return f"{size / 2**10:.0f} KiB"


def time_text(seconds: float) -> str:
    """Return a time in the largest of hours, minutes and seconds of which it has two, in three
    digits.
    """
    if seconds < 0.001:
        return "less than 0.001 seconds"
    count = seconds
    unit = "seconds"
    for larger in ("minutes", "hours"):
        if count >= 120:
            count /= 60
            unit = larger
    return f"{count:,.0f} {unit}" if count >= 100 else f"{count:.3g} {unit}"
