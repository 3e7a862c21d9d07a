from __future__ import annotations

import http.server
import socket
import threading
import time
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from rtx.data import hub
from rtx.data.hub import hub_files, unreachable
from rtx.errors import RunFailed

PATTERNS = ["config/*.parquet"]


class Quiet(http.server.BaseHTTPRequestHandler):
    """A server that answers, and writes no log."""

    def log_message(self, format, *args):
        pass


@pytest.fixture
def nobody(monkeypatch, tmp_path) -> str:
    """An address where nobody listens, in the place of the hub's; and an empty cache."""
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return address


def cached(tmp_path: Path, name: str = "config/a.parquet") -> Path:
    """Put a file into the cache as the hub's client does; return its snapshot."""
    repository = tmp_path / "cache/datasets--some--set"
    snapshot = repository / "snapshots" / ("0" * 40)
    (snapshot / name).parent.mkdir(parents=True)
    (snapshot / name).write_bytes(b"content")
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("0" * 40)
    return snapshot


def asked_of_the_cache(monkeypatch, tmp_path: Path) -> None:
    """The client's default cache was settled when it was imported."""
    real = huggingface_hub.snapshot_download
    place = str(tmp_path / "cache")
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **options: real(name, cache_dir=place, **options)
    )


def test_without_a_network_it_is_said_in_a_line_at_once(nobody, said, monkeypatch, tmp_path):
    asked_of_the_cache(monkeypatch, tmp_path)
    start = time.monotonic()
    with pytest.raises(
        RunFailed, match=r"some/set: cannot be fetched: 127\.0\.0\.1: .*refused; .*data\.path="
    ) as error:
        hub_files("some/set", PATTERNS, said.append)
    assert time.monotonic() - start < 5 and "\n" not in str(error.value)


def test_what_is_cached_needs_no_network(nobody, said, monkeypatch, tmp_path):
    asked_of_the_cache(monkeypatch, tmp_path)
    snapshot = cached(tmp_path)
    assert hub_files("some/set", PATTERNS, said.append) == snapshot
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub_files("some/set", PATTERNS, said.append) == snapshot
    assert "HF_HUB_OFFLINE is set" in said[-1]


def test_a_cache_of_other_files_is_not_enough(nobody, said, monkeypatch, tmp_path):
    asked_of_the_cache(monkeypatch, tmp_path)
    cached(tmp_path, "other/a.parquet")
    with pytest.raises(RunFailed, match=r"cannot be fetched: 127\.0\.0\.1"):
        hub_files("some/set", PATTERNS, said.append)


def test_whatever_the_client_raises_becomes_a_line(nobody, said, monkeypatch):
    class ConnectError(Exception):
        """As that of its HTTP library: no OSError."""

    def fail(name, **options):
        raise ConnectError("no route\nto the hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    monkeypatch.setattr(hub, "unreachable", lambda address: None)
    with pytest.raises(RunFailed, match="some/set: cannot be fetched: no route to the hub; fetch it"):
        hub_files("some/set", PATTERNS, said.append)


def test_a_set_without_the_files_is_refused(nobody, said, monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **options: str(tmp_path))
    monkeypatch.setattr(hub, "unreachable", lambda address: None)
    with pytest.raises(RunFailed, match=r"it has no config/\*\.parquet"):
        hub_files("some/set", PATTERNS, said.append)


def test_an_address_that_answers_or_whose_proxy_does_is_reachable(nobody, monkeypatch):
    with http.server.HTTPServer(("127.0.0.1", 0), Quiet) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        assert unreachable(address) is None  # it answers 501, which is an answer
        assert unreachable("http://nowhere.invalid") is not None
        monkeypatch.setenv("http_proxy", address)
        assert unreachable("http://nowhere.invalid") is None
        monkeypatch.setenv("https_proxy", address)
        assert "Tunnel connection failed: 501" in str(unreachable("https://nowhere.invalid"))
        server.shutdown()
    assert unreachable("http://nowhere.invalid") is not None


def test_a_name_that_takes_for_ever_is_given_up(monkeypatch):
    monkeypatch.setattr(hub, "ANSWER_WITHIN", 0.1)
    monkeypatch.setattr(socket, "create_connection", lambda *arguments, **options: time.sleep(1))
    assert unreachable("http://nowhere.invalid") == "nowhere.invalid: no answer within 0 s"
