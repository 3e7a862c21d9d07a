"""One file over HTTPS: with progress, resumed after a break, checked by size and sha256 before anyone sees its name."""

from __future__ import annotations

import contextlib
import errno
import http.client
import os
import queue
import socket
import ssl
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from rtx import __version__
from rtx.data.disk import Report, disk_errors, file_sha256, need_space
from rtx.errors import RunFailed

ANSWER_WITHIN = 10.0  # seconds for name look-up, connection, redirects and the first line of the answer
SILENCE = 30.0  # seconds without a byte after which a connection counts as broken
ATTEMPTS = 5  # in a row without a byte of progress
CHUNK = 1 << 18
BUSY = (408, 425, 429, 500, 502, 503, 504)  # answers worth another attempt
UNREACHABLE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ECONNREFUSED)
AGENT = f"Mozilla/5.0 (compatible; rtx/{__version__})"  # some mirrors refuse Python's own name
LOCAL = "fetch it some other way and name it: data.path=<the file>"


@dataclass(frozen=True)
class Remote:
    """A published file that never changes."""

    url: str
    size: int
    sha256: str

    @property
    def name(self) -> str:
        """The file's name: the last part of the address."""
        return self.url.rpartition("/")[2]


class _Broken(Exception):
    """The connection failed in a way that may pass."""


def download(
    remote: Remote, folder: Path, report: Report, schemes: tuple[str, ...] = ("https",), pause: float = 1.0
) -> Path:
    """Return `folder/<name>` with the content of `remote`, fetched unless it is there already.

    Bytes go to `<name>.part`, which a later call continues; only a file of the right size and sha256 gets its name.

    Args:
        schemes: what the address, and every redirect, may start with.
        pause: seconds before the second attempt; doubled before each further one.

    Raises:
        RunFailed: no network, a server that refuses or offers another file, a full disk.
        UserError: `folder` cannot be written.
    """
    target = folder / remote.name
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if target.exists():
            if target.stat().st_size == remote.size and file_sha256(target) == remote.sha256:
                return target
            report(f"{target}: not the published file; fetching it again")
            target.unlink()
        part = folder / f"{remote.name}.part"
        if _size(part) > remote.size:
            part.unlink()
        need_space(folder, remote.size - _size(part))
        continued = _size(part) > 0
        _fetch(remote, part, report, schemes, pause)
        if continued and file_sha256(part) != remote.sha256:
            report(f"{part}: the part that was here is of another file; starting again")
            part.unlink()
            _fetch(remote, part, report, schemes, pause)
        if (found := file_sha256(part)) != remote.sha256:
            part.unlink()
            raise RunFailed(f"{remote.url}: expected sha256 {remote.sha256}, found {found}; {LOCAL}")
        os.replace(part, target)
    report(f"{target}: {remote.size:,} bytes, sha256 as published")
    return target


def _fetch(remote: Remote, part: Path, report: Report, schemes: tuple[str, ...], pause: float) -> None:
    """Append to `part` until it has `remote.size` bytes, over as many connections as it takes."""
    progress = _Progress(remote, report)
    failures = 0
    received = False
    while (have := _size(part)) < remote.size:
        try:
            _receive(remote, part, schemes, progress)
        except _Broken as problem:
            grew = _size(part) > have
            received |= grew
            failures = 1 if grew else failures + 1
            hopeless = isinstance(problem.__cause__, OSError) and _unreachable(problem.__cause__) and not received
            if hopeless or failures >= ATTEMPTS:
                raise RunFailed(f"{remote.url}: cannot be fetched: {problem}; {LOCAL}") from problem
            wait = pause * 2 ** (failures - 1)
            report(f"{remote.name}: {problem} at {_size(part):,} of {remote.size:,} bytes; again in {wait:.0f} s")
            time.sleep(wait)
    progress.end()


def _receive(remote: Remote, part: Path, schemes: tuple[str, ...], progress: _Progress) -> None:
    """Make one connection and append what it delivers; raises _Broken if it ends early."""
    have = _size(part)
    with _open(remote, have, schemes) as response:
        start = _start(response, part, have)
        _check_offer(remote, response, start)
        with open(part, "r+b" if start else "wb") as file:
            file.seek(start)
            file.truncate()
            have = _copy(remote, response, file, start, progress)
            file.flush()
            os.fsync(file.fileno())
    if have < remote.size:
        raise _Broken("the connection ended early")


