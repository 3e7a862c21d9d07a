"""`rtx analyze WHAT RUN`: what a run's heads read (divergence, patterns), and what far context is worth (context)."""

from __future__ import annotations

import dataclasses
import io
import itertools
import math
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rtx.analysis import attention_weights as weights
from rtx.analysis.loss_by_position import Span, by_context, by_position, unit_bits, whole_windows
from rtx.analysis.output import print_table, save
from rtx.compose import with_values
from rtx.data.catalog import Store
from rtx.data.sets import IMAGE_SETS
from rtx.errors import UserError
from rtx.evaluation.protocols import windows
from rtx.evaluation.scores import sample_windows
from rtx.identity import short_hash
from rtx.options import ContextOptions, DivergenceOptions, PatternsOptions, read_words, what_to_do
from rtx.progress_bar import progress_bar
from rtx.report.summary import WIDTH, protocol_line, sees_future
from rtx.training.inference import LoadedRun, open_run, run_config
from rtx.training.run_folder import utc_now
from rtx.wording import plural

Result = dict[str, Any]
ROWS = 512
"""Positions that a map of a head shows, at the most."""


def main(arguments: list[str]) -> int:
    """Run `rtx analyze WHAT RUN [overrides]`; figures, and a picture, stand in the run's `analysis/`.

    Raises:
        UserError: no such analysis or run, a wrong option, or a run of which there is nothing to say.
        RunFailed: no checkpoint is whole, or the result cannot be written.
    """
    what, rest = what_to_do("analyze", arguments)
    words = read_words(f"analyze {what}", rest)
    folder, options = words.runs[0], words.options
    config = run_config(folder, words.overrides)
    run, store = open_run(folder, config, options.checkpoint)
    result = {"divergence": divergence, "patterns": patterns, "context": context}[what](run, store, options)
    picture = result.pop("picture", None)
    asked = {"analyze": dataclasses.asdict(options), "length": config.data.length, "data": store.fingerprint}
    name = f"{what}-{options.split}-{run.name}-step{run.checkpoint['step']}-{short_hash(asked)}"
    if picture:
        save(folder / "analysis" / f"{name}.png", picture)
    facts = {**asked, "checkpoint": run.facts(), "data": store.describe(), "time": utc_now()}
    save(folder / "analysis" / f"{name}.json", {"what": what, **result, **facts})
    return 0


def divergence(run: LoadedRun, store: Store, options: DivergenceOptions) -> Result:
    """How far apart the heads of a layer read, by layer and as mean over the layers (the paper's Table 6)."""
    if run.config.model.heads < 2:
        raise UserError("model.heads=1: a divergence is between two heads of a layer")
    tokens = store.split(options.split)
    chosen = sample_windows(windows(len(tokens), run.config.data.length), options.sequences, options.seed)
    rows = np.stack([tokens[window.start : window.stop] for window in chosen]).astype(np.int64)
    ids_BN = torch.from_numpy(rows).to(run.device)
    with run.autocast(), progress_bar("layers") as show:
        found = weights.divergences(run.model, ids_BN, draws=options.draws, seed=options.seed, on_progress=show)
    means = weights.over_layers(found)
    print(
        f"Jensen-Shannon divergence on {options.split} of {store.name}, nats (at most {math.log(2):.4f}), "
        f"mean ± deviation of {options.draws} draws"
    )
    table: dict[Any, dict[str, Any]] = {}
    for row in [*found, *({"layer": "mean", **row} for row in means)]:
        kind = " ".join(row["kind"]).replace("routed", "routing")
        table.setdefault(row["layer"], {"layer": row["layer"]})[kind] = "{mean:.4f} ± {deviation:.4f}".format(**row)
    print_table(list(table.values()))
    if (share := float(np.mean([row["share"] for row in found]))) < 1:
        print(f"over the positions where both heads read something, {share:.0%}")
    return {"layers": found, "over_layers": means, "bound": math.log(2)}


def patterns(run: LoadedRun, store: Store, options: PatternsOptions) -> Result:
    """Which positions the heads read in one sequence: a table, and a picture of a map for each of them."""
    model, N = run.config.model, run.config.data.length
    layers = numbers(options.layer, "layer", model.layers) or [model.layers - 1]
    heads = numbers(options.head, "head", model.heads) or list(range(model.heads))
    start, units_N = sequence(run, store, options)
    at_P = torch.from_numpy(np.linspace(0, len(units_N) - 1, min(ROWS, N)).round().astype(np.int64))
    rows, maps = [], []
    with run.autocast(), torch.no_grad(), progress_bar("layers") as show:
        inputs = weights.layer_inputs(run.model, torch.from_numpy(units_N)[None].to(run.device))
        for layer, (attention, x_1NE) in enumerate(inputs):
            show(layer + 1, model.layers)
            head = itertools.count()
            for name, group in weights.groups_of(attention, x_1NE).items() if layer in layers else ():
                weight_HPN = torch.cat([block.cpu() for block in weights.weight_blocks(group, at_P)], dim=-1)
                for number, weight_PN in enumerate(weight_HPN):
                    row = {"layer": layer, "head": next(head), "pattern": name.replace("routed", "routing")}
                    if row["head"] in heads:
                        rows.append({**row, **weights.summary(weight_PN, at_P)})
                        maps.append((row, weight_PN, weights.clusters_of(group, number, at_P)))
    print("means over the positions: keys read, distance by weight, weight on itself")
    print_table(rows)
    return {"start": start, "positions": len(units_N), "heads": rows, "picture": drawn(maps, len(heads))}


