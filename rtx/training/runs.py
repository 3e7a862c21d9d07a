"""A run's folder: where it is, what it records at the start, and how it ends."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import secrets
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from rtx import __version__
from rtx.disk import is_full
from rtx.errors import RunFailed, UserError
from rtx.training.files import remove_leftovers, write_json
from rtx.training.memory import out_of_memory
from rtx.training.metrics import utc_now
from rtx.training.signals import Stopped
from rtx.training.status import RunLock, Status, boot_id

LESS_MEMORY = (
    "a smaller trainer.micro_batch_size, or model.recompute=true, needs less with the same result but for rounding"
)
"""What helps a run that is out of memory."""


def outputs_root() -> Path:
    """Return the folder of all runs: RTX_OUTPUTS, or outputs/ in the current folder."""
    return Path(os.environ.get("RTX_OUTPUTS") or "outputs").expanduser().absolute()


def new_run_folder(name: str) -> Path:
    """Make the folder of a new run: outputs/<name>/<UTC date, time and four random digits>, or RTX_RUN where set.

    Raises:
        UserError: the folder cannot be written, or RTX_RUN names one with checkpoints.
    """
    given = os.environ.get("RTX_RUN")
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    folder = Path(given).expanduser().absolute() if given else outputs_root() / name / f"{stamp}-{secrets.token_hex(2)}"
    if any((folder / "checkpoints").glob("*.ckpt")):
        raise UserError(f"RTX_RUN={folder} holds a run already; continue it with: rtx resume {folder}")
    try:
        (folder / "checkpoints").mkdir(parents=True, exist_ok=given is not None)
    except OSError as error:
        raise UserError(unwritable(folder, error)) from error
    return folder


def shown(folder: Path) -> str:
    """Return a folder as the user would type it."""
    short = os.path.relpath(folder)
    return str(folder) if short.startswith("..") else short


def unwritable(folder: Path, error: OSError) -> str:
    """Return the line for a folder that cannot be written."""
    return f"cannot write to {folder}: {error.strerror}; set RTX_OUTPUTS to a folder that you can write"


@contextlib.contextmanager
def working_in(folder: Path, begin: Callable[[], None] = lambda: None) -> Iterator[Status]:
    """Hold a run folder: lock it, keep its status, and write how the work ended.

    A body that ends without a word is `done`, unless it has called `Status.end` itself. `Stopped` is written as
    interrupted (SIGINT) or preempted (SIGTERM, SIGUSR1, SIGUSR2) and passed on, like every other error. A `UserError`
    leaves the status that a resumed run had. `begin` is called with the lock held, before there is a status.

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


def record_environment(folder: Path, facts: dict[str, Any]) -> None:
    """Write environment.json, what `environment` returns: of a run that takes its first step next, or has lost it."""
    write_json(folder / "environment.json", environment(facts))


def record_resumption(folder: Path, changed: dict[str, tuple[Any, Any]], facts: dict[str, Any]) -> None:
    """Append to resumes.jsonl where and how the run goes on, and which fields changed from what to what."""
    row = {**environment(facts), "changed": changed}
    with open(folder / "resumes.jsonl", "a") as file:
        file.write(json.dumps(row) + "\n")


def machine_changes(folder: Path, facts: dict[str, Any]) -> list[str]:
    """Return what about machine and software may change the bits of a run since it began, each as `what old -> new`."""
    try:
        before = json.loads((folder / "environment.json").read_text())
        old, new = (machine(environment) for environment in (before, environment(facts)))
        return [f"{name} {old[name]} -> {new[name]}" for name in old if old[name] != new[name]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def machine(environment: dict[str, Any]) -> dict[str, Any]:
    """Return what of an environment.json the bits of a run depend on."""
    return {
        "torch": environment["versions"]["torch"],
        **{name: environment[name] for name in ("threads", "gpu")},
        **{name: environment["hardware"][name] for name in ("accelerator", "devices", "nodes")},
        "sharded": environment["hardware"].get("sharded", False),
    }


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
        "versions": {"rtx": __version__} | {name: package_version(name) for name in packages},
        "git": git_state(Path(__file__).parent),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        **facts,
    }


def package_version(name: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return commit and whether files differ from it, where the code stands in a checkout of this project."""
    if not (folder.parent.parent / ".git").exists():
        return None
    answers = []
    for question in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"]):
        try:
            answer = subprocess.run(["git", "-C", folder, *question], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        if answer.returncode != 0:
            return None
        answers.append(answer.stdout.strip())
    return {"commit": answers[0], "changed": bool(answers[1])}
