"""How the cells of a sweep end: what their records say before and after the process of a cell."""

import contextlib
import signal
from dataclasses import dataclass

from rtx.machine import OUT_OF_MEMORY
from rtx.runs.lock import busy
from rtx.runs.records import StatusRecord
from rtx.runs.signals import EXIT_CODES, state_after
from rtx.runs.status import close, read_status, seems_running
from rtx.settings.identity import cell_hashes
from rtx.settings.run_config import load_run_config
from rtx.settings.run_values import RUN_CONFIG
from rtx.sweeps.cells import Cell

NO_CODE = 999
"""The exit code of a cell that was not begun, or whose job is lost."""
ENDED_EARLY = ("failed", "interrupted", "preempted")


@dataclass(frozen=True)
class Outcome:
    """How a cell ended: exit code (128 + N after signal N), a word such as done, and the reason."""

    code: int
    word: str
    reason: str = ""

    @property
    def is_done(self) -> bool:
        """Whether the cell has a score, from this sweep or an earlier one."""
        return self.word.startswith("done")


@dataclass(frozen=True)
class Exit:
    """What a launcher saw of the process of a cell."""

    code: int
    printed: str
    """The last lines of its output."""
    status_before: StatusRecord | None
    """The status of the run before the process began."""
    short_of_memory: bool
    """Whether the system killed any process for lack of memory while this one ran."""
    stopped_by: int
    """The signal that stopped the whole sweep, else 0."""


def has_score(status: StatusRecord | None) -> bool:
    """Whether the run finished with a final score."""
    return status is not None and status.state == "done" and status.final is not None


def outcome_before(cell: Cell, retry: bool) -> Outcome | None:
    """Return the outcome of a cell that needs no run (done, in use, failed before), else None."""
    folder = cell.folder
    if (folder / RUN_CONFIG).exists():
        names = cell_hashes(load_run_config(folder))
        if folder.name not in names:
            file = folder / RUN_CONFIG
            reason = f"{file} has other values by now; move it away to run it anew"
            return Outcome(2, "changed", reason)
    status = read_status(folder)
    if status is None:
        return None
    if has_score(status):
        return Outcome(0, "done before")
    if seems_running(status):
        return Outcome(NO_CODE, "in use", busy(folder, status))
    if status.state == "failed" and not retry:
        reason = f"{status.reason}; sweep.retry=true runs it again"
        return Outcome(NO_CODE, "failed before", reason)
    return None


def outcome_after(cell: Cell, end: Exit) -> Outcome:
    """Return how the process of a cell ended.

    A failure that the process could not write into the status of its run is written there.
    """
    status = read_status(cell.folder)
    recorded = outcome_in_status(cell, status, end)
    if recorded is not None:
        return recorded
    last = last_line(end.printed)
    killed = end.code in (NO_CODE, 128 + signal.SIGKILL)
    if killed and not end.short_of_memory:
        return Outcome(end.code, "killed", last if end.code == NO_CODE else "")
    number = end.code - 128
    # A signal to the sweep may make a process abort, as in the import of a native library.
    if end.stopped_by and end.code > 128:
        number = end.stopped_by
    if number in EXIT_CODES:
        return Outcome(end.code, state_after(EXIT_CODES[signal.Signals(number)]))
    reason = f"it ended with exit code {end.code}, without a score"
    if killed:
        reason = f"{OUT_OF_MEMORY}: the system killed it"
    elif 0 < end.code < 128 and last:
        reason = last
    # If the status cannot be written, the closing table still has the reason.
    with contextlib.suppress(OSError):
        close(cell.folder, "failed", reason)
    return Outcome(end.code, "failed", reason)


def outcome_in_status(cell: Cell, status: StatusRecord | None, end: Exit) -> Outcome | None:
    """Return how a cell ended where the status of its run says so, else None."""
    if status is None:
        return None
    if has_score(status) and end.code == 0:
        return Outcome(end.code, "done")
    # Another process began the run at the same time.
    if end.code == 2 and seems_running(status):
        return Outcome(end.code, "in use", busy(cell.folder, status))
    if status != end.status_before and status.state in ENDED_EARLY:
        reason = ""
        if status.state == "failed" and status.reason:
            reason = status.reason
        return Outcome(end.code, status.state, reason)
    return None


def last_line(printed: str) -> str:
    """Return the first line that is a message of rtx, else the last line."""
    lines = [line for line in printed.splitlines() if line.strip()]
    messages = [line for line in lines if line.startswith("rtx: ")]
    line = [*messages[:1], *lines[-1:], ""][0]
    return line.removeprefix("rtx: ")
