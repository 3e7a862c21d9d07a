"""What heads read, as a table.

Shapes: P positions looked at, N positions of the sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rtx.report.names import GROUPS


def row_of(layer: int, head: int, group: str, weight_PN: np.ndarray, at_P: np.ndarray) -> dict[str, Any]:
    """Return what a head reads on average over the positions at which it reads anything."""
    reads_P = weight_PN.sum(1) > 0.5
    distance_PN = at_P[:, None] - np.arange(weight_PN.shape[1])
    mean = weight_PN[reads_P], distance_PN[reads_P]
    self_P = np.take_along_axis(weight_PN, at_P[:, None], 1)[reads_P]
    found = {"layer": layer, "head": head, "pattern": GROUPS.get(group, group), "reads_share": float(reads_P.mean())}
    if not reads_P.any():
        return found | dict.fromkeys(("keys", "distance", "farthest", "self_weight"))
    return found | {
        "keys": float((mean[0] > 0).sum(1).mean()),
        "distance": float((mean[0] * mean[1]).sum(1).mean()),
        "farthest": int(np.where(mean[0] > 0, mean[1], 0).max()),
        "self_weight": float(self_P.mean()),
    }


def patterns_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of the table of `rtx analyze patterns`."""
    lines = [f"{'layer':>5} {'head':>4}  {'pattern':<14} {'keys':>8} {'distance':>9} {'farthest':>8} {'on self':>7}"]
    for row in rows:
        start = f"{row['layer']:>5} {row['head']:>4}  {row['pattern']:<14}"
        if row["keys"] is None:
            lines.append(f"{start} reads nothing at the positions looked at")
            continue
        figures = f"{row['keys']:>8,.1f} {row['distance']:>9,.1f} {row['farthest']:>8,} {row['self_weight']:>7.1%}"
        share = "" if row["reads_share"] > 0.995 else f"  reads at {row['reads_share']:.0%}"
        lines.append(f"{start} {figures}{share}")
    return [*lines, "means over the positions: keys read, distance by weight, weight on itself"]
