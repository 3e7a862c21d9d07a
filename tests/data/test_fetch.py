"""The download against servers that behave badly on purpose, all on 127.0.0.1."""

import errno
import hashlib
import http.server
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from rtx.data import download as downloading
from rtx.data import hub
from rtx.data.download import Remote, download
from rtx.data.hub import hub_files
from rtx.errors import RunFailed
from tests.helpers.bad_servers import (
    CONTENT,
    NOBODY,
    Server,
    broken,
    ranged,
    redirect,
    refuse,
    serving,
    silent,
    whole,
)

PART = 300_000


@pytest.fixture
def server(monkeypatch) -> Iterator[Server]:
    monkeypatch.setattr(downloading, "PAUSE", 0)
    with serving() as state:
        yield state


def test_a_whole_file_arrives_once_and_an_altered_one_again(server, tmp_path, said):
    server.answers = [whole]
    target = download(server.remote, tmp_path / "downloads", said.append)
    assert target == tmp_path / "downloads" / "file.zip" and target.read_bytes() == CONTENT
    assert said == [f"fetching {server.remote.url} (1,000,000 bytes)"]
    assert download(server.remote, tmp_path / "downloads", said.append) == target
    assert server.ranges == [None] and os.listdir(target.parent) == ["file.zip"]
    target.write_bytes(CONTENT[:-1] + b"x")
    assert download(server.remote, tmp_path / "downloads", said.append).read_bytes() == CONTENT


def test_what_broke_or_fell_silent_is_continued_where_it_was(server, tmp_path, said, monkeypatch):
    server.answers = [broken, silent, ranged]
    monkeypatch.setattr(downloading, "SILENCE", 0.2)
    (tmp_path / "file.zip.part").write_bytes(CONTENT[:PART])
    assert download(server.remote, tmp_path, said.append).read_bytes() == CONTENT
    assert server.ranges == ["bytes=300000-", "bytes=550000-", "bytes=800000-"]
    assert (
        "file.zip: the connection ended early at 550,000 of 1,000,000 bytes; again in 0 s" in said
    )
    assert any("timed out" in line for line in said)


def test_a_server_that_ignores_ranges_sends_it_all_again(server, tmp_path, said):
    server.answers = [redirect("/elsewhere/file.bin"), whole]
    (tmp_path / "file.zip.part").write_bytes(b"x" * PART)
    assert download(server.remote, tmp_path, said.append).read_bytes() == CONTENT


@pytest.mark.parametrize(
    "stale", [b"x" * PART, b"x" * 1_000_000, b"x" * 1_000_001], ids=["short", "same", "long"]
)
def test_other_bytes_never_get_the_name_and_the_next_call_begins_anew(
    server, tmp_path, said, stale
):
    server.answers = [ranged]
    (tmp_path / "file.zip.part").write_bytes(stale)
    with pytest.raises(
        RunFailed,
        match=r"file\.zip: expected sha256 [0-9a-f]{64}, found [0-9a-f]{64}; .*data\.path=",
    ):
        download(server.remote, tmp_path, said.append)
    assert os.listdir(tmp_path) == []
    assert download(server.remote, tmp_path, said.append).read_bytes() == CONTENT


def endless(handler: http.server.BaseHTTPRequestHandler) -> None:
    handler.send_response(200)  # no length: the body ends where the connection does
    handler.end_headers()
    handler.wfile.write(b"more" + CONTENT + b"more")


@pytest.mark.parametrize(
    ("answer", "message"), [(endless, "expected sha256 "), (refuse(403), "HTTP Error 403: ")]
)
def test_another_file_or_a_refusal_is_told_at_once(server, tmp_path, said, answer, message):
    server.answers = [answer]
    with pytest.raises(RunFailed, match=rf"{message}.*data\.path=<file or folder>"):
        download(server.remote, tmp_path, said.append)
    assert len(server.ranges) == 1 and not (tmp_path / "file.zip").exists()