def numbers(value: str | None, name: str, count: int) -> list[int]:
    """Return the numbers below `count`, ascending, that a key joins by +; none where it is unset, else `UserError`."""
    parts = [] if value is None else str(value).split("+")
    if not all(part.isdecimal() and int(part) < count for part in parts):
        raise UserError(f"{name}={value}: must be numbers from 0 to {count - 1}, joined by +")
    return sorted({int(part) for part in parts})


def sequence(run: LoadedRun, store: Store, options: PatternsOptions) -> tuple[int, np.ndarray]:
    """Return the unit of the split that the sequence begins with, or the number of the image; and its units `[N]`."""
    tokens, N = store.split(options.split), run.config.data.length
    step = N if run.config.data.name in IMAGE_SETS else 1
    last, start = max(0, len(tokens) - N) // step, options.start
    if start is None:
        start = sample_windows(windows(len(tokens), N), 1, options.seed)[0].start // step
    if start > last:
        raise UserError(f"start={start}: the last sequence of split {options.split} begins with start={last}")
    return start, np.asarray(tokens[start * step : start * step + N]).astype(np.int64)


def drawn(maps: Sequence[tuple[Result, Tensor, Tensor | None]], columns: int) -> bytes:
    """Return a PNG of what heads read, a map for each in the manner of the paper's Figure 1.

    A key has the colour of the cluster in which it is read, the lighter the less weight: each halving takes a
    fifteenth.
    """
    import matplotlib
    from matplotlib.figure import Figure

    N = maps[0][1].shape[1]
    figure = Figure(figsize=(4 * columns, 4 * len(maps) / columns), layout="constrained", dpi=150)
    axes = figure.subplots(len(maps) // columns, columns, squeeze=False, sharex=True, sharey=True).flat
    for axis, (row, weight_PN, cluster_PN) in zip(axes, maps, strict=True):
        width = -(-N // ROWS)  # keys that share a column of the map show the one with most weight
        weight_PX, key_PX = F.max_pool1d(weight_PN.float(), width, ceil_mode=True, return_indices=True)
        hue_PX = torch.full(weight_PX.shape, 0.6) if cluster_PN is None else 0.618 * cluster_PN.gather(1, key_PX) % 1
        colour_PX4 = matplotlib.colormaps["hsv"](hue_PX.numpy())
        colour_PX4[..., 3] = torch.where(weight_PX > 0, (1 + weight_PX.log2() / 15).clamp(0.25, 1), 0.0).numpy()
        axis.imshow(colour_PX4, extent=(0, N, N, 0), interpolation="nearest", aspect="auto")
        axis.set_title("layer {layer} head {head}: {pattern}".format(**row))
    figure.supxlabel("key")
    figure.supylabel("query")
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def context(run: LoadedRun, store: Store, options: ContextOptions) -> Result:
    """Loss by position in the window, and what the same units gain from farther context."""
    config, mode, N = run.config, options.mode, run.config.data.length
    tokens = store.split(options.split)
    every = range(0, len(tokens) - N + 1, N)  # whole windows alone, which score no unit twice
    if config.data.name == "recall" or not every:
        raise UserError(f"split {options.split}: no loss by position of answers (recall), or of fewer than {N:,} units")
    starts_K = sample_windows(every, options.windows, options.seed)

    def score(spans: Sequence[Span]) -> list[np.ndarray]:
        with run.autocast(), progress_bar("spans") as show:
            return unit_bits(run.model, tokens, spans, streaming=mode == "streaming", on_progress=show)

    bits_KN, whole = np.stack(score(whole_windows(starts_K, N))), sees_future(config, mode)
    images = config.data.name in IMAGE_SETS  # a part of an image at another place is no image
    gains = [] if images else by_context(score, starts_K, N, len(tokens), whole)
    positions, partial = by_position(bits_KN, options.bins), bits_KN.size < len(tokens)
    protocol = protocol_line(
        with_values(config, {"trainer.val_stride": None}),
        *(options.split, store.unit, bits_KN.size),
        mode=mode,
        partial=partial,
        other_data="" if run.has_data(store) else store.name,
    )
    print(f"bits/{store.unit} by position, with standard errors over {plural(len(starts_K), 'window')}")
    print_table(positions)
    if gains:
        print(f"\nthe {store.unit}s of the second half with less context, and what the whole window gains")
        print_table(gains)
    print("\n".join(textwrap.wrap(protocol, WIDTH)))
    sampled = {"windows": len(starts_K), "partial": partial, "selection_sees_future": whole, "protocol": protocol}
    return {"unit": store.unit, "positions": positions, "gains": gains, **sampled}
