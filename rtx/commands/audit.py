"""`rtx audit RUN`: change later units, see which earlier outputs move, and price that in bits."""

import copy
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rtx.analysis.causality import Audit, audit_model
from rtx.analysis.choice_gradients import choice_gradients
from rtx.analysis.loss_by_position import DIFFERENCES, STREAMING, TEACHER_FORCED, differences, price
from rtx.attention import Pattern
from rtx.cli.options import AuditOptions
from rtx.cli.request import Request
from rtx.colour import GREEN, RED, YELLOW, painted
from rtx.data.store import Store
from rtx.data.windows import read_windows, sample_windows, windows
from rtx.errors import plural
from rtx.progress import progress_bar
from rtx.runs.folder import save
from rtx.runs.records import AuditRecord, ChangesRecord, CheckpointRecord, ChoiceRow, PriceRecord
from rtx.runs.status import utc_now
from rtx.tables import Column, print_table
from rtx.terminal import prose_width
from rtx.training.inference import LoadedRun, open_run
from rtx.training.uploads import add_to_wandb

Result = dict[str, Any]
MOVES = (
    Column("layer", "layer"),
    Column("heads", "heads"),
    Column("largest", "largest relative change"),
    Column("moved", "outputs moved, %", 1),
)
READINGS = (Column("reading", "reading"), Column("bits", "bits", 4))
PRICES = (
    Column("what", "difference"),
    Column("bits", "bits", 4),
    Column("over_positions", "positions", 4),
    Column("over_windows", "windows", 4),
)


def main(request: Request) -> int:
    """Run `rtx audit RUN ... [overrides]`; each run gets its record as `audit.json`."""
    options = request.options
    for folder, config in zip(request.runs, request.configs, strict=True):
        run, store = open_run(folder, config, options.checkpoint)
        changes, choices = what_moves(run, options)
        paid = price_run(run, options, store)
        record = AuditRecord(
            run=str(folder),
            checkpoint=CheckpointRecord.model_validate(run.facts()),
            seed=config.seed,
            time=utc_now(),
            changes=changes,
            choices=choices,
            price=paid,
        )
        path = save(folder, "audit.json", record.to_json_with_none())
        figures: dict[str, float] = {
            f"audit/sees_future/{TEACHER_FORCED}": changes.teacher_forced.sees_future,
            f"audit/sees_future/{STREAMING}": changes.streaming.sees_future,
        }
        for reading, mean in paid.bits.items():
            figures[f"audit/bits/{reading.replace(' ', '_')}"] = mean
        add_to_wandb(folder, "audit", figures, [path], run.checkpoint["step"])
    return 0


def what_moves(run: LoadedRun, options: AuditOptions) -> tuple[ChangesRecord, list[ChoiceRow]]:
    """Audit a model in both modes on random units, and find what trains its choices of keys.

    Prints and returns both.
    """
    B = options.sequences
    N = run.config.data.length
    generator = torch.Generator().manual_seed(options.seed)
    ids_BN = torch.randint(run.model.vocabulary, (B, N), generator=generator).to(run.device)
    wide = copy.deepcopy(run.model).double()
    for pattern in (module for module in wide.modules() if isinstance(module, Pattern)):
        # The compiled kernels have no float64.
        pattern.backend = "torch"
    prefixes = np.unique(np.geomspace(1, N - 1, options.prefixes).astype(int)).tolist()
    changes: Result = {
        "sequences": B,
        "length": N,
        "prefixes": prefixes,
        "tolerance": options.tolerance,
    }
    for mode in (TEACHER_FORCED, STREAMING):
        with progress_bar("prefixes") as show:
            audit = audit_model(
                wide,
                ids_BN,
                prefixes,
                streaming=mode == STREAMING,
                tolerance=options.tolerance,
                seed=options.seed,
                on_progress=show,
            )
        rows = []
        for (layer, heads), change_P in audit.changes.items():
            moved = float((change_P > options.tolerance).double().mean())
            rows.append(
                {"layer": layer, "heads": heads, "largest": float(change_P.max()), "moved": moved}
            )
        verdicts = {
            "sees_future": audit.sees_future,
            "arises_in": audit.origins,
            "repeat": audit.repeat,
        }
        changes[mode] = {**verdicts, "rows": rows}
        print(f"\n{mode}: {painted(verdict(audit), colour_of(audit))}")
        print_table([shown_move(row) for row in rows], MOVES)
    if choices := choice_gradients(run.model, ids_BN[:1].roll(-1, dims=1)):
        print("\nwhat trains each choice of keys")
        print("\n".join(choice_lines(choices)))
    return (
        ChangesRecord.model_validate(changes),
        [ChoiceRow.model_validate(row) for row in choices],
    )


