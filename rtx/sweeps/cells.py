"""The cells of a sweep: what a command lays out, whether each is to be run, and how it ended.

Each experiment's axes (`hydra.sweeper.params`) are a grid of its own; Hydra's BasicSweeper lays out one alone.
"""

import contextlib
import itertools
import os
import signal
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from rtx.errors import UserError, refuse, written
from rtx.machine import OUT_OF_MEMORY
from rtx.runs.folder import outputs_root
from rtx.runs.lock import busy
from rtx.runs.records import StatusRecord
from rtx.runs.signals import EXIT_CODES, state_after
from rtx.runs.status import close, read_status, seems_running
from rtx.settings.compose import compose_unresolved, composed, user_errors
from rtx.settings.identity import cell_hashes
from rtx.settings.overrides import LAUNCHED, Override, check_overrides
from rtx.settings.presets import CONFIG_DIRS, preset
from rtx.settings.readers import unread, without_effect
from rtx.settings.rules import resolve
from rtx.settings.run_config import RUN_CONFIG, load_run_config
from rtx.settings.schema import Config, flat, to_dict
from rtx.variables import SWEEP_VARIABLE

DEFINING = (
    *("model", "model.base"),
    *("routing", "routing.selection", "routing.heads", "routing.clusters", "routing.window"),
)
"""Groups and keys that make a row of a table what its name says; the command line may change any other key."""
NO_CODE = 999  # the exit code of a cell that was not begun, or whose job is lost


@dataclass(frozen=True)
class Cell:
    """One run of a sweep: its number, from 1, and as its title the overrides by which the cells differ."""

    number: int
    overrides: tuple[str, ...]
    folder: Path
    config: Config
    title: str
    combinations: tuple[str, ...]
    """The listed values that make this run; several, where they differ by keys that it does not read."""


@dataclass(frozen=True)
class Outcome:
    """How a cell ended: the exit code of its process (128 + N after signal N), a word, and the reason."""

    code: int
    word: str
    reason: str = ""


def lay_out(checked: Sequence[Override]) -> list[Cell]:
    """Compose and check every cell.

    Combinations that differ by keys that their run does not read are one cell. `UserError` for a cell that cannot be,
    for the same values listed twice, and for a key that no cell reads.
    """
    given = list(
        {entry.key: entry for entry in checked if not entry.key.startswith("hydra.")}.values()
    )
    grids = list(expanded(given).values())
    swept = {entry.key for grid in grids for entry in grid if len(entry.values) > 1}
    if len(grids) > 1:
        swept.add("experiment")
    cells: dict[Path, Cell] = {}
    for entries in combinations(grids):
        listed = [entry for entry in entries if entry.key in swept]
        with user_errors(f"cell {len(cells) + 1} ({titled(listed)}): "):
            config = resolve(compose_unresolved(entries))
        idle_keys = unread(flat(to_dict(config)))
        title = titled(entry for entry in listed if not is_idle(entry, idle_keys))
        cell = Cell(
            len(cells) + 1, words_of(entries), folder_of(config), config, title, (titled(listed),)
        )
        same = cells.setdefault(cell.folder, cell)
        if same is not cell:
            cells[cell.folder] = joined(same, cell)
    unread_keys = [
        without_effect(cell.config, [entry.key for entry in given]) for cell in cells.values()
    ]
    refuse(line for key, line in unread_keys[0].items() if all(key in each for each in unread_keys))
    return list(cells.values())


def combinations(grids: Sequence[Sequence[Override]]) -> Iterator[tuple[Override, ...]]:
    """Yield each combination of values of each grid, every key with one value."""
    for grid in grids:
        yield from itertools.product(
            *([Override(each.key, (value,)) for value in each.values] for each in grid)
        )


def titled(entries: Iterable[Override]) -> str:
    """Return overrides as the title of a cell."""
    return " ".join(map(str, entries)) or "nothing swept"


def is_idle(entry: Override, idle_keys: Collection[str]) -> bool:
    """Whether a run ignores an override; an option of the group routing is ignored where routing.selection is."""
    key = "routing.selection" if entry.key == "routing" else entry.key
    return key in idle_keys


