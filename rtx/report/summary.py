"""The closing lines of a run: our bits beside those of plain compressors, and what exactly was measured."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from rtx.config import Config, base_patterns

BAR = 24
"""Characters of the longest bar."""

WIDTH = 79
"""Columns of a narrow terminal."""


ABLATED = {
    "none": "",
    "routing": "outputs of the routing heads set to zero",
    "local": "routing heads read the last W positions",
    "random": "routing heads read random members",
}
"""What eval.ablate does to a model, in words."""


def sees_future(config: Config, mode: str, ablate: str = "none") -> bool:
    """Tell whether the score of some unit may depend on later units: top-w selection or published LSH in one pass."""
    routes = config.routing.heads > 0 and config.routing.layers > 0 and ablate == "none"
    looks_ahead = (routes and config.routing.selection == "topk") or (hashes(config) and config.model.lsh == "reformer")
    return looks_ahead and mode == "parallel"


def hashes(config: Config) -> bool:
    """Tell whether some heads read by hashing."""
    all_route = config.routing.heads == config.model.heads and config.routing.layers == config.model.layers
    return "lsh" in base_patterns(config.model) and not all_route


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
    """Return what a likelihood means: split, units scored, context, and whether selection could see the future.

    Args:
        config: the run's configuration; its `trainer.val_stride` counts.
        split: train, valid or test.
        unit: what one token is, such as "byte".
        units: how many were scored, each once.
        mode: parallel (teacher-forced) or streaming.
        partial: only a sample of the windows was scored.
        ablate: what was done to the routing heads, as eval.ablate.
        other_data: the name of the data, where the model was not trained on their training split.
        released: how the released code's reading of the text differs, where it was read so; empty: whole.
        stamps: what else makes the number another than the published ones, as `stamp_phrases` says it.
    """
    length, stride = config.data.length, config.trainer.val_stride or config.data.length
    how = "streaming" if mode == "streaming" else "teacher-forced"
    routes = config.routing.heads > 0 and config.routing.layers > 0
    selection = f"selection={config.routing.selection}" if routes else "no routing heads"
    if ablate != "none":  # what the model was trained with chooses nothing here
        selection = f"ablated ({ABLATED[ablate]}; trained with {selection})"
    selection += f", lsh={config.model.lsh}" if hashes(config) else ""
    sight = "selection sees the future" if sees_future(config, mode, ablate) else "sees no future"
    scored = f"{units:,} {unit}s each scored once" + (" (a sample of the windows)" if partial else "")
    scored += f", protocol=released ({released})" if released else ""
    scored += "".join(f", {stamp}" for stamp in stamps)
    place = f"{split} of other data than the run's ({other_data})" if other_data else split
    return f"bits/{unit} on {place}, {scored}, windows of {length:,}, stride {stride:,}, {how}; {selection}: {sight}"


def comparison(bits: float, unit: str, baselines: Mapping[str, float]) -> str:
    """Return a line with a bar for our bits/unit and for each baseline, the best first."""
    rows = sorted([("this model", bits), *baselines.items()], key=lambda row: row[1])
    widest = max(len(name) for name, _ in rows)
    longest = max(value for _, value in rows)
    lines = []
    for name, value in rows:
        bar = "█" * max(1, round(BAR * value / longest))
        ours = "  <-" if name == "this model" else ""
        lines.append(f"  {name:<{widest}}  {value:7.4f}  {bar}{ours}")
    return f"bits/{unit}, lower is better:\n" + "\n".join(lines)


def closing_lines(
    *,
    run: str,
    step: int,
    time_up: bool,
    bits: float,
    unit: str,
    protocol: str,
    baselines: Mapping[str, float],
    answers: str = "",
    further: Sequence[str] = (),
) -> str:
    """Return the summary of a finished run, to be printed.

    Args:
        run: the run folder, as the user would type it.
        step: optimizer steps taken.
        time_up: whether `trainer.max_minutes` ended it.
        bits: bits/unit on the whole validation split.
        unit: what one token is.
        protocol: from `protocol_line`.
        baselines: bits/unit of other models on the same split; may be empty.
        further: the score in other measures, a line each.
        answers: from `answers_line` where answers alone were scored, of a model that has no text to write.
    """
    why = " (trainer.max_minutes is up)" if time_up else ""
    return "\n".join(
        [
            *textwrap.wrap(f"done after {step:,} steps{why}: {bits:.4f} bits/{unit} on the validation split", WIDTH),
            *([answers] if answers else []),
            *further,
            *textwrap.wrap(protocol, WIDTH),
            *([comparison(bits, unit, baselines)] if baselines else []),
            f"next: rtx eval {run} split=test",
            *([] if answers else [f"      rtx sample {run}"]),
        ]
    )


def answers_line(accuracy: float, chance: float) -> str:
    """Return the share of right answers beside that of a guess."""
    return f"{accuracy:.2%} of the answers right (chance {chance:.2%})"
