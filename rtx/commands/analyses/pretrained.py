"""`rtx analyze pretrained`: the loss and the attention that selections cost a pretrained model.

`rtx.analysis.pretrained` says what is measured.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rtx.analysis.pretrained.compare import Compared
from rtx.analysis.pretrained.cost import cost_before_loading, line_on_cost
from rtx.analysis.pretrained.measure import mean_bytes, measure
from rtx.analysis.pretrained.rows import dense_row, selection_rows, weight_row
from rtx.analysis.pretrained.texts import (
    WindowSize,
    measured_windows,
    windows_of_file,
    windows_of_first_half,
)
from rtx.cli.options import PretrainedOptions
from rtx.cli.request import Request
from rtx.commands.analyses.pretrained_choices import choices_of
from rtx.data.catalog import data_root, open_data
from rtx.data.store import Store
from rtx.disk import make_folder
from rtx.errors import UserError, plural
from rtx.hf.choice import Choice
from rtx.hf.loading import Origin, load_model, load_tokenizer, origin_of
from rtx.progress import clock, say
from rtx.report.pretrained_comparisons import comparisons
from rtx.report.pretrained_plots import lines_of, loss_plot
from rtx.runs.folder import outputs_root, save, shown, unwritable
from rtx.runs.pretrained_record import PRETRAINED, PretrainedRecord
from rtx.runs.records import DataRecord
from rtx.runs.status import utc_now
from rtx.settings.identity import short_hash
from rtx.settings.requirements import precision_on
from rtx.tables import Column, print_table
from rtx.training.inference import prepare_device
from rtx.training.precision import WEIGHT_TYPES

COLUMNS = (
    Column("label", "further keys"),
    Column("k", "k"),
    Column("above", "bits above dense", 4, "error"),
    Column("late", "second half", 4, "late_error"),
    Column("kept", "far weight kept", 3, "kept_error"),
    Column("keys", "keys read", 1),
    Column("pairs", "pairs scored", 0),
)


@dataclasses.dataclass(frozen=True)
class Windows:
    """The windows of text of an analysis, `[B, N]`, on the device of the model."""

    measured_BN: Tensor
    """The windows that are scored."""
    fitted_BN: Tensor | None
    """The windows to which centroids are fitted; None: no choice has centroids."""


def main(request: Request) -> int:
    """Run the analysis, print its table, and write its record and its plot."""
    options: PretrainedOptions = request.options
    choices = choices_of(options)
    device = prepare_device(request.config)
    origin = origin_of(options.model)
    folder = result_folder(origin)
    cost = cost_before_loading(origin, device, options.length, options.fit_windows, choices)
    tokenizer = load_tokenizer(origin)
    store = open_data(request.config.data, data_root())
    windows = windows_of(store, tokenizer, options, choices, device)
    precision = precision_on(request.config.hardware, device.type == "cuda")
    model = load_model(origin, device, WEIGHT_TYPES.get(precision, torch.float32))
    compared = Compared(model, choices)
    with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
        say(line_on_cost(compared, windows.measured_BN, cost))
        if windows.fitted_BN is not None:
            compared.fit(windows.fitted_BN, options.fit_steps)
        measured = measure(compared, windows.measured_BN)
    bytes_per_token = mean_bytes(windows.measured_BN, tokenizer)
    record = PretrainedRecord(
        what="pretrained",
        dense=dense_row(measured.dense, bytes_per_token),
        weight=weight_row(measured.coverage),
        rows=selection_rows(measured, choices),
        seconds=measured.seconds,
        parameters=cost.parameters,
        memory=cost.memory,
        precision=precision,
        analyze=dataclasses.asdict(options),
        data=DataRecord.model_validate(store.describe()),
        time=utc_now(),
    )
    print_record(record)
    write_record(record, folder)
    return 0


def windows_of(
    store: Store,
    tokenizer: Any,
    options: PretrainedOptions,
    choices: Sequence[Choice],
    device: torch.device,
) -> Windows:
    """Return the windows that are scored, and those to which centroids are fitted.

    The latter are from the file that the option `fit` names, else from the first half of the text
    of the data set.
    """
    size = WindowSize(options.windows, options.length)
    measured_BN = measured_windows(store, tokenizer, size).to(device)
    if not any(choice.is_fitted for choice in choices):
        return Windows(measured_BN, None)
    fit_size = WindowSize(options.fit_windows, options.length)
    if options.fit is None:
        fitted_BN = windows_of_first_half(store, tokenizer, fit_size)
    else:
        fitted_BN = windows_of_file(options.fit, tokenizer, fit_size)
    return Windows(measured_BN, fitted_BN.to(device))


def print_record(record: PretrainedRecord) -> None:
    """Print the dense model's loss and attention weights, then a table of the choices."""
    dense = record.dense
    weight = record.weight
    windows = plural(len(dense.bits_of_windows), "window")
    bits = f"{dense.bits:.4f} bits/token, {dense.bits_per_byte:.4f} bits/byte"
    print(f"dense: {bits} ({dense.keys:.1f} keys read)")
    print(f"attention on sinks {weight.sinks:.3f}, on far keys {weight.far:.3f}")
    print(f"± standard errors over {windows}, of paired differences to dense")
    print_table([row.to_json() for row in record.rows], COLUMNS)
    print(f"measured in {clock(record.seconds)}")


def result_folder(origin: Origin) -> Path:
    """Create the folder for results of a model, below the folder of runs, and return it.

    Raises:
        UserError: it cannot be created.
    """
    model_path = Path(origin.gguf or origin.name)
    folder = outputs_root() / PRETRAINED / model_path.name
    try:
        make_folder(folder)
    except OSError as error:
        raise UserError(unwritable(folder, error)) from error
    return folder


def write_record(record: PretrainedRecord, folder: Path) -> None:
    """Write the plot and the record into a folder; their names have a hash of the settings."""
    settings_hash = short_hash({"analyze": record.analyze, "data": record.data.fingerprint})
    file_name = f"{record.data.name}-N{record.length}-{settings_hash}"
    (comparison,) = comparisons([record])
    save(folder, f"{file_name}.png", loss_plot(file_name, "", lines_of(comparison)).png)
    save(folder, f"{file_name}.json", record.to_json_with_none())
    print(f"next: rtx report {shown(folder)}")
