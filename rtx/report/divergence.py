"""The divergence of heads' attention as a table: a row for each layer, a column for each kind of pair."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NAMES = {"routed": "routing"}


def divergence_table(result: Mapping[str, Any]) -> list[str]:
    """Return the lines of the table of a `rtx analyze divergence` result."""
    kinds: list[tuple[str, ...]] = list(dict.fromkeys(tuple(row["kind"]) for row in result["layers"]))
    cells = {(row["layer"], tuple(row["kind"])): row for row in result["layers"]}
    heads = [" ".join(NAMES.get(name, name) for name in kind) for kind in kinds]
    drawn = f"mean and deviation of {result['analyze']['draws']} pairs of heads"
    lines = [
        f"Jensen-Shannon divergence in nats (at most {result['bound']:.4f}), {drawn}",
        f"{'layer':<7}" + "".join(f"  {head:>18}" for head in heads),
    ]
    for layer in sorted({row["layer"] for row in result["layers"]}):
        lines.append(f"{layer:<7}" + "".join(f"  {cell(cells.get((layer, kind))):>18}" for kind in kinds))
    shares = {kind: [row["share"] for row in result["layers"] if tuple(row["kind"]) == kind] for kind in kinds}
    if any(min(share) < 1 for share in shares.values()):
        means = (f"{head} {sum(shares[kind]) / len(shares[kind]):.0%}" for head, kind in zip(heads, kinds, strict=True))
        lines.append(f"over the positions where both heads read something: {', '.join(means)}")
    return lines


def cell(row: Mapping[str, Any] | None) -> str:
    """Return mean and deviation, or a dash where a layer has no such pair."""
    return "-" if row is None else f"{row['mean']:.4f} ± {row['deviation']:.4f}"
