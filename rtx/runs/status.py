"""The status of a run, status.json: written while it runs, read by everybody else. No torch."""

import contextlib
import datetime
import json
import math
import os
import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rtx.disk import open_no_link, read_file, write_json
from rtx.errors import DAMAGED

BEAT_SECONDS = 15.0
SILENCE_SECONDS = 120.0  # so long without a heartbeat, a run on another machine is taken for dead
STATES = ("running", "done", "failed", "preempted", "interrupted")
SAMPLED = "~ before bits: of a sample of the validation windows"
"""What explains the mark of `bits_of`, below a table."""


class Status:
    """The status.json of a run that this process owns, written by the training thread and by a heartbeat."""

    def __init__(self, folder: Path) -> None:
        self.path, self.before = folder / "status.json", read_status(folder) or {}
        kept = {key: self.before[key] for key in ("step", "steps", "best") if key in self.before}
        own = {"state": "running", "reason": None, "pid": os.getpid(), "host": socket.gethostname()}
        self.fields: dict[str, Any] = {"step": 0, **kept, **own}
        self.guard, self.ended = threading.RLock(), threading.Event()
        self.write()
        threading.Thread(target=self.beat, name="heartbeat", daemon=True).start()

    def update(self, *, write: bool = False, **fields: Any) -> None:
        """Change fields; they reach the disk with the next heartbeat, or at once."""
        with self.guard:
            self.fields.update(fields)
        if write:
            self.write()

    def write(self) -> None:
        """Write the status now, by renaming where there is room for a second file, else in place."""
        with self.guard:
            self.fields["heartbeat"] = utc_now()
            try:
                write_json(self.path, self.fields, durable=False)
            except OSError:
                with contextlib.suppress(OSError), open_no_link(self.path, "r+b") as file:
                    file.write(json.dumps(self.fields).encode() + b"\n")
                    file.truncate()

    def end(self, state: str, reason: str | None = None) -> None:
        """Write the last status of this process; only the first call counts."""
        if not self.ended.is_set():
            self.ended.set()
            self.update(state=state, reason=reason, write=True)

    def beat(self) -> None:
        while not self.ended.wait(BEAT_SECONDS):
            self.write()


def read_status(folder: Path) -> dict[str, Any] | None:
    """Return what status.json says, or None where there is none that can be read, or its fields make no sense."""
    try:
        status = json.loads(read_file(folder / "status.json"))
        scores = [status[key] for key in ("best", "final") if status.get(key) is not None]
        numbers = [
            number for score in scores for number in (score["bits"], score.get("windows") or 0)
        ]
        numbers += [
            *(status.get(key, 0) for key in ("step", "steps", "seconds")),
            status.get("pid", 1),
        ]
        sound = (
            all(isinstance(one, int | float) and math.isfinite(one) for one in numbers)
            and 0 < numbers[-1] < 2**31
        )
        seems_running(status)  # fails where it has no place or heartbeat
        return status if sound and status["state"] in STATES else None
    except (OSError, *DAMAGED):
        return None


def bits_of(status: Mapping[str, Any]) -> str:
    """Return the bits of a run's closing score, else of its best validation; ~ before those of a sample of windows."""
    score = (final := status.get("final")) or status.get("best")
    return f"{'~' * (not final or bool(final.get('windows')))}{score['bits']:.4f}" if score else ""


def run_state(folder: Path) -> str:
    """Return the state of a run as it is: a stale `running` is called `killed`, a folder without status `unknown`."""
    status = read_status(folder)
    if status is None:
        return "unknown"
    return (
        "killed" if status["state"] == "running" and not seems_running(status) else status["state"]
    )


def seems_running(status: dict[str, Any]) -> bool:
    """Tell whether a run is at work: it wrote lately, not in a far future, and its process, if it is ours, is there."""
    if status["state"] != "running":
        return False
    silence = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(
        status["heartbeat"]
    )
    try:
        if status["host"] == socket.gethostname():
            os.kill(status["pid"], 0)
    except PermissionError:
        pass  # the process is somebody else's
    except OSError:
        return False
    return abs(silence.total_seconds()) < SILENCE_SECONDS


def close(folder: Path, state: str, reason: str) -> None:
    """Write how a run ended whose process could not: the rest of its status stays; OSError where that cannot be."""
    folder.mkdir(parents=True, exist_ok=True)
    status = {"step": 0, **(read_status(folder) or {}), "state": state, "reason": reason}
    write_json(folder / "status.json", status)


def utc_now() -> str:
    """Return the time as records have it: `2026-01-31T12:00:00.000Z`."""
    now = datetime.datetime.now(datetime.UTC)
    return now.isoformat(timespec="milliseconds").replace("+00:00", "Z")
