"""A pretrained model of `transformers` and its tokenizer, from the hub, a folder or a .gguf file.

Weights are read from safetensors and GGUF files alone: pickled ones could run any code, and so
could the code of a model's repository, which is never run.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from rtx.errors import UserError, shorten
from rtx.paths import expand_path

GGUF = ".gguf"
WEIGHTS = "*.safetensors"
NO_CODE = {"trust_remote_code": False}
"""Set in every call: unset, transformers would ask on the terminal whether to run code."""


@dataclass(frozen=True)
class Origin:
    """Where a model is."""

    name: str
    """An id of the hub, or the path of a folder."""
    gguf: str | None = None
    """The file in the folder that has the weights; None: safetensors."""

    @property
    def options(self) -> dict[str, Any]:
        """The options of transformers' functions that load something from there."""
        options: dict[str, Any] = dict(NO_CODE)
        if self.gguf:
            options["gguf_file"] = self.gguf
        return options


def origin_of(name: str) -> Origin:
    """Return where a model is, by what the user wrote.

    Raises:
        UserError: a folder or file that has no weights that rtx reads.
    """
    path = expand_path(name, "model")
    if path.suffix == GGUF:
        if not path.is_file():
            raise UserError(f"model={name}: no such file")
        return Origin(str(path.parent), path.name)
    if not path.is_dir():
        if path.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
            raise UserError(f"model={name}: neither a folder, a {GGUF} file nor an id of the hub")
        return Origin(name)
    if not (path / "config.json").is_file():
        files = sorted(file.name for file in path.glob(f"*{GGUF}"))
        instead = f"; it has {files[0]}: name that file" if files else ""
        raise UserError(f"model={name}: the folder has no config.json{instead}")
    if not any(path.glob(WEIGHTS)):
        rule = "pickled weights are not read, as they could run code"
        raise UserError(f"model={name}: the folder has no {WEIGHTS} file; {rule}")
    return Origin(str(path))


def read_config(origin: Origin) -> Any:
    """Return the configuration of a causal decoder.

    Raises:
        UserError: there is none, it cannot be downloaded, or the model is another kind of model.
    """
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(origin.name, **origin.options)
    except (OSError, ValueError, ImportError) as error:
        raise UserError(f"model={origin.name}: {reason(origin, error)}") from error
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(f"model={origin.name}: {config.model_type} is no causal decoder")
    return config


def reason(origin: Origin, error: Exception) -> str:
    """Return in one line why something could not be loaded."""
    text = str(error)
    if "contains custom code" in text:
        return "needs code of its repository, which rtx does not run"
    if "connect" in text and not os.path.isdir(origin.name):
        return (
            "is not on this machine, and the hub cannot be reached; name a folder: model=<folder>"
        )
    if "no file named" in text or "does not appear to have" in text:
        return f"has no {WEIGHTS} file; pickled weights are not read, as they could run code"
    return shorten(text, 200)


def count_parameters(origin: Origin, config: Any) -> int:
    """Return the number of parameters of a model, which is not loaded.

    Raises:
        UserError: transformers has no causal decoder of this kind.
    """
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, **NO_CODE)
    except (ValueError, ImportError) as error:
        message = f"{config.model_type} is no causal decoder of transformers"
        raise UserError(f"model={origin.name}: {message}") from error
    assert isinstance(model, nn.Module)
    return sum(weight.numel() for weight in model.parameters())


def load_tokenizer(origin: Origin) -> Any:
    """Return the tokenizer of a model.

    Raises:
        UserError: there is none.
    """
    try:
        return AutoTokenizer.from_pretrained(origin.name, **origin.options)
    except (OSError, ValueError, ImportError, KeyError, TypeError) as error:
        problem = shorten(str(error), 120)
        raise UserError(f"model={origin.name}: no tokenizer can be read: {problem}") from error


def load_model(
    origin: Origin,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> PreTrainedModel:
    """Return a model in evaluation mode.

    Args:
        dtype: the type of its weights.

    Raises:
        UserError: its weights are missing, pickled or damaged.
    """
    options = origin.options
    if not origin.gguf:
        options["use_safetensors"] = True
    try:
        model = AutoModelForCausalLM.from_pretrained(origin.name, dtype=dtype, **options)
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        raise UserError(f"model={origin.name}: {reason(origin, error)}") from error
    assert isinstance(model, PreTrainedModel)
    nn.Module.to(model, device)
    return model.eval()
