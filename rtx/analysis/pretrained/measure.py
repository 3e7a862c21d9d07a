"""The scores of all windows of text, by the dense model and with each choice.

Shapes: B windows of text, N tokens of a window.
"""

import time
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from rtx.analysis.pretrained.compare import Compared, Coverage, Scores
from rtx.hf.choice import Choice
from rtx.progress import progress_bar


@dataclass
class Measured:
    """What was measured, with one item of each list for each window of text."""

    dense: list[Scores] = field(default_factory=list)
    """The scores of the dense model."""
    coverage: list[Coverage] = field(default_factory=list)
    """Where the attention weight of the dense model is, and how much of it each choice keeps."""
    scores: dict[Choice, list[Scores]] = field(default_factory=dict)
    """The scores of the model with each choice."""
    seconds: float = 0.0
    """The duration of the measurement."""


def measure(compared: Compared, tokens_BN: Tensor) -> Measured:
    """Return the scores of all windows of text, by the dense model and with each choice."""
    measured = Measured(scores={choice: [] for choice in compared.choices})
    passes_per_window = 1 + len(compared.choices)  # one is dense
    passes = len(tokens_BN) * passes_per_window
    done = 0
    began = time.monotonic()
    with progress_bar("passes") as show:
        for tokens_1N in tokens_BN.split(1):
            dense, coverage = compared.measure(tokens_1N)
            measured.dense.append(dense)
            measured.coverage.append(coverage)
            done += 1
            show(done, passes)
            for choice in compared.choices:
                scores = compared.score(tokens_1N, choice)
                measured.scores[choice].append(scores)
                done += 1
                show(done, passes)
    measured.seconds = time.monotonic() - began
    return measured


def mean_bytes(tokens_BN: Tensor, tokenizer: Any) -> float:
    """Return the mean number of bytes of a scored token: any but the first of a window."""
    scored_BN = tokens_BN[:, 1:]
    total = 0
    for scored_N in scored_BN:
        text = tokenizer.decode(scored_N, skip_special_tokens=True)
        total += len(text.encode("utf-8", "replace"))
    return total / scored_BN.numel()
