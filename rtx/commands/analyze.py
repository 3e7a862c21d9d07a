"""`rtx analyze WHAT RUN`: what heads read (divergence, patterns, coverage), and what far context is worth (context)."""

import dataclasses
import io
import itertools
import math
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rtx.analysis import attention_weights as weights
from rtx.analysis import coverage as covered
from rtx.analysis.divergence import divergences, mean_over_layers
from rtx.analysis.loss_by_position import by_context, by_position, estimate, unit_bits
from rtx.cli.help import prose_width
from rtx.cli.options import (
    ContextOptions,
    CoverageOptions,
    DivergenceOptions,
    PatternsOptions,
)
from rtx.cli.request import Request
from rtx.data.datamodule import RtxDataModule
from rtx.data.sets import SETS
from rtx.data.store import Store
from rtx.errors import UserError, plural
from rtx.evaluation.protocol import Reading, protocol_of, sees_future, selection_words
from rtx.evaluation.protocols import Window, windows
from rtx.evaluation.scores import read_windows, sample_windows
from rtx.progress import progress_bar
from rtx.report import plots
from rtx.report.divergences import heads_name
from rtx.report.tables import Column, print_table
from rtx.runs.folder import save
from rtx.runs.records import DataRecord
from rtx.runs.status import utc_now
from rtx.settings.identity import short_hash
from rtx.settings.schema import flat, to_dict, with_values
from rtx.training.inference import LoadedRun, open_run
from rtx.training.loggers import add_to_wandb

Result = dict[str, Any]
HEADS = (
    *(Column("layer", "layer"), Column("head", "head"), Column("pattern", "pattern")),
    Column("reads_share", "reading, %", 0),
    Column("keys", "keys read", 1),
    Column("distance", "distance", 1),
    Column("farthest", "farthest"),
    Column("self_weight", "own weight", 3),
)
"""Of a head: how many positions read anything, how many keys, how far back, the weight on the own position."""
POSITIONS = (Column("at", "positions"), Column("bits", "bits", 4, "error"))
GAINS = (
    Column("context", "units before"),
    Column("bits", "bits", 4, "error"),
    Column("gain", "gain of the whole window", 4, "gain_error"),
)
SHARES = (
    Column("mean", "mean", 3, "error"),
    Column("keys", "keys read", 1),
    Column("of all", "of all weight", 3),
)
ROWS, BINS = (
    512,
    16,
)  # positions that a map of a head shows, and ranges that a loss is averaged over, at the most


def main(request: Request) -> int:
    """Run `rtx analyze WHAT RUN [overrides]`; figures, and a picture, stand in the run's `analysis/`."""
    folder = request.run
    options = request.options
    config = request.config
    run, store = open_run(folder, config, options.checkpoint)
    what = request.command.name.removeprefix("analyze ")
    result = ANALYSES[what](run, store, options)
    picture = result.pop("picture", None)
    asked = {
        "analyze": dataclasses.asdict(options),
        "length": config.data.length,
        "data": store.fingerprint,
    }
    name = f"{what}-{options.split}-{run.checkpoint['file']}-step{run.checkpoint['step']}-{short_hash(asked)}"
    files = [save(folder / "analysis" / f"{name}.png", picture)] if picture else []
    facts = {**asked, "checkpoint": run.facts(), "data": store.describe(), "time": utc_now()}
    files += [save(folder / "analysis" / f"{name}.json", {"what": what, **result, **facts})]
    add_to_wandb(folder, what, {}, files, run.checkpoint["step"])
    return 0


def divergence(run: LoadedRun, store: Store, options: DivergenceOptions) -> Result:
    """How far apart the heads of a layer read, by layer and as mean over the layers (the paper's Table 6)."""
    tokens = store.split(options.split)
    chosen = sample_windows(
        windows(len(tokens), run.config.data.length), options.sequences, options.seed
    )
    ids_BN = read_windows(tokens, chosen)[0].to(run.device)
    with run.autocast(), progress_bar("layers") as show:
        found = divergences(
            run.model, ids_BN, draws=options.draws, seed=options.seed, on_progress=show
        )
    means, what = (
        mean_over_layers(found),
        f"Jensen-Shannon divergence on {options.split} of {store.name}",
    )
    print(f"{what}, nats (at most {math.log(2):.4f}),\nmean ± deviation of {options.draws} draws")
    table: dict[Any, dict[str, Any]] = {}
    for row in [*found, *({"layer": "mean", **row} for row in means)]:
        kind = " ".join(map(heads_name, row["kind"]))
        table.setdefault(row["layer"], {"layer": row["layer"]})[kind] = (
            "{mean:.4f} ± {deviation:.4f}".format(**row)
        )
    kinds = dict.fromkeys(key for row in table.values() for key in row)
    print_table(list(table.values()), [Column(kind, kind) for kind in kinds])
    return {"layers": found, "over_layers": means}


