"""Downloads of published files, whose size and sha256 are known, by HTTPS.

The sets are up to 190 MB, and their servers break connections, so this resumes a partial download,
also one of a killed process, and compares the sha256 before a file gets its name. The libraries
that compare checksums (pooch) cannot resume.
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from rtx.data.files import disk_errors, file_sha256, reason_of, sha256_of
from rtx.data.sets import Report
from rtx.disk import (
    is_full,
    make_folder,
    open_inside,
    remove_file,
    rename_inside,
    status_inside,
)
from rtx.errors import RunFailed, UserError
from rtx.progress import progress_bar
from rtx.version import __version__

ANSWER_WITHIN = 4.0
"""Seconds for a name look-up, a connection and the first line of an answer."""
SILENCE = 30.0
"""Seconds without a byte after which a connection counts as broken."""
ATTEMPTS = 5
"""Attempts in a row without a byte of progress before a download fails."""
PAUSE = 1.0
"""Seconds; PAUSE * 2**n are waited after n attempts in a row without progress."""
CHUNK_BYTES = 1 << 18
PARTIAL_CONTENT = 206
BUSY = (408, 425, 429)
"""Client errors of HTTP that a later attempt may not meet."""
# Some mirrors refuse the name that Python's library sends.
AGENT = {"User-Agent": f"Mozilla/5.0 (compatible; rtx/{__version__})"}
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
        """Return whether a file has this size and sha256."""
        if not path.is_file() or path.stat().st_size != self.size:
            return False
        return file_sha256(path) == self.sha256

    def check(self, path: Path) -> None:
        """Raise UserError for another file than this one: no other archive is ever opened."""
        if not self.matches(path):
            expected = f"{self.name} ({self.url}) of {self.size:,} bytes with sha256 {self.sha256}"
            actual = f"{path.stat().st_size:,} bytes with sha256 {file_sha256(path)}"
            raise UserError(f"{path}: expected {expected}, found {actual}; get it anew")

    def failure(self, problem: str) -> RunFailed:
        """Return the error of a download that `problem` ended."""
        return RunFailed(f"{self.url}: {problem}; {INSTEAD}")


def download(remote: Remote, folder: Path, report: Report) -> Path:
    """Return `folder/<name>` with the content of `remote`, downloaded where it is missing.

    A partial download, `<name>.part`, is resumed. Raises RunFailed (no network, another file, a
    full disk), and UserError where `folder` cannot be written, or it or the partial file is a link.
    """
    target = folder / remote.name
    part = folder / f"{remote.name}.part"
    with disk_errors(folder):
        if remote.matches(target):
            return target
        status_inside(*in_root(part))
        report(f"fetching {remote.url} ({remote.size:,} bytes)")
        problem = unreachable(remote.url)
        if problem:
            raise remote.failure(f"cannot be fetched: {problem}")
        make_folder(folder.parent, folder.name)
        open_part(part).close()
        receive_all(remote, part, report)
        with open_inside(*in_root(part)) as file:
            actual = sha256_of(file)
        if actual != remote.sha256:
            remove_file(*in_root(part))
            raise remote.failure(f"expected sha256 {remote.sha256}, found {actual}")
        rename_inside(*in_root(part), remote.name)
        return target


def in_root(part: Path) -> tuple[Path, str]:
    """Return the folder of all data, and the name of a partial download below that."""
    return part.parent.parent, f"{part.parent.name}/{part.name}"


def size_of(part: Path) -> int:
    """Return the bytes of a partial download; 0 where there is none."""
    status = status_inside(*in_root(part))
    return status.st_size if status else 0


def receive_all(remote: Remote, part: Path, report: Report) -> None:
    """Append to `part` until it has the size of `remote`, over as many connections as it takes."""
    failures = 0
    while size_of(part) < remote.size:
        size_before = size_of(part)
        problem = receive(remote, part)
        size = size_of(part)
        if size > size_before:
            failures = 0
        else:
            failures += 1
        if failures == ATTEMPTS:
            raise remote.failure(f"cannot be fetched: {problem}")
        if problem:
            pause = PAUSE * 2**failures
            progress = f"{size:,} of {remote.size:,} bytes"
            report(f"{remote.name}: {problem} at {progress}; again in {pause:.0f} s")
            time.sleep(pause)


def open_part(part: Path) -> BinaryIO:
    """Open a partial download, which may be missing, to append to it.

    UserError for a link, a pipe or a folder.
    """
    try:
        return open_inside(*in_root(part), "a")
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EISDIR):
            raise
        raise UserError(f"{part}: is no regular file; remove it, then again") from error


def receive(remote: Remote, part: Path) -> str:
    """Append to `part` what one connection delivers.

    Return why it ended early, or "". Raises as `download` for what a later attempt cannot mend.
    """
    size = size_of(part)
    headers = {**AGENT, "Accept-Encoding": "identity"}
    if size:
        headers["Range"] = f"bytes={size}-"
    try:
        request = urllib.request.Request(remote.url, headers=headers)
        opener = urllib.request.build_opener(SameScheme)
        # by path: an address
        with opener.open(request, timeout=SILENCE) as response, open_part(part) as file:
            copy_response(remote, response, file)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code < 500 and error.code not in BUSY:
            raise remote.failure(reason_of(error)) from error
        return reason_of(error)
    except (OSError, http.client.HTTPException) as error:
        is_of_disk = isinstance(error, OSError) and (is_full(error) or error.filename)
        if is_of_disk:
            raise
        return reason_of(error)
    if size_of(part) < remote.size:
        return "the connection ended early"
    return ""


def copy_response(remote: Remote, response: Any, file: BinaryIO) -> None:
    """Append an answer to a partial file, which a server that ignores ranges starts anew."""
    if response.status != PARTIAL_CONTENT:
        file.truncate(0)
    size = file.seek(0, 2)
    if response.length is not None and size + response.length != remote.size:
        kind = response.headers.get("Content-Type", "of no stated type")
        actual = f"{size + response.length:,} ({kind})"
        raise remote.failure(f"expected {remote.size:,} bytes, found {actual}")
    with progress_bar("bytes") as show:
        while size < remote.size:
            # `read1` returns what has arrived, so that a later break of the connection loses none.
            chunk = response.read1(CHUNK_BYTES)
            if not chunk:
                return
            size += file.write(chunk[: remote.size - size])
            show(size, remote.size)


class SameScheme(urllib.request.HTTPRedirectHandler):
    """Refuses redirects to another scheme: from https to http or to a file."""

    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> Any:
        if urlsplit(newurl).scheme != req.type:
            problem = f"the server redirects to {newurl}: refused, only {req.type} is fetched"
            raise RunFailed(f"{req.full_url}: {problem}; {INSTEAD}")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def unreachable(address: str) -> str | None:
    """Return why nothing answers at `address`, or None, within ANSWER_WITHIN seconds.

    A look-up of names has no time limit, so a thread does all this.
    """
    reasons: list[str | None] = [f"no answer within {ANSWER_WITHIN:.0f} s"]

    def connect() -> None:
        try:
            request = urllib.request.Request(address, headers=AGENT, method="HEAD")
            # `urlopen` would use the proxies that were set when it was first called.
            opener = urllib.request.build_opener()
            with contextlib.suppress(urllib.error.HTTPError):
                # by path: an address
                opener.open(request, timeout=ANSWER_WITHIN).close()
            reasons.append(None)
        except Exception as error:
            cause = getattr(error, "reason", error)
            reasons.append(f"{urlsplit(address).hostname}: {reason_of(cause)}")

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(ANSWER_WITHIN)
    return reasons[-1]
