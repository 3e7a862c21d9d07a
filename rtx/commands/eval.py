"""`rtx eval RUN [overrides]`: score a run on a split, every unit exactly once."""

import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rtx.cli.options import EvalOptions
from rtx.cli.request import Request
from rtx.data.store import Store
from rtx.errors import UserError, printable
from rtx.evaluation.measures import baselines, measures, read_as_released
from rtx.evaluation.protocol import (
    DOCUMENTS,
    Reading,
    further_lines,
    memory_phrases,
    protocol_of,
    routes,
    score_record,
)
from rtx.evaluation.scores import Score
from rtx.model.ablation import ablate
from rtx.progress import clock, say
from rtx.report.lengths import tables_of_run
from rtx.runs.folder import is_export, save, shown
from rtx.runs.records import CheckpointRecord, DataRecord, EvaluationRecord
from rtx.runs.status import read_status, state_of, utc_now
from rtx.settings.identity import short_hash
from rtx.settings.schema import Config, flat, to_dict
from rtx.tables import print_table
from rtx.terminal import terminal_width
from rtx.training.inference import LoadedRun, open_run, score_split, with_stride
from rtx.training.uploads import add_to_wandb

LOGGED = (
    "bits",
    "standard_error",
    "accuracy",
    "perplexity_per_word",
    "bits_per_byte",
    "bits_far_repeated",
)
"""Fields of a score that are sent to W&B."""


def main(request: Request) -> int:
    """Score a run on a split, print the score, and record it in `eval/`.

    Several lengths of a window make a record each, and a table.
    """
    if note := note_on_end(request.run):
        say(note)
    records = []
    for config in request.configs:
        for note in notes_on_windows(config, request.trained_length):
            say(note)
        record = evaluate(request, config)
        keep(request.run, record)
        records.append(record)
    if len(records) > 1:
        print_lengths(records)
    return 0


def evaluate(request: Request, config: Config) -> EvaluationRecord:
    """Score a run by a configuration, and return the record."""
    options = request.options
    began = time.monotonic()
    if "stride" in request.named or config.model.memory:
        config = with_stride(config, options.stride)
    run, store = open_run(request.run, config, options.checkpoint)
    ablate(run.model, config, options.ablate)
    tokens = store.split(options.split)
    habits = ""
    if options.protocol == "released":
        tokens, habits = read_as_released(store, options.split, config.data.length)
    if options.length is not None and len(tokens) < config.data.length:
        most = f"at most {len(tokens):,}, the units of split {options.split}"
        raise UserError(f"length={config.data.length} must be {most}")
    is_streaming = options.mode == "streaming"
    score, all_windows = score_split(
        run,
        store,
        options.split,
        tokens,
        options.limit,
        batch_size=options.batch_size,
        streaming=is_streaming,
    )
    units = store.scored_tokens(tokens)
    is_sample = len(score.units_K) < all_windows
    assert is_sample or score.units == units, f"scored {score.units} units of a split of {units}"
    record = evaluation_of(run, store, score, options, habits, is_sample)
    if store.unit == "byte" and not is_sample and not habits and options.split != "train":
        record = record.model_copy(update={"baselines": baselines(tokens)})
    ending: dict[str, Any] = {"split_units": units, "seconds": time.monotonic() - began}
    if config.data.length != request.trained_length:
        ending["trained_length"] = request.trained_length
    return record.model_copy(update={**ending, "time": utc_now()})


def print_lengths(records: Sequence[EvaluationRecord]) -> None:
    """Print the scores of a run at several lengths in one table, and accuracies by depth below."""
    for table in tables_of_run(records):
        print()
        print(*textwrap.wrap(table.title, terminal_width()), sep="\n")
        print_table(table.rows, table.columns)


def note_on_end(folder: Path) -> str:
    """Return a line on a run that is not done, else an empty text."""
    status = read_status(folder)
    state = state_of(status)
    if status is None or is_export(folder) or state == "done":
        return ""
    steps = f" of {status.steps:,}" if status.steps else ""
    place = f"at step {status.step:,}{steps}"
    if state == "running":
        return f"note: the run is still running, {place}"
    return f"note: the run is not done: {state} {place}; rtx resume {shown(folder)} goes on"