def patterns(run: LoadedRun, store: Store, options: PatternsOptions) -> Result:
    """Which positions the heads of a layer read in one sequence: a table, and a picture with a map for each head."""
    N = run.config.data.length
    layer = run.config.model.layers - 1 if options.layer is None else options.layer
    tokens = store.split(options.split)
    chosen = sample_windows(windows(len(tokens), N), 1, options.seed)
    ids_1N = read_windows(tokens, chosen)[0].to(run.device)
    at_P = torch.linspace(0, ids_1N.shape[1] - 1, min(ROWS, ids_1N.shape[1])).round().long()
    rows, maps = [], []
    with run.autocast(), torch.no_grad():
        attention, x_1NE = next(
            itertools.islice(weights.layer_inputs(run.model, ids_1N), layer, None)
        )
        for name, group in weights.groups_of(attention, x_1NE).items():
            for weight_PN in torch.cat(
                [block.cpu() for block in weights.weight_blocks(group, at_P)], dim=-1
            ):
                row = {"layer": layer, "head": len(rows), "pattern": heads_name(name)}
                rows.append({**row, **weights.summary(weight_PN, at_P)})
                maps.append(weight_PN.float())
    print("means over the positions that read anything; distances weighted by the attention")
    print_table([{**row, "reads_share": 100 * row["reads_share"]} for row in rows], HEADS)
    return {
        "start": chosen[0].start,
        "positions": ids_1N.shape[1],
        "heads": rows,
        "picture": drawn(rows, maps),
    }


