"""A run's folder: where it is, who works in it, what it records at the start, and how it ends. No torch.

status.json says what a run is doing, kept fresh by a heartbeat; a lock tells it apart from leftovers of a killed run.
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
from rtx.training.signals import Stopped, state_after

BEAT_SECONDS = 15.0
SILENCE_SECONDS = 120.0
"""A run on another machine that has been silent for this long is taken for dead."""
EXPORT_FACTS = "export.json"
"""Says of what run a folder has the model, and that it is an export."""
LESS_MEMORY = (
    "a smaller trainer.micro_batch_size, or model.recompute=true, needs less with the same result but for rounding"
)
EXACT = ("torch", "threads", "gpu", "accelerator", "precision", "devices", "nodes", "sharded")
"""Facts of environment.json that bits depend on."""
STATES = ("running", "done", "failed", "preempted", "interrupted")


def outputs_root() -> Path:
    """Return the folder of all runs: RTX_OUTPUTS, or outputs/ in the current folder."""
    return Path(os.environ.get("RTX_OUTPUTS") or "outputs").expanduser().absolute()


def given_folder() -> Path | None:
    """Return the folder that RTX_RUN names, if it is set."""
    given = os.environ.get("RTX_RUN")
    return Path(given).expanduser().absolute() if given else None


def new_run_folder(name: str) -> Path:
    """Make the folder of a new run: outputs/<name>/<UTC date, time and four random digits>, or RTX_RUN where set."""
    stamp, given = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S"), given_folder()
    folder = given or outputs_root() / name / f"{stamp}-{secrets.token_hex(2)}"
    if any((folder / "checkpoints").glob("*.ckpt")):
        raise UserError(f"RTX_RUN={folder} holds checkpoints but no config.yaml: take them out, or name another folder")
    try:
        (folder / "checkpoints").mkdir(parents=True, exist_ok=given is not None)
    except OSError as error:
        raise UserError(unwritable(folder, error)) from error
    return folder


def is_export(folder: Path) -> bool:
    return (folder / EXPORT_FACTS).is_file()


def shown(folder: Path) -> str:
    """Return a folder as the user would type it."""
    short = os.path.relpath(folder)
    return shlex.quote(str(folder) if short.startswith("..") else short)


def unwritable(folder: Path, error: OSError) -> str:
    name = "RTX_RUN" if given_folder() == folder else "RTX_OUTPUTS"
    return f"cannot write to {folder}: {error.strerror}; set {name} to a folder that you can write"


def open_own(path: Path, mode: str) -> IO[Any]:
    """Open a file that is the run's own: a link in its place, which may lead anywhere, is an error (OSError)."""
    return open(path, mode, opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o644))


def utc_now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def this_process() -> dict[str, Any]:
    return {"pid": os.getpid(), "host": socket.gethostname(), "started": utc_now(), "heartbeat": utc_now()}


class Status:
    """The status.json of a run that this process owns, written by the training thread and by a heartbeat.

    Fields: state (one of STATES), reason, step, steps, saved (step of the last checkpoint), best, final, seconds, pid,
    host, started, heartbeat.
    """

    def __init__(self, folder: Path) -> None:
        self.path, self.before = folder / "status.json", read_status(folder) or {}
        kept = {key: self.before[key] for key in ("step", "steps", "best", "saved") if key in self.before}
        self.fields = {"step": 0, **kept, "state": "running", "reason": None, **this_process()}
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
                with contextlib.suppress(OSError), open_own(self.path, "r+b") as file:
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
        status = json.loads((folder / "status.json").read_text())
        scores = [score["bits"] for key in ("best", "final") if (score := status.get(key)) is not None]
        numbers = [*scores, status.get("step", 0), status.get("seconds", 0), status.get("pid", 1)]
        sound = all(isinstance(number, int | float) for number in numbers) and 0 < status.get("pid", 1) < 2**31
        if status["state"] == "running":
            seems_running(status)
        return status if sound and status["state"] in STATES else None
    except (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError):
        return None


def run_state(folder: Path) -> str:
    """Return the state of a run as it is: a stale `running` is called `killed`, a folder without status `unknown`."""
    status = read_status(folder)
    if status is None:
        return "unknown"
    return "killed" if status["state"] == "running" and not seems_running(status) else status["state"]


