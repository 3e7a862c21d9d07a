"""What fits together in a model: sizes, patterns, positions, routing heads, memory."""

import math
from collections.abc import Iterator

from rtx.errors import written
from rtx.settings.data_sets import MADE
from rtx.settings.derived import (
    layer_patterns,
    queries_of_key_head,
    routes,
    sizes_of,
)
from rtx.settings.names import BASES, BUILT_IN, SELECTIONS
from rtx.settings.rules.rule import at_most, rule
from rtx.settings.schema import BY_CENTROIDS, CLUSTERED, SPARSE, TEXTS, Config

WITHOUT_WINDOW = {"full", "recurrent", *SPARSE}
"""Base patterns that do not read model.window."""


def patterns_of(config: Config) -> list[str]:
    """Return the base patterns, one as often as model.base has it."""
    return config.model.base.split("+")


@rule(
    "routing.heads",
    "routing.layers",
    "routing.window",
    "routing.clusters",
    "routing.candidates",
    "model.heads",
    "model.layers",
    "data.length",
)
def routing_sizes(config: Config) -> Iterator[str]:
    """Routing heads are no more and no wider than the model and the sequence."""
    if not routes(config):
        return
    yield from at_most(config, "routing.heads", "model.heads")
    yield from at_most(config, "routing.layers", "model.layers")
    yield from at_most(config, "routing.window", "data.length")
    yield from at_most(config, "routing.clusters", "data.length")
    yield from at_most(config, "routing.candidates", "data.length")


@rule("routing.heads", "routing.layers", "routing.selection", "routing.block", "routing.window")
def routing_block(config: Config) -> Iterator[str]:
    """A head that reads blocks reads a whole one."""
    if routes(config) and config.routing.selection in ("blocks", "blocks_random"):
        yield from at_most(config, "routing.block", "routing.window")


@rule("model.base", "model.window", "model.stride", "model.summary", "data.length")
def base_sizes(config: Config) -> Iterator[str]:
    """Base patterns are no wider than the sequence."""
    patterns = set(patterns_of(config))
    if not patterns <= WITHOUT_WINDOW:
        yield from at_most(config, "model.window", "data.length")
    if not patterns.isdisjoint(SPARSE):
        yield from at_most(config, "model.stride", "data.length")
    if not patterns.isdisjoint(("fixed", "fixed_summary")):
        yield from at_most(config, "model.summary", "model.stride")


@rule("model.hidden", "model.heads")
def size_of_heads(config: Config) -> Iterator[str]:
    """All heads have the same size."""
    model = config.model
    if model.hidden % model.heads:
        yield f"model.hidden={model.hidden} must be a multiple of model.heads={model.heads}"


@rule(
    "model.kv_heads",
    "model.heads",
    "model.layers",
    "model.base",
    "routing.heads",
    "routing.layers",
)
def groups_of_queries(config: Config) -> Iterator[str]:
    """Query heads share keys and values with heads of the same pattern."""
    model = config.model
    if model.kv_heads is None:
        return
    key = f"model.kv_heads={model.kv_heads}"
    if model.kv_heads > model.heads or model.heads % model.kv_heads:
        yield f"{key} must divide model.heads={model.heads}"
        return
    sharing = model.heads // model.kv_heads
    for layer in {0, model.layers - 1}:
        for name, heads in layer_patterns(config, layer).items():
            if heads % sharing:
                needed = f"{sharing} heads share keys, so every pattern needs a multiple of that"
                yield f"{key}: {needed}, not {heads} {name} heads"


@rule(
    "model.kv_heads",
    "model.heads",
    "routing.heads",
    "routing.layers",
    "routing.keys",
    "routing.group",
    "routing.key_loss",
)
def groups_of_routing_heads(config: Config) -> Iterator[str]:
    """Routing heads that share keys need keys of their group."""
    routing = config.routing
    if not routes(config) or queries_of_key_head(config.model) == 1:
        return
    if routing.keys == "shared" and routing.group == "own":
        reason = "where queries stand for keys, so a group has no common keys"
        yield f"routing.group=own is not for routing.keys=shared, {reason}; take shared"
    if routing.key_loss:
        reason = "which pulls W_Q to a W_K of as many heads"
        yield f"model.kv_heads={config.model.kv_heads} is not for routing.key_loss, {reason}"


@rule("model.kv_heads", "model.heads", "model.positions")
def biases_of_heads(config: Config) -> Iterator[str]:
    """Transformer-XL's keys by distance are of each head."""
    model = config.model
    if model.positions == "xl" and queries_of_key_head(model) > 1:
        reason = "whose keys by distance are of each head; take rotary, shaw or none"
        yield f"model.kv_heads={model.kv_heads} is not for model.positions=xl, {reason}"


@rule("model.positions", "model.hidden", "model.heads")
def rotary_size(config: Config) -> Iterator[str]:
    """Rotary angles turn pairs."""
    size = config.model.hidden // config.model.heads
    if config.model.positions == "rotary" and size % 2:
        yield f"model.positions=rotary needs an even head size, not hidden/heads = {size}"


