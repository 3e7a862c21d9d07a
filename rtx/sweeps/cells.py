"""The cells of a sweep: the runs that the overrides of a command and the axes of experiments make.

Hydra's BasicSweeper combines the listed values; each chosen experiment is a grid of its own.
"""

import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from rtx.errors import UserError, refuse, written
from rtx.processes import SWEEP_VARIABLE
from rtx.runs.folder import outputs_root
from rtx.settings.compose import compose_unresolved, composed, heads_option, user_errors
from rtx.settings.hydra_words import is_hydra_key, read_jobs
from rtx.settings.identity import cell_hashes, digest
from rtx.settings.overrides import LAUNCHED, Override, check_overrides
from rtx.settings.presets import CONFIG_DIRS, preset
from rtx.settings.readers import unread, without_effect
from rtx.settings.rules import resolve
from rtx.settings.run_values import RUN_CONFIG, read_values
from rtx.settings.schema import Config, flat, to_dict

DEFINING = (
    "model",
    "model.base",
    "routing",
    "routing.selection",
    "routing.heads",
    "routing.clusters",
    "routing.window",
)
"""Groups and keys that define a row of a table; a sweep reports overrides that change one."""
MOST_CELLS = 10_000
"""The largest number of combinations of a grid."""
NO_EXPERIMENT = Override("experiment", ("",))
Job = Sequence[Override]
"""The overrides of one run, each with one value."""


@dataclass(frozen=True)
class Cell:
    """One run of a sweep. `number`: from 1; `title`: the overrides by which cells differ."""

    number: int
    overrides: tuple[str, ...]
    folder: Path
    config: Config
    title: str
    combinations: tuple[str, ...]
    """The combinations of values that are this run; they differ by keys that it does not read."""


def lay_out(checked: Sequence[Override]) -> list[Cell]:
    """Return the cells of a grid, composed and checked.

    Combinations that differ by keys that their run does not read are one cell.

    Raises:
        UserError: a cell is impossible, the same values are listed twice, or no cell reads a key.
    """
    cells = list(cells_of(grid_jobs(checked), checked).values())
    refuse_idle(cells, checked)
    return cells


def refuse_many_cells(checked: Sequence[Override]) -> None:
    """Raise `UserError` for a grid of more than MOST_CELLS combinations, without making any."""
    cells = 0
    for grid in grids(checked):
        cells += math.prod(len(entry.values) for entry in grid)
    if cells > MOST_CELLS:
        axes = " ".join(f"{entry.key}: {len(entry.values):,}" for entry in checked if entry.sweeps)
        counts = f" (values of {axes})" if axes else ""
        several = "list fewer values, or make several sweeps of it"
        raise UserError(f"{cells:,} cells{counts}: a sweep has at most {MOST_CELLS:,}; {several}")


def grid_jobs(checked: Sequence[Override]) -> list[Job]:
    """Return every combination of the listed values, experiment by experiment.

    Raises `UserError` for more than MOST_CELLS.
    """
    refuse_many_cells(checked)
    # Hydra has no public name for its own sweeper, whose grid this is.
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parser = OverridesParser.create()
    jobs: list[Job] = []
    for grid in grids(checked):
        with user_errors():
            overrides = parser.parse_overrides([entry.in_hydra_words() for entry in grid])
            batches = BasicSweeper.split_arguments(overrides, max_batch_size=None)
        jobs += jobs_of(batches[0])
    return jobs


def jobs_of(words: Iterable[Iterable[str]]) -> list[Job]:
    """Return the overrides of jobs that a sweeper wrote as `key=value` in Hydra's grammar."""
    return [[Override(key, (text,)) for key, text in pairs] for pairs in read_jobs(words)]


def cells_of(
    jobs: Iterable[Job],
    checked: Sequence[Override],
    *,
    first: int = 1,
    merge: bool = False,
    report: Callable[[Cell], object] = lambda cell: None,
) -> dict[Path, Cell]:
    """Return the cells of jobs by their folders, composed and checked.

    Args:
        checked: the overrides of the command; their single values are no part of a title.
        first: number of the first cell.
        merge: whether a repeated job is allowed, as from a sweeper that draws values.
        report: called with each cell as soon as it is composed.

    Raises:
        UserError: a cell is impossible, or two jobs make the same run.
    """
    # The last override of a key wins, so an earlier single value of a swept key fixes nothing.
    last = {entry.key: entry for entry in checked}
    fixed = {(key, entry.values[0]) for key, entry in last.items() if not entry.sweeps}
    cells: dict[Path, Cell] = {}
    for job in jobs:
        varied = [entry for entry in job if (entry.key, entry.values[0]) not in fixed]
        number = first + len(cells)
        with user_errors(f"cell {number} ({titled(varied)}): "):
            config = resolve(compose_unresolved(job))
        idle_keys = unread(flat(to_dict(config)))
        title = titled(entry for entry in varied if not is_idle(entry, idle_keys))
        folder = folder_of(config)
        cell = Cell(number, words_of(job), folder, config, title, (titled(varied),))
        if folder not in cells:
            cells[folder] = cell
            report(cell)
        elif not merge:
            cells[folder] = joined(cells[folder], cell)
    return cells


