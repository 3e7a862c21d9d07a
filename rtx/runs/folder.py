"""A run's folder: how it is called, who works in it, what it records, how it ends, whether it may go on. No torch."""

import contextlib
import datetime
import fcntl
import itertools
import json
import math
import os
import platform
import secrets
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from rtx import __version__
from rtx.disk import is_full, read_file, remove_leftovers, replace_file, write_json
from rtx.errors import DAMAGED, RunFailed, UserError, nearest, plural, printable, shorten
from rtx.runs.checksum import is_whole, resumable
from rtx.runs.signals import Stopped, state_after
from rtx.settings.identity import may_change
from rtx.settings.names import REGISTERED
from rtx.settings.run_config import RUN_CONFIG, load_run_config
from rtx.settings.schema import Config, flat, to_dict, with_values
from rtx.training.hardware import out_of_memory, started_by

NAMED = 5  # runs that a message lists
BEAT_SECONDS = 15.0
SILENCE_SECONDS = 120.0  # so long without a heartbeat, a run on another machine is taken for dead
EXPORT_FACTS = "export.json"  # says of what run a folder has the model, and that it is an export
CHECKOUT = Path(__file__).parents[2]
LESS_MEMORY = (
    "a smaller trainer.micro_batch_size, or model.recompute=true, needs less with the same result"
)
EXACT = (
    "rtx",
    "torch",
    "threads",
    "gpu",
    "accelerator",
    "precision",
    "compile",
    "devices",
    "nodes",
    "sharded",
)
"""Facts of environment.json that bits depend on."""
FORMER = {"compile": False}
"""What a run did whose environment.json lacks the fact."""
STATES = ("running", "done", "failed", "preempted", "interrupted")
SAMPLED = "~ before bits: of a sample of the validation windows"
"""What explains the mark of `bits_of`, below a table."""
Differences = dict[str, tuple[Any, Any]]


def outputs_root() -> Path:
    """Return the folder of all runs: RTX_OUTPUTS, or outputs/ in the current folder."""
    return Path(os.environ.get("RTX_OUTPUTS") or "outputs").expanduser().absolute()


def given_folder() -> Path | None:
    """Return the folder that RTX_RUN names, if it is set."""
    given = os.environ.get("RTX_RUN")
    return Path(given).expanduser().absolute() if given else None


def new_run_folder(name: str) -> Path:
    """Return the folder of a new run: outputs/<name>/<UTC date, time and random digits>, or RTX_RUN where set."""
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    folder = given_folder() or outputs_root() / name / f"{stamp}-{secrets.token_hex(4)}"
    if any((folder / "checkpoints").glob("*.ckpt")):
        raise UserError(
            f"RTX_RUN={folder} holds checkpoints but no config.yaml: take them out, or name another folder"
        )
    return folder


def unwritable(folder: Path, error: OSError) -> str:
    name = "RTX_RUN" if given_folder() == folder else "RTX_OUTPUTS"
    return f"cannot write to {folder}: {error.strerror}; set {name} to a folder that you can write"


def is_export(folder: Path) -> bool:
    return (folder / EXPORT_FACTS).is_file()


def runs_below(folder: Path) -> list[Path]:
    """Return the runs that a folder is, or holds at most two levels down, the one last at work first; no exports."""
    found = {
        path.parent for depth in ("", "*/", "*/*/") for path in folder.glob(depth + RUN_CONFIG)
    }
    runs = [run for run in sorted(found) if run.parent not in found and not is_export(run)]
    return sorted(runs, key=lambda run: (read_status(run) or {}).get("heartbeat", ""), reverse=True)


def find_run(folder: Path) -> Path:
    """Return the run that `folder` is or alone holds, or of outputs/ the one of this name; else `UserError`.

    Names are `last`, and what a run's id, its random digits or `<name>/<id>` begin with; a whole one comes first.
    """
    if os.path.isfile(folder / RUN_CONFIG):
        return folder
    every, word, is_folder = runs_below(outputs_root()), str(folder), os.path.isdir(folder)
    names = {
        run: [*("/".join(run.parts[-n:]) for n in (1, 2, 3)), run.name.rpartition("-")[2]]
        for run in every
    }
    found = runs_below(folder) if is_folder else every[:1] if word == "last" else []
    for end in () if is_folder or found else ("/", ""):
        found = found or [
            run for run in every if any(f"{name}/".startswith(word + end) for name in names[run])
        ]
    if len(found) == 1:
        return Path(os.path.relpath(found[0])) if found[0].is_relative_to(Path.cwd()) else found[0]
    listed = ", ".join(shown(run) for run in (found or every)[:NAMED]) + ", ..." * (
        len(found or every) > NAMED
    )
    said = f"{shorten(word)}: "
    if found:
        raise UserError(f"{said}{plural(len(found), 'run')}; name one: {listed}")
    if is_folder:
        raise UserError(f"{said}has no config.yaml; a run is a folder such as outputs/<name>/<run>")
    near = nearest(word, itertools.chain(["last"] * bool(every), *names.values()))
    raise UserError(
        f"{said}no such folder, and no run of this name{near}; the newest: {listed or 'there is none'}"
    )