def test_a_busy_server_is_asked_again_with_growing_pauses(server, tmp_path, said, monkeypatch):
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    monkeypatch.setattr(downloading, "PAUSE", 1)
    server.answers = [refuse(503), refuse(429), refuse(500), whole]
    target = download(server.remote, tmp_path, said.append)
    assert target.read_bytes() == CONTENT and pauses == [2, 4, 8]
    target.unlink()
    server.answers = [refuse(503)]
    with pytest.raises(RunFailed, match="cannot be fetched: HTTP Error 503"):
        download(server.remote, tmp_path, said.append)
    assert len(server.ranges) == 4 + downloading.ATTEMPTS


def test_no_network_is_told_at_once(tmp_path, said, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it waited"))
    with pytest.raises(
        RunFailed, match=r"127\.0\.0\.1: Connection refused; fetch it some other way"
    ):
        download(Remote(f"{NOBODY}/file.zip", 10, "0" * 64), tmp_path, said.append)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: threading.Event().wait(20))
    monkeypatch.setattr(downloading, "ANSWER_WITHIN", 0.05)
    with pytest.raises(RunFailed, match="no answer within 0 s"):
        download(Remote("http://example.invalid/file.zip", 10, "0" * 64), tmp_path, said.append)


def test_a_full_disk_keeps_the_part_and_says_so(server, tmp_path, said, monkeypatch):
    server.answers = [ranged]
    with monkeypatch.context() as patch:
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        patch.setattr(os, "replace", Mock(side_effect=full))
        with pytest.raises(RunFailed, match="no space left to write"):
            download(server.remote, tmp_path, said.append)
    assert os.listdir(tmp_path) == ["file.zip.part"]
    assert download(server.remote, tmp_path, said.append).read_bytes() == CONTENT


REPOSITORY = "some/set"


@pytest.fixture
def cache(monkeypatch, tmp_path) -> Path:
    """Return the hub's cache with one file, as its client writes it; no server listens."""
    place = tmp_path / "datasets--some--set"
    blob = place / "blobs" / hashlib.sha256(b"content").hexdigest()
    link = place / "snapshots" / ("0" * 40) / "config" / "a.parquet"
    for folder in (blob.parent, link.parent, place / "refs"):
        folder.mkdir(parents=True)
    blob.write_bytes(b"content")
    link.symlink_to(blob)
    (place / "refs" / "main").write_text("0" * 40)
    for name, value in {
        "ENDPOINT": NOBODY,
        "HF_HUB_OFFLINE": False,
        "HF_HUB_CACHE": str(tmp_path),
    }.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    return link


def test_what_is_cached_at_the_pinned_revision_needs_no_network_and_must_be_what_the_hub_said(
    cache, said
):
    assert hub_files(REPOSITORY, ["config/*.parquet"], "0" * 40, said.append) == cache.parents[1]
    assert "127.0.0.1: Connection refused; " in said[0]
    cache.resolve().write_bytes(b"contemt")
    with pytest.raises(
        RunFailed, match=r"a\.parquet: expected sha256 [0-9a-f]{64}, found [0-9a-f]{64}; delete"
    ):
        hub_files(REPOSITORY, ["config/*.parquet"], None, said.append)


@pytest.mark.parametrize(
    ("repository", "pattern", "revision"),
    [
        ("no/set", "*", None),
        (REPOSITORY, "other/*.parquet", None),
        (REPOSITORY, "config/*.parquet", "1" * 40),
    ],
)
def test_what_is_not_cached_is_told_at_once(
    cache, said, monkeypatch, repository, pattern, revision
):
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it waited"))
    with pytest.raises(
        RunFailed,
        match=rf"hf://datasets/{repository}.*: Connection refused; fetch it .*data\.path=",
    ):
        hub_files(repository, [pattern], revision, said.append)


def test_whatever_the_hubs_client_raises_becomes_a_line(cache, said, monkeypatch):
    odd = RuntimeError("503 Server Error\nfor url")  # those of its HTTP library are no OSErrors
    monkeypatch.setattr("huggingface_hub.snapshot_download", Mock(side_effect=odd))
    monkeypatch.setattr(hub, "unreachable", lambda address: None)
    with pytest.raises(RunFailed, match="cannot be fetched: 503 Server Error for url; fetch it"):
        hub_files(REPOSITORY, ["*"], None, said.append)
