"""What `rtx audit` says: which past outputs moved, where that arises, and what it is worth in bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rtx.analysis.causality import Audit, Moves
from rtx.analysis.price import DIFFERENCES, PARALLEL, RERUN, STREAMING, Price

NAMES = {PARALLEL: "teacher-forced", RERUN: "prefix rerun", STREAMING: "streaming"}

MEANINGS = {
    "leak_gives": "the leak gives (rerun - teacher-forced)",
    "competing_costs": "competing costs (streaming - rerun)",
    "together": "together (streaming - teacher-forced)",
}
"""Competing: for the W places of each cluster, among the positions of the prefix alone."""

LABEL = max(map(len, MEANINGS.values()))


def audit_record(audit: Audit, tolerance: float) -> dict[str, Any]:
    """Return an audit as JSON values; layers count from 1."""
    groups = [
        {"layer": layer + 1, "heads": name, **moves_record(moves)} for (layer, name), moves in audit.groups.items()
    ]
    return {
        "sees_future": audit.sees_future,
        "arises_in": [{"layer": layer + 1, "heads": name} for layer, name in audit.origins],
        "tolerance": tolerance,
        "repeat": audit.repeat,
        "logits": moves_record(audit.logits),
        "groups": groups,
    }


def moves_record(moves: Moves) -> dict[str, Any]:
    """Return what moved as JSON values."""
    return {
        "largest": moves.largest,
        "share": moves.share,
        "reach": moves.reach,
        "prefixes": [asdict(row) for row in moves.prefixes],
    }


def audit_table(audits: Mapping[str, Audit], heads: Mapping[tuple[int, str], int]) -> list[str]:
    """Return the lines of the table: a row for each group of heads and one for the logits, a column for each reading.

    Args:
        audits: by reading, all with the same groups.
        heads: how many heads a group has.
    """
    names = {group: f"layer {group[0] + 1}, {heads[group]} {group[1]}" for group in heads}
    width = max(len(name) for name in [*names.values(), "logits"])
    lines = [" " * width + "".join(f"  {NAMES[mode]:^27}" for mode in audits)]
    lines.append(" " * width + f"  {'largest':>8} {'moved':>6} {'where':>11}" * len(audits))
    for group, name in names.items():
        lines.append(f"{name:<{width}}" + "".join(cells(audit.groups[group]) for audit in audits.values()))
    lines.append(f"{'logits':<{width}}" + "".join(cells(audit.logits) for audit in audits.values()))
    return [line.rstrip() for line in lines]


def cells(moves: Moves) -> str:
    """Return the largest change, the share of past positions that moved, and the first and last of them."""
    where = f"{moves.reach[0]}-{moves.reach[1]}" if moves.reach else "-"
    return f"  {moves.largest:8.1e} {moves.share:6.1%} {where:>11}"


def verdict(mode: str, audit: Audit, tolerance: float) -> str:
    """Return in a line whether a reading of a model sees the future, and where that arises."""
    if audit.repeat > tolerance:
        return f"{NAMES[mode]}: not decided: the logits move by {audit.repeat:.1e} when nothing changes"
    if not audit.sees_future:
        return f"{NAMES[mode]}: sees no future: nothing in the past moved by more than {tolerance:.0e}"
    arises = ", ".join(f"layer {layer + 1} {name}" for layer, name in audit.origins)
    return f"{NAMES[mode]}: sees the future" + (f"; arises in {arises}" if arises else "")


def price_record(price: Price, **facts: Any) -> dict[str, Any]:
    """Return a price as JSON values, `facts` in front."""
    return {
        **facts,
        "bits": {mode: price.bits(mode) for mode in NAMES},
        **{name: asdict(price.difference(name)) for name in DIFFERENCES},
    }


def price_table(record: Mapping[str, Any]) -> list[str]:
    """Return the lines of a price: the three scores, then their differences with both standard errors."""
    unit = record["unit"]
    lines = [f"{NAMES[mode]:<14}  {bits:.5f} bits/{unit}" for mode, bits in record["bits"].items()]
    lines.append(f"{'':{LABEL}}  {'bits':>9}  {'± positions':>11}  {'± windows':>9}")
    for name, meaning in MEANINGS.items():
        estimate = record[name]
        errors = [shown_error(estimate[over]) for over in ("over_positions", "over_windows")]
        lines.append(f"{meaning:<{LABEL}}  {estimate['bits']:+9.5f}  {errors[0]:>11}  {errors[1]:>9}")
    return lines


def over_runs_table(runs: int, record: Mapping[str, Any]) -> list[str]:
    """Return the lines of the differences over runs."""
    lines = [f"{f'over {runs} runs':<{LABEL}}  {'bits':>9}  {'± runs':>11}"]
    for name, meaning in MEANINGS.items():
        error = shown_error(record[name]["standard_error"])
        lines.append(f"{meaning:<{LABEL}}  {record[name]['bits']:+9.5f}  {error:>11}")
    return lines


def shown_error(error: float | None) -> str:
    """Return a standard error, or a dash where there is none."""
    return "-" if error is None else f"{error:.5f}"


def unlike(changed: Sequence[str]) -> str:
    """Return the line for runs that differ by more than their seed, or an empty string."""
    if not changed:
        return ""
    more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
    return f"note: these runs differ by more than their seed: {', '.join(changed[:3])}{more}"
