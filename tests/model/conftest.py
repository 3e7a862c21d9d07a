"""Fixtures of the model tests: one thread."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Tiny matrices gain nothing from more."""
    torch.set_num_threads(1)
