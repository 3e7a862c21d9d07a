"""Texts on one run: its routing heads, the lines at its end, the card of its exported model."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from rtx.errors import plural, written
from rtx.evaluation.protocol import routes
from rtx.report.run_records import Cell, Score
from rtx.report.templates import filled
from rtx.runs.records import ScoreRecord
from rtx.settings.compose import preset_routing
from rtx.settings.derived import clusters
from rtx.settings.readers import unread
from rtx.settings.schema import CENTROIDS, CLUSTERED, Config, flat, to_dict
from rtx.tables import aligned
from rtx.terminal import prose_width

BAR = 24
"""Characters of the longest bar."""
SIZES = (
    "model.layers",
    "model.heads",
    "model.hidden",
    "model.base",
    "model.window",
    "data.length",
)
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
    """Return how many heads route: "4 of 8 heads route in 24 of 24 layers (8 clusters, W = 64)"."""
    routing = config.routing
    if not routes(flat(to_dict(config))):
        return f"no head routes (routing.heads={routing.heads} routing.layers={routing.layers})"
    sizes = [f"W = {routing.window:,}"]
    if routing.selection in (*CLUSTERED, *CENTROIDS):
        sizes.insert(0, plural(clusters(config), "cluster"))
    if routing.selection == "probed" and routing.candidates is not None:
        sizes.append(f"of {routing.candidates:,} candidates")
    heads = f"{routing.heads} of {plural(config.model.heads, 'head')}"
    layers = f"{routing.layers} of {plural(config.model.layers, 'layer')}"
    return f"{heads} route in {layers} ({', '.join(sizes)})"


def routing_lines(config: Config) -> list[str]:
    """Return lines on the routing heads of a run, printed before it begins.

    They say how many there are, whether their selection sees the future or compares all pairs of
    positions, and which keys are not as in conf/routing/ for that selection.
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
    bits_by_name = {"this model": bits, **baselines}
    highest = max(bits_by_name.values())
    rows = []
    for name in sorted(bits_by_name, key=lambda name: bits_by_name[name]):
        value = bits_by_name[name]
        bar = "█" * max(1, round(BAR * value / highest))
        if name == "this model":
            bar += "  <-"
        rows.append([name, f"{value:.4f}", bar])
    lines = [f"  {line}" for line in aligned(rows, right={1})]
    return "\n".join([f"bits/{unit}, lower is better:", *lines])


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


def card(
    cell: Cell,
    config: Config,
    checkpoint: Mapping[str, Any],
    centroids: int,
    for_transformers: bool = False,
) -> str:
    """Return the card of an exported model as Markdown.

    Args:
        checkpoint: the exported one: its step, its file and the record of its data.
        centroids: the number of values of centroids and thresholds, which no gradient moves.
        for_transformers: the folder loads with Hugging Face `transformers`, too.
    """
    values = flat(to_dict(config))
    idle_keys = unread(values)
    return filled(
        "card.md.j2",
        config=values,
        keys=[key for key in (*SIZES, *ROUTING) if key not in idle_keys],
        scores=scores_at(cell, checkpoint["step"]),
        versions=cell.environment.versions if cell.environment else {},
        cell=cell,
        step=checkpoint["step"],
        checkpoint=checkpoint["file"],
        centroids=centroids,
        for_transformers=for_transformers,
        data=checkpoint["data"],
    )


def scores_at(cell: Cell, step: int) -> list[Score]:
    """Return the scores of a run's weights at a step, one by each protocol, ablated ones last."""
    scores = list(cell.scores)
    if cell.final is not None:
        scores.insert(0, cell.final)
    scores.sort(key=lambda score: score.protocol.ablate != "none")
    by_protocol = {score.protocol: score for score in scores if score.step == step}
    return list(by_protocol.values())
