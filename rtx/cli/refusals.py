"""What a command refuses by the configuration of a run and its own options, before torch is loaded."""

from collections.abc import Callable
from typing import Any

from rtx.cli.options import (
    ContextOptions,
    CoverageOptions,
    DivergenceOptions,
    EvalOptions,
    PatternsOptions,
    SampleOptions,
)
from rtx.data.sets import MADE, SETS
from rtx.errors import UserError
from rtx.settings.derived import full_group
from rtx.settings.schema import Config


def refuse(command: str, config: Config, options: Any) -> None:
    """Raise `UserError` where a command (its name as in `rtx.cli.commands.BY_NAME`) has no answer for such a run."""
    if check := CHECKS.get(command):
        check(config, options)


def check_eval(config: Config, options: EvalOptions) -> None:
    how = options.ablate
    if how != "none" and not (config.routing.heads and config.routing.layers):
        raise UserError(f"ablate={how}: the model has no routing heads to take away")
    if how == "random" and config.routing.selection == "random":
        raise UserError("ablate=random: the heads of selection=random read random members already")


def check_sample(config: Config, options: SampleOptions) -> None:
    size = config.data.length
    if SETS[config.data.name].image and (options.prompt or (options.length or 0) > size):
        extra = f"prompt, or a length above {size}"
        raise UserError(f"{extra}, has no place in a run on images: an image has {size} units")


def check_divergence(config: Config, options: DivergenceOptions) -> None:
    if config.model.heads < 2:
        raise UserError("model.heads=1: a divergence is between two heads of a layer")


def check_patterns(config: Config, options: PatternsOptions) -> None:
    top = config.model.layers - 1
    if options.layer is not None and options.layer > top:
        raise UserError(f"layer={options.layer}: the topmost layer is layer={top}")


def check_context(config: Config, options: ContextOptions) -> None:
    if config.data.name in MADE:
        raise UserError(
            f"a run on data={config.data.name} scores its answers alone; there is no loss by position"
        )
    if memory := config.model.memory:
        raise UserError(
            f"model.memory={memory}: the memory holds the far context; compare rtx eval memory=0 with memory={memory}"
        )


def check_coverage(config: Config, options: CoverageOptions) -> None:
    model, length = config.model, config.data.length
    if not any(full_group(config, layer)[1] for layer in range(model.layers)):
        said = f"model.base={model.base}: no layer has full heads, whose attention could be covered"
        raise UserError(
            f"{said}; train one with experiment=far_text heads=full, or model.base=local+full"
        )
    window = model.window if options.window is None else options.window
    if window < length:
        return
    key = f"window={window}"
    if options.window is None:
        key += " (unset: the run's model.window)"
    raise UserError(
        f"{key}: must be less than data.length={length}; give window=<less>, or window=0"
    )


CHECKS: dict[str, Callable[[Config, Any], None]] = {
    "eval": check_eval,
    "sample": check_sample,
    "analyze divergence": check_divergence,
    "analyze patterns": check_patterns,
    "analyze context": check_context,
    "analyze coverage": check_coverage,
}
