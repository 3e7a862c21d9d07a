"""How much memory training steps take, counted from the configuration: what one device holds at its fullest moment.

Sizes are in bytes. Counted is what `rtx/model` keeps for the backward pass, tensor by tensor, and what it works with;
the comments say where each term comes from, and `rtx.analysis.kept` counts the heads. `benchmarks/footprint.py` sets it
beside real runs.

Letters: h values of the residual stream of a position, F of the feed-forward layer; N positions.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from rtx.analysis.cost import Cost
from rtx.analysis.kept import INDEX, attention_bytes, on_gpu, widths_of
from rtx.config import Config
from rtx.model.likelihood import MAX_LOGITS

HOLES, HOLES_OF_LARGEST, HOLES_OF_RECOMPUTED = 0.25, 3.0, 0.75
"""What a CPU's process holds in holes of the C library's heap: for each byte that comes and goes with a step, for each
byte of the step's largest tensor, and for each that model.recompute makes once more.

Freed memory is kept (`rtx.training.heap`), and what a step leaves lying between its tensors cuts it into pieces that
the next step's tensors do not fill, the large ones least of all. Measured by `benchmarks/footprint.py`; torch's
allocator on a GPU has no part in it.
"""

FIXED = 45 * 2**20
"""Code and kernels that are loaded and made in the first steps of a CPU's process, whatever the model's size."""


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
    holes += HOLES_OF_RECOMPUTED * again(config, micro_batch)
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
    work = max(each.work for each in blocks) * rows
    earlier = gradients if config.trainer.batch_size > micro_batch * devices(config) else 0.0
    output = widths.wide * vocabulary * (model.embedding or model.hidden)
    # Where the output matrix's gradient adds up over parts of the rows: the sum, a part's, a copy in its layout.
    summed = output * min(3, parts(rows, vocabulary))
    return [
        Moment(earlier, kept, gathered + loss_bytes(config, micro_batch, vocabulary, 2)),
        Moment(earlier, kept, 2 * gathered + loss_bytes(config, micro_batch, vocabulary, 3) + summed),
        Moment(earlier, kept, 2 * gathered + again(config, micro_batch) + output + work),
        Moment(gradients, blocks[0].kept * rows, 2 * gathered + work),
        # Adafactor works with one more copy of the largest weight.
        Moment(gradients, 0.0, output if config.optimizer.name == "adafactor" else 0.0),
    ]


def again(config: Config, micro_batch: int) -> float:
    """Return the bytes that model.recompute makes once more, of one block at a time."""
    kept = (block(config, layer, micro_batch).kept for layer in range(config.model.layers))
    return max(kept) * micro_batch * config.data.length if config.model.recompute is True else 0.0


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


def devices(config: Config) -> int:
    """Return how many devices share a step."""
    return (config.hardware.devices or 1) * config.hardware.nodes


def saved(config: Config, micro_batch: int, vocabulary: int) -> float:
    """Return the bytes that a forward pass of training leaves for the backward pass."""
    model, (wide, narrow) = config.model, widths_of(config)
    rows = micro_batch * config.data.length
    blocks = [block(config, layer, micro_batch).kept for layer in range(model.layers)]
    # With recomputation a block keeps its input alone.
    inside = wide * model.hidden * len(blocks) if model.recompute is True else sum(blocks)
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
    attention, gradients = attention_bytes(config, layer, micro_batch)
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
    # while the product's own input is freed; later, the feed-forward branch is gone, and every vector that the heads
    # keep gets a gradient.
    hidden_work = (wide + narrow) * h + narrow * F * {"gelu": 1, "relu": 2, "geglu": 2}[model.ffn] / pieces
    hidden_work += hidden / pieces if pieces > 1 else 0
    attention_work = (wide + 2 * narrow) * h + gradients - feed_forward
    return Block(attention, feed_forward, rest, max(hidden_work, attention_work, 0.0))
