"""`rtx analyze patterns`: which positions the heads of a layer read in one sequence."""

import io
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from rtx.analysis.attention_weights import groups_of, layer_inputs, summary, weight_blocks
from rtx.cli.options import PatternsOptions
from rtx.commands.analyses.common import Result, sampled_windows
from rtx.data.store import Store
from rtx.data.windows import read_windows
from rtx.model.transformer import Transformer
from rtx.report.divergences import heads_name
from rtx.tables import Column, print_table
from rtx.training.inference import LoadedRun

MAX_ROWS = 512
"""The most positions, and columns of keys, that the map of a head shows."""

COLUMNS = (
    Column("layer", "layer"),
    Column("head", "head"),
    Column("pattern", "pattern"),
    Column("reads_share", "reading, %", 0),
    Column("keys", "keys read", 1),
    Column("distance", "distance", 1),
    Column("farthest", "farthest"),
    Column("self_weight", "own weight", 3),
)
"""Of each head: how many positions read anything, how many keys and how far back, and the weight of
a position on itself."""


def patterns(run: LoadedRun, store: Store, options: PatternsOptions) -> Result:
    """Compute what each head of a layer reads, print a table, and draw a map for each head."""
    layer = options.layer
    if layer is None:
        layer = run.config.model.layers - 1
    chosen = sampled_windows(store, options.split, run.config.data, 1, options.seed)
    tokens_1N, _ = read_windows(store.split(options.split), chosen)
    N = tokens_1N.shape[1]
    position_P = torch.linspace(0, N - 1, min(MAX_ROWS, N)).round().long()
    rows = []
    maps = []
    with run.autocast(), torch.no_grad():
        weights = weights_of_layer(run.model, tokens_1N.to(run.device), layer, position_P)
    for head, (name, weight_PN) in enumerate(weights):
        row = {"layer": layer, "head": head, "pattern": heads_name(name)}
        rows.append({**row, **summary(weight_PN, position_P)})
        maps.append(weight_PN.float())
    print("means over the positions that read anything; distances weighted by the attention")
    in_percent = [{**row, "reads_share": 100 * row["reads_share"]} for row in rows]
    print_table(in_percent, COLUMNS)
    return {
        "start": chosen[0].start,
        "units": N,
        "heads": rows,
        "picture": draw_maps(rows, maps),
    }


def weights_of_layer(
    model: Transformer,
    tokens_1N: Tensor,
    layer: int,
    position_P: Tensor,
) -> list[tuple[str, Tensor]]:
    """Return the group and the weights `[P, N]`, on the CPU, of each head of a layer."""
    inputs = layer_inputs(model, tokens_1N)
    attention, x_1NE = next(itertools.islice(inputs, layer, None))
    weights = []
    for name, heads in groups_of(attention, x_1NE).items():
        blocks = [block_HPK.cpu() for block_HPK in weight_blocks(heads, position_P)]
        for weight_PN in torch.cat(blocks, dim=-1):
            weights.append((name, weight_PN))
    return weights


def draw_maps(rows: Sequence[Result], maps: Sequence[Tensor]) -> bytes:
    """Return a PNG with a map of queries by keys for each head, like the paper's Figure 1."""
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(maps), 4), layout="constrained", dpi=150)
    axes = figure.subplots(1, len(maps), squeeze=False, sharey=True)
    for axis, row, weight_PN in zip(axes.flat, rows, maps, strict=True):
        N = weight_PN.shape[1]
        # A column of the map shows the largest weight of its keys.
        keys_of_column = -(-N // MAX_ROWS)
        weight_PX = torch.nn.functional.max_pool1d(weight_PN, keys_of_column, ceil_mode=True)
        axis.imshow(
            weight_PX.numpy(),
            norm=LogNorm(1e-4, 1),
            cmap="magma_r",
            extent=(0, N, N, 0),
        )
        title = f"layer {row['layer']} head {row['head']}: {row['pattern']}"
        axis.set(title=title, xlabel="key", ylabel="query")
    (first_image,) = axes.flat[0].images
    figure.colorbar(first_image, ax=axes, label="weight")
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()
