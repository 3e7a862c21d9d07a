"""The status of a run, status.json: its process writes it, all commands read it. No torch.

pydantic is imported where a status is read or written: `rtx --help` does not wait for it.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rtx.disk import make_folder, open_inside, write_json
from rtx.machine import out_of_memory

if TYPE_CHECKING:
    from rtx.runs.records import StatusRecord

STATUS = "status.json"
BEAT_SECONDS = 15.0
"""Seconds between two heartbeats."""
SILENCE_SECONDS = 120.0
"""Seconds without a heartbeat after which a run on another machine counts as killed."""
CLOCK_SECONDS = 1.0
"""Seconds by which two readings of the time that a process began may differ."""
STARTED_FIELD = 19
"""Place of the clock ticks at which a process began, in /proc/<number>/stat after its name."""
SAMPLED = "~ before bits: of a sample of the validation windows"
"""The explanation of the mark of `bits_of`, below a table."""


class Status:
    """The status.json of a run that this process works on.

    The training thread writes it, and a thread that renews the heartbeat. `before` is the status
    that the run had before this process, None for a new run. An earlier status stays in the file
    until `begin` is called: the run may yet be refused.

    Raises OSError where a new run's status cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        from rtx.runs.records import StatusRecord

        self.folder = folder
        self.before = read_status(folder)
        former = self.before or StatusRecord(state="done")
        self.record = StatusRecord(
            state="running",
            step=former.step,
            steps=former.steps,
            best=former.best,
            pid=os.getpid(),
            host=socket.gethostname(),
            heartbeat=utc_now(),
        )
        self.guard = threading.RLock()
        self.begun = False
        self.ended = threading.Event()
        if self.before is None:
            self.begin()

    def begin(self) -> None:
        """Write that the run is running, and go on writing heartbeats; a second call does nothing.

        Raises:
            OSError: the status cannot be written; what it says would be wrong from now on.
            RuntimeError, MemoryError: the thread that writes heartbeats cannot be started, for lack
                of memory or by a limit on threads.
        """
        if self.begun:
            return
        self.record = changed(self.record, heartbeat=utc_now())
        replace_status(self.folder, self.record.to_json())
        self.begun = True
        try:
            threading.Thread(target=self.beat, name="heartbeat", daemon=True).start()
        except (RuntimeError, MemoryError) as error:
            # Else the file would go on saying that the run is running.
            self.end("failed", out_of_memory(error) or str(error))
            raise

    def update(self, *, write: bool = False, **fields: Any) -> None:
        """Change fields; they reach the disk with the next heartbeat, or at once."""
        with self.guard:
            self.record = changed(self.record, **fields)
        if write:
            self.write()

    def write(self) -> None:
        """Write the status now; nothing happens where the system refuses."""
        with self.guard, contextlib.suppress(OSError):
            self.record = changed(self.record, heartbeat=utc_now())
            replace_status(self.folder, self.record.to_json())

    def end(self, state: str, reason: str | None = None) -> None:
        """Write the last status of this process; only the first call counts."""
        if not self.ended.is_set():
            self.ended.set()
            self.update(state=state, reason=reason, write=True)

    def restore(self) -> None:
        """Write the status that the run had before, unless this process has ended it."""
        if self.before is None or self.ended.is_set():
            return
        self.ended.set()
        if self.begun:
            with self.guard, contextlib.suppress(OSError):
                replace_status(self.folder, self.before.to_json())

    def beat(self) -> None:
        """Write a heartbeat every `BEAT_SECONDS` until the run has ended."""
        while not self.ended.wait(BEAT_SECONDS):
            self.write()


def replace_status(folder: Path, content: Any) -> None:
    """Write a status to a new file that is renamed or, on a full disk, in place.

    Raises OSError where neither can be done.
    """
    try:
        write_json(folder, STATUS, content, durable=False)
    except OSError as error:
        try:
            with open_inside(folder, STATUS, "r+") as file:
                file.write(json.dumps(content).encode() + b"\n")
                file.truncate()
        except OSError:
            raise error from None


def changed(status: StatusRecord, **fields: Any) -> StatusRecord:
    """Return a status with other values of some fields, which are checked."""
    values = {name: getattr(status, name) for name in type(status).model_fields}
    return type(status).model_validate({**values, **fields})


def read_status(folder: Path, problems: list[str] | None = None) -> StatusRecord | None:
    """Return the status of a run; None, with a line added to `problems`, if it cannot be read."""
    from rtx.runs.records import StatusRecord, read_record

    return read_record(StatusRecord, folder, STATUS, [] if problems is None else problems)


def bits_of(status: StatusRecord | None) -> str:
    """Return the bits of a run's closing score, else of its best validation, else an empty text.

    ~ stands before those of a sample of the windows, as the best validation's always are.
    """
    if status is None:
        return ""
    if status.final is not None:
        mark = "~" if status.final.sample else ""
        return f"{mark}{status.final.bits:.4f}"
    if status.best is not None:
        return f"~{status.best.bits:.4f}"
    return ""


def run_state(folder: Path) -> str:
    """Return the state of a run.

    It is `killed` where the status says running but no process is, `unknown` without a status.
    """
    return state_of(read_status(folder))


def state_of(status: StatusRecord | None) -> str:
    """Return the state of a run by its status, see `run_state`."""
    if status is None:
        return "unknown"
    if status.state == "running" and not seems_running(status):
        return "killed"
    return status.state


def seems_running(status: StatusRecord) -> bool:
    """Return whether a process seems to train the run.

    Its last heartbeat is less than `SILENCE_SECONDS` away from now; on this machine its process
    exists, too.
    """
    if status.state != "running":
        return False
    last = datetime.datetime.fromisoformat(status.heartbeat)
    if status.host == socket.gethostname() and not has_process(status.pid or 0, last):
        return False
    silence = datetime.datetime.now(datetime.UTC) - last
    return abs(silence.total_seconds()) < SILENCE_SECONDS


def has_process(number: int, at: datetime.datetime) -> bool:
    """Return whether a process exists on this machine that existed at a time.

    A process that began later has the number of one that is gone.
    """
    try:
        os.kill(number, 0)
    except PermissionError:
        # It belongs to another user.
        pass
    except OSError:
        return False
    return not began_after(number, at)


def began_after(number: int, at: datetime.datetime) -> bool:
    """Return whether a process began after a time, or is only left for its exit code to be read.

    False where the system does not tell.
    """
    try:
        # by path: a file of the kernel
        fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
        began = int(fields[STARTED_FIELD]) / os.sysconf("SC_CLK_TCK")
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - began
    except (OSError, ValueError, IndexError, AttributeError):
        return False
    since = datetime.datetime.now(datetime.UTC) - at
    return fields[0] in ("Z", "X") or 0 <= age < since.total_seconds() - CLOCK_SECONDS


def close(folder: Path, state: str, reason: str) -> None:
    """Write the end of a run whose process could not write it.

    Raises OSError where the status cannot be written.
    """
    from rtx.runs.records import StatusRecord

    make_folder(folder)
    status = read_status(folder) or StatusRecord(state="failed")
    write_json(folder, STATUS, changed(status, state=state, reason=reason).to_json())


def utc_now() -> str:
    """Return the time as records have it: `2026-01-31T12:00:00.000Z`."""
    now = datetime.datetime.now(datetime.UTC)
    return now.isoformat(timespec="milliseconds").replace("+00:00", "Z")