def seems_running(status: dict[str, Any]) -> bool:
    """Tell whether a run is at work: it wrote lately, and its process, if it is of this machine, is there.

    A heartbeat of a far future says nothing. No lock is touched: a run that begins would find the folder in use.
    """
    if status["state"] != "running":
        return False
    silence = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(status["heartbeat"])
    if abs(silence.total_seconds()) >= SILENCE_SECONDS:
        return False
    try:
        if status["host"] == socket.gethostname():
            os.kill(status["pid"], 0)
    except OSError as error:
        return isinstance(error, PermissionError)  # the process is somebody else's
    return True


def close(folder: Path, state: str, reason: str) -> None:
    """Write how a run ended whose process could not: the rest of its status stays; OSError where that cannot be."""
    folder.mkdir(parents=True, exist_ok=True)
    status = {"step": 0, **this_process(), **(read_status(folder) or {})}
    write_json(folder / "status.json", status | {"state": state, "reason": reason})


def lock(file: IO[bytes], folder: Path) -> None:
    """Keep two runs out of one folder until the file is closed or the process ends, however it does; else `UserError`.

    Record locks (`lockf`) belong to one process: neither loader processes nor children that outlive it keep them. Where
    a file system has no locks, and from other machines, the heartbeat alone tells.
    """
    status = read_status(folder)
    is_busy = run_state(folder) == "running" and status is not None and status["host"] != socket.gethostname()
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        is_busy = is_busy or isinstance(error, BlockingIOError)
    if is_busy:
        raise UserError(busy(folder, read_status(folder)))


def busy(folder: Path, status: dict[str, Any] | None) -> str:
    who = f"process {status['pid']} on {status['host']}" if status and "pid" in status else "another process"
    return f"{folder} is in use by {who}; wait for it, or stop it first"


@contextlib.contextmanager
def working_in(folder: Path, begin: Callable[[], object] = lambda: None) -> Iterator[Status]:
    """Hold a run folder: lock it, call `begin`, keep its status, and write how the work ended.

    A body that ends without a word is `done`. `Stopped` and errors are written and passed on, a full disk and a want of
    memory as `RunFailed`; a `UserError` (as another run's work in the folder is one) leaves the status of before.
    """
    with contextlib.ExitStack() as stack:
        try:
            lock(stack.enter_context(open_own(folder / "lock", "a+b")), folder)
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
            status.end(state_after(stop.code), str(stop))
            raise
        except BaseException as error:
            reason = out_of_memory(error)
            if isinstance(error, UserError) and status.before and not status.ended.is_set():
                status.ended.set()
                write_json(status.path, status.before)
            status.end("failed", reason or str(error) or type(error).__name__)
            if reason:
                raise RunFailed(f"{reason}\n{LESS_MEMORY}") from error
            if isinstance(error, OSError) and is_full(error):
                raise RunFailed(f"the disk of {folder} is full: {error}") from error
            raise


def record_start(
    folder: Path, facts: dict[str, Any], changed: dict[str, tuple[Any, Any]] | None, anew: bool
) -> list[str]:
    """Record machine and software, and in resumes.jsonl which fields a run changes that goes on, from what to what.

    Returns what about machine and software may change the bits of a run since it began, each as `what old -> new`.
    """
    now, path = environment(facts), folder / "environment.json"
    if anew or not path.exists():
        write_json(path, now)
    if changed is None:
        return []
    with open_own(folder / "resumes.jsonl", "a") as file:
        file.write(json.dumps({**now, "changed": changed}) + "\n")
    began = json.loads(path.read_text())
    old, new = ({**known, **known["versions"], **known["hardware"]} for known in (began, now))
    return [f"{name} {old.get(name)} -> {new.get(name)}" for name in EXACT if old.get(name) != new.get(name)]


def environment(facts: dict[str, Any]) -> dict[str, Any]:
    """Return software, machine, code and command of this process, and whatever `facts` adds."""
    import torch  # takes seconds, and the folders of a run are asked for without it

    packages = ("torch", "lightning", "numpy", "hydra-core", "omegaconf", "wandb")
    return {
        "time": utc_now(),
        "command": shlex.join(sys.argv),
        "host": platform.node(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {"rtx": __version__} | {name: metadata.version(name) for name in packages},
        "git": git_state(Path(__file__).parents[2]),
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
