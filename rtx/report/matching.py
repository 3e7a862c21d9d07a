"""Which row of the paper a row of ours is: told by its configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rtx.report.paper import PaperRow, PaperTable, table_of
from rtx.report.scores import Row, routes

MODEL_KINDS = {"full": "full", "local": "local", "lsh": "lsh", "adaptive_span": "adaptive_span"}

FULL_SIZE = {"heads": 8, "layers": 12, "length": 3072}
"""Of Table 1: heads, layers and positions that its routing heads, routing layers and windows are out of."""


FULL_CONTEXT = ("full", "local", "random", "routing")
"""Kinds that the paper trained itself; rows of other papers read sequences of their own lengths."""


def kind_of(config: Mapping[str, Any]) -> str:
    """Return what heads a model has, in the words of `PaperRow.kind`."""
    if routes(config):
        return "random" if config.get("routing.selection") == "random" else "routing"
    parts = set(str(config.get("model.base", "")).split("+"))
    if parts & {"strided", "fixed"}:
        return "sparse"
    return MODEL_KINDS.get("+".join(sorted(parts)), "")


def model_name(config: Mapping[str, Any]) -> str:
    """Return what a row of ours is called beside the paper's."""
    names = {
        "full": "Transformer",
        "local": "Local Transformer",
        "random": "Random Transformer",
        "routing": "Routing Transformer",
        "sparse": "Sparse Transformer",
        "lsh": "Reformer",
        "adaptive_span": "Adaptive Transformer",
    }
    return names.get(kind_of(config), str(config.get("model.name") or "unknown model"))


def paper_row(config: Mapping[str, Any], table: PaperTable) -> PaperRow | None:
    """Return the row of the paper's table that a configuration is.

    Table 1's are matched by the share of heads and layers that route and of the sequence that a window covers, so that
    a miniature has the same rows.
    """
    kind = kind_of(config)
    for row in table.rows:
        if row.kind == kind and (row.routing_heads is None or kind in ("full", "local") or same_shares(config, row)):
            return row
    return None


def same_shares(config: Mapping[str, Any], row: PaperRow) -> bool:
    """Tell whether heads, layers and window stand to the model's as in a row of Table 1."""
    pairs = (
        (config.get("routing.heads"), config.get("model.heads"), row.routing_heads, FULL_SIZE["heads"]),
        (config.get("routing.layers"), config.get("model.layers"), row.routing_layers, FULL_SIZE["layers"]),
        (config.get("routing.window"), config.get("data.length"), row.window, FULL_SIZE["length"]),
    )
    return all(a and b and c and a * whole == c * b for a, b, c, whole in pairs)


def by_paper_table(rows: Sequence[Row]) -> list[tuple[PaperTable | None, list[Row]]]:
    """Return the rows of each of the paper's tables, then those of none of them.

    Rows without a configuration (cells that have not been started) stay with the first.
    """
    groups: dict[int, tuple[PaperTable | None, list[Row]]] = {}
    homeless = []
    for row in rows:
        if not row.config:
            homeless.append(row)
            continue
        table = table_of(row.config)
        groups.setdefault(table.number if table else 99, (table, []))[1].append(row)
    ordered = [groups[number] for number in sorted(groups)] or [(None, [])]
    ordered[0][1].extend(homeless)
    return ordered


def settings_changed(config: Mapping[str, Any], table: PaperTable) -> list[str]:
    """Return each value that is not the paper's, as `key=ours (paper: theirs)`; steps have their own column.

    Layers and heads are those of the row where the table prints them.
    """
    if not config:
        return []
    setting, printed = dict(table.setting), paper_row(config, table)
    if printed:
        setting |= {f"model.{key}": size for key in ("layers", "heads") if (size := getattr(printed, key)) is not None}
    if kind_of(config) not in FULL_CONTEXT:
        setting.pop("data.length", None)
    return [
        f"{key}={config.get(key)} (paper: {value})"
        for key, value in setting.items()
        if key != "trainer.steps" and config.get(key) != value
    ]


def differing_keys(rows: Sequence[Row]) -> list[str]:
    """Return the keys by which rows differ, those of the routing first, then of the model; seeds and names apart."""
    from rtx.report.scores import UNTOUCHED, WITHOUT_EFFECT

    configs = [row.config for row in rows if row.config]
    keys = dict.fromkeys(key for config in configs for key in config)
    differing = [key for key in keys if len({repr(config.get(key)) for config in configs}) > 1]
    kept = [key for key in differing if key not in UNTOUCHED and not key.startswith(WITHOUT_EFFECT)]
    first = ("routing.", "model.", "data.", "optimizer.", "trainer.")
    return sorted(kept, key=lambda key: next((at for at, part in enumerate(first) if key.startswith(part)), 9))
