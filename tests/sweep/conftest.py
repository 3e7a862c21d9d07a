"""Where the runs of a test go."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep runs below a folder of the test's own."""
    monkeypatch.setenv("RTX_OUTPUTS", str(tmp_path / "out puts'"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "out puts'"
