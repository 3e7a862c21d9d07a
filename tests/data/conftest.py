"""What the data tests share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest


@pytest.fixture(autouse=True)
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing on this machine stand between a test and its server."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def said() -> list[str]:
    """The lines that a call with `report=said.append` printed."""
    return []


@pytest.fixture
def book(tmp_path: Path) -> Path:
    """A text file of 5,000 bytes that are not all UTF-8."""
    path = tmp_path / "book.txt"
    path.write_bytes(np.random.default_rng(0).integers(0, 256, 5000, dtype=np.uint8).tobytes())
    return path
