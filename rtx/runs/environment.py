"""Machine, software, code and command of a run, in environment.json and resumes.jsonl."""

import contextlib
import functools
import platform
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from rtx.disk import append, is_file_inside, write_json
from rtx.runs.folder import ENVIRONMENT, RESUMES
from rtx.runs.records import EnvironmentRecord, ResumeRow, read_record
from rtx.runs.resumption import Differences
from rtx.runs.status import utc_now
from rtx.settings.names import REGISTERED
from rtx.version import __version__

CHECKOUT = Path(__file__).parents[2]
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
"""Values of facts that environment.json of older runs lacks."""
PACKAGES = ("torch", "lightning", "numpy", "hydra-core", "omegaconf", "wandb")


def record_start(
    folder: Path, facts: dict[str, Any], changed: Differences | None, anew: bool
) -> list[str]:
    """Record the environment of a run that begins or resumes.

    Returns the facts that differ from the first start and may change bits, as `name old -> new`.

    Args:
        folder: of the run.
        facts: what to record beside `environment`.
        changed: the keys that have other values than before; None: the run begins.
        anew: whether to replace environment.json.
    """
    now = EnvironmentRecord.model_validate(environment(facts))
    if anew or not is_file_inside(folder, ENVIRONMENT):
        write_json(folder, ENVIRONMENT, now.model_dump(exclude_unset=True))
    if changed is None:
        return []
    row = ResumeRow(**now.model_dump(exclude_unset=True), changed=changed)
    append(folder, RESUMES, f"{row.model_dump_json(exclude_unset=True)}\n".encode())
    began = read_record(EnvironmentRecord, folder, ENVIRONMENT, problems=[])
    if began is None:
        return [f"{folder / ENVIRONMENT}, which does not say on what the run began"]
    old = exact_facts(began)
    new = exact_facts(now)
    differing = [name for name in EXACT if old[name] != new[name]]
    return [f"{name} {old[name]} -> {new[name]}" for name in differing]


def exact_facts(record: EnvironmentRecord) -> dict[str, Any]:
    """Return the facts of an environment that bits depend on, None for those that it lacks."""
    facts = {**FORMER, **record.model_dump(), **record.versions, **record.hardware}
    return {name: facts.get(name) for name in EXACT}


def environment(facts: dict[str, Any]) -> dict[str, Any]:
    """Return software, machine, code and command of this process, and `facts`."""
    # It takes seconds, and readers of environment.json do not need it.
    import torch

    versions: dict[str, str | None] = {"rtx": __version__}
    for name in (*PACKAGES, *filter(None, REGISTERED.values())):
        versions[name] = version_of(name)
    return {
        "time": utc_now(),
        "command": command_line(),
        "host": platform.node(),
        "python": platform.python_version(),
        "versions": versions,
        "git": {"commit": code_commit()},
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        **facts,
    }


@functools.cache
def version_of(package: str) -> str | None:
    """Return the version of a package; None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def command_line() -> str:
    """Return the command that started this process; `python -m rtx` is written as `rtx`."""
    program, *words = sys.argv
    if Path(program).name == "__main__.py":
        program = "rtx"
    return shlex.join([program, *words])


@functools.cache
def code_commit() -> str | None:
    """Return the commit of this code, with `-dirty` where files differ; None outside a checkout.

    It is that of the first call in this process, which has imported its code by then.
    """
    command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    if not (CHECKOUT / ".git").exists():
        return None
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        answer = subprocess.run(
            command, cwd=CHECKOUT, capture_output=True, text=True, timeout=10, check=True
        )
        return answer.stdout.strip()
    return None