def words_of(entries: Iterable[Override]) -> tuple[str, ...]:
    """Return what stands behind `rtx train` in the process of a cell."""
    return (*map(str, entries), *(f"--config-dir={place}" for place in CONFIG_DIRS))


def folder_of(config: Config) -> Path:
    """Return the folder of a cell, named by its hash, or as earlier versions named it where that folder exists."""
    parent = outputs_root() / config.name
    folders = [parent / name for name in cell_hashes(config)]
    return next((folder for folder in folders if folder.exists()), folders[0])


def joined(first: Cell, second: Cell) -> Cell:
    """Return two cells of the same run as one.

    `UserError` where their titles differ, or where the same combination is listed twice.
    """
    if second.title != first.title or second.combinations[0] in first.combinations:
        said = f"{first.combinations[0]}, and again {second.combinations[0]}"
        raise UserError(f"two cells are the same run ({said}); list values that change the result")
    return replace(first, combinations=(*first.combinations, *second.combinations))


def merged_lines(cells: Sequence[Cell]) -> list[str]:
    """Return a line for each cell that is the run of several combinations of the listed values."""
    why = "which differ by keys that it does not read"
    merged = [cell for cell in cells if len(cell.combinations) > 1]
    return [
        f"cell {cell.number} ({cell.title}): {len(cell.combinations)} combinations, {why}"
        for cell in merged
    ]


def expanded(given: Sequence[Override]) -> dict[str, list[Override]]:
    """Return the grid of every experiment that is chosen, or of none: each key once, the file's axes first.

    The command line wins over the files in every row. `UserError` where a row could not have its values and still be
    that row: the row of local heads has no routing heads.
    """
    rest = [entry for entry in given if entry.key != "experiment"]
    chosen = next((entry.values for entry in given if entry.key == "experiment"), ("",))
    if len(chosen) > 1:
        refuse_conflicts(chosen, rest)
    grids: dict[str, list[Override]] = {}
    for name in chosen:
        axes = {axis.key: axis for axis in own_axes(name)}
        if rows := axes.pop("experiment", None):
            for row, grid in expanded([*axes.values(), *rest, rows]).items():
                grids.setdefault(row, grid)
            continue
        if name:
            axes["experiment"] = Override("experiment", (name,))
        grids.setdefault(name, list((axes | {entry.key: entry for entry in rest}).values()))
    return grids


def refuse_conflicts(rows: Sequence[str], given: Sequence[Override]) -> None:
    """Raise `UserError` for overrides that contradict what makes a row of several what its name says."""
    lines = []
    for entry in given:
        keys = {row: conflicts(own_values(row), entry, given) for row in rows}
        named = [f"{row} ({' '.join(found)})" for row, found in keys.items() if found]
        if named:
            way_out = f"train such a row by a command of its own, without {entry.key}"
            lines.append(f"{entry} conflicts with {', '.join(named)}; {way_out}")
    refuse(lines)


def conflicts(own: Mapping[str, str], entry: Override, given: Sequence[Override]) -> list[str]:
    """Return what the file of a row sets, `key=value`, that an override contradicts or cannot reach past."""
    given_keys = {each.key for each in given}
    found = []
    for key, value in own.items():
        replaces = key == entry.key and key in DEFINING and entry.values != (value,)
        if replaces or (key not in given_keys and hides_option(key, value, entry, own)):
            found.append(f"{key}={value}")
    return found


def hides_option(key: str, value: str, entry: Override, own: Mapping[str, str]) -> bool:
    """Whether a key in a row's file would win over an option of its group that the command line names."""
    if entry.key not in ("model", "routing", "optimizer") or entry.values == (own.get(entry.key),):
        return False
    without_heads = key == "routing.heads" and value == "0"  # then no option of routing matters
    return key.startswith(f"{entry.key}.") and not without_heads


def own_values(experiment: str) -> dict[str, str]:
    """Return the groups and keys that the file of an experiment sets, if it builds on another experiment; else none."""
    path = preset("experiment", experiment)
    node = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.load(path))) if path else {}
    defaults = node.pop("defaults", [])
    if not any(isinstance(entry, str) and entry != "_self_" for entry in defaults):
        return {}
    found = {}
    for entry in defaults:
        if isinstance(entry, dict):
            found |= {key.rpartition("/")[2]: str(option) for key, option in entry.items()}
    return found | {key: written(value) for key, value in flat(node).items()}


