"""The card of an exported model: what it is, what it scored by which protocol, and how to load it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rtx.report.run_records import Cell
from rtx.report.score_rows import scores_of

SIZES = ("model.layers", "model.heads", "model.hidden", "model.base", "model.window", "data.length")
ROUTING = ("routing.selection", "routing.heads", "routing.layers", "routing.clusters", "routing.window")


def card(cell: Cell, step: int, checkpoint: str, numbers: int) -> str:
    """Return the card as Markdown.

    Args:
        cell: the run as its records tell it.
        step: optimizer steps behind these weights.
        checkpoint: which of the run's checkpoints they are.
        numbers: how many numbers weights and buffers are.
    """
    config, data = cell.config, cell.data
    routes = bool(config.get("routing.heads")) and bool(config.get("routing.layers"))
    shape = [f"`{key}={config.get(key)}`" for key in (*SIZES, *(ROUTING if routes else ()))]
    lines = [
        f"# {config.get('name')}: {config.get('model.name')}",
        "",
        f"A Routing Transformer trained with `rtx` on {data.get('name', config.get('data.name'))} for {step:,} steps "
        f"(its {checkpoint} checkpoint; {numbers:,} numbers).",
        f"{', '.join(shape)}; all other settings are in `config.yaml`.",
        "",
        "## Scores",
        "",
        *scores(cell, step),
        "",
        "## Use",
        "",
        "```",
        "rtx eval <this folder> split=test",
        "rtx sample <this folder>",
        "```",
        "",
        "```python",
        "import rtx",
        "",
        'model = rtx.load("<this folder>").model  # model.loss(tokens_BN)[0]: nats of each unit',
        "```",
        "",
        "## Origin",
        "",
        f"- Data fingerprint: {data.get('fingerprint', 'unknown')}",
        f"- Versions: {', '.join(f'{name} {number}' for name, number in versions(cell).items()) or 'unknown'}",
        *command(cell),
    ]
    return "\n".join(lines) + "\n"


def scores(cell: Cell, step: int) -> list[str]:
    """Return a line for each score of the weights of a step, with its protocol; the closing one is of the last step."""
    evals = [record for record in cell.evals if step_of(record) == step]
    found = scores_of(replace(cell, evals=tuple(evals), final=cell.final if step == cell.step else None))
    if not found:
        return ["None yet."]
    return [
        f"- **{score.bits:.4f} bits/{score.protocol.unit}** over {score.units:,} units: {score.protocol.line()}; "
        + ("selection sees the future" if score.sees_future else "sees no future")
        for score in found
    ]


def step_of(record: Mapping[str, Any]) -> Any:
    """Return the step of the weights that an evaluation scored, None where it does not say."""
    checkpoint = record.get("checkpoint")
    return checkpoint.get("step") if isinstance(checkpoint, Mapping) else None


def versions(cell: Cell) -> dict[str, str]:
    """Return the versions that the run recorded."""
    found = cell.environment.get("versions")
    return dict(found) if isinstance(found, dict) else {}


def command(cell: Cell) -> list[str]:
    """Return the line with the command of the run, if it recorded one."""
    words = shlex.split(str(cell.environment.get("command") or ""))
    return [f"- Command: `{shlex.join(['rtx', *words[1:]])}`"] if words else []
