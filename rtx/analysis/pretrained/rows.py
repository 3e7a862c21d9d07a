"""What was measured in a pretrained model as rows of its record: means, and errors over windows.

Shapes: B windows of text, Y layers, H heads.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rtx.analysis.loss_by_position import estimate
from rtx.analysis.pretrained.compare import Coverage, Scores
from rtx.analysis.pretrained.measure import Measured
from rtx.hf.choice import Choice
from rtx.runs.pretrained_record import (
    ChoiceFields,
    DenseRow,
    Grid,
    SelectionCostRow,
    WeightRow,
)
from rtx.runs.records import finite


def dense_row(dense: Sequence[Scores], bytes_per_token: float) -> DenseRow:
    """Return the loss of the dense model.

    Args:
        dense: its scores of each window.
        bytes_per_token: the mean number of bytes of a scored token.
    """
    bits_B = np.array([scores.bits for scores in dense])
    bits, error = estimate(bits_B)
    return DenseRow(
        bits=bits,
        error=error,
        bits_per_byte=bits / bytes_per_token,
        bits_of_windows=bits_B.tolist(),
        keys=float(np.mean([scores.keys for scores in dense])),
    )


def weight_row(coverage: Sequence[Coverage]) -> WeightRow:
    """Return the dense model's attention weight on sinks and on far keys."""
    sinks_BYH = stacked([window.sinks for window in coverage])
    far_BYH = stacked([window.far for window in coverage])
    sinks, sinks_error = estimate(sinks_BYH.mean((1, 2)))
    far, far_error = estimate(far_BYH.mean((1, 2)))
    return WeightRow(
        sinks=sinks,
        sinks_error=sinks_error,
        far=far,
        far_error=far_error,
        sinks_of_heads=sinks_BYH.mean(0).tolist(),
        far_of_heads=far_BYH.mean(0).tolist(),
    )


def stacked(weights: Sequence[Sequence[Tensor]]) -> np.ndarray:
    """Return weights `[B, Y, H]` from those of each window and layer, `[H]`."""
    windows = []
    for layers in weights:
        weight_YH = torch.stack(list(layers))
        windows.append(weight_YH)
    return torch.stack(windows).numpy()


def selection_rows(measured: Measured, choices: Sequence[Choice]) -> list[SelectionCostRow]:
    """Return a row for each choice. Errors are of differences to the dense model, by windows."""
    rows = []
    for choice in choices:
        row = cost_row(choice, measured)
        # Coverage is measured in all layers, as if none stayed dense.
        if choice.dense_layers == 0:
            add_kept(row, choice, measured.coverage)
        rows.append(row)
    return rows


def cost_row(choice: Choice, measured: Measured) -> SelectionCostRow:
    """Return the loss and the counts of a choice."""
    scores = measured.scores[choice]
    above_B = differences(scores, measured.dense, "bits")
    late_B = differences(scores, measured.dense, "late_bits")
    above, error = estimate(above_B)
    late, late_error = estimate(late_B)
    fields = ChoiceFields.model_validate(dataclasses.asdict(choice))
    return SelectionCostRow(
        label=fields.label,
        choice=fields,
        k=0 if choice.selection == "none" else choice.keys,
        above=above,
        error=error,
        above_of_windows=above_B.tolist(),
        late=late,
        late_error=late_error,
        keys=float(np.mean([score.keys for score in scores])),
        pairs=float(np.mean([score.pairs for score in scores])),
    )


def differences(scores: Sequence[Scores], dense: Sequence[Scores], field: str) -> np.ndarray:
    """Return a field of scores minus that of the dense scores, for each window, `[B]`."""
    score_B = np.array([getattr(score, field) for score in scores])
    dense_B = np.array([getattr(score, field) for score in dense])
    return score_B - dense_B


def add_kept(row: SelectionCostRow, choice: Choice, coverage: Sequence[Coverage]) -> None:
    """Add the share of the weight on far keys that a choice keeps to its row.

    It is added for the whole model, with its standard error over windows, for each layer, and for
    each head. Where there is no weight on far keys, the share is None.
    """
    far_BYH = stacked([window.far for window in coverage])
    if not far_BYH.any():
        return
    kept_BYH = stacked([window.kept[choice] for window in coverage])
    share_B = kept_BYH.sum((1, 2)) / far_BYH.sum((1, 2))
    row.kept, row.kept_error = estimate(share_B)
    far_YH = far_BYH.sum(0)
    kept_YH = kept_BYH.sum(0)
    row.kept_of_heads = shares_of(kept_YH, far_YH)
    kept_Y1 = kept_YH.sum(1, keepdims=True)
    far_Y1 = far_YH.sum(1, keepdims=True)
    row.kept_of_layers = [layer[0] for layer in shares_of(kept_Y1, far_Y1)]


def shares_of(kept_YH: np.ndarray, far_YH: np.ndarray) -> Grid:
    """Return the share of the far weight that is kept; None where there is no far weight."""
    with np.errstate(invalid="ignore"):
        share_YH = kept_YH / far_YH
    return [[finite(share) for share in share_H] for share_H in share_YH.tolist()]