def notes_on_windows(config: Config, trained_length: int | None) -> list[str]:
    """Return a line for each window that is as wide as sequences of another length than trained."""
    length = config.data.length
    if length == trained_length:
        return []
    widths = {"model.window": config.model.window}
    if routes(flat(to_dict(config))):
        widths["routing.window"] = config.routing.window
    same = f"as wide as a sequence, as it was in training ({trained_length})"
    return [f"note: {key}={width}: {same}" for key, width in widths.items() if width == length]


def evaluation_of(
    run: LoadedRun,
    store: Store,
    score: Score,
    options: EvalOptions,
    habits: str,
    is_sample: bool,
) -> EvaluationRecord:
    """Return the record of a score: which weights, on what data, read how, in what arithmetic."""
    split = options.split
    data = DataRecord.model_validate(store.describe())
    own_data = run.has_data(store)
    numbers = measures(store, split, score, is_sample=is_sample, released=bool(habits))
    protocol = protocol_of(
        run.config,
        data,
        split,
        Reading(options.mode, options.ablate, habits),
        sample=len(score.units_K) if is_sample else None,
        own_data=own_data,
    )
    scored = score_record(run.config, protocol, score, numbers)
    return EvaluationRecord(
        **scored.to_json(),
        checkpoint=CheckpointRecord.model_validate(run.facts()),
        data=data,
        own_data=own_data,
        precision=run.precision,
        read_as=options.protocol,
        seed=run.config.seed if is_sample else None,
        memory=tuple(memory_phrases(flat(to_dict(run.config)))),
    )


def keep(folder: Path, record: EvaluationRecord) -> None:
    """Print a score with its protocol, and write it to a file; each protocol has its own file."""
    width = terminal_width() if sys.stdout.isatty() else 10_000
    lines = [*score_lines(record), *textwrap.wrap(record.line(), width)]
    print(printable("\n".join(lines)))
    path = save(folder, f"eval/{file_name(record)}.json", record.to_json())
    add_to_wandb(folder, "eval", logged(record), [path], record.checkpoint.step)


def score_lines(record: EvaluationRecord) -> list[str]:
    """Return a score in every measure, and how much of the split was scored, in lines."""
    spread = ""
    if record.standard_error is not None:
        spread = f" (standard error {record.standard_error:.5f} over windows)"
    unit = record.unit
    share = "a sample:" if record.sample else "all"
    scored = f"{share} {record.units:,} of the split's {record.split_units:,} {unit}s scored"
    return [
        f"{record.bits:.5f} bits/{unit}{spread}",
        *further_lines(record),
        f"{scored}, in {clock(record.seconds or 0)}",
    ]


def file_name(record: EvaluationRecord) -> str:
    """Return a name that tells evaluations of different protocols, weights and data apart."""
    how = record.protocol
    sample = f"{record.windows}windows"
    if record.sample:
        sample += f"-seed{record.seed}"
    parts = [how.split, how.mode, f"N{how.length}", f"stride{how.stride}", sample]
    if record.memory:
        parts.append(f"memory_{short_hash({'': list(record.memory)})}")
    if DOCUMENTS in how.stamps:
        parts.append("documents")
    parts += [record.precision, record.read_as, f"ablate_{how.ablate}", how.fingerprint[:8]]
    return "-".join([*parts, record.checkpoint.name, f"step{record.checkpoint.step}"])


def logged(record: EvaluationRecord) -> dict[str, float]:
    """Return the numbers of a score for W&B: `test/bits`, or `test/streaming/bits`.

    Of the splits that training logs, too, `valid/eval_bits`: other windows are no point of a curve.
    """
    how = record.protocol
    place = how.split
    if how.mode != "parallel":
        place += f"/{how.mode}"
    if how.ablate != "none":
        place += f"/ablate_{how.ablate}"
    prefix = "" if how.split == "test" else "eval_"
    numbers = {}
    for name in LOGGED:
        value = getattr(record, name)
        if value is not None:
            numbers[f"{place}/{prefix}{name}"] = value
    return numbers
