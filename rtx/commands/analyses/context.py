"""`rtx analyze context`: loss by position, and what units gain from farther context."""

import textwrap
from collections.abc import Sequence

import numpy as np

from rtx.analysis.loss_by_position import by_context, by_position, unit_bits
from rtx.cli.options import ContextOptions
from rtx.commands.analyses.common import Result, whole_windows
from rtx.data.store import Store
from rtx.data.windows import Window, sample_windows
from rtx.errors import plural
from rtx.evaluation.protocol import Reading, protocol_of, sees_future, selection_words
from rtx.progress import progress_bar
from rtx.runs.records import DataRecord
from rtx.settings.data_sets import SETS
from rtx.settings.schema import flat, to_dict, with_values
from rtx.tables import Column, print_table
from rtx.terminal import prose_width
from rtx.training.inference import LoadedRun

MAX_RANGES = 16
"""The most ranges of position over which a loss is averaged."""

POSITIONS = (Column("at", "positions"), Column("bits", "bits", 4, "error"))
GAINS = (
    Column("context", "units before"),
    Column("bits", "bits", 4, "error"),
    Column("gain", "gain of the whole window", 4, "gain_error"),
)


def context(run: LoadedRun, store: Store, options: ContextOptions) -> Result:
    """Compute and print the loss by position, and with ever less context."""
    config = run.config
    tokens = store.split(options.split)
    starts = store.document_starts(options.split, config.data)
    cut = whole_windows(store, options.split, config.data.length)
    chosen = sample_windows(cut, options.windows, options.seed)
    streaming = options.mode == "streaming"

    def score(spans: Sequence[Window]) -> list[np.ndarray]:
        with run.autocast(), progress_bar("spans") as show:
            how = {"streaming": streaming, "starts": starts, "on_progress": show}
            return unit_bits(run.model, tokens, spans, **how)

    bits_KN = np.stack(score(chosen))
    values = flat(to_dict(config))
    is_ahead = sees_future(values, options.mode)
    gains = []
    # A part of an image at another position is no image. A selection that sees the future is
    # another one in a part.
    if not SETS[config.data.name].image and not is_ahead:
        gains = by_context(score, chosen)
    positions = by_position(bits_KN, MAX_RANGES)
    sample = None
    if bits_KN.size < len(tokens):
        sample = len(chosen)
    protocol = protocol_of(
        with_values(config, {"trainer.val_stride": None}),
        DataRecord.model_validate(store.describe()),
        options.split,
        Reading(options.mode),
        sample=sample,
        own_data=run.has_data(store),
    )
    errors = f"with standard errors over {plural(len(chosen), 'window')}"
    print(f"bits/{store.unit} by position, {errors}")
    print_positions(positions)
    print_gains(gains, store.unit)
    line = protocol.line_for_run(bits_KN.size, selection_words(values), is_ahead)
    print(textwrap.fill(line, prose_width()))
    return {
        "unit": store.unit,
        "positions": positions,
        "gains": gains,
        "windows": len(chosen),
        "protocol": protocol,
    }


def print_positions(rows: Sequence[Result]) -> None:
    """Print the bits of each range of position."""
    with_ranges = [{**row, "at": f"{row['first']} to {row['last']}"} for row in rows]
    print_table(with_ranges, POSITIONS)


def print_gains(rows: Sequence[Result], unit: str) -> None:
    """Print the bits with each context, or why there are none."""
    if not rows:
        reasons = "of images, of short windows, and where selection sees the future"
        print(f"no gain from far context: {reasons}")
        return
    half = f"the {unit}s of the second half with less context"
    print(f"\n{half}, and what the whole window gains")
    with_ranges = []
    for row in rows:
        first, last = row["context"]
        with_ranges.append({**row, "context": f"{first} to {last}"})
    print_table(with_ranges, GAINS)
