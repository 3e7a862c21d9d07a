"""How much memory training steps take, counted from the configuration: what one device holds at its fullest moment.

Sizes are in bytes. Counted is what `rtx/attention` and `rtx/model` keep for the backward pass, tensor by tensor, and
what they work with; the comments say where each term comes from. `benchmarks/footprint.py` sets it beside real runs.

Letters: h values of the residual stream of a position, F of the feed-forward layer, D of a head; N positions.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import NamedTuple

import torch

from rtx.analysis.cost import Cost
from rtx.attention.chunked import MIN_ROWS
from rtx.attention.full import MAX_SCORES
from rtx.attention.products import trusted
from rtx.attention.weights import MOST_KEYS
from rtx.config import Config
from rtx.model.likelihood import MAX_LOGITS
from rtx.model.patterns import ROUTED, layer_patterns

INDEX = 8
"""Bytes of a row number."""


HOLES, HOLES_OF_LARGEST = 0.25, 3.0
"""What a CPU's process holds in holes of the C library's heap: for each byte that comes and goes with a step, and for
each byte of the step's largest tensor.

Freed memory is kept (`rtx.training.heap`), and what a step leaves lying between its tensors cuts it into pieces that
the next step's tensors do not fill, the large ones least of all. Measured by `benchmarks/footprint.py`; torch's
allocator on a GPU has no part in it.
"""

FIXED = 45 * 2**20
"""Code and kernels that are loaded and made in the first steps of a CPU's process, whatever the model's size."""


class Widths(NamedTuple):
    """Bytes of a value."""

    wide: int
    """Of weights, gradients and the residual stream."""
    narrow: int
    """Of what matrix products read and write: half of it under bf16."""


class Block(NamedTuple):
    """What a block takes, in bytes for each position of the micro-batch."""

    attention: float
    """Kept by the attention heads for the backward pass."""
    feed_forward: float
    """Kept by the feed-forward branch, its norm among it."""
    rest: float
    """Kept beside: the stream, the attention's norm, its joined heads."""
    work: float
    """The most that the backward pass of the block holds on top of what it has not freed yet."""

    @property
    def kept(self) -> float:
        """All that is kept for the backward pass."""
        return self.attention + self.feed_forward + self.rest


class Moment(NamedTuple):
    """What a moment of a step holds beside the weights and the optimizer's state."""

    gradients: float
    activations: float
    """Kept for the backward pass."""
    working: float


def footprint(config: Config, total: Cost, micro_batch: int, vocabulary: int) -> dict[str, float]:
    """Return the parts of the peak, in bytes on each device; their sum is the peak."""
    widths = widths_of(config)
    own = total.parameters / shards(config)
    weights, gradients = widths.wide * own, widths.wide * own
    if widths.narrow < widths.wide:  # autocast holds on to the weights that it has narrowed
        weights += widths.narrow * own
    # Adam keeps two moments; Adafactor a row and a column for each matrix.
    state = 2 * widths.wide * own if config.optimizer.name != "adafactor" else 0.02 * widths.wide * own
    fullest = max(moments(config, total, gradients, micro_batch, vocabulary), key=sum)
    holes = HOLES * sum(fullest) + HOLES_OF_LARGEST * largest(config, micro_batch, vocabulary)
    return {
        "weights": weights,
        "gradients": fullest.gradients,
        "optimizer": state,
        "activations": fullest.activations,
        "working": fullest.working,
        "heap": 0.0 if on_gpu(config) else FIXED + holes,
    }


