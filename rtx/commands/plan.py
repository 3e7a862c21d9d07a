"""`rtx plan`: the cost of a run, the kernels on a GPU, and whether it fits; nothing is run."""

import textwrap

import torch

from rtx.analysis.cost import Cost, cost
from rtx.analysis.engines import META, attention_line, gpu_here
from rtx.analysis.footprint import footprint
from rtx.analysis.micro_batch import choose_micro_batch, with_choice
from rtx.analysis.planned_device import devices, on_gpu
from rtx.analysis.speed import expected_step, rates
from rtx.cli.request import Request
from rtx.data.catalog import vocabulary_size
from rtx.errors import UserError, plural
from rtx.evaluation.protocol import sees_future
from rtx.report.summary import heads_phrase
from rtx.settings.derived import clusters, routes
from rtx.settings.requirements import precision_on
from rtx.settings.schema import CENTROIDS, Config, flat, to_dict, with_values
from rtx.terminal import prose_width
from rtx.training.hardware import device_memory

GIB = 2**30
TERA = 1e12
GPUS = (16, 24, 80)
"""Sizes of the GPUs that a plan is made for, in GiB."""
MOST_COMPARISONS = 2**32
LESS_MEMORY = (
    "less is needed with optimizer=adafactor, model.ffn_parts=16, hardware=fsdp or a smaller "
    "data.length"
)


def main(request: Request) -> int:
    """Run `rtx plan <overrides>`."""
    config = request.config
    memory = request.options.memory
    refuse_long_selection(config)
    vocabulary = vocabulary_size(config.data)
    world = devices(config)
    width = prose_width()
    total = cost(config, vocabulary)
    lines = cost_lines(config, total, vocabulary, world, memory)
    lines += fit_lines(config, total, vocabulary, world, memory)
    for line in lines:
        print(textwrap.fill(line, width, subsequent_indent=" " * 12, break_on_hyphens=False))
    return 0


def refuse_long_selection(config: Config) -> None:
    """Raise `UserError` where it would take minutes to select the keys of one sequence.

    A plan selects them once, because the memory of a step depends on how many there are.
    """
    routing = config.routing
    if not routes(config) or routing.selection not in CENTROIDS:
        return
    if config.data.length * clusters(config) > MOST_COMPARISONS:
        sizes = f"data.length={config.data.length} with {plural(clusters(config), 'cluster')}"
        rule = f"a plan compares at most {MOST_COMPARISONS:,} pairs of a position and a cluster"
        raise UserError(f"{sizes}: {rule}; take fewer clusters (a larger routing.window)")


def cost_lines(
    config: Config, total: Cost, vocabulary: int, world: int, memory: float | None
) -> list[str]:
    """Return the lines on the cost of a run.

    The micro-batch is that for `memory` GiB, or else for this machine, or for a GPU of 80 GiB.
    """
    trainer = config.trainer
    room = (memory or 0) * GIB or device_memory(config) or GPUS[-1] * GIB
    micro, recompute, *_ = choose_micro_batch(config, vocabulary, room, world, total)
    used = footprint(with_choice(config, micro, recompute), total, micro, vocabulary)
    sizes = ", ".join(f"{name} {size_text(size)}" for name, size in used.items())
    units = trainer.batch_size * config.data.length
    step = total.step(config) / TERA
    run = step * trainer.steps
    batch = f"{plural(trainer.batch_size, 'sequence')}, {units:,} units, {step:,.3g} TFLOP"
    split = f"{plural(world, 'device')}, {micro_text(micro, recompute)}"
    whole = f"{plural(trainer.steps, 'step')}, {units * trainer.steps:,} units, {run:,.3g} TFLOP"
    embedding = f"{total.embedding_parameters:,} of them embedding and output"
    return [
        f"model       {model_text(config)}",
        f"parameters  {total.parameters:,} ({embedding})",
        f"operations  {operations_text(total)}",
        f"step        {batch} ({split})",
        f"run         {whole}: {time_text(run / 100)} at 100 TFLOP/s",
        f"memory      about {size_text(sum(used.values()))} a device: {sizes}",
        *attention_lines(config, memory),
        *speed_lines(config, total, vocabulary, world),
    ]


def model_text(config: Config) -> str:
    """Return the kind and size of a model, its heads, and what it reads at once."""
    model = config.model
    heads = f"{plural(model.layers, 'layer')}, {model.base} heads; {routing_phrase(config)}"
    text = f"{model.name}: {heads}; N = {config.data.length:,} units of {config.data.name}"
    if model.memory:
        text += f", with a memory of {model.memory:,}"
    if model.compressed:
        text += f" and {model.compressed:,} compressed"
    return text