def drawn(rows: Sequence[Result], maps: Sequence[Tensor]) -> bytes:
    """Return a PNG of what heads read, a map of queries by keys for each in the manner of the paper's Figure 1."""
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(maps), 4), layout="constrained", dpi=150)
    axes = figure.subplots(1, len(maps), squeeze=False, sharey=True)
    for axis, row, weight_PN in zip(axes.flat, rows, maps, strict=True):
        N = weight_PN.shape[1]  # keys that share a column of the map show the largest weight
        weight_PX = torch.nn.functional.max_pool1d(weight_PN, -(-N // ROWS), ceil_mode=True)
        colours = axis.imshow(
            weight_PX.numpy(), norm=LogNorm(1e-4, 1), cmap="magma_r", extent=(0, N, N, 0)
        )
        axis.set(
            title="layer {layer} head {head}: {pattern}".format(**row), xlabel="key", ylabel="query"
        )
    figure.colorbar(colours, ax=axes, label="weight")
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def context(run: LoadedRun, store: Store, options: ContextOptions) -> Result:
    """Loss by position in the window, and what the same units gain from farther context."""
    config, mode, N = run.config, options.mode, run.config.data.length
    tokens = store.split(options.split)
    every = windows(len(tokens), N)[
        : max(1, len(tokens) // N)
    ]  # without the last, that scores a part of its units
    chosen = sample_windows(every, options.windows, options.seed)

    def score(spans: Sequence[Window]) -> list[np.ndarray]:
        with run.autocast(), progress_bar("spans") as show:
            return unit_bits(
                run.model, tokens, spans, streaming=mode == "streaming", on_progress=show
            )

    bits_KN = np.stack(score(chosen))
    # A part of an image at another place is no image; a choice that sees the future is another one in a part.
    values = flat(to_dict(config))
    looks_on = sees_future(values, mode)
    apart = not SETS[config.data.name].image and not looks_on
    gains = by_context(score, chosen) if apart else []
    positions, partial = by_position(bits_KN, BINS), bits_KN.size < len(tokens)
    protocol = protocol_of(
        with_values(config, {"trainer.val_stride": None}),
        DataRecord.model_validate(store.describe()),
        options.split,
        Reading(mode),
        sample=len(chosen) if partial else None,
        own_data=run.has_data(store),
    )
    line = protocol.line_for_run(bits_KN.size, selection_words(values), looks_on)
    print(
        f"bits/{store.unit} by position, with standard errors over {plural(len(chosen), 'window')}"
    )
    print_table([{"at": f"{row['first']} to {row['last']}", **row} for row in positions], POSITIONS)
    if gains:
        print(
            f"\nthe {store.unit}s of the second half with less context, and what the whole window gains"
        )
        print_table(
            [{**row, "context": "{} to {}".format(*row["context"])} for row in gains], GAINS
        )
    else:
        print(
            "no gain from far context: of images, of short windows, and where selection sees the future"
        )
    print(textwrap.fill(line, prose_width()))
    sampled = {"windows": len(chosen), "protocol": protocol.to_json()}
    return {"unit": store.unit, "positions": positions, "gains": gains, **sampled}


def coverage(run: LoadedRun, store: Store, options: CoverageOptions) -> Result:
    """What share of full heads' weight beyond a local window each selection keeps at equal keys."""
    config = with_values(run.config, {"seed": options.seed, "trainer.steps": options.steps})
    tokens, N, model = store.split(options.split), config.data.length, config.model
    chosen = sample_windows(
        windows(len(tokens), N)[: max(1, len(tokens) // N)], options.windows, options.seed
    )
    ids_KN, window = (
        read_windows(tokens, chosen)[0],
        model.window if options.window is None else options.window,
    )
    if window >= ids_KN.shape[1]:
        units = f"the {ids_KN.shape[1]} units of split {options.split}"
        raise UserError(
            f"window={window}: must be less than {units}; give window=<less>, or window=0"
        )
    keys, block = options.keys or config.routing.window, options.block or config.routing.block
    sizes = sorted({min(N, max(1, keys << double >> 2)) for double in range(5)})
    every = [covered.selections(config, layer, sizes, block) for layer in range(model.layers)]
    layers = [f"layer {layer}" for layer, patterns in enumerate(every) if len(patterns)]
    made, found = torch.nn.ModuleList(every).to(run.device), []
    for ids_BN in RtxDataModule(config, store).train_dataloader():
        covered.fit(config, run.model, made, ids_BN.long().to(run.device))
    with progress_bar("windows") as show:
        for ids_1N in ids_KN.to(run.device).split(1):
            found.append(covered.measure(config, run.model, made, ids_1N, window))
            show(len(found), len(chosen))
    found_SLKZ3 = np.reshape(found, (len(found), len(layers), -1, len(sizes), 3)).transpose(
        2, 1, 0, 3, 4
    )
    far_LK, rows = found_SLKZ3[0, :, :, 0, 0], coverage_rows(found_SLKZ3, layers, keys)
    beyond = dict(
        zip(("mean", "error", *layers), (*estimate(far_LK.mean(0)), *far_LK.mean(1)), strict=True)
    )
    by_layer = [Column(layer, layer, 3) for layer in layers]
    print(f"share of full heads' weight that lies {window} or more positions back")
    print_table(
        [{"what": "beyond the window", **beyond}], [Column("what", ""), *SHARES[:1], *by_layer]
    )
    print(
        f"\nshare of that kept with {keys} keys a query, standard errors over {plural(len(chosen), 'window')}"
    )
    kept = [{**row, "mean": row["share"]} for row in rows]
    print_table(kept, [Column("selection", "selection"), *SHARES, *by_layer])
    return {
        "window": window,
        "keys": keys,
        "block": block,
        "beyond": beyond,
        "rows": rows,
        "picture": curves(rows),
    }


def coverage_rows(found_SLKZ3: np.ndarray, layers: list[str], keys: int) -> list[Result]:
    """Return what each selection keeps with so many keys, by layers and at all its sizes; the most first."""
    rows = []
    for name, found_LKZ3 in zip(covered.NAMES, found_SLKZ3, strict=True):
        mean_KZ3, every = found_LKZ3.mean(0), (keys, *found_LKZ3[..., 2].mean((0, 1)))
        first, *curve = [covered.at_keys(mean_KZ3, each) for each in every]
        shares = {
            layer: covered.at_keys(of, keys)["share"]
            for layer, of in zip(layers, found_LKZ3, strict=True)
        }
        rows.append(
            {
                "selection": name + " (sees the future)" * (name == "topk"),
                **first,
                **shares,
                "curve": curve,
            }
        )
    return sorted(rows, key=lambda row: -row["share"])


def curves(rows: Sequence[Result]) -> bytes:
    """Return a PNG of the share that each selection keeps by the keys that a query reads."""
    figure, (axis,) = plots.axes("keys of a query (mean)", "share kept")
    for row in rows:
        x, y, error = zip(
            *((at["keys"], at["share"], at["error"] or 0) for at in row["curve"]), strict=True
        )
        axis.errorbar(x, y, error, marker=".", label=row["selection"])
    axis.set(xscale="log", ylim=(0, 1.02))
    axis.legend(fontsize="small")
    return plots.finished("coverage", "", figure).png


ANALYSES = {
    "divergence": divergence,
    "patterns": patterns,
    "context": context,
    "coverage": coverage,
}
"""What each analysis computes and prints, by its word on the command line."""
