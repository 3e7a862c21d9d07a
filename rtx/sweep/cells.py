"""The cells of a sweep: what a command lays out, the folder of each, whether it is to be run, and how it ended.

A cell is known by its configuration, whose hash names its folder. An experiment's file may carry axes
(`hydra.sweeper.params`, as Hydra users write them); an axis `experiment` makes it stand for other experiments. Each
experiment is a grid of its own, which is why Hydra's BasicSweeper, for one grid, does not lay out the cells.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import hydra
from omegaconf import OmegaConf

from rtx.commandline.overrides import MOST_CELLS, Checked, check_overrides
from rtx.compose import (
    CONFIG_NAME,
    compose_checked,
    config_hash,
    for_hydra,
    hydra_session,
    load_run_config,
    to_yaml,
    with_absolute_path,
)
from rtx.config import Config, DataConfig
from rtx.disk import replace_file
from rtx.errors import RunFailed, UserError
from rtx.keys import conf_dir
from rtx.options import LAUNCHED
from rtx.training.memory import OUT_OF_MEMORY
from rtx.training.run_folder import busy, close, outputs_root, read_status, seems_running
from rtx.training.signals import EXIT_CODES, SWEEP_VARIABLE, state_after

STOPPED = {128 + number: state_after(code) for number, code in EXIT_CODES.items()}
"""How a cell ended that a signal stopped, by its exit code: 143 of its handlers, or what it is before there are any."""


@dataclass(frozen=True)
class Cell:
    """One run of a sweep: its place in the order, from 1; the overrides that train it; its folder and configuration."""

    number: int
    overrides: tuple[str, ...]
    folder: Path
    config: Config

    def title(self, keys: Sequence[str]) -> str:
        """Return the overrides of the given keys, as a user would write them."""
        return title(self.overrides, keys)


@dataclass(frozen=True)
class Outcome:
    """How a cell ended: the exit code of its process, or None where there is none; a word, and the reason."""

    number: int
    code: int | None
    word: str
    reason: str = ""

    @property
    def done(self) -> bool:
        """Whether the cell has its score."""
        return self.word in ("done", "done before")


class InUse(Exception):
    """Another process works on the cell: it is to be asked again later."""


def lay_out(checked: Sequence[Checked]) -> tuple[list[Cell], list[str]]:
    """Compose and check every cell that the overrides stand for; returns them with the keys by which they differ.

    Raises:
        UserError: a line for each problem with the first cell that has it; cells that are the same run; too many.
    """
    grids = list(expanded(checked).values())
    count = sum(math.prod(len(entry.values) for entry in grid) for grid in grids)
    if count > MOST_CELLS:
        raise UserError(f"the sweep has {count:,} cells; at most {MOST_CELLS:,} are taken at once")
    lists = [entry.key for grid in grids for entry in grid if len(entry.values) > 1]
    swept = list(dict.fromkeys(["experiment"] * (len(grids) > 1) + lists))
    cells: dict[Path, Cell] = {}
    problems: dict[str, str] = {}
    words = (tuple(cell) for grid in grids for cell in itertools.product(*map(one_by_one, grid)))
    for number, overrides in enumerate(words, 1):
        named = title(overrides, swept)
        try:
            config = compose_checked(overrides)
            folder = outputs_root() / config.name / config_hash(config)
            if folder in cells:
                same = f"cells {cells[folder].number} and {number} are the same run"
                raise UserError(f"{same} ({named}); list values that change the result")
            cells[folder] = Cell(number, overrides, folder, config)
        except UserError as error:
            for line in str(error).splitlines():
                problems.setdefault(line, line if "same run" in line else f"cell {number} ({named}): {line}")
    if problems:
        raise UserError("\n".join(problems.values()))
    return list(cells.values()), swept


def title(overrides: Sequence[str], keys: Sequence[str]) -> str:
    """Return those of a cell's overrides that are for the given keys, as a user would write them."""
    shown = [override.replace("'", "") for override in overrides if override.partition("=")[0] in keys]
    return " ".join(shown) or "nothing swept"


def one_by_one(entry: Checked) -> list[str]:
    """Return an override for each value of one that lists several."""
    return [f"{entry.key}={value}" for value in entry.values]