def moments(config: Config, total: Cost, gradients: float, micro_batch: int, vocabulary: int) -> list[Moment]:
    """Return the moments of a step of which one is the fullest.

    At the end of the forward pass, and in the backward pass of the topmost parts, nearly all activations are there; the
    gradients are not, unless micro-batches have gone before. At the end of the backward pass it is the other way round.
    In the optimizer's step no activations are. The gradients are freed behind it.
    """
    widths, model = widths_of(config), config.model
    # Shared out, the embedding and output matrices stay whole from the forward to the end of the backward pass, one
    # block is whole at a time, and so are their gradients before they are shared out.
    outside = total.embedding_parameters
    gathered = widths.wide * (outside + (total.parameters - outside) / model.layers) if shards(config) > 1 else 0.0
    kept = saved(config, micro_batch, vocabulary) - loss_bytes(config, micro_batch, vocabulary, 1)
    blocks = [block(config, layer, micro_batch) for layer in range(model.layers)]
    rows = micro_batch * config.data.length
    again = max(each.kept for each in blocks) * rows if model.recompute else 0.0
    work = max(each.work for each in blocks) * rows
    earlier = gradients if config.trainer.batch_size > micro_batch * devices(config) else 0.0
    output = widths.wide * vocabulary * (model.embedding or model.hidden)
    # Where the output matrix's gradient adds up over parts of the rows: the sum, a part's, a copy in its layout.
    summed = output * min(3, parts(rows, vocabulary))
    return [
        Moment(earlier, kept, gathered + loss_bytes(config, micro_batch, vocabulary, 2)),
        Moment(earlier, kept, 2 * gathered + loss_bytes(config, micro_batch, vocabulary, 3) + summed),
        Moment(earlier, kept, 2 * gathered + again + output + work),
        Moment(gradients, blocks[0].kept * rows, 2 * gathered + work),
        # Adafactor works with one more copy of the largest weight.
        Moment(gradients, 0.0, output if config.optimizer.name == "adafactor" else 0.0),
    ]


def largest(config: Config, micro_batch: int, vocabulary: int) -> float:
    """Return the bytes of the largest tensor of a step: of a feed-forward layer, the logits or the output matrix."""
    model, (wide, narrow) = config.model, widths_of(config)
    rows = micro_batch * config.data.length
    hidden = narrow * rows * model.ffn_hidden * (2 if model.ffn == "geglu" else 1) / model.ffn_parts
    output = wide * vocabulary * (model.embedding or model.hidden)
    return max(hidden, output, loss_bytes(config, micro_batch, vocabulary, 2) / 2)


def shards(config: Config) -> int:
    """Return over how many devices weights, gradients and state are shared out."""
    return devices(config) if config.hardware.name == "fsdp" else 1


def on_gpu(config: Config) -> bool:
    """Tell whether a run would compute on a GPU: where it is asked for, or left open and one is here."""
    return config.hardware.name == "gpu" or (config.hardware.name != "cpu" and torch.cuda.device_count() > 0)


def devices(config: Config) -> int:
    """Return how many devices share a step."""
    return (config.hardware.devices or 1) * config.hardware.nodes


def widths_of(config: Config) -> Widths:
    """Return the bytes of values."""
    wide = 8 if config.hardware.precision == "fp64" else 4
    return Widths(wide, 2 if config.hardware.precision == "bf16" else wide)


def saved(config: Config, micro_batch: int, vocabulary: int) -> float:
    """Return the bytes that a forward pass of training leaves for the backward pass."""
    model, (wide, narrow) = config.model, widths_of(config)
    rows = micro_batch * config.data.length
    blocks = [block(config, layer, micro_batch).kept for layer in range(model.layers)]
    # With recomputation a block keeps its input alone.
    inside = wide * model.hidden * len(blocks) if model.recompute else sum(blocks)
    # The ids; the last norm's input, and what the output matrix reads; a dropout's factors on the embedding.
    ends = INDEX + (wide * model.hidden if model.norm == "pre" else 0) + narrow * (model.embedding or model.hidden)
    ends += wide * model.hidden if model.dropout else 0
    return rows * (inside + ends) + loss_bytes(config, micro_batch, vocabulary, 1)


