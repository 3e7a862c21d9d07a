"""What the data tests share."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing on this machine stand between a test and its server."""
    monkeypatch.setenv("no_proxy", "*")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "stores"


@pytest.fixture
def said() -> list[str]:
    return []
