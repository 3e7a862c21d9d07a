"""status.json: what a run is doing, kept fresh by a heartbeat, and told apart from the leftovers of a killed run."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import socket
import threading
from pathlib import Path
from typing import Any

from rtx.errors import UserError
from rtx.training.files import write_json
from rtx.training.metrics import utc_now

BEAT_SECONDS = 15.0
"""Time between heartbeats."""

SILENCE_SECONDS = 120.0
"""A run on another machine that has been silent for this long is taken for dead."""


KINDS = {
    **{"reason": str | None, "step": int, "steps": int | None, "seconds": int | float},
    **{"best": dict | None, "final": dict | None},
    **{"pid": int, "host": str, "boot_id": str | None, "started": str, "heartbeat": str},
}
"""Types of the fields of a status.json."""

NEEDED = {
    "running": ("pid", "host", "heartbeat"),
    **{"done": (), "failed": (), "preempted": (), "interrupted": ()},
}
"""The states of a run, and the fields without which each of them says nothing."""


class Status:
    """The status.json of a run that this process owns.

    Fields: state (running, done, failed, preempted, interrupted), reason, step, steps, best, final, pid, host, boot_id,
    started, heartbeat. Written by the training thread and by the heartbeat's own.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "status.json"
        self.before = read_status(folder)
        previous = self.before or {}
        self.fields: dict[str, Any] = {
            "state": "running",
            "reason": None,
            "step": previous.get("step", 0),
            "steps": previous.get("steps"),
            "best": previous.get("best"),
            "final": None,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "boot_id": boot_id(),
            "started": utc_now(),
            "heartbeat": utc_now(),
        }
        self.guard = threading.RLock()
        self.ended = threading.Event()
        self.write()
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

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
                with contextlib.suppress(OSError), open(self.path, "r+b") as file:
                    file.write(json.dumps(self.fields).encode() + b"\n")
                    file.truncate()

    def end(self, state: str, reason: str | None = None) -> None:
        """Write the last status of this process; only the first call counts."""
        if not self.ended.is_set():
            self.ended.set()
            self.update(state=state, reason=reason, write=True)

    def withdraw(self, reason: str) -> None:
        """End because there was nothing to begin with: the status of before stands again, or else failed."""
        if self.before and not self.ended.is_set():
            self.ended.set()
            self.fields = self.before
            write_json(self.path, self.before)
        self.end("failed", reason)

    def _beat(self) -> None:
        while not self.ended.wait(BEAT_SECONDS):
            self.write()


def read_status(folder: Path) -> dict[str, Any] | None:
    """Return what status.json says, or None where there is none that can be read, or its fields make no sense."""
    try:
        content = json.loads((folder / "status.json").read_text())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and is_sound(content) else None


def is_sound(status: dict[str, Any]) -> bool:
    """Tell whether a record has a known state, what that needs, and values of the right types."""
    needed = NEEDED.get(state) if isinstance(state := status.get("state"), str) else None
    if needed is None or not status.keys() >= set(needed):
        return False
    if not all(isinstance(status[key], kind) for key, kind in KINDS.items() if key in status):
        return False
    scores = [score for key in ("best", "final") if (score := status.get(key)) is not None]
    if not all(isinstance(score.get("bits"), int | float) for score in scores):
        return False
    try:
        beat = datetime.datetime.fromisoformat(status.get("heartbeat", utc_now()))
    except ValueError:
        return False
    return beat.tzinfo is not None and 0 < status.get("pid", 1) < 2**31


def run_state(folder: Path) -> str:
    """Return the state of a run as it is: a stale `running` is called `killed`, a folder without status `unknown`."""
    status = read_status(folder)
    if status is None:
        return "unknown"
    if status["state"] == "running" and not is_running(folder, status):
        return "killed"
    return status["state"]


def is_running(folder: Path, status: dict[str, Any] | None) -> bool:
    """Tell whether some process works on a run: it holds the lock, or lately wrote from another machine."""
    if is_locked(folder):
        return True
    if status is None or status["state"] != "running" or status["host"] == socket.gethostname():
        return False
    return silence(status) < SILENCE_SECONDS


def seems_running(folder: Path, status: dict[str, Any]) -> bool:
    """As `is_running`, for an onlooker: the lock is touched only where process and heartbeat do not agree.

    Who asks for the lock holds it for a moment, in which a run that begins would find the folder in use.
    """
    if status["state"] != "running":
        return False
    if status["host"] != socket.gethostname():
        return silence(status) < SILENCE_SECONDS
    if status.get("boot_id") != boot_id() or not process_exists(status["pid"]):
        return False
    return silence(status) < SILENCE_SECONDS or is_locked(folder)


def process_exists(number: int) -> bool:
    """Tell whether there is a process of this number on this machine."""
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it is somebody else's
    return True


def silence(status: dict[str, Any]) -> float:
    """Return the seconds since the last heartbeat."""
    beat = datetime.datetime.fromisoformat(status["heartbeat"])
    return (datetime.datetime.now(datetime.UTC) - beat).total_seconds()


def close(folder: Path, state: str, reason: str) -> None:
    """Write how a run ended whose process could not: the rest of its status stays.

    Raises:
        OSError: the folder cannot be written.
    """
    fields: dict[str, Any] = {"step": 0, "steps": None, "best": None, "final": None, "pid": os.getpid()}
    fields |= {"host": socket.gethostname(), "boot_id": boot_id(), "started": utc_now(), "heartbeat": utc_now()}
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "status.json", {**fields, **(read_status(folder) or {}), "state": state, "reason": reason})


held: set[Path] = set()
"""Folders that this process has locked. (Opening and closing the file of a held lock would release it.)"""


class RunLock:
    """Keeps two runs out of one folder, as a context; the system releases it however the process ends.

    Record locks (`lockf`) belong to one process: neither loader processes nor children that outlive it keep them.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.descriptor: int | None = None

    def __enter__(self) -> RunLock:
        status = read_status(self.folder)
        if self.folder in held or (status is not None and is_running(self.folder, status)):
            raise UserError(busy(self.folder, status))
        self.descriptor = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            raise UserError(busy(self.folder, read_status(self.folder))) from error
        except OSError:
            pass  # a file system without locks: the heartbeat alone tells
        held.add(self.folder)
        return self

    def __exit__(self, *error: object) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)
        held.discard(self.folder)


def is_locked(folder: Path) -> bool:
    """Tell whether a process, this one included, holds the lock of a run folder."""
    if folder.resolve() in held:
        return True
    try:
        with open(folder / "lock", "rb") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                return True
    except OSError:
        pass  # no lock there, or a file system without locks
    return False


def busy(folder: Path, status: dict[str, Any] | None) -> str:
    """Return the line that refuses a folder in use."""
    known = status is not None and status.keys() >= {"pid", "host"}
    who = f"process {status['pid']} on {status['host']}" if status and known else "another process"
    return f"{folder} is in use by {who}; wait for it, or stop it first"


def boot_id() -> str | None:
    """Return what tells one boot of this machine from the next, where the system says it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
