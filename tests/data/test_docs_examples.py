"""The example of docs/datasets.md, run as it stands there in a copy of the project."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "datasets.md").read_text()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A copy of the project."""
    for name in ("rtx", "conf"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def run(place: Path, script: str) -> tuple[Path, dict[str, Any]]:
    """Run a script of the page; return the only store that it made, and its record."""
    environment = {**os.environ, "PYTHONPATH": str(place), "RTX_DATA": str(place / "stores")}
    script = f'rtx() {{ {sys.executable} -m rtx "$@"; }}\n{script}'
    done = subprocess.run(["sh", "-ec", script], cwd=place, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (record,) = (place / "stores").glob("*/store.json")
    return record.parent, json.loads(record.read_text())


def block(language: str, after: str) -> str:
    """Return the first block of code in a language behind a phrase of the page."""
    found = re.search(rf"```{language}\n(.*?)```", PAGE[PAGE.index(after) :], re.S)
    assert found
    return found[1]


def test_any_text_of_the_hub(place: Path) -> None:
    folder, record = run(place, block("sh", "## Any text of the hub"))
    assert record["splits"]["valid"]["documents"] == 6 and record["source"]["column"] == "verse"
    assert (folder / "valid.bin").read_bytes().startswith(b"line 1 of validation, and a few words more\nline 2")
