"""Files from the network: of the hub at a pinned revision, or from an address; each is compared with its sha256."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import queue
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rtx import __version__
from rtx.data.sets import Report
from rtx.disk import is_full
from rtx.errors import RunFailed, UserError
from rtx.progress_bar import progress_bar

ANSWER_WITHIN = 4.0  # seconds for a name look-up, a connection and the first line of an answer
SILENCE = 30.0  # seconds without a byte after which a connection counts as broken
ATTEMPTS = 5  # in a row without a byte of progress
CHUNK = 1 << 18
BUSY = (408, 425, 429, 500, 502, 503, 504)  # answers worth another attempt
AGENT = f"Mozilla/5.0 (compatible; rtx/{__version__})"  # some mirrors refuse Python's own name
INSTEAD = "fetch it some other way and name it: data.path=<file or folder>"


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

    def matches(self, path: Path) -> bool:
        """Tell whether a file is this one."""
        return path.stat().st_size == self.size and file_sha256(path) == self.sha256


def download(
    remote: Remote, folder: Path, report: Report, schemes: Sequence[str] = ("https",), pause: float = 1.0
) -> Path:
    """Return `folder/<name>` with the content of `remote`, fetched unless it is there.

    Bytes go to `<name>.part`, which a later call goes on with; only a file of the right size and sha256 gets its name.

    Args:
        schemes: what the address, and every redirect, may start with.
        pause: seconds before the second attempt; doubled before each further one.

    Raises:
        RunFailed: no network, a server that refuses or offers another file, a full disk.
        UserError: `folder` cannot be written.
    """
    target, part = folder / remote.name, folder / f"{remote.name}.part"
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if target.exists() and remote.matches(target):
            return target
        target.unlink(missing_ok=True)
        report(f"fetching {remote.url} ({remote.size:,} bytes)")
        if size_of(part) < remote.size and (problem := unreachable(remote.url)):
            raise RunFailed(f"{remote.url}: cannot be fetched: {problem}; {INSTEAD}")
        began_empty = size_of(part) == 0
        for fresh in (began_empty, True):
            fetch_rest(remote, part, report, schemes, pause)
            if (found := file_sha256(part)) == remote.sha256:
                os.replace(part, target)
                return target
            part.unlink()
            if fresh:
                raise RunFailed(f"{remote.url}: expected sha256 {remote.sha256}, found {found}; {INSTEAD}")
            report(f"{part}: the part that was here is of another file; starting again")
    raise AssertionError("a second attempt begins empty")


def fetch_rest(remote: Remote, part: Path, report: Report, schemes: Sequence[str], pause: float) -> None:
    """Append to `part` until it has all bytes, over as many connections as it takes."""
    failures = 0
    while (have := size_of(part)) != remote.size:
        try:
            receive(remote, part, have if have < remote.size else 0, schemes)
            reason = "the connection ended early"
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 416:  # nothing there from `have` on: the part is of another, longer file
                part.unlink()
            elif error.code not in BUSY:
                raise RunFailed(f"{remote.url}: {reason_of(error)}; {INSTEAD}") from error
            reason = reason_of(error)
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, OSError) and (is_full(error) or error.filename):
                raise
            reason = reason_of(error)
        if size_of(part) == remote.size:
            return
        failures = 1 if size_of(part) > have else failures + 1
        if failures >= ATTEMPTS:
            raise RunFailed(f"{remote.url}: cannot be fetched: {reason}; {INSTEAD}")
        wait = pause * 2 ** (failures - 1)
        report(f"{remote.name}: {reason} at {size_of(part):,} of {remote.size:,} bytes; again in {wait:.0f} s")
        time.sleep(wait)


def receive(remote: Remote, part: Path, have: int, schemes: Sequence[str]) -> None:
    """Make one connection and append what it delivers from byte `have` on, or all anew where the server does so."""
    allow(remote.url, schemes)
    asked = {"Range": f"bytes={have}-"} if have else {}
    headers = {"User-Agent": AGENT, "Accept-Encoding": "identity", **asked}
    opener = urllib.request.build_opener(Redirects(schemes))
    with opener.open(urllib.request.Request(remote.url, headers=headers), timeout=SILENCE) as response:
        sent = response.headers.get("Content-Range", "")
        have = have if response.status == 206 else 0
        if have and not sent.startswith(f"bytes {have}-"):
            part.unlink()
            raise OSError("the server sent another range than was asked for; the part that was here was removed")
        if response.length is not None and have + response.length != remote.size:
            kind = response.headers.get("Content-Type", "of no stated type")
            found = f"{have + response.length:,} ({kind})"
            raise RunFailed(f"{remote.url}: expected {remote.size:,} bytes, found {found}; {INSTEAD}")
        with open(part, "r+b" if have else "wb") as file, progress_bar("bytes") as show:
            file.seek(have)
            file.truncate()
            while chunk := response.read1(CHUNK):  # what is there: a break later costs none of it
                have += len(chunk)
                if have > remote.size:
                    raise RunFailed(f"{remote.url}: expected {remote.size:,} bytes, found more; {INSTEAD}")
                file.write(chunk)
                show(have, remote.size)


class Redirects(urllib.request.HTTPRedirectHandler):
    """Follows a redirect only to an address of an allowed scheme: never from https to http or file."""

    def __init__(self, schemes: Sequence[str]) -> None:
        self.schemes = schemes

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        allow(newurl, self.schemes, f"{req.full_url}: the server redirects to ")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def allow(url: str, schemes: Sequence[str], prefix: str = "") -> None:
    """Raise RunFailed for an address of another scheme."""
    if urlsplit(url).scheme not in schemes:
        raise RunFailed(f"{prefix}{url}: refused, only {' and '.join(schemes)} is fetched; {INSTEAD}")


def hub_files(repository: str, patterns: Sequence[str], revision: str | None, report: Report) -> Path:
    """Return the folder, named after its commit, with the files of a hub data set that match `patterns`.

    They are fetched into the hub's own cache, and without a network taken from there, at once. Each is compared with
    the sha256 that the hub gave for it: the cache names large files by it.

    Raises:
        RunFailed: they are neither there nor to be had, or one is not what the hub said.
    """
    from huggingface_hub import constants, snapshot_download

    where = f"hf://datasets/{repository}{f'@{revision}' if revision else ''}"
    problem = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else unreachable(constants.ENDPOINT)
    there = f"{problem}; looking in" if problem else "fetching what is not in"
    report(f"{where}: {there} {constants.HF_HUB_CACHE}")
    options = {"allow_patterns": list(patterns), "local_files_only": problem is not None}
    try:
        folder = Path(snapshot_download(repository, repo_type="dataset", revision=revision, **options))
    except Exception as error:  # those of whichever HTTP library it uses among them, which are no OSError
        reason = problem or reason_of(error)[:300]
        raise RunFailed(f"{where}: cannot be fetched: {reason}; {INSTEAD}") from error
    files = [path for pattern in patterns for path in folder.glob(pattern) if path.is_file()]
    if not files:
        reason = problem or f"it has no {' or '.join(patterns)}"
        raise RunFailed(f"{where}: cannot be fetched: {reason}; {INSTEAD}")
    for path in files:
        expected = path.resolve().name
        if re.fullmatch("[0-9a-f]{64}", expected) and (found := file_sha256(path)) != expected:
            raise RunFailed(f"{path}: expected sha256 {expected}, found {found}; delete {path.resolve()}, then again")
    return folder


def unreachable(address: str) -> str | None:
    """Return why nothing answers at `address` (through the proxy, where there is one), or None: any answer will do.

    Said within `ANSWER_WITHIN` seconds: in a thread, for a name look-up knows no limit of its own.
    """
    request = urllib.request.Request(address, headers={"User-Agent": AGENT}, method="HEAD")
    opener = urllib.request.build_opener()  # with the proxies of now: urlopen remembers those of its first call
    results: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def ask() -> None:
        try:
            opener.open(request, timeout=ANSWER_WITHIN).close()
            results.put(None)
        except BaseException as error:
            results.put(error)

    threading.Thread(target=ask, daemon=True).start()
    try:
        error = results.get(timeout=ANSWER_WITHIN)
    except queue.Empty:
        error = TimeoutError(f"no answer within {ANSWER_WITHIN:.0f} s")
    if error is None or isinstance(error, urllib.error.HTTPError):
        return None
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    return f"{urlsplit(address).hostname}: {reason_of(cause)}"


def reason_of(error: object) -> str:
    """Return what an error says, in one line."""
    said = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return " ".join(said.split())


def size_of(path: Path) -> int:
    """Return the bytes of a file; 0 where there is none."""
    return path.stat().st_size if path.exists() else 0


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file's bytes, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def disk_errors(root: Path) -> Iterator[None]:
    """Turn what is raised while something is written below `root` into one line that says what to do.

    Raises:
        RunFailed: the disk is full.
        UserError: the folder cannot be written, or a file cannot be read.
    """
    try:
        yield
    except (UserError, RunFailed):
        raise
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:  # `datasets` puts errors of its own around what went wrong
            if isinstance(cause, UserError | RunFailed):
                raise cause from None
            if isinstance(cause, OSError) and is_full(cause):
                advice = "free some, or set RTX_DATA to a folder on a larger disk"
                raise RunFailed(f"{root}: no space left to write; {advice}") from error
            if isinstance(cause, PermissionError) or (isinstance(cause, OSError) and cause.errno == 30):
                advice = "set RTX_DATA to a folder that you may write"
                raise UserError(f"{cause.filename or root}: {reason_of(cause)}; {advice}") from error
            cause = cause.__cause__ or cause.__context__
        if isinstance(error, OSError) and error.filename:
            raise UserError(f"{error.filename}: {reason_of(error)}") from error
        raise
