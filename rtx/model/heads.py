"""The heads of a layer: one constructor call for each pattern of model.base and routing.selection.

`config` is always a resolved configuration, and layer 0 the lowest.
"""

import traceback
from typing import Any

from torch import nn

from rtx.attention import (
    AdaptiveSpan,
    Blocks,
    Centroids,
    Exact,
    Fixed,
    FixedBlock,
    FixedSummary,
    Full,
    Indexer,
    Local,
    Lsh,
    Pattern,
    Probed,
    Random,
    RandomBlocks,
    Recurrent,
    Routing,
    Strided,
)
from rtx.config import (
    BASES,
    ROUTED,
    SELECTIONS,
    Config,
    clusters,
    hash_buckets,
    how_to_register,
    maker_problem,
    memory_slots,
    reads_self,
)
from rtx.errors import UserError
from rtx.keys import imported

MISTAKES = (AttributeError, LookupError, NameError, TypeError, ValueError)
"""Errors of an extension's code that users read in one line."""


def make_pattern(name: str, heads: int, config: Config, layer: int) -> Pattern:
    """Return the heads of a group, called by its base pattern, or `ROUTED`.

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
    """Return heads of one of our patterns of model.base."""
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
    """Return heads of one of our patterns of routing.selection."""
    routing = config.routing
    size = head_size(config)
    options = selection_options(config)
    top_keys = {"window": routing.window, "qk_norm": routing.qk_norm, **options}
    blocks = {"block": routing.block, "compressed": routing.compressed, **top_keys}
    match name:
        case "causal" | "topk" | "nearest":
            return Routing(
                make_centroids(name, heads, config),
                selection=name,
                commitment=routing.commitment,
                merge=routing.merge,
                **options,
            )
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


def make_centroids(selection: str, heads: int, config: Config) -> Centroids:
    """Return the centroids of routing heads; thresholds move only if they choose the members."""
    routing = config.routing
    keys = routing.keys
    if keys == "tied":
        keys = "separate"
    threshold_rate = 0.0
    if selection == "causal":
        threshold_rate = routing.threshold_rate
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
    """Return the arguments that every pattern gets alike."""
    return {"dropout": config.model.attention_dropout, "backend": config.hardware.attention}


def base_options(config: Config) -> dict[str, Any]:
    """Return the arguments of `Pattern` for a pattern of model.base."""
    own = {"scale": base_scale(config), "attend_self": config.model.attend_self}
    return {**own, **common_options(config)}


def selection_options(config: Config) -> dict[str, Any]:
    """Return the arguments of `Pattern` for a pattern of routing.selection."""
    size = head_size(config)
    scales = {"sqrt_d": size**-0.5, "none": 1.0, "unit": 1 / size}
    own = {
        "scale": scales[config.routing.logit_scale],
        "attend_self": reads_self(config.routing),
    }
    return {**own, **common_options(config)}


def base_scale(config: Config) -> float:
    """Return 1 / sqrt(D), by which logits of base patterns are multiplied."""
    return head_size(config) ** -0.5


def head_size(config: Config) -> int:
    """Return D, the width of a head."""
    return config.model.hidden // config.model.heads


def layer_seed(config: Config, layer: int) -> int:
    """Return the seed of what a layer's patterns draw for themselves."""
    return config.seed * 1_000 + layer


def make_registered(name: str, maker: Any, heads: int, config: Config, layer: int) -> Pattern:
    """Return the pattern that an extension makes.

    Args:
        maker: the function that was registered, or the dotted path of an entry point.

    Raises:
        UserError: the code of the extension fails, or makes no pattern that a run can train.
    """
    if problem := attribute_problem(name):  # entry points have not been checked before
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
    if not pattern.strictly_causal:  # every score of it would be marked as one that sees no future
        problem = "a pattern of an extension reads no later position"
        raise UserError(f"{name}: strictly_causal=False: {problem}")
    return pattern


def attribute_problem(name: str) -> str:
    """Return that torch's container of modules has an attribute of this name, or ""."""
    if not hasattr(nn.ModuleDict(), name):
        return ""
    held = "which holds the heads by their names"
    return f"{name!r} is an attribute of torch.nn.ModuleDict, {held}"


def mistake(error: Exception) -> str:
    """Return an error in a line, with its place in the file whose function was called."""
    text = f"{type(error).__name__}: {error}"
    _, *frames = traceback.extract_tb(error.__traceback__)  # the first one is the caller's
    if not frames:
        return text
    file = frames[0].filename
    lines = [frame.lineno for frame in frames if frame.filename == file]
    return f"{file}, line {lines[-1]}: {text}"
