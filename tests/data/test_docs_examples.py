"""The two examples of docs/datasets.md, run as they stand there in a copy of the project."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "datasets.md").read_text()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A copy of the project, and a script `rtx` that runs it."""
    for name in ("rtx", "conf"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "rtx").write_text(f'#!/bin/sh\nexec {sys.executable} -m rtx "$@"\n')
    (tmp_path / "bin" / "rtx").chmod(0o755)
    return tmp_path


def run(place: Path, script: str) -> str:
    """Run a script of the page; return what it said."""
    path = f"{place / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(place), "RTX_DATA": str(place / "stores")}
    done = subprocess.run(["sh", "-ec", script], cwd=place, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def block(language: str, after: str) -> str:
    """Return the first block of code in a language behind a phrase of the page."""
    found = re.search(rf"```{language}\n(.*?)```", PAGE[PAGE.index(after) :], re.S)
    assert found
    return found[1]


def test_any_text_of_the_hub(place: Path) -> None:
    run(place, block("sh", "## Any text of the hub"))
    (record,) = (place / "stores").glob("hub-*/store.json")
    facts = json.loads(record.read_text())
    assert facts["splits"]["valid"]["documents"] == 6 and facts["source"]["column"] == "verse"
    text = (record.parent / "valid.bin").read_bytes()
    assert text.startswith(b"line 1 of validation, and a few words more\nline 2")


def test_a_data_set_of_ones_own(place: Path) -> None:
    (place / "rtx" / "data" / "own").mkdir()
    (place / "rtx" / "data" / "own" / "primes.py").write_text(block("python", "## A data set of your own"))
    (place / "conf" / "data" / "primes.yaml").write_text(block("yaml", "and `conf/data/primes.yaml`"))
    said = run(place, "rtx data prepare data=primes data.tokenizer=words && rtx plan data=primes model=tiny")
    assert "stores/primes-" in said and "primes bytes" in said
    (record,) = (place / "stores").glob("primes-*/store.json")
    assert (record.parent / "train.bin").stat().st_size > 3_000
    assert json.loads(record.read_text())["splits"]["train"]["documents"] == 18