def refuse_idle(cells: Sequence[Cell], checked: Sequence[Override]) -> None:
    """Raise `UserError` for keys of the command that no cell reads."""
    keys = [entry.key for entry in checked if not is_hydra_key(entry.key)]
    problems = [without_effect(cell.config, keys) for cell in cells]
    common = set(problems[0]).intersection(*problems[1:])
    refuse(line for key, line in problems[0].items() if key in common)


def titled(entries: Iterable[Override]) -> str:
    """Return overrides as the title of a cell."""
    return " ".join(map(str, entries)) or "nothing swept"


def is_idle(entry: Override, idle_keys: Collection[str]) -> bool:
    """Whether a run ignores an override.

    An option of the group routing is ignored where routing.selection is.
    """
    key = "routing.selection" if entry.key == "routing" else entry.key
    return key in idle_keys


def words_of(job: Job) -> tuple[str, ...]:
    """Return the words after `rtx train` in the process of a cell."""
    return (*map(str, job), *(f"--config-dir={folder}" for folder in CONFIG_DIRS))


def folder_of(config: Config) -> Path:
    """Return the folder of a cell, named by its hash.

    If an earlier version has trained the cell, that is the folder with its former hash.
    """
    parent = outputs_root() / config.name
    name, *former_names = cell_hashes(config)
    if (parent / name).exists():
        return parent / name
    for former_name in former_names:
        former = parent / former_name
        # An earlier version gave one hash to cells that are two now.
        if (former / RUN_CONFIG).exists() and digest(values_in(former)) == name:
            return former
    return parent / name


def values_in(run: Path) -> dict[str, Any]:
    """Return the values in a run's config.yaml; UserError if it is damaged."""
    with user_errors(f"{run / RUN_CONFIG}: "):
        return read_values(run)


def joined(first: Cell, second: Cell) -> Cell:
    """Return two cells of the same run as one.

    `UserError` where their titles differ, or where the same combination is listed twice.
    """
    if second.title != first.title or second.combinations[0] in first.combinations:
        both = f"{first.combinations[0]}, and again {second.combinations[0]}"
        raise UserError(f"two cells are the same run ({both}); list values that change the result")
    return replace(first, combinations=(*first.combinations, *second.combinations))


def merged_lines(cells: Sequence[Cell]) -> list[str]:
    """Return a line for each cell that several combinations of the listed values make."""
    reason = "which differ by keys that it does not read"
    merged = [cell for cell in cells if len(cell.combinations) > 1]
    return [
        f"cell {cell.number} ({cell.title}): {len(cell.combinations)} combinations, {reason}"
        for cell in merged
    ]


def grids(checked: Sequence[Override]) -> Iterator[list[Override]]:
    """Yield the grid of each chosen experiment, or of none.

    It has each key once, the axes of its file first. The command line wins over the files in every
    row.
    """
    last = last_entries(checked)
    rows = table_rows(checked)
    if len(rows) > 1:
        refuse_hidden_options(rows, list(last.values()))
    chosen = last.pop("experiment", NO_EXPERIMENT)
    for name in dict.fromkeys(chosen.values):
        grid = {axis.key: axis for axis in own_axes(name)}
        if name:
            grid["experiment"] = Override("experiment", (name,))
        yield list((grid | last).values())


def last_entries(checked: Iterable[Override]) -> dict[str, Override]:
    """Return the last override of each key of a configuration."""
    return {entry.key: entry for entry in checked if not is_hydra_key(entry.key)}


def own_axes(experiment: str) -> list[Override]:
    """Return the axes in the file of an experiment."""
    if experiment in ("", "null"):
        return []
    params = composed((f"experiment={experiment}",)).hydra.sweeper.params or {}
    with user_errors("hydra.sweeper.params: "):
        axes = check_overrides([f"{key}={values}" for key, values in params.items()], sweep=True)
    if any(axis.key == "experiment" for axis in axes):
        problem = "hydra.sweeper.params lists experiments"
        raise UserError(f"experiment={experiment}: {problem}; let it list options of heads")
    return axes