def shown_move(row: Result) -> Result:
    """Return a row of the table: how far the outputs of a group of heads moved."""
    largest = f"{row['largest']:.1e}" if row["largest"] else "0"
    return {**row, "heads": named(row["heads"]), "largest": largest, "moved": 100 * row["moved"]}


def named(heads: str) -> str:
    """Return the name of a group of heads as other tables have it."""
    return heads.replace("routed", "routing")


def choice_lines(choices: Sequence[Result]) -> list[str]:
    """Return what trains the choices of each group of heads, in a few lines for each."""
    lines = []
    for row in choices:
        line = f"layer {row['layer']}, {named(row['heads'])} heads: {row['trained_by']}"
        if row["gradient"] is not None:
            line += f"; gradient {row['gradient']:.2g}"
        if row["missing"]:
            line += "; not trained: no gradient, or centroids that stay as they are"
        lines += textwrap.wrap(line, prose_width(), initial_indent="  ", subsequent_indent="    ")
    return lines


def verdict(audit: Audit) -> str:
    """Return whether a model sees the future in one mode, and in which layers that arises."""
    if audit.repeat > audit.tolerance:
        return f"not decided: the logits move by {audit.repeat:.1e} when nothing changes"
    if not audit.sees_future:
        return f"sees no future: nothing in the past moved by more than {audit.tolerance:.0e}"
    places = [f"layer {layer} ({named(heads)} heads)" for layer, heads in audit.origins]
    return f"sees the future; arises in {', '.join(places)}"


def colour_of(audit: Audit) -> int:
    """Return the colour of the verdict."""
    if audit.repeat > audit.tolerance:
        return YELLOW
    return RED if audit.sees_future else GREEN


def price_run(run: LoadedRun, options: AuditOptions, store: Store) -> PriceRecord:
    """Price a run on its data, print the table and return the record."""
    tokens = store.split(options.split)
    starts = store.document_starts(options.split, run.config.data)
    all_windows = windows(len(tokens), run.config.data.length)
    chosen = [
        window._replace(first=window.start)
        for window in sample_windows(all_windows, options.windows, options.seed)
    ]
    length = chosen[0].stop - chosen[0].start
    candidates: list[Sequence[int]] = [range(length)]
    if store.answers is not None:
        at_KA = store.answers(read_windows(tokens, chosen)[0]).position_BA
        candidates = [at_A[at_A >= 0].tolist() for at_A in at_KA]
    most = min(options.positions, *map(len, candidates))
    positions_KP = np.array([sample_windows(of_one, most, options.seed) for of_one in candidates])
    with run.autocast(), progress_bar("prefixes") as show:
        bits = price(run.model, tokens, chosen, positions_KP, show, starts)
    means = {mode: float(bits_KP.mean()) for mode, bits_KP in bits.items()}
    paired = differences(bits)
    places = f"{plural(most, 'position')} in each of {plural(len(chosen), 'window')} of {length:,}"
    print(f"\nbits/{store.unit} on {options.split}, {places}")
    print_table([{"reading": reading, "bits": mean} for reading, mean in means.items()], READINGS)
    print("\ndifferences in bits, with standard errors over positions and over windows")
    print_table([{"what": said_of(name), **figures} for name, figures in paired.items()], PRICES)
    facts = {
        "unit": store.unit,
        "split": options.split,
        "windows": len(chosen),
        "positions": positions_KP.tolist(),
    }
    facts |= {"length": length, "precision": run.precision, "data": store.describe(), "bits": means}
    return PriceRecord.model_validate({**facts, **paired})


def said_of(name: str) -> str:
    """Return the name of a difference of two readings, and which they are."""
    more, less = DIFFERENCES[name]
    return f"{name.replace('_', ' ')} ({more} - {less})"
