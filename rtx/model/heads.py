"""The heads of a layer: groups of heads, and one constructor call for each pattern they can have.

`config` is always a resolved configuration, and layer 0 the lowest.

Shapes: B sequences, H heads of a group, N positions, D head size, S earlier keys that a key mix
reads.
"""

import functools
import traceback
from typing import Any, Literal

from torch import Tensor, nn

from rtx.attention import (
    AdaptiveSpan,
    Blocks,
    Centroids,
    Documents,
    Exact,
    Fixed,
    FixedBlock,
    FixedSummary,
    Full,
    Indexer,
    Local,
    Lsh,
    Nearest,
    Pattern,
    PositionPattern,
    Probed,
    Random,
    RandomBlocks,
    Recurrent,
    RelativeTables,
    Strided,
    Thresholds,
    TopK,
)
from rtx.attention.grouped import group_mean
from rtx.attention.pattern import Rotate
from rtx.attention.reads import QueriesKeys
from rtx.errors import UserError
from rtx.model.key_mix import KeyMix
from rtx.model.norm import make_norm
from rtx.model.positions import ROTARY_BASE, Shaw, SinusoidKeys, rotate
from rtx.settings.derived import (
    ROUTED,
    clusters,
    hash_buckets,
    memory_slots,
    queries_of_key_head,
    reads_self,
)
from rtx.settings.fields import imported
from rtx.settings.names import BASES, SELECTIONS, how_to_register, maker_problem
from rtx.settings.schema import Config, ModelConfig, RoutingConfig

KeySource = Literal["matrix", "queries", "none"]
"""Where the keys of heads come from: a projection matrix, or the queries.

none: the pattern takes no keys.
"""

MISTAKES = (AttributeError, LookupError, NameError, TypeError, ValueError)
"""Exceptions of an extension's code that are reported to the user in one line."""


