"""Scoring windows: B of a batch, N units of a window, at most A of them answers, K windows of the split."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rtx.evaluation.protocols import Window, far_repeated

BATCH_UNITS = 16_384  # scored at once where the user does not say

Answers = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Gives the positions of the answers of sequences `[B, N]`, or -1, and how far back each was told, or 0; `[B, A]`."""


@dataclass(frozen=True)
class Score:
    """What windows scored, in float64."""

    units_K: np.ndarray
    nats_K: np.ndarray
    right_KA: np.ndarray | None = (
        None  # where answers alone are scored: 1 where the unit was the likeliest
    )
    back_KA: np.ndarray | None = None  # how far back each answer was told; 0 for none
    far_K2: np.ndarray | None = None  # where they are counted: far-repeated units, and their nats

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
        return None if self.right_KA is None else float(self.right_KA.sum()) / self.units

    def accuracies(self) -> dict[str, dict[str, tuple[float, int]]]:
        """Return accuracy and number of answers by distance (from a power of two on) and by pairs of a window."""
        assert self.right_KA is not None and self.back_KA is not None
        is_KA = self.back_KA > 0
        right, pairs = (
            self.right_KA[is_KA],
            np.broadcast_to(self.units_K[:, None], is_KA.shape)[is_KA].astype(int),
        )
        kinds = {"distance": 2 ** np.log2(self.back_KA[is_KA]).astype(int), "pairs": pairs}
        return {
            kind: {
                str(value): (float(right[of == value].mean()), int((of == value).sum()))
                for value in np.unique(of)
            }
            for kind, of in kinds.items()
        }

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
    answers: Answers | None = None,
    reach: int | None = None,
    batch_size: int | None = None,
    streaming: bool = False,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Score:
    """Score windows of a split (`tokens`) with a model in evaluation mode, `batch_size` of them at once.

    `answers`: finds in windows, which must be whole, the units that alone are scored; None: all units are.
    `reach`: count the units that are far-repeated by it, see `far_repeated`.
    `streaming`: decisions from the prefix alone. `on_progress` is called with windows done and windows in all.
    """
    device = next(model.parameters()).device
    scored: list[Tensor] = []
    for batch in equal_batches(windows, batch_size):
        tokens_BN, skipped_B = read_windows(tokens, [windows[k] for k in batch])
        scored.append(
            score_batch(
                model, (tokens_BN.to(device), skipped_B.to(device)), answers, reach, streaming
            )
        )
        on_progress(batch[-1] + 1, len(windows))
    return joined(torch.cat(scored).numpy(), answers)


def joined(scored_KX: np.ndarray, answers: Answers | None) -> Score:
    """Return what `score_batch` gave of all windows, float64 `[K, X]`, as one score."""
    units_K, nats_K = np.ascontiguousarray(scored_KX[:, :2].T)
    if answers is not None:
        return Score(units_K, nats_K, *np.split(scored_KX[:, 2:], 2, axis=1))
    return Score(units_K, nats_K, far_K2=scored_KX[:, 2:] if scored_KX.shape[1] > 2 else None)


def equal_batches(windows: Sequence[Window], batch_size: int | None) -> list[list[int]]:
    """Cut 0..K-1 into runs of at most `batch_size` windows of the same length."""
    batches: list[list[int]] = []
    for size, group in itertools.groupby(
        range(len(windows)), lambda k: windows[k].stop - windows[k].start
    ):
        numbers, most = list(group), batch_size or max(1, BATCH_UNITS // size)
        batches += [numbers[at : at + most] for at in range(0, len(numbers), most)]
    return batches


def read_windows(tokens: np.ndarray, windows: Sequence[Window]) -> tuple[Tensor, Tensor]:
    """Return windows of equal length: ids `[B, N]`, and the units before the first that counts `[B]`; int64."""
    rows = np.stack([tokens[window.start : window.stop] for window in windows]).astype(np.int64)
    return torch.from_numpy(rows), torch.tensor([window.first - window.start for window in windows])


def score_batch(
    model: nn.Module,
    read: tuple[Tensor, Tensor],
    answers: Answers | None,
    reach: int | None,
    streaming: bool = False,
) -> Tensor:
    """Return what each of the windows of `read_windows` scores, float64 `[B, X]` on the CPU: units and nats.

    Of answers also whether each is right and how far back it was told, in A columns each; else, with a `reach`, the
    units that are far-repeated and their nats.

    `model` has `loss(tokens_BN, prefix=...) -> (nats_BN, auxiliary)`, or, where answers are scored,
    `answers(tokens_BN, at_BA, prefix=...) -> (nats_BA, right_BA, auxiliary)`.
    """
    tokens_BN, skipped_B = read
    if answers is None:
        nats_BN, _ = model.loss(tokens_BN, streaming=streaming)  # type: ignore[operator]
        counts_BN = torch.arange(tokens_BN.shape[1], device=tokens_BN.device) >= skipped_B[:, None]
        nats_B = torch.where(counts_BN, nats_BN.double(), 0.0).sum(dim=1)
        units_B, more = counts_BN.sum(dim=1), []
        if reach is not None:
            far_BN = counts_BN & torch.from_numpy(far_repeated(tokens_BN.cpu().numpy(), reach)).to(
                counts_BN.device
            )
            far_nats_B = torch.where(far_BN, nats_BN.double(), 0.0).sum(dim=1)
            more = [far_BN.sum(dim=1)[:, None], far_nats_B[:, None]]
    else:
        assert not skipped_B.any(), "answers are scored in whole windows"
        at_BA, back_BA = answers(tokens_BN)
        nats_BA, right_BA, _ = model.answers(tokens_BN, at_BA, streaming=streaming)  # type: ignore[operator]
        nats_B, units_B, more = (
            nats_BA.double().sum(dim=1),
            (at_BA >= 0).sum(dim=1),
            [right_BA, back_BA],
        )
    return torch.cat([units_B[:, None], nats_B[:, None], *more], dim=1).double().cpu()
