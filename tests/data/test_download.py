"""The download against servers that behave badly on purpose, all on 127.0.0.1."""

from __future__ import annotations

import errno
import http.server
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from bad_servers import CONTENT, Server, broken, ranged, redirect, refuse, send, serving, whole

from rtx.data import download as module
from rtx.data.download import Remote, download
from rtx.errors import RunFailed, UserError

PART = 300_000


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as state:
        yield state


def fetch(remote: Remote, folder: Path, report: Callable[[str], object]) -> Path:
    return download(remote, folder, report, schemes=("http",), pause=0)


def test_a_whole_file_arrives_once(server, tmp_path, said):
    server.answers = [whole]
    target = fetch(server.remote, tmp_path / "downloads", said.append)
    assert target == tmp_path / "downloads" / "file.zip" and target.read_bytes() == CONTENT
    assert said[0] == f"fetching {server.remote.url} (1,000,000 bytes)"
    percents = [int(line.removeprefix("file.zip ").removesuffix("%")) for line in said if line.endswith("%")]
    assert [percent // 25 for percent in percents] == [1, 2, 3, 4]
    assert fetch(server.remote, tmp_path / "downloads", said.append) == target
    assert server.ranges == [None] and os.listdir(target.parent) == ["file.zip"]


def test_a_terminal_gets_a_percent_line(server, tmp_path, said, monkeypatch, capsys):
    server.answers = [whole]
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    fetch(server.remote, tmp_path, said.append)
    error = capsys.readouterr().err
    assert error.startswith("\rfile.zip") and error.endswith("\rfile.zip 100%  1,000,000 bytes\n")
    assert not [line for line in said if line.endswith("%")]


def test_a_partial_file_is_continued(server, tmp_path, said):
    server.answers = [ranged]
    (tmp_path / "file.zip.part").write_bytes(CONTENT[:PART])
    assert fetch(server.remote, tmp_path, said.append).read_bytes() == CONTENT
    assert server.ranges == ["bytes=300000-"]


def test_connections_that_break_are_continued_where_they_broke(server, tmp_path, said):
    server.answers = [broken, broken, broken, ranged]
    assert fetch(server.remote, tmp_path, said.append).read_bytes() == CONTENT
    assert server.ranges == [None, "bytes=250000-", "bytes=500000-", "bytes=750000-"]
    assert "file.zip: the connection ended early at 250,000 of 1,000,000 bytes; again in 0 s" in said


def test_a_server_that_ignores_ranges_sends_it_all_again(server, tmp_path, said):
    server.answers = [whole]
    (tmp_path / "file.zip.part").write_bytes(b"x" * PART)
    assert fetch(server.remote, tmp_path, said.append).read_bytes() == CONTENT


@pytest.mark.parametrize("stale", [b"x" * PART, b"x" * 1_000_000, b"x" * 1_000_001], ids=["short", "same", "long"])
def test_a_part_of_another_version_is_replaced(server, tmp_path, said, stale):
    server.answers = [ranged]
    (tmp_path / "file.zip.part").write_bytes(stale)
    assert fetch(server.remote, tmp_path, said.append).read_bytes() == CONTENT
    assert server.ranges[-1] is None


def test_a_range_that_is_refused_or_another_one_starts_again(server, tmp_path, said):
    for answer in (
        refuse(416),
        lambda handler: send(handler, 206, CONTENT[5:], Content_Range="bytes 5-999999/1000000"),
    ):
        server.answers = [answer, ranged]
        server.ranges.clear()
        (tmp_path / "file.zip.part").write_bytes(CONTENT[:PART])
        assert fetch(server.remote, tmp_path, said.append).read_bytes() == CONTENT
        assert server.ranges == ["bytes=300000-", None]
        (tmp_path / "file.zip").unlink()


def test_a_finished_file_that_was_altered_is_fetched_again(server, tmp_path, said):
    server.answers = [whole]
    (tmp_path / "file.zip").write_bytes(CONTENT[:-1] + b"x")
    assert fetch(server.remote, tmp_path, said.append).read_bytes() == CONTENT
    assert said[0].endswith("file.zip: not the published file; fetching it again")


def test_wrong_bytes_never_get_the_name(server, tmp_path, said):
    server.answers = [lambda handler: send(handler, 200, b"x" * len(CONTENT))]
    with pytest.raises(RunFailed, match=r"file\.zip: expected sha256 [0-9a-f]{64}, found [0-9a-f]{64}; .*data\.path="):
        fetch(server.remote, tmp_path, said.append)
    assert os.listdir(tmp_path) == [] and len(server.ranges) == 1


def test_another_file_is_refused_before_it_is_fetched(server, tmp_path, said):
    server.answers = [lambda handler: send(handler, 200, b"<html>gone</html>", Content_Type="text/html")]
    with pytest.raises(RunFailed, match=r"expected 1,000,000 bytes, found 17 \(text/html\); fetch it some other way"):
        fetch(server.remote, tmp_path, said.append)
    server.answers = [lambda handler: send(handler, 206, b"new", Content_Range=f"bytes {PART}-300002/300003")]
    (tmp_path / "file.zip.part").write_bytes(CONTENT[:PART])
    with pytest.raises(RunFailed, match=r"expected 1,000,000 bytes, found 300,003"):
        fetch(server.remote, tmp_path, said.append)


def test_an_endless_file_is_cut_off(server, tmp_path, said):
    def endless(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(200)  # no length: the body ends where the connection does
        handler.end_headers()
        handler.wfile.write(CONTENT + b"more")

    server.answers = [endless]
    with pytest.raises(RunFailed, match="expected 1,000,000 bytes, found more"):
        fetch(server.remote, tmp_path, said.append)
    assert not (tmp_path / "file.zip").exists()


@pytest.mark.parametrize("status", [403, 404])
def test_a_refusal_is_told_at_once(server, tmp_path, said, status):
    server.answers = [refuse(status)]
    with pytest.raises(RunFailed, match=rf"the server answers {status} .*data\.path=<the file>"):
        fetch(server.remote, tmp_path, said.append)
    assert len(server.ranges) == 1


def test_a_busy_server_is_asked_again_with_growing_pauses(server, tmp_path, said, monkeypatch):
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    server.answers = [refuse(503), refuse(429), refuse(500), whole]
    target = download(server.remote, tmp_path, said.append, schemes=("http",), pause=1)
    assert target.read_bytes() == CONTENT and pauses == [1, 2, 4]
    target.unlink()
    server.answers = [refuse(503)]
    with pytest.raises(RunFailed, match="cannot be fetched: the server answers 503"):
        fetch(server.remote, tmp_path, said.append)
    assert len(server.ranges) == 4 + module.ATTEMPTS


def test_redirects_stay_within_the_allowed_schemes(server, tmp_path, said):
    server.answers = [redirect("/elsewhere/file.bin"), whole]
    assert fetch(server.remote, tmp_path, said.append).name == "file.zip"
    (tmp_path / "file.zip").unlink()
    server.answers = [redirect("file:///etc/passwd")]
    with pytest.raises(RunFailed, match=r"the server answers 302 .*'file:///etc/passwd' is not allowed"):
        fetch(server.remote, tmp_path, said.append)
    for target in ("ftp://127.0.0.1/file.zip", "https://127.0.0.1/file.zip"):
        server.answers = [redirect(target)]
        with pytest.raises(RunFailed, match=rf"the server redirects to {target}: refused, only http is fetched"):
            fetch(server.remote, tmp_path, said.append)
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
            fetch(remote, tmp_path, said.append)


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
            fetch(Remote("http://example.invalid/file.zip", 10, "0" * 64), tmp_path, said.append)
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
        assert fetch(server.remote, tmp_path, said.append).read_bytes() == CONTENT
    finally:
        release.set()
    assert len(server.ranges) == 2 and any("timed out" in line for line in said)


def test_a_full_disk_keeps_the_part_and_says_so(server, tmp_path, said, monkeypatch):
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    server.answers = [ranged]
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(RunFailed, match="no space left to write"):
            fetch(server.remote, tmp_path, said.append)
    assert not (tmp_path / "file.zip").exists()
    assert fetch(server.remote, tmp_path, said.append).read_bytes() == CONTENT
    with pytest.raises(RunFailed, match="bytes are needed"):
        fetch(replace(server.remote, size=10**18), tmp_path / "other", said.append)


def test_a_folder_that_cannot_be_made_is_named(server, tmp_path, said):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="Not a directory"):
        fetch(server.remote, tmp_path / "file" / "downloads", said.append)
