"""`rtx analyze coverage`: the share of full heads' weight that each selection retains.

Only weight beyond a local window counts, and selections are compared at equal keys.

Shapes: K windows, N positions, S selections, Z sizes, L layers with full heads; the last dimension
of 3 is `rtx.analysis.coverage.Retained`.
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor, nn

from rtx.analysis.coverage import NAMES, at_keys, fit, measure, selections
from rtx.analysis.loss_by_position import estimate
from rtx.cli.options import CoverageOptions
from rtx.commands.analyses.common import Result, whole_windows
from rtx.data.batches import training_batches, training_sampler
from rtx.data.store import Store
from rtx.data.windows import read_windows, sample_windows
from rtx.errors import UserError, plural
from rtx.progress import progress_bar
from rtx.report.drawing import axes, plot_of
from rtx.settings.derived import full_group
from rtx.settings.schema import Config, with_values
from rtx.tables import Column, print_table
from rtx.training.inference import LoadedRun

MEAN = Column("mean", "mean", 3, "error")
KEYS = Column("keys", "keys read", 1)
OF_ALL = Column("of all", "of all weight", 3)


def coverage(run: LoadedRun, store: Store, options: CoverageOptions) -> Result:
    """Fit the clusters of selections, measure what they retain, and print it."""
    config = with_values(run.config, {"seed": options.seed, "trainer.steps": options.steps})
    tokens_KN = tokens_of_sample(store, options, config.data.length)
    window = options.window
    if window is None:
        window = config.model.window
    check_window(window, tokens_KN.shape[1], options.split)
    keys = options.keys or config.routing.window
    block = options.block or config.routing.block
    sizes = sizes_around(keys, config.data.length)
    patterns = patterns_of_layers(config, sizes, block).to(run.device)
    layers = full_layers(config)
    fit_to_training(run, store, config, patterns)
    retained = measure_windows(run, config, patterns, tokens_KN, window)
    shape = (len(tokens_KN), len(layers), len(NAMES), len(sizes), 3)
    retained_SLKZ3 = np.reshape(retained, shape).transpose(2, 1, 0, 3, 4)
    result = {
        "window": window,
        "keys": keys,
        "block": block,
        "beyond": weight_beyond(retained_SLKZ3[0, :, :, 0, 0], layers),
        "rows": rows_of_selections(retained_SLKZ3, layers, keys),
    }
    print_coverage(result, layers, len(tokens_KN))
    return {**result, "picture": draw_curves(result["rows"])}


def tokens_of_sample(store: Store, options: CoverageOptions, length: int) -> Tensor:
    """Return the windows that are measured, `[K, N]`."""
    cut = whole_windows(store, options.split, length)
    chosen = sample_windows(cut, options.windows, options.seed)
    tokens_KN, _ = read_windows(store.split(options.split), chosen)
    return tokens_KN


def patterns_of_layers(config: Config, sizes: list[int], block: int) -> nn.ModuleList:
    """Return the selections of every layer, none for a layer without full heads."""
    patterns = nn.ModuleList()
    for layer in range(config.model.layers):
        patterns.append(selections(config, layer, sizes, block))
    return patterns


def full_layers(config: Config) -> list[str]:
    """Return the titles of the layers with full heads."""
    titles = []
    for layer in range(config.model.layers):
        _, heads = full_group(config, layer)
        if heads:
            titles.append(f"layer {layer}")
    return titles


def print_coverage(result: Result, layers: list[str], windows: int) -> None:
    """Print the weight beyond the window, and the share of it that each selection retains."""
    columns_of_layers = [Column(layer, layer, 3) for layer in layers]
    print(f"share of full heads' weight that lies {result['window']} or more positions back")
    beyond = {"what": "beyond the window", **result["beyond"]}
    print_table([beyond], [Column("what", ""), MEAN, *columns_of_layers])
    errors = f"standard errors over {plural(windows, 'window')}"
    print(f"\nshare of that kept with {result['keys']} keys a query, {errors}")
    rows = [{**row, "mean": row["share"]} for row in result["rows"]]
    columns = [Column("selection", "selection"), MEAN, KEYS, OF_ALL, *columns_of_layers]
    print_table(rows, columns)


def check_window(window: int, length: int, split: str) -> None:
    """Raise UserError if no key of a window of the split is beyond the local window."""
    if window >= length:
        units = f"the {length} units of split {split}"
        instead = "give window=<less>, or window=0"
        raise UserError(f"window={window}: must be less than {units}; {instead}")


def sizes_around(keys: int, length: int) -> list[int]:
    """Return the numbers of keys that are measured: a quarter of `keys` to four times as many."""
    sizes = {keys // 4, keys // 2, keys, 2 * keys, 4 * keys}
    return sorted({min(length, max(1, size)) for size in sizes})


def fit_to_training(run: LoadedRun, store: Store, config: Config, patterns: nn.ModuleList) -> None:
    """Fit centroids and thresholds of the patterns to training batches; the model stays."""
    sampler = training_sampler(config, store)
    for tokens_BN in training_batches(sampler, 0, config.trainer.steps):
        fit(config, run.model, patterns, tokens_BN.long().to(run.device))


def measure_windows(
    run: LoadedRun,
    config: Config,
    patterns: nn.ModuleList,
    tokens_KN: Tensor,
    window: int,
) -> list[list[list[tuple[float, float, float]]]]:
    """Return what the patterns retain in each window, `[K, L, S * Z, 3]`."""
    retained = []
    with progress_bar("windows") as show:
        for tokens_1N in tokens_KN.to(run.device).split(1):
            retained.append(measure(config, run.model, patterns, tokens_1N, window))
            show(len(retained), len(tokens_KN))
    return retained


def weight_beyond(weight_LK: np.ndarray, layers: list[str]) -> Result:
    """Return the weight beyond the window: its mean, standard error, and mean in each layer."""
    mean, error = estimate(weight_LK.mean(0))
    beyond: Result = {"mean": mean, "error": error}
    for layer, weight_K in zip(layers, weight_LK, strict=True):
        beyond[layer] = weight_K.mean()
    return beyond


def rows_of_selections(retained_SLKZ3: np.ndarray, layers: list[str], keys: int) -> list[Result]:
    """Return what each selection retains at `keys` keys, by layers and at all sizes.

    The selection that retains most comes first.
    """
    rows = []
    for name, retained_LKZ3 in zip(NAMES, retained_SLKZ3, strict=True):
        mean_KZ3 = retained_LKZ3.mean(0)
        row: Result = {"selection": name, **at_keys(mean_KZ3, keys)}
        if name == "topk":
            row["selection"] = "topk (sees the future)"
        for layer, retained_KZ3 in zip(layers, retained_LKZ3, strict=True):
            row[layer] = at_keys(retained_KZ3, keys)["share"]
        keys_Z = retained_LKZ3[..., 2].mean((0, 1))
        row["curve"] = [at_keys(mean_KZ3, keys_of_size) for keys_of_size in keys_Z]
        rows.append(row)
    return sorted(rows, key=lambda row: -row["share"])


def draw_curves(rows: Sequence[Result]) -> bytes:
    """Return a PNG of the share that each selection retains over the keys that a query reads."""
    figure, (axis,) = axes("keys of a query (mean)", "share kept")
    for row in rows:
        keys = [point["keys"] for point in row["curve"]]
        share = [point["share"] for point in row["curve"]]
        error = [point["error"] or 0 for point in row["curve"]]
        axis.errorbar(keys, share, error, marker=".", label=row["selection"])
    axis.set(xscale="log", ylim=(0, 1.02))
    axis.legend(fontsize="small")
    return plot_of("coverage", "", figure).png
