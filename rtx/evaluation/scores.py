"""Scoring windows: B of a batch, N units of a window, A of them that are answers, K windows of the split."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rtx.evaluation.protocols import Window

BATCH_UNITS = 16_384  # scored at once where the user does not say


@dataclass(frozen=True)
class Score:
    """What windows scored, in float64."""

    units_K: np.ndarray
    nats_K: np.ndarray
    right_K: np.ndarray | None = None  # where answers alone are scored: of how many the unit was the likeliest

    @property
    def units(self) -> int:
        return int(self.units_K.sum())

    @property
    def nats(self) -> float:
        return float(self.nats_K.sum())

    @property
    def bits(self) -> float:
        return self.nats / self.units / math.log(2)

    @property
    def accuracy(self) -> float | None:
        """Share of answers that were right; None where every unit is scored."""
        return None if self.right_K is None else float(self.right_K.sum()) / self.units

    @property
    def standard_error(self) -> float:
        """Standard error of `bits`, the windows taken as a sample of the text (NaN for a single window)."""
        windows = len(self.units_K)
        if windows < 2:
            return math.nan
        residual_K = self.nats_K - self.nats / self.units * self.units_K
        variance = float((residual_K**2).sum()) * windows / (windows - 1)
        return math.sqrt(variance) / self.units / math.log(2)


def sample_windows(windows: Sequence[Any], count: int | None, seed: int = 0) -> Sequence[Any]:
    """Return `count` of the windows in order, the same ones for a seed, or all of them where `count` covers them."""
    if count is None or count >= len(windows):
        return windows
    chosen = np.random.default_rng(seed).choice(len(windows), size=count, replace=False)
    return [windows[int(index)] for index in np.sort(chosen)]


@torch.no_grad()
def score_windows(
    model: nn.Module,
    tokens: np.ndarray,
    windows: Sequence[Window],
    *,
    answers: np.ndarray | None = None,
    batch_size: int | None = None,
    streaming: bool = False,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Score:
    """Score windows of a split (`tokens`) with a model in evaluation mode, `batch_size` of them at once.

    `answers`: positions `[A]` in each window, which must be whole, whose units alone are scored; None: all units.
    `streaming`: decisions from the prefix alone. `on_progress` is called with windows done and windows in all.
    """
    device = next(model.parameters()).device
    at_A = None if answers is None else torch.from_numpy(answers).to(device)
    sums_K3 = np.zeros((len(windows), 3))
    for batch in equal_batches(windows, batch_size):
        tokens_BN, skipped_B = read_windows(tokens, [windows[k] for k in batch])
        sums_K3[batch] = score_batch(model, tokens_BN.to(device), skipped_B.to(device), at_A, streaming)
        on_progress(batch[-1] + 1, len(windows))
    units_K, nats_K, right_K = np.ascontiguousarray(sums_K3.T)
    return Score(units_K, nats_K, None if at_A is None else right_K)


def equal_batches(windows: Sequence[Window], batch_size: int | None) -> list[list[int]]:
    """Cut 0..K-1 into runs of at most `batch_size` windows of the same length."""
    batches: list[list[int]] = []
    for size, group in itertools.groupby(range(len(windows)), lambda k: windows[k].stop - windows[k].start):
        numbers, most = list(group), batch_size or max(1, BATCH_UNITS // size)
        batches += [numbers[at : at + most] for at in range(0, len(numbers), most)]
    return batches


def read_windows(tokens: np.ndarray, windows: Sequence[Window]) -> tuple[Tensor, Tensor]:
    """Return windows of equal length: ids `[B, N]`, and the units before the first that counts `[B]`; int64."""
    rows = np.stack([tokens[window.start : window.stop] for window in windows]).astype(np.int64)
    return torch.from_numpy(rows), torch.tensor([window.first - window.start for window in windows])


def score_batch(
    model: nn.Module, tokens_BN: Tensor, skipped_B: Tensor, at_A: Tensor | None, streaming: bool = False
) -> Tensor:
    """Return what each window of `read_windows` scores: units, nats and right answers; float64 `[B, 3]` on the CPU.

    `model` has `loss(tokens_BN, prefix=...) -> (nats_BN, auxiliary)`, or, where answers are scored,
    `answers(tokens_BN, at_A, prefix=...) -> (nats_BA, right_BA, auxiliary)`.
    """
    if at_A is None:
        nats_BN, _ = model.loss(tokens_BN, prefix=streaming)  # type: ignore[operator]
        counts_BN = torch.arange(tokens_BN.shape[1], device=tokens_BN.device) >= skipped_B[:, None]
        nats_B = torch.where(counts_BN, nats_BN.double(), 0.0).sum(dim=1)
        units_B, right_B = counts_BN.sum(dim=1), torch.zeros_like(nats_B)
    else:
        assert not skipped_B.any(), "answers are scored in whole windows"
        nats_BA, right_BA, _ = model.answers(tokens_BN, at_A, prefix=streaming)  # type: ignore[operator]
        nats_B, right_B = nats_BA.double().sum(dim=1), right_BA.double().sum(dim=1)
        units_B = torch.full_like(nats_B, len(at_A))
    return torch.stack([units_B.double(), nats_B, right_B], dim=1).cpu()
