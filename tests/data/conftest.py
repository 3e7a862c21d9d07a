"""What the data tests share."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing on this machine stand between a test and its server."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "stores"


@pytest.fixture
def said() -> list[str]:
    return []
