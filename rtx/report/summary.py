"""What a run says of itself: its protocol, the lines with which it ends, and the card of its exported model."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from rtx.errors import plural, written
from rtx.evaluation.protocol import routes
from rtx.report.run_records import Cell
from rtx.report.tables import filled
from rtx.runs.records import ScoreRecord
from rtx.settings.compose import preset_routing
from rtx.settings.derived import clusters
from rtx.settings.readers import unread
from rtx.settings.schema import CENTROIDS, CLUSTERED, Config, flat, to_dict
from rtx.terminal import prose_width

BAR = 24  # characters of the longest bar
SIZES = ("model.layers", "model.heads", "model.hidden", "model.base", "model.window", "data.length")
ALL_PAIRS = ("exact", "indexer")
"""Selections that score every key for every query."""
ROUTING = (
    "routing.selection",
    "routing.heads",
    "routing.layers",
    "routing.clusters",
    "routing.window",
)


def heads_phrase(config: Config) -> str:
    """Return how many heads route in how many layers, and by what: "4 of 8 heads route in 24 of 24 layers (...)"."""
    model, routing = config.model, config.routing
    if not routes(flat(to_dict(config))):
        return f"no head routes (routing.heads={routing.heads} routing.layers={routing.layers})"
    sizes = [f"W = {routing.window:,}"]
    if routing.selection in (*CLUSTERED, *CENTROIDS):
        sizes.insert(0, plural(clusters(config), "cluster"))
    if routing.selection == "probed" and routing.candidates is not None:
        sizes.append(f"of {routing.candidates:,} candidates")
    layers = f"{routing.layers} of {plural(model.layers, 'layer')}"
    return (
        f"{routing.heads} of {plural(model.heads, 'head')} route in {layers} ({', '.join(sizes)})"
    )


def routing_lines(config: Config) -> list[str]:
    """Return what a run says of its routing heads before it begins.

    First how many there are, and whether their selection sees the future or compares all pairs of positions, with the
    selection that does neither; then the keys by which they differ from what conf/routing/ has for that selection.
    """
    values = flat(to_dict(config))
    if not routes(values):
        return [heads_phrase(config)]
    selection = config.routing.selection
    lines = [f"routing={selection}: {heads_phrase(config)}"]
    if selection == "topk":
        lines.append("its selection sees the future, as in the paper; routing=causal does not")
    if selection in ALL_PAIRS:
        lines.append(
            "selection compares all pairs of positions; routing=causal has clusters instead"
        )
    preset = preset_routing(config)
    idle_keys = unread(values)
    changed = []
    for key, usual in preset.items():
        if key not in idle_keys and values[key] != usual:
            changed.append(f"{key}={written(values[key])} (there {written(usual)})")
    if changed:
        lines.append(
            f"routing={selection} is not as in conf/routing/{selection}.yaml: {', '.join(changed)}"
        )
    return lines


def comparison(bits: float, unit: str, baselines: Mapping[str, float]) -> str:
    """Return a line with a bar for our bits/unit and for each baseline, the best first."""
    rows = sorted([("this model", bits), *baselines.items()], key=lambda row: row[1])
    highest = rows[-1][1]
    width = max(len(name) for name, _ in rows)
    lines = [f"bits/{unit}, lower is better:"]
    for name, value in rows:
        bar = "█" * max(1, round(BAR * value / highest))
        mark = "  <-" if name == "this model" else ""
        lines.append(f"  {name:<{width}}  {value:7.4f}  {bar}{mark}")
    return "\n".join(lines)


def closing_lines(run: str, steps: str, final: ScoreRecord, further: Sequence[str] = ()) -> str:
    """Return the summary of a finished run: steps, closing score, `further` lines, protocol."""
    width = prose_width() - 1
    sample = f"a sample of {final.sample:,} windows of " if final.sample else ""
    score = f"{final.bits:.4f} bits/{final.unit} on {sample}the validation split"
    lines = textwrap.wrap(f"done after {steps}: {score}", width)
    lines += further
    lines += textwrap.wrap(final.line(), width)
    if final.baselines:
        lines.append(comparison(final.bits, final.unit, final.baselines))
    lines.append(f"next: rtx eval {run} split=test")
    if final.accuracy is None:
        lines.append(f"      rtx sample {run}")
    return "\n".join(lines)


def card(cell: Cell, config: Config, checkpoint: Mapping[str, Any], centroids: int) -> str:
    """Return the card of an exported model as Markdown; `centroids`: how many numbers these and thresholds are."""
    every, step = [*filter(None, [cell.final]), *cell.scores], checkpoint["step"]
    every.sort(key=lambda score: score.protocol.ablate != "none")
    values = flat(to_dict(config))
    idle_keys = unread(values)
    facts = {
        "config": values,
        "keys": [key for key in (*SIZES, *ROUTING) if key not in idle_keys],
        "scores": {score.protocol: score for score in every if score.step == step}.values(),
        "versions": cell.environment.versions if cell.environment else {},
    }
    facts |= {"cell": cell, "step": step, "checkpoint": checkpoint["file"], "centroids": centroids}
    return filled("card.md.j2", **facts, data=checkpoint["data"])