def shown(folder: Path) -> str:
    """Return a folder as the user would type it."""
    short = os.path.relpath(folder)
    short = (
        str(folder) if short.startswith("..") else f"./{short}" if short.startswith("-") else short
    )  # no flag
    return printable(shlex.quote(short))


def open_own(path: Path, mode: str) -> IO[Any]:
    """Open a file that is the run's own: a link in its place, which may lead anywhere, is an error (OSError).

    So is a pipe, whose other end nobody need open.
    """
    kept = os.O_NOFOLLOW | os.O_NONBLOCK
    return open(path, mode, opener=lambda name, flags: os.open(name, flags | kept, 0o644))


def save(path: Path, content: bytes | Mapping[str, Any]) -> Path:
    """Write a result of a run, a mapping as JSON, say where, and return that; `RunFailed` where that cannot be."""
    try:
        path.parent.mkdir(exist_ok=True)
        if isinstance(content, bytes):
            replace_file(path, lambda file: file.write(content))
        else:
            write_json(path, content)
    except OSError as error:
        raise RunFailed(f"cannot write {path}: {error.strerror}") from error
    print(printable(str(path)))
    return path


def utc_now() -> str:
    return (
        datetime.datetime.now(datetime.UTC)
        .isoformat(timespec="milliseconds")
        .replace("+00:00", "Z")
    )


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


def lock(file: IO[bytes], folder: Path) -> None:
    """Keep two runs out of one folder until the file is closed or the process ends, or raise `UserError`."""
    status = read_status(folder)
    is_busy = (
        status is not None and seems_running(status) and status["host"] != socket.gethostname()
    )
    try:
        fcntl.lockf(
            file, fcntl.LOCK_EX | fcntl.LOCK_NB
        )  # of this process alone: children do not keep it
    except OSError as error:  # some file systems have no locks
        is_busy = is_busy or isinstance(error, BlockingIOError)
    if is_busy:
        raise UserError(busy(folder, read_status(folder)))


def refuse_busy(folder: Path) -> None:
    """Raise `UserError` early for a run that is in use elsewhere; `working_in` alone makes sure of it."""
    status = read_status(folder)
    if started_by()[1] > 0 or status is None or not seems_running(status):
        return  # the first process of a run has the folder, and the others leave it to that one
    if status["pid"] == os.getpid():
        return  # a process that opened its own lock here would let go of it
    with contextlib.suppress(OSError), open_own(folder / "lock", "r+b") as file:
        lock(file, folder)


def busy(folder: Path, status: dict[str, Any] | None) -> str:
    who = (
        f"process {status['pid']} on {status['host']}"
        if status and "pid" in status
        else "another process"
    )
    return f"{folder} is in use by {who}; wait for it, or stop it first"


