"""`rtx analyze divergence`: how far apart the heads of a layer read (the paper's Table 6)."""

import math
from collections.abc import Sequence

from rtx.analysis.divergence import divergences, mean_over_layers
from rtx.cli.options import DivergenceOptions
from rtx.commands.analyses.common import Result, sampled_windows
from rtx.data.store import Store
from rtx.data.windows import read_windows
from rtx.progress import progress_bar
from rtx.report.divergences import heads_name
from rtx.tables import Column, print_table
from rtx.training.inference import LoadedRun


def divergence(run: LoadedRun, store: Store, options: DivergenceOptions) -> Result:
    """Compute and print divergences by layer, and as a mean over the layers."""
    data = run.config.data
    chosen = sampled_windows(store, options.split, data, options.sequences, options.seed)
    tokens_BN, _ = read_windows(store.split(options.split), chosen)
    with run.autocast(), progress_bar("layers") as show:
        rows = divergences(
            run.model,
            tokens_BN.to(run.device),
            draws=options.draws,
            seed=options.seed,
            on_progress=show,
        )
    means = mean_over_layers(rows)
    print(f"Jensen-Shannon divergence on {options.split} of {store.name}, ", end="")
    print(f"nats (at most {math.log(2):.4f}),")
    print(f"mean ± deviation of {options.draws} draws")
    print_divergences([*rows, *({"layer": "mean", **row} for row in means)])
    return {"layers": rows, "over_layers": means}


def print_divergences(rows: Sequence[Result]) -> None:
    """Print a table with a row for each layer and a column for each kind of pair."""
    by_layer: dict[int | str, Result] = {}
    for row in rows:
        kind = " ".join(heads_name(group) for group in row["kind"])
        table_row = by_layer.setdefault(row["layer"], {"layer": row["layer"]})
        table_row[kind] = f"{row['mean']:.4f} ± {row['deviation']:.4f}"
    columns: dict[str, Column] = {}
    for table_row in by_layer.values():
        for key in table_row:
            columns.setdefault(key, Column(key, key))
    print_table(list(by_layer.values()), list(columns.values()))