def parts(rows: int, vocabulary: int) -> int:
    """Return in how many parts the logits of the rows are worked out."""
    return math.ceil(rows / max(1, MAX_LOGITS // vocabulary))


def loss_bytes(config: Config, micro_batch: int, vocabulary: int, copies: int) -> float:
    """Return the bytes of so many copies of the logits that are held at once.

    One is kept (logarithms of the likelihoods); two are there when they are made, three when their gradient is. In more
    than one part nothing is kept, and each part is worked out again.
    """
    rows = config.data.length * micro_batch
    many = parts(rows, vocabulary) > 1
    if many and copies == 1:
        return 0.0
    return copies * float(widths_of(config).wide) * (MAX_LOGITS if many else rows * vocabulary)


def block(config: Config, layer: int, micro_batch: int) -> Block:
    """Return what a block takes, per position."""
    model, (wide, narrow) = config.model, widths_of(config)
    h, F = model.hidden, model.ffn_hidden
    dropped = narrow * h if model.dropout else 0
    attention = attention_bytes(config, layer, micro_batch)
    # GELU keeps what it reads, ReLU what it gives; the product behind keeps what it reads. GEGLU reads both halves of
    # one tensor, and its product keeps a factor more. Dropout keeps its factors and, behind ReLU, its result.
    factor = {"gelu": 2, "relu": 1, "geglu": 4}[model.ffn]
    factor += (2 if model.ffn == "relu" else 1) if model.ffn_dropout else 0
    # Norm before or after: each branch has one wide value of the stream and one that its first product reads.
    # In parts, each is worked out again in the backward pass, and nothing of it is kept.
    pieces, hidden = model.ffn_parts, narrow * F * factor
    feed_forward = (hidden if pieces == 1 else 0) + (wide + narrow) * h + dropped
    rest = (wide + 2 * narrow) * h + dropped  # with the joined heads
    # Backward, the gradients of the stream and of the branch are there, and of the hidden units two or three copies
    # while the product's own input is freed; later, the feed-forward branch is gone, and every tensor that the heads
    # keep gets a gradient.
    hidden_work = (wide + narrow) * h + narrow * F * {"gelu": 1, "relu": 2, "geglu": 2}[model.ffn] / pieces
    hidden_work += hidden / pieces if pieces > 1 else 0
    attention_work = (wide + 2 * narrow) * h + attention - feed_forward
    return Block(attention, feed_forward, rest, max(hidden_work, attention_work, 0.0))


def attention_bytes(config: Config, layer: int, micro_batch: int) -> float:
    """Return what the heads of a block keep, per position; weights are worked out again by every pattern."""
    model, routing, (_, narrow) = config.model, config.routing, widths_of(config)
    size, groups = model.hidden // model.heads, layer_patterns(config, layer)
    total = 0.0
    whole = False
    for name, count in groups.items():
        tiles = in_tiles(name, config)
        if name == ROUTED:
            total += count * routed_bytes(config, micro_batch, tiles)
            whole |= narrow >= 4
        elif name == "full":
            total += count * full_bytes(config, micro_batch, tiles)
            whole |= model.positions != "shaw" and (not tiles or micro_batch == 1)
        else:
            total += count * local_bytes(config, tiles, micro_batch)
            whole |= name == "local" and micro_batch == 1 and model.positions != "rotary"
    # One product makes queries, keys and values: where any of them is kept as a view of it, all of it is.
    own_keys = routing.keys != "shared"
    columns = sum(count * (2 + own_keys if name == ROUTED else 3) for name, count in groups.items())
    return total + whole * columns * size * narrow


def local_bytes(config: Config, tiles: bool, micro_batch: int) -> float:
    """Return what a local head keeps, per position, beside the layer's queries, keys and values.

    Heads without a count of their own (strided, fixed, lsh, adaptive_span) are taken for local ones.
    """
    model, (_, narrow) = config.model, widths_of(config)
    first = min(1.0, model.window / config.data.length)
    # Every block of W keys and values stands there twice, as its own and as the previous one, but the first.
    values = 2.0 * (2 - first) if first < 1 else 2.0
    # The first block is a view of all queries; tiles have the others in a tensor of their own, kernels keep outputs.
    viewed = 1.0 if micro_batch > 1 or model.positions == "rotary" or first == 1 else 0.0
    return model.hidden // model.heads * narrow * (values + viewed + ((1 - first) if tiles else 1))


def full_bytes(config: Config, micro_batch: int, tiles: bool) -> float:
    """Return what a full head keeps, per position, beside the layer's queries, keys and values."""
    model, N, (_, narrow) = config.model, config.data.length, widths_of(config)
    size = model.hidden // model.heads
    turned = 2 * size * narrow if model.positions == "rotary" else 0
    if model.positions == "shaw":
        # In parts of the queries, each with the keys before it, their distances (for all heads) and its mask.
        count = math.ceil(N / max(1, min(N, MAX_SCORES // (micro_batch * model.heads * N))))
        seen = (count + 1) / 2
        return narrow * size * (1 + 2 * seen) + (INDEX + 1) * N * seen / count / micro_batch / model.heads
    if tiles:  # copies, but for what is turned or there already
        return turned if micro_batch == 1 else 3 * size * narrow
    return turned + size * narrow + 4  # outputs, and a sum for each query


def routed_bytes(config: Config, micro_batch: int, tiles: bool) -> float:
    """Return what a routing head keeps, per position, beside the layer's queries, keys and values."""
    model, routing, (_, narrow) = config.model, config.routing, widths_of(config)
    size, slots = model.hidden // model.heads, gathered(config)
    queries, keys = slots.heads + slots.tails, slots.heads + slots.before
    # Gathered queries, keys (blocks that read themselves have them in their queries, unless keys are others), values,
    # and the shares that are added up; kernels keep their output.
    own_keys = keys if routing.keys != "shared" else slots.before
    copies = size * narrow * (2 * queries + own_keys + keys + queries * (not tiles))
    # Row numbers of queries and values, those of queries once more for the sum; a factor for each query.
    numbers = INDEX * (2 * queries + own_keys + keys) + 4 * queries
    shaw = model.positions == "shaw" and not routing.slot_distance
    listed = 2 * INDEX * listed_pairs(config) + INDEX * keys if shaw else 0.0
    # Telemetry keeps queries, keys, members and nearest clusters of the first sequence.
    snapshot = (2 * size * narrow + INDEX * (1 + clusters_of_a_position(config))) / micro_batch
    norm = size * 4 if narrow < 4 else 0.0  # in bf16 the norm reads a wide copy
    return copies + numbers + listed + snapshot + norm


class Slots(NamedTuple):
    """What the blocks of a routing head gather, per position; see `rtx.attention.clusters`."""

    heads: float
    """Members of blocks that read themselves: each is a query and a key."""
    tails: float
    """Queries of blocks behind the first W members of a list."""
    before: float
    """Keys of such blocks: W for a quarter of W queries, and theirs."""


def gathered(config: Config) -> Slots:
    """Return the slots of a routing head.

    With topk and random members every list has exactly W. Else the lists' lengths are taken to be spread by half of
    their mean, as those of runs are, and blocks are a quarter of W longer than they need be, half of that on average.
    """
    routing, times = config.routing, clusters_of_a_position(config)
    if routing.selection in ("topk", "random"):
        return Slots(times, 0.0, 0.0)
    lists = (routing.clusters or 1) / config.data.length
    mean = times / lists
    lengths = NormalDist(mean, mean / 2)
    longer = 1 - lengths.cdf(routing.window)
    beyond = (mean - routing.window) * longer + lengths.variance * lengths.pdf(routing.window)
    quarter = max(1.0, routing.window / 4)
    tails = beyond + longer * quarter / 2
    heads = mean - beyond + (1 - longer) * quarter / 2
    return Slots(lists * heads, lists * tails, lists * tails * (routing.window + quarter) / quarter)


def in_tiles(name: str, config: Config) -> bool:
    """Tell whether a group's attention will be worked out in tiles (`rtx.attention.chunked`), which keep no outputs.

    As `rtx.attention.weights.worked_in_tiles` decides for tensors; groups without a name here are taken to keep theirs.
    """
    wish, keys = config.hardware, {"full": config.data.length, "local": config.model.window}
    keys[ROUTED] = config.routing.window
    if name not in keys or on_gpu(config):
        return False
    usual = MIN_ROWS <= keys[name] <= MOST_KEYS
    shaw = config.model.positions == "shaw"
    return shaw or config.model.attention_dropout > 0 or (wish.precision == "fp32" and usual and trusted())


def clusters_of_a_position(config: Config) -> float:
    """Return how many clusters a position is in, on average."""
    if config.routing.selection == "nearest":
        return 1.0
    return (config.routing.clusters or 0) * min(1.0, config.routing.window / config.data.length)


def listed_pairs(config: Config) -> float:
    """Return the pairs of a routing head, per position, that Shaw's terms list: members of a cluster that are near
    enough for a row of their own.

    The members are taken to lie evenly: W in N positions, and W / 2 of them before a member on average.
    """
    routing = config.routing
    near = min(routing.window / 2, config.model.max_distance * routing.window / config.data.length)
    return near * clusters_of_a_position(config)
