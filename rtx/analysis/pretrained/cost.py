"""What an analysis of a pretrained model costs: memory, before it is loaded, and time.

Shapes: N positions, B windows.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rtx.analysis.pretrained.compare import Compared
from rtx.errors import UserError
from rtx.hf.choice import Choice
from rtx.hf.loading import Origin, count_parameters, read_config
from rtx.machine import memory_bytes
from rtx.progress import clock

GIB = 2**30
LIBRARIES = GIB
"""Bytes of the process before it has a model."""
TIMED_TOKENS = 256
"""The most tokens of the pass that is timed before the analysis."""


@dataclass(frozen=True)
class Cost:
    """What is known of an analysis before the model is loaded."""

    parameters: int
    """The number of the model's parameters."""
    memory: int
    """The bytes that the analysis needs at the most."""


def cost_before_loading(
    origin: Origin,
    device: torch.device,
    length: int,
    fit_windows: int,
    choices: Sequence[Choice],
) -> Cost:
    """Return what an analysis costs, by the configuration of its model.

    Args:
        length: N.
        fit_windows: the windows that centroids are fitted to at once.

    Raises:
        UserError: the analysis needs more memory than there is, the model has fewer positions than
            a window of text, it has no attention, or it is no causal decoder.
    """
    config = read_config(origin)
    if getattr(config.get_text_config(), "num_attention_heads", None) is None:
        raise UserError(f"model={origin.name}: {config.model_type} has no attention to replace")
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and length > positions:
        raise UserError(f"length={length}: the model has {positions} positions")
    parameters = count_parameters(origin, config)
    memory = memory_needed(config, parameters, length, fit_windows, choices)
    check_memory(memory, device, origin, length)
    return Cost(parameters, memory)


def check_memory(needed: int, device: torch.device, origin: Origin, length: int) -> None:
    """Raise UserError if the analysis needs more bytes than the machine or its GPU has."""
    available = memory_bytes()
    owner = "this machine"
    if device.type == "cuda":
        available = torch.cuda.get_device_properties(device).total_memory
        owner = "the GPU"
    if needed > available:
        need = f"needs up to {needed / GIB:.1f} GiB in float32"
        limit = f"{owner} has {available / GIB:.1f}"
        advice = f"length={length // 2} needs less"
        raise UserError(f"model={origin.gguf or origin.name}: {need}, and {limit}; {advice}")


def memory_needed(
    config: Any,
    parameters: int,
    length: int,
    fit_windows: int,
    choices: Iterable[Choice],
) -> int:
    """Return the bytes that an analysis needs at the most, by a count.

    A model of 135 million parameters took 4.0 GiB in windows of 2,048, where the count is 4.2.

    Args:
        config: of the model of transformers.
        parameters: of the model.
        length: N.
        fit_windows: the windows that centroids are fitted to at once.
    """
    text = config.get_text_config()
    heads = text.num_attention_heads
    hidden = text.hidden_size
    layers = text.num_hidden_layers
    logits = 3 * length * text.vocab_size
    activations = 24 * fit_windows * length * hidden
    # Of a layer's scores and masks some copies exist, in types of 4 bytes and of 1.
    scores = 6 * heads * length * length
    most_keys = max((choice.keys for choice in choices), default=0)
    # An entry of an index takes 8 bytes.
    index = 8 * heads * length * fit_windows * most_keys
    centroids = 0
    for choice in choices:
        if choice.is_fitted:
            # With sums in float64.
            centroids += 3 * layers * choice.cluster_count * hidden
    # Autocast has a copy of the weights in 2 bytes.
    weights = 6 * parameters
    return LIBRARIES + weights + 4 * (logits + activations + scores + index + centroids)


def line_on_cost(compared: Compared, tokens_BN: Tensor, cost: Cost) -> str:
    """Return how long an analysis takes at least, and how much memory it needs at most."""
    B, N = tokens_BN.shape
    passes_per_window = 1 + len(compared.choices)  # one is dense
    passes = B * passes_per_window
    seconds = passes * pass_seconds(compared, tokens_BN[:1])
    model = f"{type(compared.model).__name__}, {cost.parameters:,} parameters"
    time_and_memory = f"at least about {clock(seconds)}, at most {cost.memory / GIB:.1f} GiB"
    return f"{model}; {passes:,} passes over {N:,} tokens: {time_and_memory}"


def pass_seconds(compared: Compared, tokens_1N: Tensor) -> float:
    """Return about how many seconds a pass over a window of text takes at least.

    This times a pass over the start of the window, with the choice "none". Other choices take
    longer, because they select keys.
    """
    start_1N = tokens_1N[:, :TIMED_TOKENS]
    none = compared.choices[0]
    began = time.monotonic()
    compared.score(start_1N, none)
    seconds = time.monotonic() - began
    return seconds * tokens_1N.shape[1] / start_1N.shape[1]
