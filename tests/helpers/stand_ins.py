"""A stand-in for Python in the cells of a sweep: it records its start and ends as told."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rtx.cli import main as cli
from rtx.settings.compose import compose
from rtx.settings.identity import config_hash

PYTHON = sys.executable
RECORD = "record.jsonl"
STAND_IN = """#!{python}
import json, os, pathlib, signal, sys, time
folder = pathlib.Path(os.environ["RTX_RUN"])
folder.mkdir(parents=True, exist_ok=True)
with open({record!r}, "a") as file:
    file.write(json.dumps([sys.argv[1:], os.environ["RTX_RUN"]]) + "\\n")
def end(code, state, **fields):
    (folder / "status.json").write_text(json.dumps(dict(state=state, **fields)))
    os._exit(code)
def done():
    end(0, "done", final=dict(bits=1.5))
{behaviour}
"""


SMALL = (
    *(
        "data=text",
        "data.path=book.txt",
        "data.length=32",
        "model.layers=1",
        "model.hidden=16",
        "model.heads=2",
    ),
    *(
        "model.ffn_hidden=16",
        "model.window=16",
        "routing.layers=1",
        "routing.window=16",
        "routing.heads=1",
    ),
    *("trainer.steps=2", "trainer.batch_size=2", "hardware.threads=1", "logger=jsonl"),
)
"""A run of a second, on a text in the current folder."""


def write_book() -> None:
    """Write the text that `SMALL` trains on."""
    Path("book.txt").write_bytes(bytes(range(32, 127)) * 100)


def stand_in(behaviour: str) -> Path:
    script = Path("stand_in").absolute()
    script.write_text(
        STAND_IN.format(python=PYTHON, record=str(script.with_name(RECORD)), behaviour=behaviour)
    )
    script.chmod(0o755)
    return script


class Sweep:
    """`rtx train -m` with a stand-in for Python in its cells."""

    def __init__(
        self, outputs: Path, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.outputs = outputs
        self.patch = patch
        self.capsys = capsys

    def asked(self, behaviour: str, *words: str, code: int = 0) -> str:
        """Run a sweep of such cells, check its exit code, and return its output or error."""
        if behaviour:
            self.patch.setattr(sys, "executable", str(stand_in(behaviour)))
        assert cli.main(["train", "-m", *words]) == code
        out, error = self.capsys.readouterr()
        assert "Traceback" not in error
        return error if code == 2 else out

    def cell(self, *words: str) -> Path:
        folder = self.outputs / "rtx" / config_hash(compose(words))
        folder.mkdir(parents=True)
        return folder

    @property
    def started(self) -> list[tuple[list[str], Path]]:
        """The arguments, and the folder of the run, of each cell that was started."""
        rows = Path(RECORD).read_text().splitlines() if Path(RECORD).exists() else []
        return [(arguments, Path(folder)) for arguments, folder in map(json.loads, rows)]


def begin(python: Path | str, *arguments: str) -> subprocess.Popen[str]:
    """Run `rtx train -m` with a stand-in for Python in its cells, in a new session."""
    imports = "import sys; from rtx.cli import main as cli"
    code = f"{imports}; sys.executable = {str(python)!r}; cli.entry()"
    command = [sys.executable, "-c", code, "train", "-m", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)


def patiently(ready: Callable[[], object], process: subprocess.Popen[str]) -> None:
    """Wait until something is so, while a process runs."""
    until = time.monotonic() + 600
    while not ready():
        if time.monotonic() > until or process.poll() is not None:
            process.kill()
            raise AssertionError("waited in vain")
        time.sleep(0.02)


def table(said: str) -> list[list[str]]:
    """Return the words of each cell of the closing table, by title: title first, reason last."""
    rows: list[list[str]] = []
    for line in re.split(r"\ncell +state +bits +run\n", said)[1].splitlines():
        if line.startswith("runs: "):
            break
        if line.startswith("  "):
            rows[-1] += line.split()
        else:
            rows.append(line.split())
    return sorted(rows)
