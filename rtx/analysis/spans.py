"""The nats of each unit of some spans of a split, and how sure a mean over them is.

Shapes: B spans of a batch, N units of a span.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from rtx.errors import RunFailed
from rtx.evaluation.scores import equal_batches


class Span(NamedTuple):
    """Units `[start, stop)` of a split are read, and of those `[first, last)` are scored."""

    start: int
    stop: int
    first: int
    last: int


@torch.no_grad()
def unit_nats(
    model: nn.Module,
    tokens: np.ndarray,
    spans: Sequence[Span],
    *,
    streaming: bool = False,
    on_progress: Callable[[int], None] = lambda done: None,
) -> list[np.ndarray]:
    """Return the nats of every scored unit of each span, float64, in evaluation mode.

    Args:
        model: has `loss(tokens_BN, prefix=...) -> (nats_BN, auxiliary)`; its mode is put back afterwards.
        tokens: the split, unsigned integers `[units]`.
        spans: spans of equal length that follow each other are read together.
        streaming: decisions from the prefix alone, instead of teacher-forced.
        on_progress: called with the spans done.

    Raises:
        RunFailed: what the model gives are no numbers.
    """
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    found: list[np.ndarray] = []
    try:
        for batch in equal_batches(spans, None):
            chosen = [spans[k] for k in batch]
            rows = np.stack([tokens[span.start : span.stop] for span in chosen]).astype(np.int64)
            nats_BN, _ = model.loss(torch.from_numpy(rows).to(device), prefix=streaming)  # type: ignore[operator]
            if not bool(nats_BN.isfinite().all()):
                raise RunFailed("the model gives nats that are no numbers: the run has diverged")
            for span, nats_N in zip(chosen, nats_BN.double().cpu().numpy(), strict=True):
                found.append(nats_N[span.first - span.start : span.last - span.start])
            on_progress(len(found))
    finally:
        model.train(was_training)
    return found


def standard_error(values: np.ndarray) -> float | None:
    """Return the standard error of the mean of independent values, None for a single one."""
    return float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else None
