"""A run's folder: where it is, who works in it, what it records at the start, and how it ends. No torch.

status.json says what a run is doing, kept fresh by a heartbeat, and is told apart from the leftovers of a killed run.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import platform
import secrets
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from rtx import __version__
from rtx.disk import is_full, remove_leftovers, write_json
from rtx.errors import RunFailed, UserError
from rtx.training.memory import out_of_memory
from rtx.training.signals import Stopped

BEAT_SECONDS = 15.0
"""Time between heartbeats."""

SILENCE_SECONDS = 120.0
"""A run on another machine that has been silent for this long is taken for dead."""

LESS_MEMORY = (
    "a smaller trainer.micro_batch_size, or model.recompute=true, needs less with the same result but for rounding"
)
"""What helps a run that is out of memory."""

EXPORT_FACTS = "export.json"
"""Says of what run a folder has the model, and that it is an export."""

STATES = ("running", "done", "failed", "preempted", "interrupted")

KINDS = {
    **{"reason": str | None, "step": int, "steps": int | None, "seconds": int | float},
    **{"best": dict | None, "final": dict | None},
    **{"pid": int, "host": str, "boot_id": str | None, "started": str, "heartbeat": str},
}
"""Types of the fields of a status.json, of which a bit may have rotted."""


# Where


def outputs_root() -> Path:
    """Return the folder of all runs: RTX_OUTPUTS, or outputs/ in the current folder."""
    return Path(os.environ.get("RTX_OUTPUTS") or "outputs").expanduser().absolute()


def given_folder() -> Path | None:
    """Return the folder that RTX_RUN names, if it is set."""
    given = os.environ.get("RTX_RUN")
    return Path(given).expanduser().absolute() if given else None


def new_run_folder(name: str) -> Path:
    """Make the folder of a new run: outputs/<name>/<UTC date, time and four random digits>, or RTX_RUN where set.

    Raises:
        UserError: the folder cannot be written, or RTX_RUN names one with checkpoints.
    """
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    given = given_folder()
    folder = given or outputs_root() / name / f"{stamp}-{secrets.token_hex(2)}"
    if any((folder / "checkpoints").glob("*.ckpt")):
        raise UserError(f"RTX_RUN={folder} holds checkpoints but no config.yaml: take them out, or name another folder")
    try:
        (folder / "checkpoints").mkdir(parents=True, exist_ok=given is not None)
    except OSError as error:
        raise UserError(unwritable(folder, error)) from error
    return folder


def is_export(folder: Path) -> bool:
    """Tell whether a folder is an exported model, not a run."""
    return (folder / EXPORT_FACTS).is_file()


def shown(folder: Path) -> str:
    """Return a folder as the user would type it."""
    short = os.path.relpath(folder)
    return shlex.quote(str(folder) if short.startswith("..") else short)


def unwritable(folder: Path, error: OSError) -> str:
    """Return the line for a folder that cannot be written."""
    name = "RTX_RUN" if given_folder() == folder else "RTX_OUTPUTS"
    return f"cannot write to {folder}: {error.strerror}; set {name} to a folder that you can write"


def open_own(path: Path, mode: str) -> IO[Any]:
    """Open a file that is the run's own: a link in its place, which may lead anywhere, is an error (OSError)."""
    return open(path, mode, opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o644))


def utc_now() -> str:
    """Return the time as ISO 8601 in UTC, to the millisecond."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


# Status


class Status:
    """The status.json of a run that this process owns.

    Fields: state (running, done, failed, preempted, interrupted), reason, step, steps, best, final, pid, host, boot_id,
    started, heartbeat. Written by the training thread and by the heartbeat's own.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "status.json"
        self.before = read_status(folder)
        previous = self.before or {}
        self.fields = new_status() | {key: previous[key] for key in ("step", "steps", "best") if key in previous}
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
                with contextlib.suppress(OSError), open_own(self.path, "r+b") as file:
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


def new_status() -> dict[str, Any]:
    """Return the fields of a run that begins in this process."""
    now = utc_now()
    place = {"pid": os.getpid(), "host": socket.gethostname(), "boot_id": boot_id()}
    progress = {"state": "running", "reason": None, "step": 0, "steps": None, "best": None, "final": None}
    return {**progress, **place, "started": now, "heartbeat": now}


def read_status(folder: Path) -> dict[str, Any] | None:
    """Return what status.json says, or None where there is none that can be read, or its fields make no sense."""
    try:
        content = json.loads((folder / "status.json").read_text())
        return content if is_sound(content) else None
    except (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError):
        return None


def is_sound(status: dict[str, Any]) -> bool:
    """Tell whether a record has a known state, what that needs, and values of the right types."""
    if status["state"] not in STATES or (status["state"] == "running" and not status.keys() >= {"pid", "host"}):
        return False
    if not all(isinstance(status[key], kind) for key, kind in KINDS.items() if key in status):
        return False
    scores = [score for key in ("best", "final") if (score := status.get(key)) is not None]
    if not all(isinstance(score.get("bits"), int | float) for score in scores):
        return False
    needs_beat = status["state"] == "running"
    beat = datetime.datetime.fromisoformat(status["heartbeat"] if needs_beat else status.get("heartbeat", utc_now()))
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
    return is_fresh(status)


def seems_running(folder: Path, status: dict[str, Any]) -> bool:
    """As `is_running`, for an onlooker: the lock is touched only where process and heartbeat do not agree.

    Who asks for the lock holds it for a moment, in which a run that begins would find the folder in use.
    """
    if status["state"] != "running":
        return False
    if status["host"] != socket.gethostname():
        return is_fresh(status)
    if status.get("boot_id") != boot_id() or not process_exists(status["pid"]):
        return False
    return is_fresh(status) or is_locked(folder)


