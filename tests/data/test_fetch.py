"""The download against servers that behave badly on purpose, all on 127.0.0.1."""

from __future__ import annotations

import errno
import hashlib
import http.server
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from bad_servers import CONTENT, Server, broken, ranged, redirect, refuse, send, serving, whole

from rtx.data import fetch as module
from rtx.data.fetch import Remote, download, hub_files
from rtx.errors import RunFailed

PART = 300_000


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as state:
        yield state


def get(remote: Remote, folder: Path, report: Callable[[str], object]) -> Path:
    return download(remote, folder, report, schemes=("http",), pause=0)


def test_a_whole_file_arrives_once(server, tmp_path, said):
    server.answers = [whole]
    target = get(server.remote, tmp_path / "downloads", said.append)
    assert target == tmp_path / "downloads" / "file.zip" and target.read_bytes() == CONTENT
    assert said == [f"fetching {server.remote.url} (1,000,000 bytes)"]
    assert get(server.remote, tmp_path / "downloads", said.append) == target
    assert server.ranges == [None] and os.listdir(target.parent) == ["file.zip"]


def test_a_partial_file_is_continued(server, tmp_path, said):
    server.answers = [ranged]
    (tmp_path / "file.zip.part").write_bytes(CONTENT[:PART])
    assert get(server.remote, tmp_path, said.append).read_bytes() == CONTENT
    assert server.ranges == ["bytes=300000-"]


def test_connections_that_break_are_continued_where_they_broke(server, tmp_path, said):
    server.answers = [broken, broken, broken, ranged]
    assert get(server.remote, tmp_path, said.append).read_bytes() == CONTENT
    assert server.ranges == [None, "bytes=250000-", "bytes=500000-", "bytes=750000-"]
    assert "file.zip: the connection ended early at 250,000 of 1,000,000 bytes; again in 0 s" in said


def test_a_server_that_ignores_ranges_sends_it_all_again(server, tmp_path, said):
    server.answers = [whole]
    (tmp_path / "file.zip.part").write_bytes(b"x" * PART)
    assert get(server.remote, tmp_path, said.append).read_bytes() == CONTENT


@pytest.mark.parametrize("stale", [b"x" * PART, b"x" * 1_000_000, b"x" * 1_000_001], ids=["short", "same", "long"])
def test_a_part_of_another_version_is_replaced(server, tmp_path, said, stale):
    server.answers = [ranged]
    (tmp_path / "file.zip.part").write_bytes(stale)
    assert get(server.remote, tmp_path, said.append).read_bytes() == CONTENT
    assert server.ranges[-1] is None


def test_a_range_that_is_refused_or_another_one_starts_again(server, tmp_path, said):
    for answer in (
        refuse(416),
        lambda handler: send(handler, 206, CONTENT[5:], Content_Range="bytes 5-999999/1000000"),
    ):
        server.answers = [answer, ranged]
        server.ranges.clear()
        (tmp_path / "file.zip.part").write_bytes(CONTENT[:PART])
        assert get(server.remote, tmp_path, said.append).read_bytes() == CONTENT
        assert server.ranges == ["bytes=300000-", None]
        (tmp_path / "file.zip").unlink()


def test_a_finished_file_that_was_altered_is_fetched_again(server, tmp_path, said):
    server.answers = [whole]
    (tmp_path / "file.zip").write_bytes(CONTENT[:-1] + b"x")
    assert get(server.remote, tmp_path, said.append).read_bytes() == CONTENT


def test_wrong_bytes_never_get_the_name(server, tmp_path, said):
    server.answers = [lambda handler: send(handler, 200, b"x" * len(CONTENT))]
    with pytest.raises(RunFailed, match=r"file\.zip: expected sha256 [0-9a-f]{64}, found [0-9a-f]{64}; .*data\.path="):
        get(server.remote, tmp_path, said.append)
    assert os.listdir(tmp_path) == [] and len(server.ranges) == 1


