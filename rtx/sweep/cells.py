"""The cells of a sweep: what a command lays out, whether each is to be run, and how it ended.

A cell is known by its configuration, whose hash names its folder. An experiment's file may carry axes
(`hydra.sweeper.params`, as Hydra users write them); an axis `experiment` makes it stand for other experiments. Each
experiment is a grid of its own, which is why Hydra's BasicSweeper, for one grid, does not lay out the cells.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from rtx.checks import idle, refuse, resolve
from rtx.commandline.overrides import MOST_CELLS, Override, check_overrides
from rtx.compose import (
    RUN_CONFIG,
    compose_unresolved,
    composed,
    config_hash,
    load_run_config,
    to_yaml,
    user_errors,
    with_absolute_path,
)
from rtx.config import Config
from rtx.disk import replace_file
from rtx.errors import RunFailed, UserError
from rtx.keys import conf_dir
from rtx.options import LAUNCHED
from rtx.training.memory import OUT_OF_MEMORY
from rtx.training.run_folder import close, outputs_root, read_status
from rtx.training.signals import EXIT_CODES, SWEEP_VARIABLE, state_after

STOPPED = {128 + number: state_after(code) for number, code in EXIT_CODES.items()}
"""How a cell ended that a signal stopped, by its exit code: 143 of its handlers, or what it is before there are any."""


@dataclass(frozen=True)
class Cell:
    """One run of a sweep."""

    number: int
    """From 1."""
    overrides: tuple[str, ...]
    folder: Path
    config: Config
    title: str
    """The overrides by which the cells differ."""


@dataclass(frozen=True)
class Outcome:
    """How a cell ended: the exit code of its process, or None where there is none; a word, and the reason."""

    number: int
    code: int | None
    word: str
    reason: str = ""


def lay_out(checked: Sequence[Override]) -> tuple[list[Cell], list[str]]:
    """Compose and check every cell that the overrides stand for; returns them with the keys by which they differ.

    Raises:
        UserError: a line for each problem with the first cell that has it; cells that are the same run; too many; a
            key that no cell reads.
    """
    given = list({entry.key: entry for entry in checked if not entry.key.startswith("hydra.")}.values())
    grids = list(expanded(given).values())
    count = sum(math.prod(len(entry.values) for entry in grid) for grid in grids)
    if count > MOST_CELLS:
        raise UserError(f"the sweep has {count:,} cells; at most {MOST_CELLS:,} are taken at once")
    for entry in given:
        if entry.key != "experiment" and not any(entry in grid for grid in grids):
            raise UserError(f"{entry}: each of these experiments sets {entry.key} itself; sweep them one by one")
    lists = [entry.key for grid in grids for entry in grid if len(entry.values) > 1]
    swept = list(dict.fromkeys(["experiment"] * (len(grids) > 1) + lists))
    cells: dict[Path, Cell] = {}
    problems: dict[str, str] = {}
    single = [[[Override(each.key, (value,)) for value in each.values] for each in grid] for grid in grids]
    for number, entries in enumerate(itertools.chain(*(itertools.product(*grid) for grid in single)), 1):
        title = " ".join(str(entry) for entry in entries if entry.key in swept) or "nothing swept"
        try:
            config = resolve(compose_unresolved(entries))
            folder = outputs_root() / config.name / config_hash(config)
            same = cells.setdefault(folder, Cell(number, tuple(map(str, entries)), folder, config, title))
            if same.number != number:
                both = f"cells {same.number} and {number} are the same run ({title})"
                problems[both] = f"{both}; list values that change the result"
        except UserError as error:
            for line in str(error).splitlines():
                problems.setdefault(line, f"cell {number} ({title}): {line}")
    refuse(problems.values())
    unread = [idle(cell.config, (entry.key for entry in given)) for cell in cells.values()]
    refuse(line for key, line in unread[0].items() if all(key in each for each in unread))
    return list(cells.values()), swept


def expanded(given: Sequence[Override]) -> dict[str, list[Override]]:
    """Return the grid of every experiment that is chosen, or the one without any: each key once.

    Its own axes come first; an axis of the command line replaces the file's, in its place. Of several experiments each
    keeps what tells it from the one that its file builds on: the local row has no routing heads, whatever is asked of
    all rows.
    """
    rest = [entry for entry in given if entry.key != "experiment"]
    chosen = next((entry.values for entry in given if entry.key == "experiment"), ("",))
    grids: dict[str, list[Override]] = {}
    for name in chosen:
        axes = own_axes(name)
        if rows := [axis for axis in axes if axis.key == "experiment"]:
            several = expanded([*(axis for axis in axes if axis not in rows), *rest, *rows])
        else:
            kept = own_keys(name) if len(chosen) > 1 else set()
            asked = [*axes, *[Override("experiment", (name,))] * bool(name), *(e for e in rest if e.key not in kept)]
            several = {name: list({entry.key: entry for entry in asked}.values())}
        grids |= {row: grid for row, grid in several.items() if row not in grids}
    return grids


def own_keys(experiment: str) -> set[str]:
    """Return the keys and groups that an experiment's file sets which builds on another experiment, else none."""
    path = conf_dir() / "experiment" / f"{experiment}.yaml"
    node = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.load(path))) if path.is_file() else {}
    defaults = node.pop("defaults", [])
    if not any(isinstance(entry, str) and entry != "_self_" for entry in defaults):
        return set()
    groups = {key.rpartition("/")[2] for entry in defaults if isinstance(entry, dict) for key in entry}
    return groups | {f"{section}.{key}" for section, part in node.items() if isinstance(part, dict) for key in part}


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
    if (entry := given.get("hardware")) and entry.values[0] in LAUNCHED and SWEEP_VARIABLE not in os.environ:
        raise UserError(f"{entry}: makes jobs of the cells of a sweep (rtx train -m; one cell is a sweep, too)")
    name = given["experiment"].values[0] if "experiment" in given else ""
    axes = [axis for axis in own_axes(name) if axis.key == "experiment" or axis.key not in given]
    if what := " ".join(str(axis) for axis in axes if len(axis.values) > 1):
        advice = "rtx train -m runs it; for one cell of it, give each key one value"
        raise UserError(f"experiment={name} is a sweep ({what}): {advice}")


