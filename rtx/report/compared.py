"""Rows of ours beside the paper's: one table for each protocol and each table of the paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rtx.report.local import local_speed
from rtx.report.matching import differing_keys, kind_of, model_name, paper_row, settings_changed
from rtx.report.names import labels_of
from rtx.report.paper import PaperRow, PaperTable
from rtx.report.scores import Protocol, Row, has_effect, standings
from rtx.report.views import Column, Value, View, count, number, text
from rtx.wording import plural, written

LABELS = {
    "model": Column("model", "model", brief=True, label=True),
    "layers": Column("layers", "layers", True, label=True),
    "heads": Column("heads", "heads", True, label=True),
    "routing_heads": Column("routing_heads", "routing heads", True, brief=True, label=True),
    "routing_layers": Column("routing_layers", "routing layers", True, brief=True, label=True),
    "window": Column("window", "window", True, brief=True, label=True),
}

NOT_RUN = "not run"


def paper_view(title: str, table: PaperTable, protocol: Protocol | None, rows: Sequence[Row]) -> View:
    """Return a table in the paper's layout: each of its rows with ours, or as not run; then ours that it does not have.

    Several rows of ours on one of the paper's stand below each other, each with what tells it apart.
    """
    labels = ["model", *(("routing_heads", "routing_layers", "window") if table.number == 1 else ("layers", "heads"))]
    words, claim = standings(rows, table.metric, labels_of(rows))
    standing = {id(row): word for row, word in zip(rows, words, strict=True)}
    placed = {id(row): paper_row(row.config, table) for row in rows if row.config}
    shared = common([settings_changed(row.config, table) for row in rows if row.config])
    lines = protocol_lines(protocol, claim, rows)
    if protocol and protocol.split != table.split:
        shared.append(f"split {protocol.split} (paper: {table.split})")
    lines += [f"Not the paper's setting: {'; '.join(shared)}."] if shared else []
    view = View(title, columns(table, labels, protocol), [], lines, table.footnotes)
    for printed in (*table.rows, None):
        mine = [row for row in rows if placed.get(id(row)) is printed]
        for row in mine:
            view.waiting |= {len(view.rows)} if states_of(row) == "not started" else set()
            base = local_speed(row, rows)
            tail = our_values(row, printed, table, base, standing[id(row)], shared, differing_keys(mine))
            view.rows.append([*label_values(row, printed, labels), *tail])
        if not mine and printed is not None:
            view.absent.add(len(view.rows))
            view.rows.append([*printed_labels(printed, labels), *absent_values(printed, table)])
    return view.without_empty(stated=["units"])


def columns(table: PaperTable, labels: Sequence[str], protocol: Protocol | None) -> list[Column]:
    """Return the columns of a table in the paper's layout."""
    unit = protocol.unit if protocol else "unit"
    return [
        *(LABELS[label] for label in labels),
        Column("ours", f"ours ({table.metric})", True, brief=True),
        Column("error", "± seeds", True, brief=True),
        Column("seeds", "seeds", True, brief=True),
        Column("paper", "paper", True, brief=True),
        Column("difference", "difference", True, brief=True),
        Column("standing", "standing"),
        Column("bits", f"bits/{unit}", True),
        Column("steps_per_second", "steps/s", True),
        Column("speed_ratio", "x local", True),
        Column("paper_steps_per_second", f"paper {table.speed or 'steps/s'}", True),
        Column("paper_speed_ratio", "paper x local", True),
        Column("trained", "steps done", True),
        Column("units", "units scored", True),
        Column("sees_future", "sees future"),
        Column("notes", "notes", brief=True),
    ]


def our_values(
    row: Row,
    printed: PaperRow | None,
    table: PaperTable,
    base: float | None,
    standing: str,
    shared: Sequence[str],
    variants: Sequence[str],
) -> list[Value]:
    """Return the entries of a row of ours behind its labels."""
    ours, theirs = row.mean(table.metric), printed.value if printed else None
    digits = own_digits(table)
    notes = notes_of(row, variants, [c for c in settings_changed(row.config, table) if c not in shared])
    difference = number(ours - theirs, digits, sign=True) if ours is not None and theirs is not None else Value()
    if difference.raw is not None and (reasons := obstacles(row, table)):
        difference = Value(f"({difference.text})", difference.raw, f"not comparable: {'; '.join(reasons)}")
    perplexity = table.metric.startswith("perplexity")
    if perplexity and ours is None and row.scores:
        notes.append("no perplexity per word in the records")
    return [
        number(ours, digits) if ours is not None else text(states_of(row)),
        number(row.error(table.metric), 4),
        count(len(row.values(table.metric)) or len(row.values())) if row.scores else Value(),
        number(theirs, table.digits),
        difference,
        text(standing),
        number(row.mean()) if perplexity else Value(),
        *speeds(row.speed, base),
        *speeds(printed.steps_per_second if printed else None, table.local_speed()),
        trained(row, table.steps),
        units_of(row),
        sight(row),
        text("; ".join(notes)),
    ]