def test_another_file_is_refused_before_it_is_fetched(server, tmp_path, said):
    server.answers = [lambda handler: send(handler, 200, b"<html>gone</html>", Content_Type="text/html")]
    with pytest.raises(RunFailed, match=r"expected 1,000,000 bytes, found 17 \(text/html\); fetch it some other way"):
        get(server.remote, tmp_path, said.append)
    server.answers = [lambda handler: send(handler, 206, b"new", Content_Range=f"bytes {PART}-300002/300003")]
    (tmp_path / "file.zip.part").write_bytes(CONTENT[:PART])
    with pytest.raises(RunFailed, match=r"expected 1,000,000 bytes, found 300,003"):
        get(server.remote, tmp_path, said.append)


def test_an_endless_file_is_cut_off(server, tmp_path, said):
    def endless(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(200)  # no length: the body ends where the connection does
        handler.end_headers()
        handler.wfile.write(CONTENT + b"more")

    server.answers = [endless]
    with pytest.raises(RunFailed, match="expected 1,000,000 bytes, found more"):
        get(server.remote, tmp_path, said.append)
    assert not (tmp_path / "file.zip").exists()


@pytest.mark.parametrize("status", [403, 404])
def test_a_refusal_is_told_at_once(server, tmp_path, said, status):
    server.answers = [refuse(status)]
    with pytest.raises(RunFailed, match=rf"HTTP Error {status}: .*data\.path=<file or folder>"):
        get(server.remote, tmp_path, said.append)
    assert len(server.ranges) == 1


def test_a_busy_server_is_asked_again_with_growing_pauses(server, tmp_path, said, monkeypatch):
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    server.answers = [refuse(503), refuse(429), refuse(500), whole]
    target = download(server.remote, tmp_path, said.append, schemes=("http",), pause=1)
    assert target.read_bytes() == CONTENT and pauses == [1, 2, 4]
    target.unlink()
    server.answers = [refuse(503)]
    with pytest.raises(RunFailed, match="cannot be fetched: HTTP Error 503"):
        get(server.remote, tmp_path, said.append)
    assert len(server.ranges) == 4 + module.ATTEMPTS


def test_redirects_stay_within_the_allowed_schemes(server, tmp_path, said):
    server.answers = [redirect("/elsewhere/file.bin"), whole]
    assert get(server.remote, tmp_path, said.append).name == "file.zip"
    (tmp_path / "file.zip").unlink()
    server.answers = [redirect("file:///etc/passwd")]
    with pytest.raises(RunFailed, match=r"'file:///etc/passwd' is not allowed"):
        get(server.remote, tmp_path, said.append)
    for target in ("ftp://127.0.0.1/file.zip", "https://127.0.0.1/file.zip"):
        server.answers = [redirect(target)]
        with pytest.raises(RunFailed, match=rf"the server redirects to {target}: refused, only http is fetched"):
            get(server.remote, tmp_path, said.append)
    with pytest.raises(RunFailed, match=r"http://127\.0\.0\.1.*: refused, only https is fetched"):
        download(server.remote, tmp_path, said.append)
    assert os.listdir(tmp_path) == []


def test_no_network_is_told_at_once(tmp_path, said, monkeypatch):
    asked = []

    def fail(*arguments, **options):
        asked.append(arguments)
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it waited"))
    remote = Remote("https://example.invalid/file.zip", 10, "0" * 64)
    with pytest.raises(RunFailed, match=r"example\.invalid: Temporary failure in name resolution; .*data\.path="):
        download(remote, tmp_path, said.append)
    assert len(asked) == 1


def test_nobody_at_the_port_is_told_at_once(tmp_path, said, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it waited"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        remote = Remote(f"http://127.0.0.1:{free.getsockname()[1]}/file.zip", 10, "0" * 64)
        with pytest.raises(RunFailed, match=r"127\.0\.0\.1: Connection refused; fetch it some other way"):
            get(remote, tmp_path, said.append)


def test_a_proxy_that_refuses_is_told_at_once(server, tmp_path, said, monkeypatch):
    monkeypatch.setenv("https_proxy", server.address)
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it waited"))
    with pytest.raises(RunFailed, match=r"example\.invalid: Tunnel connection failed: 501"):
        download(Remote("https://example.invalid/file.zip", 10, "0" * 64), tmp_path, said.append)


def test_a_name_look_up_that_hangs_is_given_up(tmp_path, said, monkeypatch):
    release = threading.Event()

    def hang(*arguments, **options):
        release.wait(20)
        raise socket.gaierror(socket.EAI_AGAIN, "at last")

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    monkeypatch.setattr(module, "ANSWER_WITHIN", 0.05)
    try:
        with pytest.raises(RunFailed, match="no answer within 0 s"):
            get(Remote("http://example.invalid/file.zip", 10, "0" * 64), tmp_path, said.append)
    finally:
        release.set()


def test_a_connection_that_falls_silent_is_broken(server, tmp_path, said, monkeypatch):
    release = threading.Event()

    def silent(handler: http.server.BaseHTTPRequestHandler) -> None:
        ranged(handler, 250_000)
        handler.wfile.flush()
        release.wait(20)

    server.answers = [silent, ranged]
    monkeypatch.setattr(module, "SILENCE", 0.2)
    try:
        assert get(server.remote, tmp_path, said.append).read_bytes() == CONTENT
    finally:
        release.set()
    assert len(server.ranges) == 2 and any("timed out" in line for line in said)


def test_a_full_disk_keeps_the_part_and_says_so(server, tmp_path, said, monkeypatch):
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    server.answers = [ranged]
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(RunFailed, match="no space left to write"):
            get(server.remote, tmp_path, said.append)
    assert os.listdir(tmp_path) == ["file.zip.part"]
    assert get(server.remote, tmp_path, said.append).read_bytes() == CONTENT


REPOSITORY = "some/set"


@pytest.fixture
def cache(monkeypatch, tmp_path) -> Path:
    """The hub's cache, with one file as the hub's client puts it there; and an address where nobody listens."""
    import huggingface_hub
    from huggingface_hub import constants

    place, real = tmp_path / "datasets--some--set", huggingface_hub.snapshot_download
    blob = place / "blobs" / hashlib.sha256(b"content").hexdigest()
    link = place / "snapshots" / ("0" * 40) / "config" / "a.parquet"
    for folder in (blob.parent, link.parent, place / "refs"):
        folder.mkdir(parents=True)
    blob.write_bytes(b"content")
    link.symlink_to(blob)
    (place / "refs" / "main").write_text("0" * 40)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **options: real(name, cache_dir=str(tmp_path), **options)
    )
    return link


def test_what_is_cached_at_the_pinned_revision_needs_no_network(cache, said):
    assert hub_files(REPOSITORY, ["config/*.parquet"], "0" * 40, said.append) == cache.parents[1]
    assert "127.0.0.1: Connection refused; looking in" in said[0]


@pytest.mark.parametrize(
    ("repository", "pattern", "revision"),
    [("no/set", "*", None), (REPOSITORY, "other/*.parquet", None), (REPOSITORY, "config/*.parquet", "1" * 40)],
)
def test_what_is_not_cached_is_told_at_once(cache, said, repository, pattern, revision):
    begin = time.monotonic()
    with pytest.raises(RunFailed, match=rf"hf://datasets/{repository}.*: Connection refused; fetch it .*data\.path="):
        hub_files(repository, [pattern], revision, said.append)
    assert time.monotonic() - begin < 5


def test_a_cached_file_that_is_not_what_the_hub_said_is_refused(cache, said):
    cache.resolve().write_bytes(b"contemt")
    with pytest.raises(RunFailed, match=r"a\.parquet: expected sha256 [0-9a-f]{64}, found [0-9a-f]{64}; delete"):
        hub_files(REPOSITORY, ["config/*.parquet"], None, said.append)


def test_whatever_the_hubs_client_raises_becomes_a_line(cache, said, monkeypatch):
    import huggingface_hub

    class Odd(Exception):
        """As that of its HTTP library: no OSError."""

    def fail(*arguments: object, **options: object) -> None:
        raise Odd("503 Server Error\nfor url")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    monkeypatch.setattr(module, "unreachable", lambda address: None)
    with pytest.raises(RunFailed, match="cannot be fetched: 503 Server Error for url; fetch it"):
        hub_files(REPOSITORY, ["*"], None, said.append)
