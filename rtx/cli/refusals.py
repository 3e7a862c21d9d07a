"""What a command refuses by a run's configuration and its own options, before torch is loaded."""

import importlib.util
from collections.abc import Callable
from typing import Any

from rtx.cli.options import (
    ContextOptions,
    CoverageOptions,
    DivergenceOptions,
    EvalOptions,
    ExportOptions,
    PatternsOptions,
    PretrainedOptions,
    SampleOptions,
)
from rtx.data.catalog import check_source, data_root
from rtx.errors import UserError
from rtx.paths import expand_path
from rtx.settings.data_sets import MADE, SETS
from rtx.settings.derived import full_group
from rtx.settings.schema import SPREAD, Config

LEFT_TO_RIGHT = ("sample", "audit", "analyze coverage")
"""Commands on models that read earlier units alone."""


def refuse(command: str, config: Config, options: Any) -> None:
    """Raise `UserError` where a command, by its name, has no answer for such a run."""
    if command in LEFT_TO_RIGHT and not config.model.causal:
        reason = "an encoder reads both sides, so it has no streams and no causal score"
        raise UserError(f"model.causal=false: {reason}; rtx {command} is for model.causal=true")
    check = CHECKS.get(command)
    if check:
        check(config, options)


def check_eval(config: Config, options: EvalOptions) -> None:
    if options.mode == "streaming" and not config.model.causal:
        reason = "an encoder reads both sides, so it has no streams; take mode=parallel"
        raise UserError(f"mode=streaming is not for model.causal=false: {reason}")
    ablation = options.ablate
    routes = config.routing.heads and config.routing.layers
    if ablation != "none" and not routes:
        raise UserError(f"ablate={ablation}: the model has no routing heads to take away")
    if ablation == "random" and config.routing.selection == "random":
        raise UserError("ablate=random: the heads of selection=random read random members already")
    if config.data.documents and options.protocol == "released":
        reason = "it leaves out units, so that documents would start elsewhere"
        raise UserError(f"protocol=released is not for data.documents=true: {reason}; take whole")


def check_sample(config: Config, options: SampleOptions) -> None:
    if not SETS[config.data.name].image:
        return
    size = config.data.length
    length = options.length or 0
    if options.prompt or length > size:
        extra = f"prompt, or a length above {size}"
        reason = f"an image has {size} units"
        raise UserError(f"{extra}, has no place in a run on images: {reason}")


def check_export(config: Config, options: ExportOptions) -> None:
    if options.format != "hf":
        return
    if not config.model.causal:
        reason = "an encoder is no causal language model of transformers"
        raise UserError(f"format=hf is not for model.causal=false: {reason}; take format=rtx")
    if config.extensions:
        reason = "a folder for transformers does not hold code of extensions"
        raise UserError(f"format=hf: {reason}; take format=rtx")


def check_divergence(config: Config, options: DivergenceOptions) -> None:
    if config.model.heads < 2:
        raise UserError("model.heads=1: a divergence is between two heads of a layer")


def check_patterns(config: Config, options: PatternsOptions) -> None:
    top = config.model.layers - 1
    if options.layer is not None and options.layer > top:
        raise UserError(f"layer={options.layer}: the topmost layer is layer={top}")


def check_context(config: Config, options: ContextOptions) -> None:
    name = config.data.name
    if name in MADE:
        reason = "scores its answers alone; there is no loss by position"
        raise UserError(f"a run on data={name} {reason}")
    memory = config.model.memory
    if memory:
        instead = f"compare rtx eval memory=0 with memory={memory}"
        raise UserError(f"model.memory={memory}: the memory holds the far context; {instead}")


def check_coverage(config: Config, options: CoverageOptions) -> None:
    model = config.model
    length = config.data.length
    if config.data.documents:
        reason = "coverage fits selections to sequences that are read whole"
        raise UserError(f"data.documents=true: {reason}; take a run with data.documents=false")
    if not any(full_group(config, layer)[1] for layer in range(model.layers)):
        reason = "no layer has full heads, whose attention could be covered"
        instead = "train one with experiment=far_text heads=full, or model.base=local+full"
        raise UserError(f"model.base={model.base}: {reason}; {instead}")
    if options.window is None:
        window = model.window
        key = f"window={window} (unset: the run's model.window)"
    else:
        window = options.window
        key = f"window={window}"
    if window >= length:
        limit = f"must be less than data.length={length}"
        raise UserError(f"{key}: {limit}; give window=<less>, or window=0")


def check_pretrained(config: Config, options: PretrainedOptions) -> None:
    name = config.data.name
    if SETS[name].image or name in MADE:
        raise UserError(f"data={name}: has no text; say data=text data.path=<file>")
    if not options.model:
        kinds = "an id of the hub, a folder or a .gguf file"
        raise UserError(f"rtx analyze pretrained needs model=<model>: {kinds}")
    hardware = config.hardware.name
    if hardware in SPREAD:
        raise UserError(f"hardware={hardware}: rtx analyze pretrained takes one device")
    if options.window + options.sinks >= options.length:
        near = f"window={options.window} and sinks={options.sinks}"
        raise UserError(f"length={options.length}: must be more than {near} together")
    if importlib.util.find_spec("transformers") is None:
        raise UserError("rtx analyze pretrained needs transformers: pip install 'rtx[hf]'")
    fit = options.fit
    if fit is not None and not expand_path(fit, "fit").is_file():
        raise UserError(f"fit={fit}: no such file")
    check_source(config.data, data_root())


CHECKS: dict[str, Callable[[Config, Any], None]] = {
    "eval": check_eval,
    "export": check_export,
    "sample": check_sample,
    "analyze divergence": check_divergence,
    "analyze patterns": check_patterns,
    "analyze context": check_context,
    "analyze coverage": check_coverage,
    "analyze pretrained": check_pretrained,
}
