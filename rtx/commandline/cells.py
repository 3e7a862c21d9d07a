"""The cells of a sweep: whether one is to be run, how, and how it ended.

A cell is known by its configuration, whose hash names its folder. What is done is skipped, what was interrupted (by a
signal, a kill or a power cut) goes on, what failed is reported as it failed, or with `sweep.retry` run again.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rtx.commandline.children import Children
from rtx.compose import config_hash, load_run_config, to_dict, to_yaml, with_absolute_path
from rtx.config import Config, DataConfig
from rtx.disk import replace_file
from rtx.errors import RunFailed, UserError
from rtx.identity import counts
from rtx.report.cells import Collection, read_rows
from rtx.training.config_diff import differences
from rtx.training.memory import OUT_OF_MEMORY, system_kills
from rtx.training.run_folder import busy, close, read_status, seems_running
from rtx.training.signals import EXIT_CODES, state_after
from rtx.wording import plural

RUN_VARIABLE = "RTX_RUN"
"""Tells a process of a sweep the folder of its run, as an absolute path."""

STOPPED = {128 + number: state_after(code) for number, code in EXIT_CODES.items()}
"""How a cell ended that a signal stopped, by its exit code: 143 of its handlers, or what it is before there are any."""

OUTPUT = "output.log"
"""What a cell prints, where several run side by side; in its folder."""


@dataclass(frozen=True)
class Cell:
    """One run of a sweep: its place in the order, its overrides, its folder, and its configuration."""

    number: int
    overrides: tuple[str, ...]
    folder: Path
    config: Config

    @property
    def data(self) -> DataConfig:
        """What it is trained on."""
        return self.config.data

    def title(self, keys: Sequence[str]) -> str:
        """Return the overrides of the given keys, as a user would write them."""
        return written(self.overrides, keys)


@dataclass(frozen=True)
class Outcome:
    """How a cell ended: the exit code of its process, or None where none was started; a word, and the reason."""

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


@dataclass(frozen=True)
class Order:
    """What is asked of all cells of a sweep alike."""

    word: str
    """The command that each runs."""
    cells: int
    swept: tuple[str, ...]
    """The keys by which cells differ."""
    retry: bool = False
    side_by_side: bool = False
    """Whether several run at once, so that what one prints goes to a file in its folder."""


def written(overrides: Sequence[str], keys: Sequence[str]) -> str:
    """Return those of a cell's overrides that are for the given keys, as a user would write them."""
    shown = [override.replace("'", "") for override in overrides if override.partition("=")[0] in keys]
    return " ".join(shown) or "nothing swept"


def run_cell(order: Order, cell: Cell, children: Children, variables: dict[str, str]) -> Outcome:
    """Run a cell to its end, unless it has come to one already or the sweep is being stopped.

    Args:
        order: what is asked of all cells.
        cell: the one to run.
        children: runs its process.
        variables: of the environment of a cell that is begun.

    Raises:
        InUse: another process works on it.
    """
    if children.stopped_by:
        return Outcome(cell.number, None, "not started")
    refuse_in_use(cell.folder)
    say = speaker(order, cell)
    if outcome := ended_before(cell, order.retry):
        say(f"{outcome.word}: {outcome.reason or cell.folder}")
        return outcome
    command, note = command_for(order.word, cell)
    say(note)
    before, kills = read_status(cell.folder), system_kills()
    ended = children.run(
        [sys.executable, "-m", "rtx", *command],
        {**(variables | recorded_threads(cell)), RUN_VARIABLE: str(cell.folder)},
        log_of(cell) if order.side_by_side else None,
    )
    if ended.code == 2:
        refuse_in_use(cell.folder)  # by one that was begun at the same time
        refuse_overtaken(cell.folder, before, ended.pid)
    outcome = ending(cell, ended.code, ended.lines, system_kills() > kills, before)
    if order.side_by_side:
        say(outcome.word + (f": {outcome.reason}" if outcome.reason else ""))
    return outcome


def speaker(order: Order, cell: Cell) -> Callable[[str], None]:
    """Return what prints a line on a cell behind its title, or below it where the cell's own lines follow."""
    title = f"cell {cell.number} of {order.cells}: {cell.title(order.swept)}"

    def say(line: str) -> None:
        text = (
            f"{title}: {line or 'begins'}\n" if order.side_by_side else f"\n{title}\n" + (f"{line}\n" if line else "")
        )
        sys.stdout.write(text)  # in one piece: other threads may print, too
        sys.stdout.flush()

    return say


def refuse_in_use(folder: Path) -> None:
    """Leave a cell to the process that works on it.

    Raises:
        InUse: there is one; the message names it.
    """
    status = read_status(folder)
    try:
        if status and seems_running(folder, status):
            raise InUse(busy(folder, status).partition(";")[0])
    except (KeyError, TypeError, ValueError):
        pass  # no status of ours


def refuse_overtaken(folder: Path, before: Any, process: int) -> None:
    """Look at a cell again that another process has run meanwhile, perhaps to its end: then ours could not.

    Raises:
        InUse: the status has changed, and not by our process.
    """
    status = read_status(folder)
    if status and status != before and "pid" in status and status["pid"] != process:
        raise InUse(f"{folder} was run by another process meanwhile")


