"""What `model.start` decides: the keys of a run that follow from a Llama-type model's config.json.

pydantic is imported by this module, so it is imported only for runs with `model.start`.
"""

import json
from collections.abc import Collection, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from rtx.disk import read_named
from rtx.errors import UserError, refuse, shorten, written
from rtx.paths import expand_path
from rtx.settings.schema import TEXTS, Config, all_fields, flat, to_dict, with_values

CONFIG_FILE = "config.json"
LARGEST_CONFIG = 1 << 20
"""The most bytes of it."""
KEPT_KEYS: dict[str, Any] = {
    "routing.keys": "separate",
    "routing.key_shift": 0,
    "routing.key_conv": 1,
    "routing.rotary": True,
    "routing.qk_norm": False,
    "routing.attend_self": None,
    "routing.init": "data",
}
"""Rules of routing heads that leave queries and keys as the model has them.

`conf/routing/` has other rules for models that are trained from the beginning.
"""


class RotaryFile(BaseModel):
    """The object `rope_parameters` of a config.json."""

    model_config = ConfigDict(strict=True, extra="forbid")
    rope_theta: float = 10_000.0
    rope_type: Literal["default"] = "default"


class LlamaFile(BaseModel):
    """A config.json of `transformers` whose model is a decoder that rtx has, too."""

    model_config = ConfigDict(strict=True, extra="ignore")
    model_type: Literal["llama"]
    architectures: list[Literal["LlamaForCausalLM"]]
    vocab_size: int
    bos_token_id: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: Literal["silu"] = "silu"
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_parameters: RotaryFile | None = None
    rope_scaling: None = None
    attention_bias: Literal[False] = False
    mlp_bias: Literal[False] = False
    tie_word_embeddings: bool = False
    quantization_config: None = None

    @property
    def rotary_base(self) -> float:
        """The base of rotary angles, which older files have beside `rope_scaling`."""
        if self.rope_parameters is None:
            return self.rope_theta
        return self.rope_parameters.rope_theta


def read_llama(start: str) -> LlamaFile:
    """Return the config.json of the folder `start`.

    Raises:
        UserError: the folder has none, or its model is not one that rtx's decoder can be.
    """
    path = expand_path(start, "model.start") / CONFIG_FILE
    try:
        content = json.loads(read_named(path, LARGEST_CONFIG))
        file = LlamaFile.model_validate(content)
    except ValidationError as error:
        lines = [f"model.start={start}: {problem}" for problem in problems_of(error)]
        raise UserError("\n".join(lines)) from None
    except (OSError, ValueError, RecursionError) as error:
        needed = f"expected a folder with {CONFIG_FILE} and *.safetensors"
        raise UserError(f"model.start={start}: {needed}: {shorten(str(error))}") from error
    size = file.hidden_size // max(1, file.num_attention_heads)
    if file.head_dim is not None and file.head_dim != size:
        needed = f"hidden_size / num_attention_heads = {size}"
        raise UserError(f"model.start={start}: {CONFIG_FILE}: head_dim={file.head_dim}: {needed}")
    if not 0 <= file.bos_token_id < file.vocab_size:
        needed = f"a token below vocab_size={file.vocab_size}"
        field = f"bos_token_id={file.bos_token_id}"
        raise UserError(f"model.start={start}: {CONFIG_FILE}: {field} must be {needed}")
    return file


def problems_of(error: ValidationError) -> list[str]:
    """Return a line for each field of a config.json that rtx's decoder does not have."""
    lines: list[str] = []
    for problem in error.errors():
        field = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "missing":
            lines.append(f"{CONFIG_FILE} has no {field}")
            continue
        value = shorten(json.dumps(problem["input"]))
        needed = problem["msg"].removeprefix("Input should be ")
        if problem["type"] == "extra_forbidden":
            needed = "left out: rtx has plain rotary angles"
        elif problem["type"] == "none_required":
            needed = "null"
        lines.append(f"{CONFIG_FILE}: {field}={value} must be {needed}")
    return lines


def with_start(config: Config, keys: Collection[str]) -> Config:
    """Return a configuration with the keys that its `model.start` decides.

    Args:
        keys: those that the user has set. Others get the values of the model, whatever a preset
            says.

    Raises:
        UserError: the user has set a key to a value that the weights do not have, or the model is
            not one that rtx's decoder can be.
    """
    start = config.model.start
    assert start is not None
    needed = needed_values(read_llama(start))
    refuse_others(config, keys, needed)
    filled = {key: all_fields()[key].read(value) for key, value in needed.items()}
    for key, value in (KEPT_KEYS | data_values(config)).items():
        if key not in keys:
            filled[key] = value
    if "model.name" not in keys:
        filled["model.name"] = expand_path(start, "model.start").resolve().name
    return with_values(config, filled)


def refuse_others(config: Config, keys: Collection[str], needed: Mapping[str, Any]) -> None:
    """Raise UserError for each of `keys` whose value is not the needed one."""
    values = flat(to_dict(config))
    problems: list[str] = []
    for key, value in needed.items():
        if key in keys and values[key] != value:
            rule = f"the weights of model.start={config.model.start} need {written(value)}"
            problems.append(f"{key}={written(values[key])}: {rule}; leave the key out")
    refuse(problems)


def needed_values(file: LlamaFile) -> dict[str, Any]:
    """Return the keys, by dotted names, whose values the weights decide."""
    kv_heads = file.num_key_value_heads
    if kv_heads == file.num_attention_heads:
        kv_heads = None
    return {
        "model.layers": file.num_hidden_layers,
        "model.heads": file.num_attention_heads,
        "model.kv_heads": kv_heads,
        "model.hidden": file.hidden_size,
        "model.causal": True,
        "model.positions": "rotary",
        "model.rotary_base": file.rotary_base,
        "model.norm": "pre",
        "model.norm_kind": "rmsnorm",
        "model.norm_eps": file.rms_norm_eps,
        "model.qk_norm": False,
        "model.sinks": False,
        "model.ffn": "swiglu",
        "model.ffn_hidden": file.intermediate_size,
        "model.embedding": None,
        "model.tie_embeddings": file.tie_word_embeddings,
    }


def data_values(config: Config) -> dict[str, Any]:
    """Return the keys of data by which text is read with the tokenizer of `model.start`."""
    if config.data.name not in TEXTS:
        return {}
    return {"data.tokenizer": "pretrained", "data.tokenizer_path": config.model.start}