class HeadGroup(nn.Module):
    """Heads of one pattern in one layer, with their positions and options of keys.

    Tables of positions are added later (`add_tables`), because the weights of the layer's matrices
    are drawn first.

    Args:
        name: the base pattern of these heads, or `ROUTED`.
        heads: H.
    """

    def __init__(self, name: str, heads: int, config: Config, layer: int) -> None:
        super().__init__()
        self.name = name
        self.heads = heads
        self.size = head_size(config)
        self.queries_of_key_head = queries_of_key_head(config.model)
        """The number of query heads that share a head of keys and values."""
        self.kv_heads = heads // self.queries_of_key_head
        self.choosing_heads = heads
        """The number of heads that choose keys: all, or one for each head of keys and values."""
        if chooses_in_groups(name, config):
            self.choosing_heads = self.kv_heads
        self.pattern = self.make_pattern(config, layer)
        self.key_source: KeySource = "none"
        if self.pattern.has_keys:
            self.key_source = "matrix"
        self.key_mix: KeyMix | None = None
        self.key_loss = 0.0
        """Weight of the distance between the matrices of queries and of keys in the loss."""
        self.rotate = rotation(config.model)
        """Rotates queries and keys by their positions."""
        self.tables: Shaw | SinusoidKeys | None = None
        """Terms of the logits by distance."""
        if name == ROUTED:
            self.apply_routing(config.routing)
        self.query_norm: nn.Module | None = None
        self.key_norm: nn.Module | None = None
        if config.model.qk_norm and not self.pattern.normalises:
            self.add_norms(config.model)

    def make_pattern(self, config: Config, layer: int) -> Pattern:
        """Return the pattern of the heads, with grouped queries and sinks."""
        pattern = make_pattern(self.name, self.choosing_heads, config, layer)
        together = chooses_in_groups(self.name, config)
        pattern.group_queries(self.queries_of_key_head, together=together)
        if config.model.sinks:
            pattern.add_sinks(self.heads)
        return pattern

    def apply_routing(self, routing: RoutingConfig) -> None:
        """Apply the options of routing heads."""
        if routing.keys == "tied":
            self.key_source = "queries"
        if self.key_source == "matrix":
            self.key_loss = routing.key_loss
        if routing.key_shift or routing.key_conv > 1:
            self.key_mix = KeyMix(self.kv_heads, self.size, routing.key_shift, routing.key_conv)
        if not routing.rotary:
            self.rotate = None

    def add_norms(self, model: ModelConfig) -> None:
        """Add the norms of queries and keys, which all heads of the group share."""
        self.query_norm = make_norm(model, self.size)
        if self.key_source != "none":
            self.key_norm = make_norm(model, self.size)

    def add_tables(self, config: Config) -> None:
        """Add the tables by distance that the positions of the configuration need."""
        model = config.model
        if model.positions == "shaw":
            self.tables = Shaw(model.max_distance, self.size)
        if model.positions == "xl":
            self.tables = SinusoidKeys(model.hidden, self.heads, model.clamp, model.dropout)

    @property
    def width(self) -> int:
        """H * D, the number of columns that the queries of this group have, and its outputs."""
        return self.heads * self.size

    @property
    def kv_width(self) -> int:
        """The number of columns that the keys of this group have, and its values."""
        return self.kv_heads * self.size

    def forward(
        self,
        q_BHND: Tensor,
        k_BHND: Tensor | None,
        v_BHND: Tensor,
        streaming: bool = False,
        memory_length: int = 0,
        documents: Documents | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs `[B, H, N, D]` and the auxiliary loss of the pattern.

        Args:
            k_BHND: the keys, if `key_source` is "matrix"; otherwise None.
            streaming: every selection is made from the prefix alone.
            memory_length: the number of positions at the start that serve as keys and values alone.
            documents: the documents of the sequences; None: each sequence is one.
        """
        q_BHND, k_BHND, _ = self.queries_and_keys(q_BHND, k_BHND, documents=documents)
        return self.pattern(
            q_BHND,
            k_BHND,
            v_BHND,
            rotate=self.rotate,
            relative=self.relative(),
            streaming=streaming,
            memory=memory_length,
            documents=documents,
        )

    def queries_and_keys(
        self,
        q_BHND: Tensor,
        k_BHND: Tensor | None,
        before_BHSD: Tensor | None = None,
        documents: Documents | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the queries and keys that the pattern gets, and the last keys before the key mix.

        With `key_source` "queries" (W_K = W_Q), a key is the mean of the queries that share it. The
        third result is None without a key mix. In a stream it is `before_BHSD` of the next call.

        Args:
            before_BHSD: the earlier keys that the key mix reads; None at position 0.
            documents: the documents of the sequences; None: each sequence is one.
        """
        if self.key_source == "queries":
            k_BHND = group_mean(q_BHND, self.queries_of_key_head)
        if self.query_norm is not None:
            q_BHND = self.query_norm(q_BHND)
        if self.key_norm is not None:
            k_BHND = self.key_norm(k_BHND)
        if isinstance(self.tables, SinusoidKeys):
            q_BHND = self.tables.with_content(q_BHND)
        if self.key_mix is None:
            return q_BHND, k_BHND, None
        assert k_BHND is not None
        mixed_BHND, last_BHSD = self.key_mix(k_BHND, before_BHSD, documents)
        return q_BHND, mixed_BHND, last_BHSD

    def relative(self) -> RelativeTables | None:
        """Return the terms by distance for the pattern; None: there are none."""
        if isinstance(self.tables, SinusoidKeys):
            assert isinstance(self.pattern, PositionPattern)
            assert self.pattern.cache_size is not None
            return self.tables(self.pattern.cache_size)
        if self.tables is not None:
            return self.tables()
        return None

    def inputs(self, q_BHND: Tensor, k_BHND: Tensor | None) -> QueriesKeys:
        """Return the queries and keys that the selection and the logits of the pattern use."""
        q_BHND, k_BHND, _ = self.queries_and_keys(q_BHND, k_BHND)
        return self.pattern.inputs(q_BHND, k_BHND, self.rotate)


def rotation(model: ModelConfig) -> Rotate | None:
    """Return the function that rotates queries and keys; None: positions are not rotary."""
    if model.positions != "rotary":
        return None
    if model.rotary_base == ROTARY_BASE:
        return rotate
    return functools.partial(rotate, base=model.rotary_base)


class HeadStream:
    """Autoregressive decoding with one group of heads: stream and key mix."""

    def __init__(self, group: HeadGroup) -> None:
        self.group = group
        self.stream = group.pattern.stream(rotate=group.rotate, relative=group.relative())
        self.before_BHSD: Tensor | None = None
        """The last keys, which the key mix reads at the next position."""

    def prefill(self, q_BHND: Tensor, k_BHND: Tensor | None, v_BHND: Tensor) -> Tensor:
        """Return the outputs `[B, H, N, D]` of the first N positions."""
        q_BHND, k_BHND, self.before_BHSD = self.group.queries_and_keys(q_BHND, k_BHND)
        return self.stream.prefill(q_BHND, k_BHND, v_BHND)

    def decode(self, q_BH1D: Tensor, k_BH1D: Tensor | None, v_BH1D: Tensor) -> Tensor:
        """Return the output `[B, H, 1, D]` of the next position."""
        q_BH1D, k_BH1D, self.before_BHSD = self.group.queries_and_keys(
            q_BH1D, k_BH1D, self.before_BHSD
        )
        return self.stream.decode(q_BH1D, k_BH1D, v_BH1D)


def chooses_in_groups(name: str, config: Config) -> bool:
    """Return whether query heads that share a head of keys and values choose their keys together.

    Args:
        name: the base pattern of the heads, or `ROUTED`.
    """
    return name == ROUTED and config.routing.group == "shared"


def make_pattern(name: str, heads: int, config: Config, layer: int) -> Pattern:
    """Return the heads of a group.

    Args:
        name: the base pattern of the group, or `ROUTED`.
        heads: the number of heads that choose keys, see `HeadGroup.choosing_heads`.

    Raises:
        UserError: an extension makes no pattern.
    """
    table = BASES
    make = make_base
    if name == ROUTED:
        table = SELECTIONS
        make = make_selection
        name = config.routing.selection
    if table[name] is not None:
        return make_registered(name, table[name], heads, config, layer)
    return make(name, heads, config, layer)


def make_base(name: str, heads: int, config: Config, layer: int) -> Pattern:
    """Return heads of one of rtx's patterns of model.base."""
    model = config.model
    common = common_options(config)
    options = base_options(config)
    match name:
        case "full":
            return Full(**options)
        case "local":
            return Local(window=model.window, **options)
        case "recurrent":
            return Recurrent(
                length=config.data.length,
                memory=memory_slots(model),
                same_length=model.same_length,
                **options,
            )
        case "strided":
            return Strided(stride=model.stride, **options)
        case "fixed":
            return Fixed(block=model.stride, summary=model.summary, **options)
        case "fixed_block":
            return FixedBlock(block=model.stride, **options)
        case "fixed_summary":
            return FixedSummary(block=model.stride, summary=model.summary, **options)
        case "adaptive_span":
            return AdaptiveSpan(
                heads,
                window=model.window,
                ramp=model.span_ramp,
                cost=model.span_cost,
                scale=base_scale(config),
                **common,
            )
        case "lsh":
            return Lsh(
                heads,
                head_size(config),
                rounds=model.hash_rounds,
                buckets=hash_buckets(config),
                seed=layer_seed(config, layer),
                variant=model.lsh,
                window=model.window,
                scale=base_scale(config),
                **common,
            )
    raise AssertionError(name)


def make_selection(name: str, heads: int, config: Config, layer: int) -> Pattern:
    """Return heads of one of rtx's patterns of routing.selection."""
    routing = config.routing
    size = head_size(config)
    options = selection_options(config)
    routed = {"commitment": routing.commitment, "merge": routing.merge, **options}
    top_keys = {"window": routing.window, "qk_norm": routing.qk_norm, **options}
    blocks = {"block": routing.block, "compressed": routing.compressed, **top_keys}
    match name:
        case "topk":
            return TopK(make_centroids(heads, config), **routed)
        case "causal":
            rate = routing.threshold_rate
            return Thresholds(make_centroids(heads, config, rate), **routed)
        case "nearest":
            return Nearest(make_centroids(heads, config), **routed)
        case "random":
            return Random(
                heads,
                clusters(config),
                length=config.data.length,
                seed=layer_seed(config, layer),
                has_keys=routing.keys != "shared",
                window=routing.window,
                merge=routing.merge,
                **options,
            )
        case "exact":
            return Exact(**top_keys)
        case "blocks":
            return Blocks(heads, size, **blocks)
        case "blocks_random":
            return RandomBlocks(heads, size, seed=layer_seed(config, layer), **blocks)
        case "indexer":
            return Indexer(heads, size, warmup=routing.warmup, **top_keys)
        case "probed":
            return Probed(
                heads,
                size,
                clusters=clusters(config),
                decay=routing.decay,
                candidates=routing.candidates,
                **top_keys,
            )
    raise AssertionError(name)


def make_centroids(heads: int, config: Config, threshold_rate: float = 0.0) -> Centroids:
    """Return the centroids of routing heads."""
    routing = config.routing
    keys = routing.keys
    if keys == "tied":
        keys = "separate"
    return Centroids(
        heads,
        clusters(config),
        head_size(config),
        window=routing.window,
        length=config.data.length,
        decay=routing.decay,
        update=routing.update,
        threshold_rate=threshold_rate,
        keys=keys,
    )


def common_options(config: Config) -> dict[str, Any]:
    """Return the arguments that all patterns share."""
    return {
        "dropout": config.model.attention_dropout,
        "backend": config.hardware.attention,
    }


def base_options(config: Config) -> dict[str, Any]:
    """Return the arguments of `Pattern` for a pattern of model.base."""
    options = common_options(config)
    options["scale"] = base_scale(config)
    options["attend_self"] = config.model.attend_self
    return options | encoder_options(config)


def selection_options(config: Config) -> dict[str, Any]:
    """Return the arguments of `Pattern` for a pattern of routing.selection."""
    size = head_size(config)
    scales = {"sqrt_d": size**-0.5, "none": 1.0, "unit": 1 / size}
    options = common_options(config)
    options["scale"] = scales[config.routing.logit_scale]
    options["attend_self"] = reads_self(config.routing)
    return options | encoder_options(config)


def encoder_options(config: Config) -> dict[str, Any]:
    """Return the arguments of patterns in an encoder; none for a decoder."""
    if config.model.causal:
        return {}
    return {"causal": False}


def base_scale(config: Config) -> float:
    """Return 1 / sqrt(D), by which logits of base patterns are multiplied."""
    return head_size(config) ** -0.5


def head_size(config: Config) -> int:
    """Return D, the width of a head."""
    return config.model.hidden // config.model.heads


def layer_seed(config: Config, layer: int) -> int:
    """Return the seed of the draws of a layer's patterns."""
    return config.seed * 1_000 + layer


def make_registered(name: str, maker: Any, heads: int, config: Config, layer: int) -> Pattern:
    """Return the pattern that an extension makes.

    Args:
        maker: the registered function, or the dotted path of an entry point.

    Raises:
        UserError: the code of the extension fails, or makes no pattern that a run can train.
    """
    # Entry points have not been checked before.
    if problem := attribute_problem(name):
        raise UserError(problem)
    make = imported(maker)
    if problem := maker_problem(make):
        raise UserError(f"{name}: {problem}")
    try:
        pattern = make(heads=heads, config=config, layer=layer)
    except MISTAKES as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{name}: {mistake(error)}{how_to_register(make)}") from error
    if not isinstance(pattern, Pattern):
        kind = type(pattern).__name__
        problem = f"its function returned a {kind}, which is no rtx.attention.Pattern"
        raise UserError(f"{name}: {problem}")
    if not pattern.strictly_causal:
        # rtx would label its scores "sees no future".
        problem = "a pattern of an extension reads no later position"
        raise UserError(f"{name}: strictly_causal=False: {problem}")
    return pattern


def attribute_problem(name: str) -> str:
    """Return why torch's ModuleDict cannot contain a module of this name, or ""."""
    if not hasattr(nn.ModuleDict(), name):
        return ""
    use = "which holds the heads by their names"
    return f"{name!r} is an attribute of torch.nn.ModuleDict, {use}"


def mistake(error: Exception) -> str:
    """Return an error in one line, with the file and line of the extension that raised it."""
    text = f"{type(error).__name__}: {error}"
    # The first frame is the caller's.
    frames = traceback.extract_tb(error.__traceback__)[1:]
    if not frames:
        return text
    file = frames[0].filename
    lines = [frame.lineno for frame in frames if frame.filename == file]
    return f"{file}, line {lines[-1]}: {text}"