def own_axes(experiment: str) -> list[Override]:
    """Return the axes in the file of an experiment."""
    if experiment in ("", "null"):
        return []
    params = composed((f"experiment={experiment}",)).hydra.sweeper.params or {}
    with user_errors("hydra.sweeper.params: "):
        return check_overrides([f"{key}={values}" for key, values in params.items()], sweep=True)


def refuse_sweep(arguments: Sequence[str]) -> None:
    """Refuse to take a sweep for one run: an experiment with axes that have no value, or jobs made of cells."""
    given = {entry.key: entry for entry in check_overrides(arguments)}
    if (
        (entry := given.get("hardware"))
        and entry.values[0] in LAUNCHED
        and SWEEP_VARIABLE not in os.environ
    ):
        raise UserError(
            f"{entry}: makes jobs of the cells of a sweep (rtx train -m; one cell is a sweep, too)"
        )
    name = given["experiment"].values[0] if "experiment" in given else ""
    axes = [axis for axis in own_axes(name) if axis.key == "experiment" or axis.key not in given]
    if what := " ".join(str(axis) for axis in axes if len(axis.values) > 1):
        advice = "rtx train -m runs it; for one cell of it, give each key one value"
        raise UserError(f"experiment={name} is a sweep ({what}): {advice}")


def has_score(status: StatusRecord | None) -> bool:
    """Tell whether a run is done and has a closing score."""
    return status is not None and status.state == "done" and status.final is not None


def ended_before(cell: Cell, retry: bool) -> Outcome | None:
    """Return how a cell stands that is not to be run, or None."""
    status = read_status(cell.folder)
    if (cell.folder / RUN_CONFIG).exists() and cell.folder.name not in cell_hashes(
        load_run_config(cell.folder)
    ):
        return Outcome(
            2,
            "changed",
            f"{cell.folder}/{RUN_CONFIG} has other values by now; move it away to run it anew",
        )
    if has_score(status):
        return Outcome(0, "done before")
    if status and seems_running(status):
        return Outcome(NO_CODE, "in use", busy(cell.folder, status))
    if status and status.state == "failed" and not retry:
        again = "sweep.retry=true runs it again"
        return Outcome(NO_CODE, "failed before", f"{status.reason}; {again}")
    return None


def ending(
    cell: Cell, code: int, said: str, before: Any, out_of_memory: bool, stopped_by: int
) -> Outcome:
    """Return how the process of a cell ended; a failure that it could not write into its status is written here."""
    status, killed = read_status(cell.folder), code in (NO_CODE, 128 + signal.SIGKILL)
    if has_score(status) and code == 0:
        return Outcome(code, "done")
    if status and code == 2 and seems_running(status):  # by one that was begun at the same time
        return Outcome(code, "in use", busy(cell.folder, status))
    if status and status != before and status.state in ("failed", "interrupted", "preempted"):
        reason = status.reason or "" if status.state == "failed" else ""
        return Outcome(code, status.state, reason)
    lines = [line for line in said.splitlines() if line.strip()]
    last = next(
        (line for line in lines if line.startswith("rtx: ")), "".join(lines[-1:])
    ).removeprefix("rtx: ")
    if killed and not out_of_memory:
        return Outcome(code, "killed", last if code == NO_CODE else "")
    # A signal can find a process where it aborts, as in the import of a native library.
    if (number := stopped_by if stopped_by and code > 128 else code - 128) in EXIT_CODES:
        return Outcome(code, state_after(EXIT_CODES[signal.Signals(number)]))
    reason = (last if 0 < code < 128 else "") or f"it ended with exit code {code}, without a score"
    reason = f"{OUT_OF_MEMORY}: the system killed it" if killed else reason
    with contextlib.suppress(OSError):  # the table tells it all the same
        close(cell.folder, "failed", reason)
    return Outcome(code, "failed", reason)
