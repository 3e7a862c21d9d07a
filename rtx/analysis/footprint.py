"""How much memory a training step takes on one device, at the moment when it takes most.

Sizes are in bytes. Counted is what `rtx/model` and `rtx.attention.engine` save for the backward
pass, tensor by tensor, and what they work with. Not counted are holes of an allocator and the
program itself. `benchmarks/footprint.py` compares the count with real runs on CPUs, and
`benchmarks/gpu.py` with steps on a GPU, where it follows the engines (`gpu_memory.py`).

Shapes: N positions, E hidden width, F feed-forward width.
"""

import itertools
import math
from typing import NamedTuple

from rtx.analysis.cost import Cost
from rtx.analysis.gpu_memory import INDEX, SHORT_INDEX
from rtx.analysis.head_memory import attention_bytes, saves_result
from rtx.analysis.planned_device import devices, on_gpu, widths_of
from rtx.attention.routing_thresholds import CAPACITY_FACTOR
from rtx.model.likelihood import most_logits
from rtx.settings.derived import clusters, embedding_width, memory_slots, sizes_of
from rtx.settings.schema import GATED, Config, ModelConfig

WORKSPACES = 2 * 2**25
"""What cuBLAS holds on a GPU: 32 MiB for the thread of the forward pass and 32 MiB for that of the
backward pass, measured on an H100."""


def footprint(config: Config, total: Cost, micro_batch: int, vocabulary: int) -> dict[str, float]:
    """Return the parts of the peak on each device; their sum is the peak."""
    model = config.model
    wide, narrow = widths_of(config)
    shards = 1
    if config.hardware.name == "fsdp":
        shards = devices(config)
    parameters = total.parameters / shards
    weight_bytes = wide
    if narrow < wide:
        # Autocast holds the weights that it has narrowed.
        weight_bytes += narrow
    # Adam has two moments; Adafactor a row and a column for each matrix; Muon one moment.
    moments_of_weights = 2.0
    if config.optimizer.name == "adafactor":
        moments_of_weights = 0.02
    if config.optimizer.name == "muon":
        moments_of_weights -= total.matrix_parameters / total.parameters
    gathered = 0.0
    if shards > 1:
        gathered = wide * gathered_parameters(total, model.layers)
    moments = moments_of_step(config, wide * parameters, gathered, micro_batch, vocabulary)
    fullest = max(moments, key=sum)
    parts = {
        "weights": weight_bytes * parameters,
        "gradients": fullest.gradients,
        "optimizer": moments_of_weights * wide * parameters,
        "activations": fullest.activations,
        "temporary": fullest.working,
    }
    if on_gpu(config):
        parts["libraries"] = WORKSPACES
    if memory_slots(model):
        # The memory of every stream in every layer, and that which replaces it in a micro-batch.
        streams = config.trainer.batch_size / devices(config) + micro_batch
        parts["memory"] = wide * model.hidden * model.layers * memory_slots(model) * streams
    return parts


def gathered_parameters(total: Cost, layers: int) -> float:
    """Return how many parameters of a sharded model are whole on a device at a time.

    The embedding and output matrices stay whole from the forward to the end of the backward pass,
    and one block is whole at a time. So are their gradients before they are sharded.
    """
    in_blocks = total.parameters - total.embedding_parameters
    return total.embedding_parameters + in_blocks / layers


class Moment(NamedTuple):
    """Bytes at a moment of a step."""

    gradients: float
    activations: float
    working: float


