"""A small run for each file of tests, and copies of it to be spoilt."""

import shutil
from pathlib import Path

import pytest
from small_runs import Workshop


@pytest.fixture(scope="module")
def run(workshop: Workshop) -> Path:
    return workshop.train("run")


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "run"))
