"""What a run says of itself: its protocol, the lines with which it ends, and the card of its exported model."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from rtx.cli.help import prose_width
from rtx.errors import plural, written
from rtx.evaluation.protocols import memory_phrases, spans
from rtx.report.paper import hashes, looks_ahead, routes
from rtx.report.run_records import SIGHT, Cell, Protocol
from rtx.report.tables import filled
from rtx.settings.compose import preset_routing
from rtx.settings.derived import clusters
from rtx.settings.readers import unread
from rtx.settings.schema import CENTROIDS, CLUSTERED, Config, flat, to_dict

BAR = 24  # characters of the longest bar
ABLATED = {
    "routing": "outputs of the routing heads set to zero",
    "local": "routing heads read the last W positions",
    "random": "routing heads read random members",
}
"""What option `ablate` does to a model, in words."""

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


def sees_future(config: Config, mode: str, ablate: str = "none") -> bool:
    """Tell whether the score of some unit may depend on later units: top-w selection or published LSH in one pass."""
    return mode == "parallel" and looks_ahead(flat(to_dict(config)), ablate)


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


def protocol_line(
    config: Config,
    split: str,
    unit: str,
    units: int,
    *,
    mode: str = "parallel",
    partial: bool = False,
    ablate: str = "none",
    other_data: str = "",
    released: str = "",
    stamps: Sequence[str] = (),
) -> str:
    """Return what a likelihood means: split, `units` scored, context, and whether selection could see the future.

    `config` has the stride of the windows. `mode` and `ablate` are as options of rtx eval have them. `partial`: of a
    sample of the windows. `other_data`: the name of data that the model was not trained on. `released`: how the
    released code's reading of the text differs, where it was read so. `stamps`: as `stamp_phrases` says them.
    """
    values = flat(to_dict(config))
    place = f"{split} of other data than the run's ({other_data})" if other_data else split
    said = [
        *([f"protocol=released ({released})"] if released else []),
        *stamps,
        *memory_phrases(values),
    ]
    windows = 0 if partial else None
    protocol = Protocol(place, mode, unit, "", "", *spans(values), windows, stamps=tuple(said))
    selection = f"selection={config.routing.selection}" if routes(values) else "no routing heads"
    if ablate != "none":  # what the model was trained with chooses nothing here
        selection = f"ablated ({ABLATED[ablate]}; trained with {selection})"
    selection += f", lsh={config.model.lsh}" if hashes(values) else ""
    return f"{protocol.line(units)}; {selection}: {SIGHT[sees_future(config, mode, ablate)]}"


def comparison(bits: float, unit: str, baselines: Mapping[str, float]) -> str:
    """Return a line with a bar for our bits/unit and for each baseline, the best first."""
    rows = sorted([("this model", bits), *baselines.items()], key=lambda row: row[1])
    lines = []
    for name, value in rows:
        bar = "█" * max(1, round(BAR * value / rows[-1][1]))
        ours = "  <-" if name == "this model" else ""
        lines.append(f"  {name:<{max(len(name) for name, _ in rows)}}  {value:7.4f}  {bar}{ours}")
    return f"bits/{unit}, lower is better:\n" + "\n".join(lines)


def closing_lines(
    run: str, steps: str, final: Mapping[str, Any], protocol: str, further: Sequence[str] = ()
) -> str:
    """Return the summary of a finished run: its steps, closing score (`final` of its status), protocol, more lines."""
    bits, unit, baselines = final["bits"], final["unit"], final.get("baselines")
    width = prose_width() - 1
    place = f"a sample of {final['windows']:,} windows of " if final.get("windows") else ""
    lines = textwrap.wrap(
        f"done after {steps}: {bits:.4f} bits/{unit} on {place}the validation split", width
    )
    lines += [*further, *textwrap.wrap(protocol, width)]
    lines += [comparison(bits, unit, baselines)] if baselines else []
    lines += [
        f"next: rtx eval {run} split=test",
        *([] if "accuracy" in final else [f"      rtx sample {run}"]),
    ]
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
        "versions": cell.environment.get("versions", {}),
    }
    facts |= {"cell": cell, "step": step, "checkpoint": checkpoint["file"], "centroids": centroids}
    return filled("card.md.j2", **facts, data=checkpoint["data"])