def has_score(status: dict[str, Any] | None) -> bool:
    """Tell whether a run is done and says with what score."""
    return bool(status and status.get("state") == "done" and status.get("final"))


def environment(cell: Cell) -> dict[str, Any]:
    """Return what the run of a cell recorded of its machine and data; empty where it has not begun."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((cell.folder / "environment.json").read_text())
        return found if isinstance(found, dict) else {}
    return {}


def ended_before(cell: Cell, retry: bool) -> Outcome | None:
    """Return how a cell ended that is not to be run, or None."""
    status = read_status(cell.folder)
    if stale := changed(cell, has_score(status)):
        advice = "move it away, or give the sweep another name=, to run the cell anew"
        return Outcome(cell.number, 2, "changed", f"{stale}; {advice}")
    if has_score(status):
        return Outcome(cell.number, 0, "done before")
    if status and status["state"] == "failed" and not retry:
        reason = status.get("reason") or "it does not say why"
        return Outcome(cell.number, None, "failed before", f"{reason}; sweep.retry=true runs it again")
    return None


def changed(cell: Cell, done: bool) -> str:
    """Return a line if the cell's folder has another run, or one that is done with other data than there are now."""
    from rtx.data.catalog import data_root, open_data

    try:
        if (cell.folder / RUN_CONFIG).is_file() and config_hash(load_run_config(cell.folder)) != cell.folder.name:
            return f"{cell.folder} is no longer the run of this cell: its config.yaml has other values by now"
    except UserError as error:
        return str(error).partition("\n")[0]
    with contextlib.suppress(OSError, UserError, RunFailed):  # of data that are away nobody can tell
        before = environment(cell).get("data", {}).get("fingerprint")
        if done and before and open_data(cell.config.data, data_root()).fingerprint != before:
            return f"{cell.folder} was done with other data than are there now"
    return ""


def ending(
    cell: Cell, code: int | None, lines: Sequence[str], out_of_memory: bool, before: Any, stopped_by: int
) -> Outcome:
    """Return how the process of a cell ended; where it could not write that into its status, that is done here.

    `code` is 128 + N after signal N, None of a job that is lost; `out_of_memory`: the system killed some process for
    want of memory meanwhile; `before`: the cell's status then; `stopped_by`: the signal that stopped the sweep, or 0.
    """
    status = read_status(cell.folder)
    if has_score(status) and not code:
        return Outcome(cell.number, code, "done")
    own = status if status and status != before else {}
    state, killed = own.get("state", ""), code in (None, 128 + signal.SIGKILL)
    if state == "failed" and own.get("reason"):
        return Outcome(cell.number, code, "failed", own["reason"])
    stopped = dict(STOPPED)
    if stopped_by:  # a signal can find a process where it aborts, as in the import of a native library
        stopped[128 + signal.SIGABRT] = STOPPED[128 + stopped_by]
    said = [line.removeprefix("rtx: ") for line in lines if line.startswith("rtx: ")]
    last = next(iter(said or [line.strip() for line in reversed(lines) if line.strip()]), "")
    if state in STOPPED.values() or (killed and not out_of_memory) or (code in stopped and state != "failed"):
        word = state if state in STOPPED.values() else stopped.get(code or 0, "killed")
        return Outcome(cell.number, code, word, last if code is None else "")
    reason = last or f"exit code {code}"
    if killed:
        reason = f"{OUT_OF_MEMORY}: the system killed it"
    elif not code:
        reason = "it ended with exit code 0, but without a score"
    elif code - 128 in set(signal.Signals):
        reason = f"ended by {signal.Signals(code - 128).name}"
    with contextlib.suppress(OSError):  # the table tells it all the same
        close(cell.folder, "failed", reason)
        if not (cell.folder / RUN_CONFIG).exists():
            text = to_yaml(with_absolute_path(cell.config)).encode()
            replace_file(cell.folder / RUN_CONFIG, lambda file: file.write(text))
    return Outcome(cell.number, code, "failed", reason)
