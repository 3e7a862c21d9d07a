"""A stand-in for `python -m rtx` in the cells of a sweep: it records how it was started and ends as the test wants."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from rtx import cli

ROOT = Path(__file__).resolve().parents[2]
STAND_IN = """#!{python}
import json, os, pathlib, signal, sys, time
folder = pathlib.Path(os.environ["RTX_RUN"])
folder.mkdir(parents=True, exist_ok=True)
with open({record!r}, "a") as file:
    file.write(json.dumps([sys.argv[1:], os.environ["RTX_RUN"]]) + "\\n")
def end(code, state, **fields):
    (folder / "status.json").write_text(json.dumps(dict(state=state, **fields)))
    os._exit(code)
{behaviour}
"""


def stand_in(tmp_path: Path, behaviour: str) -> Path:
    """Write the program that stands in for Python in a cell."""
    script = tmp_path / "stand_in"
    record = str(tmp_path / "record.jsonl")
    script.write_text(STAND_IN.format(python=sys.executable, record=record, behaviour=behaviour))
    script.chmod(0o755)
    return script


def started(tmp_path: Path) -> list[tuple[list[str], str]]:
    """Return arguments and RTX_RUN of each cell that was started."""
    record = tmp_path / "record.jsonl"
    return [tuple(json.loads(line)) for line in record.read_text().splitlines()] if record.exists() else []


def run(monkeypatch: pytest.MonkeyPatch, script: Path, *arguments: str) -> int:
    """Run `rtx train -m` with the stand-in."""
    monkeypatch.setattr(sys, "executable", str(script))
    return cli.main(["train", "-m", *arguments])