def operations_text(total: Cost) -> str:
    """Return the operations of a forward pass, by parts, and what full heads would need."""
    parts = {"dense": total.dense, "attention": total.attention, "selection": total.selection}
    shares = ", ".join(f"{name} {100 * part / total.forward:.0f}%" for name, part in parts.items())
    times = total.full_attention / (total.attention + total.selection)
    full = f"the attention would be {times:.1f} times as much with every head full"
    return f"{total.forward / TERA:,.3g} TFLOP a sequence forward: {shares}; {full}"


def micro_text(micro: int, recompute: bool) -> str:
    """Return how many sequences a device takes at a time, and whether it recomputes."""
    text = f"{plural(micro, 'sequence')} at a time"
    return f"{text}, recomputed" if recompute else text


def attention_lines(config: Config, memory: float | None) -> list[str]:
    """Return by which engines a GPU computes attention.

    The GPU is one of `memory` GiB, or the one of the configuration or of this machine.
    """
    if memory and config.hardware.name in ("auto", "ddp"):
        config = with_values(config, {"hardware.name": "gpu"})
    if not on_gpu(config):
        return []
    device = META if memory else gpu_here()
    return [f"attention   {attention_line(config, device)}"]


def speed_lines(config: Config, total: Cost, vocabulary: int, world: int) -> list[str]:
    """Return the expected time of a step on the GPU of the roofline, and how it is known."""
    if config.hardware.name in ("auto", "cpu"):
        config = with_values(config, {"hardware.name": "gpu"})
    micro, recompute, *_ = choose_micro_batch(config, vocabulary, GPUS[-1] * GIB, world, total)
    config = with_choice(config, micro, recompute)
    expected = expected_step(config, total, micro, vocabulary, world)
    if expected is None:
        return []
    roofline = rates()["roofline"]
    source = "by rates measured there" if roofline["measured"] else "predicted, not measured"
    parts = {
        "products": expected.products,
        "memory": expected.traffic,
        "launches": expected.launches,
    }
    shares = ", ".join(f"{name} {1e3 * seconds:,.3g} ms" for name, seconds in parts.items())
    name = roofline["name"]
    where = name if world == 1 else f"{world} devices like {name}"
    units = config.trainer.batch_size * config.data.length / expected.step
    pace = f"about {1e3 * expected.step:,.3g} ms a step, {units:,.0f} units/s on {where}"
    precision = precision_on(config.hardware, gpu=True)
    longest = f"products and memory, or launches if longer ({shares})"
    return [f"speed       {pace} in {precision}, {source}: {longest}"]


def routing_phrase(config: Config) -> str:
    """Return how many heads route, by which selection, and whether it sees the future."""
    phrase = heads_phrase(config)
    if config.routing.heads and config.routing.layers:
        phrase = f"routing={config.routing.selection}: {phrase}"
    if sees_future(flat(to_dict(config))):
        phrase += ", which see the future"
    return phrase


def fit_lines(
    config: Config, total: Cost, vocabulary: int, world: int, memory: float | None
) -> list[str]:
    """Return what `auto` chooses, or whether the requested micro-batch fits.

    There is a line for a device of `memory` GiB, or else for each usual GPU and this machine.
    """
    lines = []
    for name, planned, room in planned_devices(config, memory):
        micro, recompute, peak, fits = choose_micro_batch(planned, vocabulary, room, world, total)
        text = f"{micro_text(micro, recompute)}, {size_text(peak)}"
        if not fits:
            text = f"does not fit ({text}); {LESS_MEMORY}"
        head = "" if lines else "what fits"
        lines.append(f"{head:<12}{name}: {text}")
    return lines


def planned_devices(config: Config, memory: float | None) -> list[tuple[str, Config, float]]:
    """Return the name, the configuration and the bytes of each device that a plan is made for."""
    gpus = torch.cuda.device_count()
    places: list[tuple[str, Config, float]] = []
    if config.hardware.name != "cpu" and (gpus or config.hardware.name != "fsdp"):
        planned = config if gpus else with_values(config, {"hardware.name": "gpu"})
        for size in (memory,) if memory else GPUS:
            places.append((f"a GPU of {size:g} GiB", planned, size * GIB))
    if memory:
        return places or [(f"a machine of {memory:g} GiB", config, memory * GIB)]
    here = device_memory(config)
    if here:
        places.append((f"this machine ({here / GIB:.1f} GiB)", config, here))
    return places


def size_text(size: float) -> str:
    """Return a number of bytes in GiB, or in MiB or KiB where it is less than one."""
    if size >= GIB:
        return f"{size / GIB:.2f} GiB"
    if size >= 2**20 or not size:
        return f"{size / 2**20:.0f} MiB"
    return f"{size / 2**10:.0f} KiB"


def time_text(seconds: float) -> str:
    """Return a time in hours, minutes or seconds: the largest of which it has two."""
    if seconds < 0.001:
        return "less than 0.001 seconds"
    count = seconds
    unit = "seconds"
    for larger in ("minutes", "hours"):
        if count >= 120:
            count /= 60
            unit = larger
    return f"{count:,.0f} {unit}" if count >= 100 else f"{count:.3g} {unit}"