def table_rows(checked: Iterable[Override]) -> dict[str, dict[str, str]]:
    """Return the groups and keys that the file of each row of a sweep sets, by the name of the row.

    Rows are the experiments of a command, if it lists several, and the options of heads that it or
    the file of an experiment lists.
    """
    last = last_entries(checked)
    experiments = last.get("experiment", NO_EXPERIMENT).values
    rows = {}
    for experiment in experiments:
        if len(experiments) > 1:
            rows[experiment] = own_values("experiment", experiment)
        axes = {axis.key: axis for axis in own_axes(experiment)}
        heads = (axes | last).get("heads")
        if heads is None or not heads.sweeps:
            continue
        for word in heads.values:
            option = "" if word.lower() == "null" else heads_option(word, experiment)
            rows[f"heads={word}"] = own_values("heads", option)
    return rows


def refuse_hidden_options(
    rows: Mapping[str, Mapping[str, str]], entries: Sequence[Override]
) -> None:
    """Raise `UserError` for options of groups of which the file of a row sets keys.

    Args:
        rows: the groups and keys that the file of each row sets, by the name of the row.
    """
    keys = {entry.key for entry in entries}
    lines = []
    for entry in entries:
        named = [hidden_by(row, values, entry, keys) for row, values in rows.items()]
        hiding = ", ".join(text for text in named if text)
        if hiding:
            instead = f"train such a row by a command of its own, without {entry.key}"
            lines.append(f"{entry} conflicts with {hiding}; {instead}")
    refuse(lines)


def hidden_by(row: str, values: Mapping[str, str], entry: Override, keys: Collection[str]) -> str:
    """Return a row with those of its values that would override an option of a group, else "".

    `keys` are those of the command line, which win over the file of the row.
    """
    hiding = []
    for key, value in values.items():
        if key not in keys and hides_option(key, value, entry, values):
            hiding.append(f"{key}={value}")
    return f"{row} ({' '.join(hiding)})" if hiding else ""


def hides_option(key: str, value: str, entry: Override, values: Mapping[str, str]) -> bool:
    """Whether a key in the file of a row would win over an option from the command line."""
    if entry.key not in ("model", "routing", "optimizer"):
        return False
    if entry.values == (values.get(entry.key),):
        return False
    # Without routing heads no option of routing matters.
    return key.startswith(f"{entry.key}.") and (key, value) != ("routing.heads", "0")


def replaced_lines(checked: Sequence[Override]) -> list[str]:
    """Return a line for each override that changes a key which defines a row."""
    rows = table_rows(checked)
    if len(rows) < 2:
        return []
    lines = []
    for entry in checked:
        if entry.key not in DEFINING:
            continue
        changed = []
        for row, values in rows.items():
            value = values.get(entry.key)
            if value is not None and entry.values != (value,):
                changed.append(f"{row} ({entry.key}={value})")
        if changed:
            lines.append(f"{entry} replaces what the file says in {', '.join(changed)}")
    return lines


def own_values(group: str, option: str) -> dict[str, str]:
    """Return the groups and keys that the file of an option sets.

    An experiment that builds on no other sets none: it is no row of a table.
    """
    path = preset(group, option)
    if path is None:
        return {}
    node = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.load(path)))
    values: dict[str, str] = {}
    builds_on_another = False
    for entry in node.pop("defaults", []):
        if isinstance(entry, dict):
            for name, choice in entry.items():
                values[name.rpartition("/")[2]] = str(choice)
        elif entry != "_self_":
            builds_on_another = True
    if group == "experiment" and not builds_on_another:
        return {}
    for key, value in flat(node).items():
        values[key] = written(value)
    return values


def refuse_sweep(overrides: Sequence[Override]) -> None:
    """Raise `UserError` for overrides of a sweep: an experiment with axes, or cells as jobs."""
    last = {entry.key: entry for entry in overrides}
    hardware = last.get("hardware")
    if hardware and hardware.values[0] in LAUNCHED and SWEEP_VARIABLE not in os.environ:
        reason = "makes jobs of the cells of a sweep (rtx train -m; one cell is a sweep, too)"
        raise UserError(f"{hardware}: {reason}")
    if "experiment" not in last:
        return
    name = last["experiment"].values[0]
    axes = [axis for axis in own_axes(name) if axis.key not in last]
    listed = " ".join(str(axis) for axis in axes if axis.sweeps)
    if listed:
        advice = "rtx train -m runs it; for one cell of it, give each key one value"
        raise UserError(f"experiment={name} is a sweep ({listed}): {advice}")