def expanded(checked: Sequence[Checked]) -> dict[str, list[Checked]]:
    """Return the grid of every experiment that is chosen, or the one without any: each key once, the last of it counts.

    Its own axes come first; an axis of the command line replaces the file's, in its place. Of several experiments each
    keeps what tells it from the one that its file builds on: the local row has no routing heads, whatever is asked of
    all rows.
    """
    given = [entry for entry in checked if not entry.key.startswith(("hydra.", "hydra/"))]
    rest = [entry for entry in given if entry.key != "experiment"]
    chosen = next((entry.values for entry in reversed(given) if entry.key == "experiment"), ("",))
    grids: dict[str, list[Checked]] = {}
    for name in chosen:
        axes = own_axes(name)
        rows = [axis for axis in axes if axis.key == "experiment"]
        if rows:
            several = expanded([*(axis for axis in axes if axis not in rows), *rest, *rows])
            grids |= {row: grid for row, grid in several.items() if row not in grids}
        elif name not in grids:
            kept = own_keys(name) if len(chosen) > 1 else set()
            asked = [*axes, *[Checked("experiment", (name,))] * bool(name), *(e for e in rest if e.key not in kept)]
            grids[name] = list({entry.key: entry for entry in asked}.values())
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


def own_axes(experiment: str) -> list[Checked]:
    """Return the axes in the file of an experiment.

    Raises:
        UserError: a key or value in them is wrong.
    """
    if experiment in ("", "null"):
        return []
    with hydra_session():
        node = hydra.compose(CONFIG_NAME, for_hydra([f"experiment={experiment}"]), return_hydra_config=True)
        words = [f"{key}={values}" for key, values in dict(node.hydra.sweeper.params or {}).items()]
    try:
        return check_overrides(words, sweep=True)
    except UserError as error:
        raise UserError("\n".join(f"hydra.sweeper.params: {line}" for line in str(error).splitlines())) from None


def refuse_half_a_sweep(arguments: Sequence[str]) -> None:
    """Refuse to train one cell of an experiment that is a sweep, unless the words say which, and jobs without a sweep.

    Raises:
        UserError: names the axes that have no value, or the hardware that is for sweeps.
    """
    given = {entry.key: entry for entry in check_overrides(arguments)}
    if (entry := given.get("hardware")) and entry.values[0] in LAUNCHED and SWEEP_VARIABLE not in os.environ:
        raise UserError(f"{entry}: makes jobs of the cells of a sweep; add -m (one cell is a sweep, too)")
    refuse_axes(arguments, "add -m to run it; for a single cell, give each key one value")


def refuse_axes(arguments: Sequence[str], advice: str = "give each key one value") -> None:
    """Refuse to take one configuration for an experiment that is a sweep, unless the words say which.

    Raises:
        UserError: names the axes that have no value, and says what to do.
    """
    given = {entry.key: entry for entry in check_overrides(arguments)}
    name = given["experiment"].values[0] if "experiment" in given else ""
    axes = [axis for axis in own_axes(name) if axis.key == "experiment" or axis.key not in given]
    if what := " ".join(str(axis) for axis in axes if len(axis.values) > 1):
        raise UserError(f"experiment={name} is a sweep ({what}): {advice}")


def check_sources(cells: Sequence[Cell]) -> None:
    """Check that there is something to make the data from of every cell that has no score yet.

    Raises:
        UserError: a line for each set of data that is missing.
    """
    from rtx.data.catalog import check_source, data_root

    checked: list[DataConfig] = []
    problems: list[str] = []
    for cell in cells:
        data = cell.config.data
        if data not in checked and not has_score(read_status(cell.folder) or {}):
            checked.append(data)
            try:
                check_source(data, data_root(), lambda line: None)
            except UserError as error:
                problems.append(str(error))
    if problems:
        raise UserError("\n".join(dict.fromkeys(problems)))


def refuse_in_use(folder: Path) -> None:
    """Leave a cell to the process that works on it.

    Raises:
        InUse: there is one; the message names it.
    """
    status = read_status(folder)
    if status and seems_running(folder, status):
        raise InUse(busy(folder, status).partition(";")[0])


def ended_before(cell: Cell, retry: bool) -> Outcome | None:
    """Return how a cell ended that is not to be run, or None."""
    status = read_status(cell.folder) or {}
    advice = "move it away, or give the sweep another name=, to run the cell anew"
    if changed := changed_under(cell):
        return Outcome(cell.number, 2, "changed", f"{changed}; {advice}")
    if has_score(status) and data_changed(cell):
        reason = f"{cell.folder} was done with other data than are there now; {advice}"
        return Outcome(cell.number, 2, "other data", reason)
    if has_score(status):
        return Outcome(cell.number, 0, "done before")
    if status.get("state") == "failed" and not retry:
        reason = status.get("reason") or "it does not say why"
        return Outcome(cell.number, None, "failed before", f"{reason}; sweep.retry=true runs it again")
    return None