def process_exists(number: int) -> bool:
    """Tell whether there is a process of this number on this machine."""
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it is somebody else's
    return True


def is_fresh(status: dict[str, Any]) -> bool:
    """Tell whether the last heartbeat is of a short while ago; one of a far future says nothing."""
    beat = datetime.datetime.fromisoformat(status["heartbeat"])
    return abs((datetime.datetime.now(datetime.UTC) - beat).total_seconds()) < SILENCE_SECONDS


def close(folder: Path, state: str, reason: str) -> None:
    """Write how a run ended whose process could not: the rest of its status stays.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_json(
        folder / "status.json", {**new_status(), **(read_status(folder) or {}), "state": state, "reason": reason}
    )


def boot_id() -> str | None:
    """Return what tells one boot of this machine from the next, where the system says it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


# Lock

held: set[Path] = set()
"""Folders that this process has locked. (Opening and closing the file of a held lock would release it.)"""


class RunLock:
    """Keeps two runs out of one folder, as a context; the system releases it however the process ends.

    Record locks (`lockf`) belong to one process: neither loader processes nor children that outlive it keep them.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.file: IO[bytes] | None = None

    def __enter__(self) -> RunLock:
        status = read_status(self.folder)
        if self.folder in held or (status is not None and is_running(self.folder, status)):
            raise UserError(busy(self.folder, status))
        self.file = open_own(self.folder / "lock", "a+b")
        try:
            fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            raise UserError(busy(self.folder, read_status(self.folder))) from error
        except OSError:
            pass  # a file system without locks: the heartbeat alone tells
        held.add(self.folder)
        return self

    def __exit__(self, *error: object) -> None:
        if self.file is not None:
            self.file.close()
        held.discard(self.folder)


def is_locked(folder: Path) -> bool:
    """Tell whether a process, this one included, holds the lock of a run folder."""
    if folder.resolve() in held:
        return True
    try:
        with open_own(folder / "lock", "rb") as file:
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


@contextlib.contextmanager
def working_in(folder: Path, begin: Callable[[], object] = lambda: None) -> Iterator[Status]:
    """Hold a run folder: lock it, keep its status, and write how the work ended.

    A body that ends without a word is `done`, unless it has called `Status.end` itself. `Stopped` is written as
    interrupted (SIGINT) or preempted (all other signals) and passed on, like every other error. A `UserError` leaves
    the status that a resumed run had. `begin` is called with the lock held, before there is a status.

    Raises:
        UserError: another run works in the folder, or it cannot be written.
        RunFailed: the disk is full, or there was not enough memory.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(RunLock(folder))
            remove_leftovers(folder)
            remove_leftovers(folder / "checkpoints")
            begin()
            status = Status(folder)
        except OSError as error:
            raise UserError(unwritable(folder, error)) from error
        try:
            yield status
            status.end("done")
        except Stopped as stop:
            status.end(stop.state, str(stop))
            raise
        except UserError as error:
            status.withdraw(str(error))
            raise
        except OSError as error:
            status.end("failed", out_of_memory(error) or str(error))
            if is_full(error):
                raise RunFailed(f"the disk of {folder} is full: {error}") from error
            raise
        except BaseException as error:
            if reason := out_of_memory(error):
                status.end("failed", reason)
                raise RunFailed(f"{reason}\n{LESS_MEMORY}") from error
            status.end("failed", str(error) or type(error).__name__)
            raise


# Records


def record_resumption(folder: Path, changed: dict[str, tuple[Any, Any]], facts: dict[str, Any]) -> None:
    """Append to resumes.jsonl where and how the run goes on, and which fields changed from what to what."""
    row = {**environment(facts), "changed": changed}
    with open_own(folder / "resumes.jsonl", "a") as file:
        file.write(json.dumps(row) + "\n")


def machine_changes(folder: Path, facts: dict[str, Any]) -> list[str]:
    """Return what about machine and software may change the bits of a run since it began, each as `what old -> new`."""

    def machine(known: dict[str, Any]) -> dict[str, Any]:
        hardware = {name: known["hardware"].get(name) for name in ("accelerator", "devices", "nodes", "sharded")}
        return {"torch": known["versions"]["torch"], "threads": known["threads"], "gpu": known["gpu"], **hardware}

    try:
        old = machine(json.loads((folder / "environment.json").read_text()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []
    return [f"{name} {old[name]} -> {now}" for name, now in machine(environment(facts)).items() if old[name] != now]


def environment(facts: dict[str, Any]) -> dict[str, Any]:
    """Return software, machine, code and command of this process, and whatever `facts` adds."""
    import torch  # takes seconds, and the folders of a run are asked for without it

    packages = ("torch", "lightning", "numpy", "hydra-core", "omegaconf", "wandb")
    return {
        "time": utc_now(),
        "command": shlex.join(sys.argv),
        "folder": os.getcwd(),
        "host": platform.node(),
        "boot_id": boot_id(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {"rtx": __version__} | {name: metadata.version(name) for name in packages},
        "git": git_state(Path(__file__).parents[2]),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        **facts,
    }


def git_state(checkout: Path) -> dict[str, Any] | None:
    """Return commit and whether files differ from it, where the code stands in a checkout of this project."""
    if not (checkout / ".git").exists():
        return None
    question = ["git", "-C", checkout, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        answer = subprocess.run(question, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": answer.removesuffix("-dirty"), "changed": answer.endswith("-dirty")}