@rule("model.base", "model.heads", "model.layers", "routing.heads", "routing.layers")
def shares_of_patterns(config: Config) -> Iterator[str]:
    """The heads that do not route are shared out evenly among the base patterns."""
    model = config.model
    routing = config.routing
    counts: set[int] = set()
    if routing.layers < model.layers:
        counts.add(model.heads)
    if routing.layers:
        counts.add(model.heads - routing.heads)
    number = len(patterns_of(config))
    if any(count % number for count in counts):
        needed = f"a multiple of {number} heads that do not route"
        yield f"model.base={model.base} needs in every layer {needed}"


@rule("model.hash_buckets")
def even_buckets(config: Config) -> Iterator[str]:
    """Hash buckets come in pairs."""
    buckets = config.model.hash_buckets
    if buckets is not None and buckets % 2:
        reason = "a rotation and its opposite give two buckets"
        yield f"model.hash_buckets={buckets} must be even: {reason}"


@rule("model.positions", "model.axes", "data.length")
def axes_cover_sequence(config: Config) -> Iterator[str]:
    """Every position has its place on the axes."""
    model = config.model
    length = config.data.length
    if model.positions == "axial" and math.prod(sizes_of(model.axes)) != length:
        needed = f"the product data.length={length}, such as 32x32x3 for 3072"
        yield f"model.axes={model.axes} must have {needed}"


@rule(
    "routing.heads",
    "routing.layers",
    "routing.selection",
    "routing.candidates",
    "routing.window",
)
def enough_candidates(config: Config) -> Iterator[str]:
    """A probing head chooses its window among the candidates."""
    routing = config.routing
    if not routes(config) or routing.selection != "probed" or routing.candidates is None:
        return
    if routing.candidates < routing.window:
        least = f"routing.window={routing.window}"
        yield f"routing.candidates={routing.candidates} must be at least {least}"


@rule("routing.heads", "routing.layers", "routing.selection", "routing.keys")
def keys_of_selection(config: Config) -> Iterator[str]:
    """Each selection goes with some kinds of keys."""
    if not routes(config):
        return
    chosen = config.routing.selection
    keys = config.routing.keys
    if keys == "projected" and chosen not in BY_CENTROIDS:
        needed = "routing.selection=causal, topk or nearest"
        yield f"routing.keys=projected needs {needed}, not {chosen}"
    if keys in ("shared", "projected") and chosen not in CLUSTERED:
        needed = "routing.keys=separate or tied"
        yield f"routing.selection={chosen} needs {needed}, not {keys}; routing={chosen} sets both"


@rule(
    "routing.heads",
    "routing.layers",
    "routing.keys",
    "routing.key_shift",
    "routing.key_conv",
)
def shared_keys_stay(config: Config) -> Iterator[str]:
    """Queries that are keys cannot look back."""
    routing = config.routing
    looks_back = routing.key_shift != 0 or routing.key_conv != 1
    if routes(config) and routing.keys == "shared" and looks_back:
        needed = "routing.key_shift=0 and routing.key_conv=1"
        yield f"routing.keys=shared, where queries stand for keys, needs {needed}"


@rule("routing.heads", "routing.layers", "routing.keys", "routing.key_loss")
def key_loss_has_two_matrices(config: Config) -> Iterator[str]:
    """The loss of keys pulls two matrices together."""
    routing = config.routing
    if routes(config) and routing.keys in ("shared", "tied") and routing.key_loss:
        needed = "routing.keys=separate or projected"
        yield f"routing.key_loss is for {needed}, not for {routing.keys}, whose W_K is W_Q"


@rule(
    "model.embedding",
    "model.cutoffs",
    "model.band_factor",
    "model.hidden",
    "model.init",
    "data.name",
)
def adaptive_bands(config: Config) -> Iterator[str]:
    """Bands of an adaptive embedding ascend and are at least one wide, on data with rare words.

    Which bands the vocabulary covers is known with the data.
    """
    model = config.model
    if model.embedding != "adaptive":
        return
    ends = sizes_of(model.cutoffs)
    if not ends or list(ends) != sorted({*ends} - {0}):
        needed = "ascending numbers joined by x, such as 20000x60000"
        yield f"model.cutoffs={written(model.cutoffs)} must be {needed}"
    least = model.band_factor ** len(ends)
    if model.hidden < least:
        power = f"model.band_factor={model.band_factor}^{len(ends)} = {least}"
        yield f"model.hidden={model.hidden} must be at least {power}"
    name = config.data.name
    if name in MADE:
        reason = "whose tokens are all as frequent; take null"
        yield f"model.embedding=adaptive has no place in data={name}, {reason}"
    if model.init == "depth_scaled":
        yield "model.init=depth_scaled is not for model.embedding=adaptive; take model.init=fan_in"