@contextlib.contextmanager
def working_in(folder: Path, begin: Callable[[], object] = lambda: None) -> Iterator[Status]:
    """Hold a run folder: lock it, call `begin`, and keep its status to the end, which `UserError` leaves as before."""
    with contextlib.ExitStack() as stack:
        try:
            (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
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
            if isinstance(error, OSError) and not reason:
                what = (
                    f"the disk of {folder} is full"
                    if is_full(error)
                    else f"{folder} cannot be worked in"
                )
                raise RunFailed(f"{what}: {error}") from error
            if reason:
                raise RunFailed(f"{reason}\n{LESS_MEMORY}") from error
            raise


def record_start(
    folder: Path, facts: dict[str, Any], changed: Differences | None, anew: bool
) -> list[str]:
    """Record machine, software and changes of a run; return what since it began may change bits, `what old -> new`."""
    now, path = environment(facts), folder / "environment.json"
    if anew or not path.exists():
        write_json(path, now)
    if changed is None:
        return []
    with open_own(folder / "resumes.jsonl", "a") as file:
        file.write(json.dumps({**now, "changed": changed}) + "\n")
    try:
        began = json.loads(read_file(path))
        old, new = (
            {**FORMER, **known, **known["versions"], **known["hardware"]} for known in (began, now)
        )
    except DAMAGED:
        return [f"{path}, which does not say on what the run began"]
    return [
        f"{name} {old.get(name)} -> {new.get(name)}"
        for name in EXACT
        if old.get(name) != new.get(name)
    ]


def environment(facts: dict[str, Any]) -> dict[str, Any]:
    """Return software, machine, code and command of this process, and whatever `facts` adds."""
    import torch  # takes seconds, and the folders of a run are asked for without it

    packages = (
        "torch",
        "lightning",
        "numpy",
        "hydra-core",
        "omegaconf",
        "wandb",
        *filter(None, REGISTERED.values()),
    )
    return {
        "time": utc_now(),
        "command": command_line(),
        "host": platform.node(),
        "python": platform.python_version(),
        "versions": {"rtx": __version__} | {name: version_of(name) for name in packages},
        "git": {"commit": code_commit()},
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        **facts,
    }


def version_of(package: str) -> str | None:
    """Return the version of a package; None where it is not installed, as wandb is with `logger=jsonl` alone."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def command_line() -> str:
    """Return the command that this process was started by; `python -m rtx` is written as `rtx`."""
    program, *words = sys.argv
    if Path(program).name == "__main__.py":
        program = "rtx"
    return shlex.join([program, *words])


def code_commit() -> str | None:
    """Return the commit of this code where it is a checkout of the project, with `-dirty` where files differ."""
    ask = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        if (CHECKOUT / ".git").exists():
            return subprocess.check_output(
                ask, cwd=CHECKOUT, stderr=subprocess.DEVNULL, text=True, timeout=10
            ).strip()
    return None


def differences(
    old: Mapping[str, Any], new: Mapping[str, Any], *, shared: bool = False
) -> Differences:
    """Return the fields (dotted names) whose values differ, with both; `shared`: of those that both have."""
    old, new = flat(old), flat(new)
    keys = sorted(old.keys() & new.keys() if shared else old.keys() | new.keys())
    return {key: (old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)}


def refuse_changes(changed: Differences) -> None:
    """Raise `UserError` for a change that would make another run."""
    may = "trainer.steps, max_minutes, micro_batch_size, the intervals, hardware and logger"
    for key, (old, new) in changed.items():
        if not may_change(key):
            raise UserError(
                f"{key}: {old} -> {new} is refused: a run that goes on may change {may}"
            )


def place_of(config: Config) -> tuple[Config, Path | None, str | None]:
    """Return what `rtx train` is to train, in which folder, and the state of the run there that goes on.

    A new run has no folder yet, and an empty state. The state is None where nothing is left to do, which is said.
    """
    folder = given_folder()
    if folder is None or not (folder / RUN_CONFIG).exists():
        return config, None, ""
    config = as_chosen(config, load_run_config(folder))
    return config, folder, plan_resumption(folder, config) or None


def plan_resumption(folder: Path, config: Config) -> str:
    """Return the state of a run that goes on with a configuration; empty where nothing is left to do, which is said."""
    if is_export(folder):
        raise UserError(f"{folder} is an exported model; resume the run it came from")
    if is_first := started_by()[1] == 0:  # the others are compared with it
        refuse_changes(differences(to_dict(load_run_config(folder)), to_dict(config)))
    line = printable(already_done(folder, config))
    if line and is_first:
        print(line, flush=True)
    return "" if line else run_state(folder)


def already_done(folder: Path, config: Config) -> str:
    """Return the line for a run that has nothing left to do, else (also where its last.ckpt is damaged) nothing."""
    status, steps, limit = (
        read_status(folder) or {},
        config.trainer.steps,
        config.trainer.max_minutes or math.inf,
    )
    step, final, is_over = (
        status.get("step", 0),
        status.get("final"),
        status.get("seconds", 0.0) >= 60 * limit,
    )
    if status.get("state") != "done" or not final or not (is_over or step >= steps):
        return ""
    if step > steps:
        raise UserError(
            f"trainer.steps={steps}: the run is done with {step} steps; give more than that"
        )
    whole = [is_whole(path) for path in resumable(folder / "checkpoints")]
    if not any(whole):
        raise RunFailed(
            f"{folder} was done after {step:,} steps, but no whole checkpoint is left in it"
        )
    longer = (
        f"steps=N with N above {step:,}"
        if step == steps
        else f"max_minutes=M with M above {limit:g}"
    )
    sample = f"{final['windows']:,} windows of " if final.get("windows") else ""
    score = f"{final['bits']:.4f} bits/{final.get('unit', 'unit')} on {sample}the validation split"
    return (
        f"{folder} is done: {step:,} steps, {score}; trainer.{longer} continues it"
        if whole[0]
        else ""
    )


def as_chosen(config: Config, before: Config) -> Config:
    """Return a configuration in which what is `auto` is as a run has chosen it before, if it was on as many devices."""
    wished, chosen = flat(to_dict(config)), flat(to_dict(before))
    if any(
        wished[f"hardware.{key}"] != chosen[f"hardware.{key}"]
        for key in ("name", "devices", "nodes")
    ):
        return config
    keys = [key for key in ("trainer.micro_batch_size", "model.recompute") if wished[key] == "auto"]
    return with_values(config, {key: chosen[key] for key in keys})
