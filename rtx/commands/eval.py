"""`rtx eval RUN [overrides]`: score a run on a split, every unit exactly once, and say by which protocol."""

import math
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

from rtx.cli.help import terminal_width
from rtx.cli.options import EvalOptions
from rtx.cli.request import Request
from rtx.data.store import Store
from rtx.errors import printable
from rtx.evaluation import protocols
from rtx.evaluation.scores import Score
from rtx.model.ablation import ablate
from rtx.progress import clock, say
from rtx.report.summary import protocol_line, sees_future
from rtx.runs.folder import is_export, save, shown
from rtx.runs.status import read_status, run_state, utc_now
from rtx.settings.identity import short_hash
from rtx.settings.schema import flat, to_dict
from rtx.training.inference import LoadedRun, open_run, score_split, with_stride
from rtx.training.loggers import add_to_wandb


def main(request: Request) -> int:
    folder, options, began = request.run, request.options, time.monotonic()
    config = request.config
    if "stride" in request.named or config.model.memory:
        config = with_stride(config, options.stride)
    if note := note_on_end(folder):
        say(note)
    run, store = open_run(folder, config, options.checkpoint)
    ablate(run.model, config, options.ablate)
    tokens, habits = store.split(options.split), ""
    if options.protocol == "released":
        tokens, habits = protocols.read_as_released(store, options.split, config.data.length)
    how: dict[str, Any] = {
        "batch_size": options.batch_size,
        "streaming": options.mode == "streaming",
    }
    score, every = score_split(run, store, options.split, tokens, options.limit, **how)
    partial = len(score.units_K) < every
    units = store.scored_tokens(tokens)
    assert partial or score.units == units, f"scored {score.units} units of a split of {units}"
    counts = {"windows": len(score.units_K), "split_units": units}
    result = described(run, store, score, options, habits, partial) | counts
    if store.unit == "byte" and not partial and not habits and options.split != "train":
        result["baselines"] = protocols.baselines(tokens)
    keep(folder, result | {"seconds": time.monotonic() - began, "time": utc_now()})
    return 0


def note_on_end(folder: Path) -> str:
    """Return a line on a run that has not come to its end, or nothing."""
    status, state = read_status(folder) or {}, run_state(folder)
    if is_export(folder) or state in ("done", "unknown"):
        return ""
    steps = f" of {status['steps']:,}" if status.get("steps") else ""
    at = f"at step {status['step']:,}{steps}"
    if state == "running":
        return f"note: the run is still running, {at}"
    return f"note: the run is not done: {state} {at}; rtx resume {shown(folder)} goes on"


def described(
    run: LoadedRun, store: Store, score: Score, options: EvalOptions, habits: str, partial: bool
) -> dict[str, Any]:
    """Return a score and all that it means: which weights, on what data, read how, in what arithmetic."""
    config, split, own = run.config, options.split, run.has_data(store)
    reads, stride = protocols.spans(values := flat(to_dict(config)))
    how = {"mode": options.mode, "ablate": options.ablate}
    stamps, other = protocols.stamp_phrases(store.stamps, split), "" if own else store.name
    read = {"partial": partial, "other_data": other, "released": habits, "stamps": stamps}
    return {
        **protocols.measures(store, split, score, partial=partial, released=bool(habits)),
        "nats": score.nats,
        "units": score.units,
        "standard_error": score.standard_error if math.isfinite(score.standard_error) else None,
        **how,
        "split": split,
        "read_as": options.protocol,
        "length": reads,
        "stride": stride,
        "memory": protocols.memory_phrases(values),
        "partial": partial,
        "seed": config.seed if partial else None,
        "selection_sees_future": sees_future(config, options.mode, options.ablate),
        "protocol": protocol_line(config, split, store.unit, score.units, **how, **read),
        "checkpoint": run.facts(),
        "data": store.describe(),
        "own_data": own,
        "precision": run.precision,
    }


def keep(folder: Path, result: dict[str, Any]) -> None:
    """Print a result with its protocol, and write it to a file of its own, beside those of other protocols."""
    unit, error, checkpoint = result["data"]["unit"], result["standard_error"], result["checkpoint"]
    spread = f" (standard error {error:.5f} over windows)" if error is not None else ""
    share = (
        f"a sample: {result['units']:,} of" if result["partial"] else f"all {result['units']:,} of"
    )
    lines = [
        f"{result[f'bits_per_{unit}']:.5f} bits/{unit}{spread}",
        *protocols.further_lines(unit, result),
    ]
    lines += [
        f"{share} the split's {result['split_units']:,} {unit}s scored, in {clock(result['seconds'])}"
    ]
    width = terminal_width() if sys.stdout.isatty() else 10_000
    print(printable("\n".join([*lines, *textwrap.wrap(result["protocol"], width)])))
    sample = f"{result['windows']}windows" + (f"-seed{result['seed']}" if result["partial"] else "")
    parts = [
        result["split"],
        result["mode"],
        f"N{result['length']}",
        f"stride{result['stride']}",
        sample,
    ]
    parts += [f"memory_{short_hash({'': result['memory']})}"] if result["memory"] else []
    parts += [
        result["precision"],
        result["read_as"],
        f"ablate_{result['ablate']}",
        result["data"]["fingerprint"][:8],
    ]
    name = "-".join([*parts, checkpoint["name"], f"step{checkpoint['step']}"])
    path = save(folder / "eval" / f"{name}.json", result)
    place = f"{result['split']}/{result['mode']}" + f"/ablate_{result['ablate']}" * (
        result["ablate"] != "none"
    )
    measured = [
        key
        for key in result
        if key.startswith(("bits_", "accuracy", "perplexity", "standard_error"))
    ]
    add_to_wandb(
        folder,
        "eval",
        {f"{place}/{key}": result[key] for key in measured},
        [path],
        checkpoint["step"],
    )
