"""The cells of a sweep: what a command lays out, whether each is to be run, and how it ended.

Each experiment's axes (`hydra.sweeper.params`) are a grid of its own; Hydra's BasicSweeper lays out one alone.
"""

import contextlib
import itertools
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from rtx.checks import idle, resolve
from rtx.compose import RUN_CONFIG, compose_unresolved, composed, config_hash, load_run_config, user_errors
from rtx.config import Config
from rtx.errors import UserError, refuse
from rtx.keys import CONFIG_DIRS, preset
from rtx.options import LAUNCHED, Override, check_overrides
from rtx.training.hardware import OUT_OF_MEMORY
from rtx.training.run_folder import busy, close, outputs_root, read_status, seems_running
from rtx.training.signals import EXIT_CODES, SWEEP_VARIABLE, state_after

NO_CODE = 999  # the exit code of a cell that was not begun, or whose job is lost


@dataclass(frozen=True)
class Cell:
    """One run of a sweep: its number, from 1, and as its title the overrides by which the cells differ."""

    number: int
    overrides: tuple[str, ...]
    folder: Path
    config: Config
    title: str


@dataclass(frozen=True)
class Outcome:
    """How a cell ended: the exit code of its process (128 + N after signal N), a word, and the reason."""

    code: int
    word: str
    reason: str = ""


def lay_out(checked: Sequence[Override]) -> list[Cell]:
    """Compose and check every cell; `UserError` for one that cannot be, equal ones, and a key that no cell reads."""
    given = list({entry.key: entry for entry in checked if not entry.key.startswith("hydra.")}.values())
    grids = list(expanded(given).values())
    for entry in given:
        if entry.key != "experiment" and not any(entry in grid for grid in grids):
            raise UserError(f"{entry}: each of these experiments sets {entry.key} itself; sweep them one by one")
    lists = {entry.key for grid in grids for entry in grid if len(entry.values) > 1}
    swept = lists | {"experiment"} if len(grids) > 1 else lists
    single = [[[Override(each.key, (value,)) for value in each.values] for each in grid] for grid in grids]
    cells: dict[Path, Cell] = {}
    for number, entries in enumerate(itertools.chain(*(itertools.product(*grid) for grid in single)), 1):
        title = " ".join(str(entry) for entry in entries if entry.key in swept) or "nothing swept"
        with user_errors(f"cell {number} ({title}): "):
            config = resolve(compose_unresolved(entries))
        folder = outputs_root() / config.name / config_hash(config)
        words = (*map(str, entries), *(f"--config-dir={place}" for place in CONFIG_DIRS))
        same = cells.setdefault(folder, Cell(number, words, folder, config, title)).number
        if same != number:
            raise UserError(f"cells {same} and {number} are the same run ({title}); list values that change the result")
    unread = [idle(cell.config, (entry.key for entry in given)) for cell in cells.values()]
    refuse(line for key, line in unread[0].items() if all(key in each for each in unread))
    return list(cells.values())


def expanded(given: Sequence[Override]) -> dict[str, list[Override]]:
    """Return the grid of every experiment that is chosen, or of none: each key once, the file's axes first.

    Of several, each keeps what tells it from the one that it builds on: the local row never has routing heads.
    """
    rest = [entry for entry in given if entry.key != "experiment"]
    chosen = next((entry.values for entry in given if entry.key == "experiment"), ("",))
    grids: dict[str, list[Override]] = {}
    for name in chosen:
        asked = {axis.key: axis for axis in own_axes(name)}
        if rows := asked.pop("experiment", None):
            grids = grids | expanded([*asked.values(), *rest, rows]) | grids
            continue
        kept = own_keys(name) if len(chosen) > 1 else set()
        asked |= {"experiment": Override("experiment", (name,))} if name else {}
        asked |= {entry.key: entry for entry in rest if entry.key not in kept}
        grids.setdefault(name, list(asked.values()))
    return grids


def own_keys(experiment: str) -> set[str]:
    """Return the keys and groups that an experiment's file sets which builds on another experiment, else none."""
    path = preset("experiment", experiment)
    node = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.load(path))) if path else {}
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
    return bool(status and status["state"] == "done" and status.get("final"))


def ended_before(cell: Cell, retry: bool) -> Outcome | None:
    """Return how a cell stands that is not to be run, or None."""
    status = read_status(cell.folder)
    if (cell.folder / RUN_CONFIG).exists() and config_hash(load_run_config(cell.folder)) != cell.folder.name:
        return Outcome(2, "changed", f"{cell.folder}/{RUN_CONFIG} has other values by now; move it away to run it anew")
    if has_score(status):
        return Outcome(0, "done before")
    if status and seems_running(status):
        return Outcome(NO_CODE, "in use", busy(cell.folder, status))
    if status and status["state"] == "failed" and not retry:
        return Outcome(NO_CODE, "failed before", f"{status['reason']}; sweep.retry=true runs it again")
    return None


def ending(cell: Cell, code: int, said: str, before: Any, out_of_memory: bool, stopped_by: int) -> Outcome:
    """Return how the process of a cell ended; a failure that it could not write into its status is written here."""
    status, killed = read_status(cell.folder), code in (NO_CODE, 128 + signal.SIGKILL)
    if has_score(status) and code == 0:
        return Outcome(code, "done")
    if status and code == 2 and seems_running(status):  # by one that was begun at the same time
        return Outcome(code, "in use", busy(cell.folder, status))
    if status and status != before and status["state"] in ("failed", "interrupted", "preempted"):
        return Outcome(code, status["state"], status["reason"] if status["state"] == "failed" else "")
    lines = [line for line in said.splitlines() if line.strip()]
    last = next((line for line in lines if line.startswith("rtx: ")), "".join(lines[-1:])).removeprefix("rtx: ")
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