@rule("model.positions", "model.base", "routing.heads", "routing.layers")
def recurrent_heads(config: Config) -> Iterator[str]:
    """Recurrent heads take no other heads beside them, and positions that go on in a memory."""
    model = config.model
    is_recurrent = model.base == "recurrent"
    if model.positions == "xl" and not is_recurrent:
        yield f"model.positions=xl is for model.base=recurrent, not {model.base}"
    if "recurrent" in patterns_of(config) and not is_recurrent:
        yield f"model.base={model.base}: recurrent heads take no others beside them"
    if not is_recurrent:
        return
    if routes(config):
        heads = f"routing.heads={config.routing.heads}"
        yield f"{heads} has no place beside model.base=recurrent; take routing=none"
    if model.positions in ("learned", "axial"):
        place = "has no place in model.base=recurrent; take xl, rotary, shaw or none"
        yield f"model.positions={model.positions} {place}"


@rule("model.base", "model.memory", "model.same_length", "data.name", "hardware.compile")
def memory_of_segments(config: Config) -> Iterator[str]:
    """A memory is of a text that goes on, and grows over the first steps."""
    model = config.model
    if model.base != "recurrent":
        return
    if model.same_length and not model.memory:
        reason = "every position reads that number of keys"
        yield f"model.same_length=true needs model.memory of at least 1: {reason}"
    if not model.memory:
        return
    name = config.data.name
    if name not in TEXTS:
        needed = f"a text that goes on: data={name} has sequences of its own"
        yield f"model.memory={model.memory} needs {needed}"
    if config.hardware.compile is True:
        memory = f"model.memory={model.memory}, which grows over the first steps"
        yield f"hardware.compile=true is not for {memory}"


@rule("model.causal", "data.name")
def data_of_encoder(config: Config) -> Iterator[str]:
    """An encoder predicts hidden units."""
    name = config.data.name
    if not config.model.causal and name != "masked":
        reason = "an encoder would see the units that it predicts"
        yield f"model.causal=false needs data=masked, not {name}, of which {reason}"


@rule(
    "model.causal",
    "model.base",
    "model.positions",
    "routing.heads",
    "routing.layers",
    "routing.selection",
)
def heads_of_encoder(config: Config) -> Iterator[str]:
    """Heads of an encoder read both sides, and have no tables by distance."""
    model = config.model
    if model.causal:
        return
    # Patterns of extensions read no later position. The memory of recurrent heads is of earlier
    # segments.
    bases = [name for name in BASES if name in BUILT_IN and name != "recurrent"]
    if not set(patterns_of(config)) <= {*bases}:
        allowed = ", ".join(bases)
        yield f"model.causal=false is for model.base of {allowed}, not {model.base}"
    if model.positions in ("shaw", "xl"):
        allowed = "rotary, learned, axial or none"
        yield f"model.positions={model.positions} needs model.causal=true; take {allowed}"
    selection = config.routing.selection
    if routes(config) and selection not in BUILT_IN:
        allowed = ", ".join(name for name in SELECTIONS if name in BUILT_IN)
        yield f"model.causal=false is for routing.selection of {allowed}, not {selection}"


@rule("data.documents", "model.base")
def documents_of_base(config: Config) -> Iterator[str]:
    """Segments of streams read earlier segments, of whatever document."""
    if config.data.documents and config.model.base == "recurrent":
        allowed = ", ".join(name for name in BASES if name != "recurrent")
        reason = "which goes on from segment to segment"
        yield f"data.documents=true is not for model.base=recurrent, {reason}; take {allowed}"


@rule("model.positions", "model.tie_biases", "hardware.name")
def tied_biases(config: Config) -> Iterator[str]:
    """Blocks that fsdp shares out one by one have no parameters in common."""
    is_tied = config.model.positions == "xl" and config.model.tie_biases
    if is_tied and config.hardware.name == "fsdp":
        reason = "which shares out each block by itself; take false"
        yield f"model.tie_biases=true is not for hardware=fsdp, {reason}"


@rule(
    "model.base",
    "model.compressed",
    "model.memory",
    "model.same_length",
    "model.compression_rate",
    "data.length",
    "hardware.name",
)
def compressed_memory(config: Config) -> Iterator[str]:
    """A compressed memory takes whole groups of positions out of a memory."""
    model = config.model
    if model.base != "recurrent" or not model.compressed:
        return
    if not model.memory or model.same_length:
        needed = "model.memory of at least 1, and model.same_length=false"
        yield f"model.compressed={model.compressed} needs {needed}"
    rate = model.compression_rate
    for key, value in (("data.length", config.data.length), ("model.memory", model.memory)):
        if value % rate:
            yield f"{key}={value} must be a multiple of model.compression_rate={rate}"
    if config.hardware.name == "fsdp":
        reason = "which gathers weights in blocks alone; take hardware=ddp"
        yield f"model.compressed is not for hardware=fsdp, {reason}"
