"""Where the runs of a test go, and what its sweeps say."""

from pathlib import Path

import pytest

from tests.helpers.stand_ins import Sweep


@pytest.fixture
def sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Sweep:
    monkeypatch.setenv("RTX_OUTPUTS", str(tmp_path / "out puts'"))
    monkeypatch.chdir(tmp_path)
    return Sweep(tmp_path / "out puts'", monkeypatch, capsys)