def absent_values(printed: PaperRow, table: PaperTable) -> list[Value]:
    """Return the entries of a row of the paper that has not been run."""
    speed = speeds(printed.steps_per_second, table.local_speed())
    front = [Value(NOT_RUN), Value(), Value(), number(printed.value, table.digits), *[Value()] * 5]
    return [*front, *speed, Value(), Value(), Value(), Value()]


def speeds(speed: float | None, base: float | None) -> list[Value]:
    """Return steps a second, and their ratio to the local row's."""
    return [number(speed), number(speed / base, 2) if speed and base else Value()]


def own_digits(table: PaperTable) -> int:
    """Return how many digits behind the point our numbers have: of bits three, of perplexities one more than theirs."""
    return max(3, table.digits) if table.metric.startswith("bits") else table.digits + 1


def obstacles(row: Row, table: PaperTable) -> list[str]:
    """Return why a number may not be set against the paper's: too few steps, another split, setting or data."""
    protocol = row.scores[0].protocol
    reasons = []
    if row.step < (table.steps or row.steps):
        reasons.append(f"{row.step:,} of {table.steps or row.steps:,} steps")
    if protocol.split != table.split:
        reasons.append(f"split {protocol.split} (paper: {table.split})")
    if protocol.windows:
        reasons.append("a sample of the windows")
    if protocol.ablate != "none":
        reasons.append(f"ablated: {protocol.ablate}")
    stamps = [stamp.removesuffix(", not comparable") for stamp in protocol.stamps]
    return [*reasons, *stamps, *settings_changed(row.config, table)]


def trained(row: Row, steps: int | None) -> Value:
    """Return the share of training done: of the paper's steps where it has some, else of the run's own."""
    whole = steps or row.steps
    if not row.step or not whole:
        return Value()
    share = row.step / whole
    percent = f"{share:.0%}" if share >= 0.1 else f"{100 * share:.2g}%"
    return Value(f"{row.step:,} of {whole:,} ({percent})", row.step)


def sight(row: Row) -> Value:
    """Return whether selection could see the future."""
    if not row.scores:
        return Value()
    return Value("yes", 1.0) if any(score.sees_future for score in row.scores) else Value("no", 0.0)


def notes_of(row: Row, variants: Sequence[str], changed: Sequence[str]) -> list[str]:
    """Return what else to know of a row: how runs ended, what it is, what makes it other than the paper's."""
    notes = []
    for cell in row.cells:
        if cell.state != "done":
            seed = f"seed {cell.config['seed']} " if len(row.cells) > 1 and "seed" in cell.config else ""
            at = f" at step {cell.step:,}" if cell.step else ""
            why = f": {cell.reason.splitlines()[0]}" if cell.reason else ""
            notes.append(f"{seed}{cell.state}{at}{why}")
        elif cell.reason:
            notes.append(cell.reason)
    notes += [f"seed {seed}: mean of {runs} runs" for seed, runs in row.runs_of_seeds().items() if runs > 1]
    notes += [f"{key}={written(row.config.get(key))}" for key in variants if key != "data.path"]
    selection = row.config.get("routing.selection")
    if kind_of(row.config) == "routing" and selection != "topk" and "routing.selection" not in variants:
        notes.append(f"selection={selection}")
    if row.scores:
        notes += row.scores[0].protocol.stamps
    return [*notes, *changed]


def states_of(row: Row) -> str:
    """Return what stands for a number that there is not: how the runs ended."""
    return ", ".join(dict.fromkeys(cell.state for cell in row.cells if cell.state != "done"))


def label_values(row: Row, printed: PaperRow | None, labels: Sequence[str]) -> list[Value]:
    """Return what a row of ours is, in the words of the paper's table."""
    config = row.config
    if not config:
        return [Value(row.cells[0].title or row.cells[0].name), *[Value() for _ in labels[1:]]]
    own: Mapping[str, Any] = {
        "layers": config.get("model.layers"),
        "heads": config.get("model.heads"),
        "routing_heads": config.get("routing.heads") if kind_of(config) in ("routing", "random") else 0,
        "routing_layers": config.get("routing.layers") if kind_of(config) in ("routing", "random") else 0,
        "window": window_of(config),
    }
    name = printed.model if printed else model_name(config)
    return [Value(name, name, short=short_name(name, own, labels)), *(count(own[label]) for label in labels[1:])]


def window_of(config: Mapping[str, Any]) -> int | None:
    """Return the window that a row of Table 1 is named by."""
    kind = kind_of(config)
    if kind in ("routing", "random"):
        return config.get("routing.window")
    return config.get("data.length" if kind == "full" else "model.window")