def has_score(status: dict[str, Any]) -> bool:
    """Tell whether a run is done and says with what score."""
    return status.get("state") == "done" and bool(status.get("final"))


def changed_under(cell: Cell) -> str:
    """Return a line if the run in the cell's folder has another configuration than the cell, else an empty string."""
    if not (cell.folder / "config.yaml").is_file():
        return ""
    try:
        if config_hash(load_run_config(cell.folder)) == config_hash(cell.config):
            return ""
    except UserError as error:
        return str(error).partition("\n")[0]
    return f"{cell.folder} is no longer the run of this cell: its config.yaml has other values by now"


def data_changed(cell: Cell) -> bool:
    """Tell whether the data of a finished cell are no longer those it was trained on; False where nobody can tell."""
    from rtx.data.catalog import data_root, open_data

    try:
        before = json.loads((cell.folder / "environment.json").read_text())["data"]["fingerprint"]
        return open_data(cell.config.data, data_root()).fingerprint != before
    except (OSError, ValueError, KeyError, TypeError, UserError, RunFailed):
        return False


def recorded_threads(cell: Cell) -> dict[str, str]:
    """Return the variable that gives a cell which goes on the threads it began with: its bits depend on them.

    Those who set the threads themselves know what they do.
    """
    try:
        threads = json.loads((cell.folder / "environment.json").read_text())["threads"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    chosen = cell.config.hardware.threads is not None or "OMP_NUM_THREADS" in os.environ
    return {"OMP_NUM_THREADS": str(threads)} if isinstance(threads, int) and threads > 0 and not chosen else {}


def ending(
    cell: Cell, code: int | None, lines: Sequence[str], out_of_memory: bool, before: Any, stopped_by: int = 0
) -> Outcome:
    """Return how the process of a cell ended; where it could not write that into its status, that is done here.

    Args:
        cell: the cell.
        code: its exit code, 128 + N after signal N; None of a job that is lost.
        lines: its last words.
        out_of_memory: whether the system killed some process for want of memory meanwhile.
        before: its status before it was run.
        stopped_by: the signal that stopped the sweep and was passed on to the cell, or 0.
    """
    status = read_status(cell.folder) or {}
    if has_score(status) and not code:
        return Outcome(cell.number, code, "done")
    own = status if status != before else {}
    state, killed = own.get("state", ""), code in (None, 128 + signal.SIGKILL)
    lost = last_words(lines) if code is None else ""
    if state in STOPPED.values():
        return Outcome(cell.number, code, state, lost)
    if state != "failed" and killed and not out_of_memory:
        return Outcome(cell.number, code, "killed", lost)
    if state != "failed" and stopped_by and code == 128 + signal.SIGABRT:
        # A signal can find a process where it aborts, as in the import of a native library: the same command goes on.
        return Outcome(cell.number, code, STOPPED[128 + stopped_by])
    if state != "failed" and code in STOPPED:
        return Outcome(cell.number, code, STOPPED[code])
    reason = own.get("reason") if state == "failed" else ""
    if not reason:
        reason = reason_of(code, lines) if not killed else f"{OUT_OF_MEMORY}: the system killed it"
        record_failure(cell, reason)
    return Outcome(cell.number, code, "failed", reason)


def reason_of(code: int | None, lines: Sequence[str]) -> str:
    """Return why a process failed that wrote no status, by its exit code and its last words."""
    if code == 0:
        return "it ended with exit code 0, but without a score"
    if code and code - 128 in set(signal.Signals):
        return f"ended by {signal.Signals(code - 128).name}"
    return last_words(lines) or f"exit code {code}"


def last_words(lines: Sequence[str]) -> str:
    """Return what a process that failed said of it: its own complaint, else the last line of a traceback."""
    complaints = [line.removeprefix("rtx: ") for line in lines if line.startswith("rtx: ")]
    return complaints[0] if complaints else next((line.strip() for line in reversed(lines) if line.strip()), "")


def record_failure(cell: Cell, reason: str) -> None:
    """Write into a cell's folder that it failed; where there was no run yet, with the configuration it was to have."""
    try:
        close(cell.folder, "failed", reason)
        if not (cell.folder / "config.yaml").exists():
            text = to_yaml(with_absolute_path(cell.config))
            replace_file(cell.folder / "config.yaml", lambda file: file.write(text.encode()))
    except OSError:
        pass  # the table tells it all the same