def _open(remote: Remote, have: int, schemes: tuple[str, ...]) -> Any:
    """Return the server's answer to a request for the bytes from `have` on."""
    _allow(remote.url, schemes)
    headers = {"User-Agent": AGENT, "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    request = urllib.request.Request(remote.url, headers=headers)
    opener = urllib.request.build_opener(_Redirects(schemes))
    try:
        return within(ANSWER_WITHIN, lambda: opener.open(request, timeout=SILENCE))
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416 and have:  # nothing there from `have` on: the part is of another, longer file
            return contextlib.nullcontext(None)
        problem = f"the server answers {error.code} {error.reason}"
        if error.code in BUSY:
            raise _Broken(problem) from error
        raise RunFailed(f"{remote.url}: {problem}; {LOCAL}") from error
    except (OSError, http.client.HTTPException) as error:
        cause = error.reason if isinstance(error, urllib.error.URLError) else error
        raise _Broken(f"{urlsplit(remote.url).hostname}: {reason_of(cause)}") from (
            cause if isinstance(cause, OSError) else error
        )


def _start(response: Any, part: Path, have: int) -> int:
    """Return where in the file the answer's first byte belongs: `have`, or 0 where the server sends it all anew."""
    if response is None:
        part.unlink()
        raise _Broken("the server has nothing to add to the part that is here; it was removed")
    if response.status != 206:
        return 0
    if not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
        part.unlink()
        raise _Broken("the server sent another range than was asked for")
    return have


def _check_offer(remote: Remote, response: Any, start: int) -> None:
    """Refuse a file of another size (often a page in HTML) before it is fetched."""
    if response.length is not None and start + response.length != remote.size:
        kind = response.headers.get("Content-Type", "of no stated type")
        raise RunFailed(
            f"{remote.url}: expected {remote.size:,} bytes, found {start + response.length:,} ({kind}); {LOCAL}"
        )


def _copy(remote: Remote, response: Any, file: IO[bytes], have: int, progress: _Progress) -> int:
    """Write what the server sends, the first byte of it being byte `have` of the file; return the size reached."""
    while True:
        try:
            chunk = response.read1(CHUNK)  # what is there: a break later costs none of it
        except (OSError, http.client.HTTPException) as error:
            file.flush()
            raise _Broken(reason_of(error)) from error
        if not chunk:
            return have
        have += len(chunk)
        if have > remote.size:
            raise RunFailed(f"{remote.url}: expected {remote.size:,} bytes, found more; {LOCAL}")
        file.write(chunk)
        progress.show(have)


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows a redirect only to an address of an allowed scheme: never from https to http or file."""

    def __init__(self, schemes: tuple[str, ...]) -> None:
        self.schemes = schemes

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        try:
            _allow(newurl, self.schemes, f"{req.full_url}: the server redirects to ")
        except RunFailed:
            fp.close()
            raise
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _allow(url: str, schemes: tuple[str, ...], prefix: str = "") -> None:
    if urlsplit(url).scheme not in schemes:
        raise RunFailed(f"{prefix}{url}: refused, only {' and '.join(schemes)} is fetched; {LOCAL}")


def within(seconds: float, call: Callable[[], Any]) -> Any:
    """Return `call()`, or raise TimeoutError after `seconds`: a name look-up knows no time limit of its own."""
    results: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def work() -> None:
        try:
            results.put((call(), None))
        except BaseException as error:
            results.put((None, error))

    threading.Thread(target=work, daemon=True).start()
    try:
        result, error = results.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no answer within {seconds:.0f} s") from None
    if error is not None:
        raise error
    return result


def _unreachable(error: OSError) -> bool:
    """Whether another attempt in a few seconds is idle: no network, no such name, nobody there, no trust."""
    hopeless = (socket.gaierror, TimeoutError, ssl.SSLCertVerificationError)
    refused_by_proxy = str(error).startswith("Tunnel connection failed")
    return isinstance(error, hopeless) or error.errno in UNREACHABLE or refused_by_proxy


def reason_of(error: object) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


class _Progress:
    """A percent line that renews itself on a terminal; elsewhere one line per quarter."""

    def __init__(self, remote: Remote, report: Report) -> None:
        self.remote, self.report = remote, report
        self.terminal = sys.stderr.isatty()
        self.shown, self.at = 0, 0.0
        report(f"fetching {remote.url} ({remote.size:,} bytes)")

    def show(self, have: int) -> None:
        """Say that `have` bytes are here."""
        percent = 100 * have // self.remote.size
        if self.terminal and (time.monotonic() - self.at > 0.2 or percent == 100):
            self.at = time.monotonic()
            print(f"\r{self.remote.name} {percent:3d}%  {have:,} bytes", end="", file=sys.stderr, flush=True)
        elif not self.terminal and percent // 25 > self.shown // 25:
            self.report(f"{self.remote.name} {percent}%")
        self.shown = percent

    def end(self) -> None:
        """Leave the percent line standing."""
        if self.terminal and self.shown:
            print(file=sys.stderr, flush=True)
