"""The workshop in which small runs are made."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest
from small_runs import Workshop, forking_server


@pytest.fixture(scope="session")
def server() -> Iterator[subprocess.Popen[str]]:
    with forking_server() as process:
        yield process


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory, server: subprocess.Popen[str]) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("workshop"), server)
