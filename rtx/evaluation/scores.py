"""Scores of a model on windows of a split.

Shapes: B windows of a batch, N units of a window, at most A of them answers, K windows of the
split, F facts of an answer, X columns of a window's score.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from rtx.data.store import Answers
from rtx.data.windows import (
    Window,
    batches_by_length,
    read_windows,
    tokens_and_documents,
)
from rtx.evaluation.far_repeats import far_repeated

Progress = Callable[[int, int], None]
"""Is called with the number of windows scored, and of all windows."""


TENTHS = 10
"""The number of equal parts of a window in which answers are counted by their depth."""


class ScoredAnswers(NamedTuple):
    """The answers of windows, in float64; those that a window lacks come last."""

    right_KA: np.ndarray
    """1 for an answer that was the likeliest unit."""
    back_KA: np.ndarray
    """Distance from each answer back to the unit that it repeats; 0: there is none."""
    tenth_KA: np.ndarray
    """In which tenth of the window that unit is."""
    hops_KA: np.ndarray
    """How many pairs lead from the question to the answer; 0: none does."""


@dataclass(frozen=True)
class Score:
    """The score of windows, in float64."""

    units_K: np.ndarray
    """Number of units scored."""
    nats_K: np.ndarray
    """Sum of their nats."""
    answers: ScoredAnswers | None = None
    """None: all units are scored, not only answers."""
    far_K2: np.ndarray | None = None
    """Number of far-repeated units, and the sum of their nats, if they are counted."""

    @property
    def units(self) -> int:
        return int(self.units_K.sum())

    @property
    def nats(self) -> float:
        return float(self.nats_K.sum())

    @property
    def bits(self) -> float:
        """Mean bits of a unit."""
        return self.nats / self.units / math.log(2)

    @property
    def accuracy(self) -> float | None:
        """Share of answers that were right; None if all units are scored."""
        if self.answers is None:
            return None
        return float(self.answers.right_KA.sum()) / self.units

    def accuracies(self) -> dict[str, dict[str, tuple[float, int]]]:
        """Return accuracies and numbers of answers, by what may make an answer hard.

        distance: back to the unit that the answer repeats, rounded down to a power of two.
        depth: where this unit is, in percent of the window, rounded down to a tenth of it.
        hops: how many pairs lead from the question to the answer.
        pairs: how many answers the window has.

        Answers without such a unit have no distance and depth, those without a pair no hops.
        """
        assert self.answers is not None
        right_KA, back_KA, tenth_KA, hops_KA = self.answers
        number_A = np.arange(right_KA.shape[1])
        is_answer_KA = number_A < self.units_K[:, None]
        repeats_KA = is_answer_KA & (back_KA > 0)
        has_hops_KA = is_answer_KA & (hops_KA > 0)
        distance = 2 ** np.log2(back_KA[repeats_KA]).astype(int)
        percent = tenth_KA[repeats_KA].astype(int) * (100 // TENTHS)
        pairs_KA = np.broadcast_to(self.units_K[:, None], is_answer_KA.shape)
        return {
            "distance": accuracy_by(distance, right_KA[repeats_KA]),
            "depth": accuracy_by(percent, right_KA[repeats_KA]),
            "hops": accuracy_by(hops_KA[has_hops_KA].astype(int), right_KA[has_hops_KA]),
            "pairs": accuracy_by(pairs_KA[is_answer_KA].astype(int), right_KA[is_answer_KA]),
        }

    @property
    def standard_error(self) -> float:
        """Standard error of `bits`, if the windows are a sample of the text; NaN for one window."""
        windows = len(self.units_K)
        if windows < 2:
            return math.nan
        residual_K = self.nats_K - self.nats / self.units * self.units_K
        variance = float((residual_K**2).sum()) * windows / (windows - 1)
        return math.sqrt(variance) / self.units / math.log(2)


def accuracy_by(group: np.ndarray, right: np.ndarray) -> dict[str, tuple[float, int]]:
    """Return of each group of answers the share that is right, and their number."""
    accuracies: dict[str, tuple[float, int]] = {}
    for value in np.unique(group):
        right_of_group = right[group == value]
        accuracies[str(value)] = (float(right_of_group.mean()), len(right_of_group))
    return accuracies


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
    starts: np.ndarray | None = None,
    on_progress: Progress = lambda done, total: None,
) -> Score:
    """Score windows of a split with a model in evaluation mode.

    Args:
        tokens: the split.
        answers: finds the units that alone are scored, in windows that must be whole; None: all
            units are scored.
        reach: count the units that are far-repeated by it, see `far_repeated`.
        batch_size: windows scored at once.
        streaming: every selection of keys is made from the prefix alone.
        starts: where documents start, if units are predicted from their document alone.
        on_progress: is called with the number of windows scored, and of all windows.
    """
    device = next(model.parameters()).device
    scored: list[Tensor] = []
    for numbers in batches_by_length(windows, batch_size):
        here = [windows[number] for number in numbers]
        units, skipped_B = read_windows(tokens, here, starts)
        batch = (units.to(device), skipped_B.to(device))
        scored.append(score_batch(model, batch, answers, reach, streaming))
        on_progress(numbers[-1] + 1, len(windows))
    return joined(torch.cat(scored).numpy(), answers)


def joined(scored_KX: np.ndarray, answers: Answers | None) -> Score:
    """Return one score from those of all windows, which `score_batch` returns in parts."""
    units_K = np.ascontiguousarray(scored_KX[:, 0])
    nats_K = np.ascontiguousarray(scored_KX[:, 1])
    more_KX = scored_KX[:, 2:]
    if answers is not None:
        facts = np.split(more_KX, len(ScoredAnswers._fields), axis=1)
        return Score(units_K, nats_K, ScoredAnswers(*facts))
    if more_KX.shape[1]:
        return Score(units_K, nats_K, far_K2=more_KX)
    return Score(units_K, nats_K)


def score_batch(
    model: nn.Module,
    batch: tuple[Tensor, Tensor],
    answers: Answers | None,
    reach: int | None,
    streaming: bool = False,
) -> Tensor:
    """Return the score of each window, float64 on the CPU, `[B, X]`.

    Its columns are units and nats; for answers, A columns for each field of `ScoredAnswers`; else,
    with a `reach`, the far-repeated units and their nats.

    Args:
        model: has `loss(tokens_BN, streaming=...) -> (nats_BN, auxiliary)`, which takes `first_BN`,
            too, if there are documents. For answers it has
            `answers(tokens_BN, position_BA, streaming=...) -> (nats_BA, right_BA, auxiliary)`.
        batch: what `read_windows` returns.
    """
    units, skipped_B = batch
    tokens_BN, first_BN = tokens_and_documents(units)
    if answers is None:
        documents = {} if first_BN is None else {"first_BN": first_BN}
        nats_BN, _ = model.loss(  # type: ignore[operator]
            tokens_BN, streaming=streaming, **documents
        )
        columns = score_units(tokens_BN, nats_BN, skipped_B, reach)
    else:
        assert not skipped_B.any(), "answers are scored in whole windows"
        columns = score_answers(model, tokens_BN, answers, streaming)
    return torch.cat(columns, dim=1).double().cpu()


def score_units(
    tokens_BN: Tensor,
    nats_BN: Tensor,
    skipped_B: Tensor,
    reach: int | None,
) -> list[Tensor]:
    """Return the columns of `score_batch` for windows of which all units are scored."""
    position_N = torch.arange(tokens_BN.shape[1], device=tokens_BN.device)
    is_scored_BN = position_N >= skipped_B[:, None]
    columns = count_and_nats(is_scored_BN, nats_BN)
    if reach is not None:
        is_far = torch.from_numpy(far_repeated(tokens_BN.cpu().numpy(), reach))
        is_far_BN = is_scored_BN & is_far.to(tokens_BN.device)
        columns += count_and_nats(is_far_BN, nats_BN)
    return columns


def count_and_nats(is_scored_BN: Tensor, nats_BN: Tensor) -> list[Tensor]:
    """Return the number and the nats of some units of each window, two columns `[B, 1]`."""
    count_B1 = is_scored_BN.sum(dim=1, keepdim=True)
    nats_BN = torch.where(is_scored_BN, nats_BN.double(), 0.0)
    return [count_B1, nats_BN.sum(dim=1, keepdim=True)]


def score_answers(
    model: nn.Module,
    tokens_BN: Tensor,
    answers: Answers,
    streaming: bool,
) -> list[Tensor]:
    """Return the columns of `score_batch` for windows of which the answers are scored."""
    found = answers(tokens_BN)
    position_BA = found.position_BA
    nats_BA, right_BA, _ = model.answers(  # type: ignore[operator]
        tokens_BN, position_BA, streaming=streaming
    )
    is_answer_BA = position_BA >= 0
    count_B1 = is_answer_BA.sum(dim=1, keepdim=True)
    nats_B1 = nats_BA.double().sum(dim=1, keepdim=True)
    N = tokens_BN.shape[1]
    repeated_BA = position_BA - found.distance_BA
    tenth_BA = TENTHS * repeated_BA.clamp(min=0) // N
    return [count_B1, nats_B1, right_BA, found.distance_BA, tenth_BA, found.hops_BA]