def moments_of_step(
    config: Config,
    gradients: float,
    gathered: float,
    micro_batch: int,
    vocabulary: int,
) -> list[Moment]:
    """Return the moments of a step of which one is the fullest.

    Activations grow until the end of the forward pass, gradients until the end of the backward
    pass; after earlier micro-batches all gradients exist already. The optimizer's step frees them.

    Args:
        gradients: bytes of all gradients.
        gathered: bytes of sharded weights that are whole at a time.
    """
    model = config.model
    rows = micro_batch * config.data.length
    blocks = [block_memory(config, layer, micro_batch) for layer in range(model.layers)]
    working = max(block.working for block in blocks) * rows
    recomputed = 0.0
    if model.recompute is True:
        recomputed = max(block.saved for block in blocks) * rows
    earlier = 0.0
    if config.trainer.batch_size > micro_batch * devices(config):
        earlier = gradients
    logits, pieces = logits_bytes(config, rows, logits_of_row(model, vocabulary))
    activations = saved(config, micro_batch)
    output = output_bytes(config, vocabulary)
    # Over pieces of the rows the gradient of the output matrix adds up: the sum, the gradient of a
    # piece, and a copy in its layout.
    output_gradients = output * min(3, pieces)
    in_optimizer = 0.0
    if config.optimizer.name == "adafactor":
        # It works with one more copy of the largest weight.
        in_optimizer = output
    if config.optimizer.name == "muon":
        # It works with the update of one matrix, and with three copies of it in bfloat16.
        wide = widths_of(config).wide
        in_optimizer = (wide + 3 * 2) * largest_matrix(config)
    return [
        Moment(earlier, activations, gathered + 2 * logits),
        Moment(earlier, activations, 2 * gathered + 3 * logits + output_gradients),
        Moment(earlier, activations, 2 * gathered + recomputed + output + working),
        Moment(gradients, blocks[0].saved * rows, 2 * gathered + working),
        Moment(gradients, 0.0, in_optimizer),
    ]


def largest_matrix(config: Config) -> int:
    """Return the number of weights of the largest matrix of a block."""
    model = config.model
    inner_width = model.ffn_hidden
    if model.ffn in GATED:
        inner_width = 2 * model.ffn_hidden
    return model.hidden * max(inner_width, 3 * model.hidden)