def ended_before(cell: Cell, retry: bool) -> Outcome | None:
    """Return how a cell ended that is not to be run, or None."""
    state = (status := read_status(cell.folder) or {}).get("state")
    if changed := changed_under(cell):
        return Outcome(cell.number, 2, "changed", changed)
    if state == "done":
        if data_changed(cell):
            advice = "move it away, or give the sweep another name=, to run the cell anew"
            reason = f"{cell.folder} was done with other data than are there now; {advice}"
            return Outcome(cell.number, 2, "other data", reason)
        return Outcome(cell.number, 0, "done before")
    if state == "failed" and not retry:
        reason = status.get("reason") or "it does not say why"
        return Outcome(cell.number, None, "failed before", f"{reason}; sweep.retry=true runs it again")
    return None


def changed_under(cell: Cell) -> str:
    """Return a line if the run in the cell's folder has another configuration than the cell, else an empty string."""
    if not (cell.folder / "config.yaml").is_file():
        return ""
    try:
        found = load_run_config(cell.folder)
    except UserError as error:
        return str(error).partition("\n")[0]
    if config_hash(found) == config_hash(cell.config):
        return ""
    changed = differences(to_dict(with_absolute_path(cell.config)), to_dict(found))
    said = [f"{key} {old} -> {new}" for key, (old, new) in changed.items() if counts(key)]
    told, more = ", ".join(said[:3]), f" and {len(said) - 3} more" if len(said) > 3 else ""
    return (
        f"{cell.folder} is no longer the run of this cell: {told}{more}; "
        "move it away, or give the sweep another name=, to run the cell anew"
    )


def data_changed(cell: Cell) -> bool:
    """Tell whether the data of a finished cell are no longer those it was trained on; False where nobody can tell."""
    from rtx.data.catalog import data_root, open_data

    try:
        before = json.loads((cell.folder / "environment.json").read_text())["data"]["fingerprint"]
        return open_data(cell.data, data_root()).fingerprint != before
    except (OSError, ValueError, KeyError, TypeError, UserError, RunFailed):
        return False


def command_for(word: str, cell: Cell) -> tuple[list[str], str]:
    """Return the words behind rtx that run a cell, and a line to say where they go on, or that they cannot."""
    status = read_status(cell.folder) or {}
    again = f"it failed before ({status.get('reason')}); " if status.get("state") == "failed" else ""
    if any((cell.folder / "checkpoints").glob("*.ckpt")):
        return ["resume", str(cell.folder)], again and f"{again}it goes on from its checkpoint"
    steps = [status.get("step"), *(row["step"] for row in read_rows(cell.folder / "metrics.jsonl", Collection()))]
    if step := max((step for step in steps if isinstance(step, int)), default=0):
        again += f"no checkpoint is left of its {plural(step, 'step')}; "
    return [word, *cell.overrides], again and f"{again}it begins anew"


def recorded_threads(cell: Cell) -> dict[str, str]:
    """Return the variable that gives a cell which goes on the threads it began with: its bits depend on them.

    Those who set the threads themselves know what they do.
    """
    if cell.config.hardware.threads is not None or "OMP_NUM_THREADS" in os.environ:
        return {}
    try:
        threads = json.loads((cell.folder / "environment.json").read_text())["threads"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return {"OMP_NUM_THREADS": str(threads)} if isinstance(threads, int) and threads > 0 else {}


def log_of(cell: Cell) -> Path:
    """Return the file for what a cell prints, its folder made."""
    try:
        cell.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to {cell.folder}: {error.strerror}") from error
    return cell.folder / OUTPUT


def ending(cell: Cell, code: int, lines: Sequence[str], out_of_memory: bool, before: Any) -> Outcome:
    """Return how the process of a cell ended; where it could not write that into its status, that is done here.

    Args:
        cell: the cell.
        code: its exit code, 128 + N after signal N.
        lines: its last words.
        out_of_memory: whether the system killed some process for want of memory meanwhile.
        before: its status before it was run.
    """
    status = read_status(cell.folder)
    own: dict[str, Any] = status if status and status != before else {}
    if code == 0:
        return Outcome(cell.number, code, "done")
    failed = own.get("state") == "failed"
    if code == 128 + signal.SIGKILL and not out_of_memory and not failed:
        return Outcome(cell.number, code, "killed")  # it goes on when the sweep is asked again
    if own.get("state") in ("interrupted", "preempted"):
        return Outcome(cell.number, code, own["state"])
    if code in STOPPED and not failed:
        return Outcome(cell.number, code, STOPPED[code])
    reason = str(own.get("reason") or "") if failed else ""
    if not reason:
        reason = by_signal(code, out_of_memory) or last_words(lines) or f"exit code {code}"
        record_failure(cell, reason)
    return Outcome(cell.number, code, "failed", reason)


def last_words(lines: Sequence[str]) -> str:
    """Return what a process that failed said of it: its own complaint, else the last line of a traceback."""
    complaints = [line.removeprefix("rtx: ") for line in lines if line.startswith("rtx: ")]
    return complaints[0] if complaints else next((line for line in reversed(lines) if line), "")


def by_signal(code: int, out_of_memory: bool) -> str:
    """Return the reason of a process that a signal ended, or an empty string where none did."""
    if out_of_memory and code == 128 + signal.SIGKILL:
        return f"{OUT_OF_MEMORY}: the system killed it"
    if code - 128 in set(signal.Signals):
        return f"ended by {signal.Signals(code - 128).name}"
    return ""


def record_failure(cell: Cell, reason: str) -> None:
    """Write into a cell's folder that it failed; where there was no run yet, with the configuration it was to have."""
    try:
        close(cell.folder, "failed", reason)
        if not (cell.folder / "config.yaml").exists():
            text = to_yaml(with_absolute_path(cell.config))
            replace_file(cell.folder / "config.yaml", lambda file: file.write(text.encode()))
    except OSError:
        pass  # the table tells it all the same
