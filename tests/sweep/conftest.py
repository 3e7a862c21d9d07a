"""Where the runs of a test go, and what its sweeps say."""

from pathlib import Path

import pytest
from stand_ins import Sweep


@pytest.fixture
def outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RTX_OUTPUTS", str(tmp_path / "out puts'"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "out puts'"


@pytest.fixture
def sweep(outputs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Sweep:
    return Sweep(outputs, monkeypatch, capsys)