def printed_labels(printed: PaperRow, labels: Sequence[str]) -> list[Value]:
    """Return what a row of the paper is."""
    own = {label: getattr(printed, label) for label in labels[1:]}
    name = Value(printed.model, printed.model, short=short_name(printed.model, own, labels))
    return [name, *(count(own[label]) for label in labels[1:])]


def short_name(name: str, own: Mapping[str, Any], labels: Sequence[str]) -> str:
    """Return what a row is called where its model's name and its sizes have no columns of their own."""
    name = name.removesuffix(" Transformer")
    if "routing_heads" in labels:
        return (
            f"{name} {own['routing_heads']}x{own['routing_layers']} W={own['window']}" if own["routing_heads"] else name
        )
    return name


def own_view(title: str, protocol: Protocol | None, rows: Sequence[Row]) -> View:
    """Return a table of runs that are no rows of the paper: the keys by which they differ, then what came out."""
    keys = differing_keys(rows)
    rows = sorted(rows, key=lambda row: (not row.config, [order_of(told(key, row.config)) for key in keys]))
    words, claim = standings(rows, names=labels_of(rows))
    heads = [
        Column("run", "run", brief=True),
        *(Column(key, key, brief=True) for key in keys),
        Column("ours", f"bits/{protocol.unit if protocol else 'unit'}", True, brief=True),
        Column("error", "± seeds", True, brief=True),
        Column("seeds", "seeds", True, brief=True),
        Column("standing", "standing"),
        Column("steps_per_second", "steps/s", True),
        Column("speed_ratio", "x local", True),
        Column("trained", "steps done", True),
        Column("units", "units scored", True),
        Column("sees_future", "sees future"),
        Column("notes", "notes", brief=True),
    ]
    view = View(title, heads, [], protocol_lines(protocol, claim if len(rows) > 1 else "", rows))
    for row, word in zip(rows, words, strict=True):
        name = row.cells[0].title or (model_name(row.config) if row.config else row.cells[0].name)
        view.waiting |= {len(view.rows)} if states_of(row) == "not started" else set()
        notes = [note for note in notes_of(row, (), ()) if "routing.selection" not in keys or "selection=" not in note]
        view.rows.append(
            [
                text(name),
                *(sortable(row.config.get(key)) if has_effect(key, row.config) else Value() for key in keys),
                number(row.mean(), 4) if row.scores else text(states_of(row)),
                number(row.error(), 4),
                count(len(row.values())) if row.scores else Value(),
                text(word),
                *speeds(row.speed, local_speed(row, rows)),
                trained(row, None),
                units_of(row),
                sight(row),
                text("; ".join(notes)),
            ]
        )
    return view.without_empty(stated=["units"])


def told(key: str, config: Mapping[str, Any]) -> Any:
    """Return the value of a key, nothing where it has no effect."""
    return config.get(key) if has_effect(key, config) else ""


def order_of(value: Any) -> tuple[bool, float, str]:
    """Return what values of a key are sorted by: numbers by size, before texts."""
    plain = isinstance(value, int | float)
    return (not plain, float(value) if plain else 0.0, written(value))


def sortable(value: Any) -> Value:
    """Return a value of the configuration, sorted as a number where it is one."""
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return Value(written(value), float(value) if plain else written(value))


def protocol_lines(protocol: Protocol | None, claim: str, rows: Sequence[Row]) -> list[str]:
    """Return the lines above a table: its protocol, and what ordering it claims."""
    if protocol is None:
        return ["No run has a score."]
    units = {score.units for row in rows for score in row.scores}
    line = protocol.line(units.pop() if len(units) == 1 else None)
    return [f"Protocol: {line}.", *earlier_weights(rows), *([claim] if claim else [])]


def earlier_weights(rows: Sequence[Row]) -> list[str]:
    """Return a line where some scores are of a checkpoint before the run's last step, as the best one may be."""
    scores = [score for row in rows for score in row.scores]
    steps = sorted({score.earlier for score in scores if score.earlier})
    if not steps:
        return []
    number = sum(score.earlier is not None for score in scores)
    which = f"step {' or '.join(f'{step:,}' for step in steps)}" if len(steps) <= 3 else "of several steps"
    return [f"{number} of {plural(len(scores), 'score')} are of a checkpoint before the run's last step ({which})."]


def units_of(row: Row) -> Value:
    """Return how many units were scored in each run of a row."""
    numbers = sorted({score.units for score in row.scores})
    return Value(" or ".join(f"{units:,}" for units in numbers), numbers[0]) if numbers else Value()


def common(lists: Sequence[Sequence[str]]) -> list[str]:
    """Return what all lists hold."""
    return [entry for entry in lists[0] if all(entry in other for other in lists)] if lists else []