def logits_of_row(model: ModelConfig, vocabulary: int) -> int:
    """Return how many logits of a row are computed; for bands, about how many."""
    if model.embedding != "adaptive":
        return vocabulary
    first_end = sizes_of(model.cutoffs)[0]
    return max(first_end, vocabulary // 4)


def output_bytes(config: Config, vocabulary: int) -> int:
    """Return the bytes of the output matrix, or of the tables of all bands."""
    model = config.model
    ends = [vocabulary]
    if model.embedding == "adaptive":
        ends = [*sizes_of(model.cutoffs), vocabulary]
    width = embedding_width(model)
    values = 0
    for band, (start, stop) in enumerate(itertools.pairwise([0, *ends])):
        values += (stop - start) * width // model.band_factor**band
    return widths_of(config).wide * values


def saved(config: Config, micro_batch: int) -> float:
    """Return the bytes that a forward pass saves for the backward pass, without the logits."""
    model = config.model
    wide, narrow = widths_of(config)
    if model.recompute is True:
        # A block saves its input alone.
        saved_of_row = float(wide * model.hidden * model.layers)
    else:
        blocks = [block_memory(config, layer, micro_batch) for layer in range(model.layers)]
        saved_of_row = sum(block.saved for block in blocks)
    saved_of_row += members_bytes(config)
    # The token, and what the output matrix reads.
    saved_of_row += INDEX + narrow * embedding_width(model)
    if model.norm == "pre":
        # The input of the last norm.
        saved_of_row += wide * model.hidden
        if saves_result(config):
            saved_of_row += wide * model.hidden
    if model.dropout:
        # The factors on the embedding.
        saved_of_row += wide * model.hidden
    return micro_batch * config.data.length * saved_of_row


def members_bytes(config: Config) -> float:
    """Return the bytes of the members that telemetry counts, for each position."""
    routing = config.routing
    N = config.data.length
    if routing.selection not in ("topk", "causal", "nearest"):
        return 0.0
    members = clusters(config) * min(routing.window, N)
    if routing.selection == "nearest":
        members = N
    index_bytes = INDEX
    if on_gpu(config):
        if config.model.recompute is not True:
            # They are the lists of the kernels, which are counted.
            return 0.0
        index_bytes = SHORT_INDEX
        if routing.selection == "causal":
            members = min(CAPACITY_FACTOR * max(N, members), N * clusters(config))
    lists = 1
    if routing.keys in ("separate", "tied"):
        # Members of queries and of keys.
        lists = 2
    return index_bytes * routing.heads * routing.layers * members / N * lists


def logits_bytes(config: Config, rows: int, logits: int) -> tuple[float, int]:
    """Return the bytes of one copy of the logits in memory at once, and the number of pieces.

    One copy is saved, or none of several pieces. Two exist when logits are computed, three when
    their gradient is.

    Args:
        logits: of a row.
    """
    number_bytes = float(max(4, widths_of(config).wide))
    most = most_logits(on_gpu(config))
    pieces = math.ceil(rows / max(1, most // logits))
    if pieces == 1:
        return number_bytes * rows * logits, pieces
    return number_bytes * most, pieces


class BlockMemory(NamedTuple):
    """Bytes of a block, for each position."""

    saved: float
    """What it saves for the backward pass."""
    working: float
    """The most that it holds besides in the backward pass."""


def block_memory(config: Config, layer: int, micro_batch: int) -> BlockMemory:
    """Return the memory of a block."""
    model = config.model
    E = model.hidden
    wide, narrow = widths_of(config)
    dropout = 0
    if model.dropout:
        dropout = narrow * E
    heads = attention_bytes(config, layer, micro_batch)
    # A branch has a wide value of the stream, and one that its first product reads.
    feed_forward = (wide + narrow) * E + dropout
    if model.ffn_parts == 1:
        # Several parts compute their hidden units again, and save none.
        feed_forward += hidden_units(config)
    # The stream, the attention's norm, and its joined heads.
    rest = (wide + 2 * narrow) * E + dropout
    if saves_result(config):
        # The norms of both branches.
        rest += 2 * wide * E
    # Of a memory: besides the stream, what the norm and the product after it read, and the queries
    # that are not used.
    rest += memory_slots(model) / config.data.length * (wide + 2 * narrow) * E
    # Later in the backward pass the feed-forward branch is freed, and every vector that the heads
    # save gets a gradient.
    attention_working = (wide + 2 * narrow) * E + heads.working - feed_forward
    return BlockMemory(
        saved=heads.saved + feed_forward + rest,
        working=max(feed_forward_working(config), attention_working, 0.0),
    )


def hidden_units(config: Config) -> int:
    """Return the bytes of hidden units that a feed-forward layer saves, for each position.

    GELU saves its input and ReLU its result; the product after it saves its input. GEGLU reads both
    halves of one tensor, and its product saves another factor. Dropout saves its factors and, after
    ReLU, its result.
    """
    model = config.model
    tensors = {"gelu": 2, "relu": 1, "geglu": 4, "swiglu": 4}[model.ffn]
    if model.ffn_dropout:
        tensors += 1
        if model.ffn == "relu":
            tensors += 1
    return widths_of(config).narrow * model.ffn_hidden * tensors


def feed_forward_working(config: Config) -> float:
    """Return the bytes with which the backward pass of a feed-forward layer works, by position.

    They are the gradients of the stream and of the branch, and of the hidden units one or two
    copies, while the product's own input is freed.
    """
    model = config.model
    wide, narrow = widths_of(config)
    copies = {"gelu": 1, "relu": 2, "geglu": 2, "swiglu": 2}[model.ffn]
    working = (wide + narrow) * model.hidden
    working += narrow * model.ffn_hidden * copies / model.ffn_parts
    if model.ffn_parts > 1:
        working += hidden_units(config) / model.ffn_parts
    return working
