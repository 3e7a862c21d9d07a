"""Files from the network: of the hub at a pinned revision, or from an address; each is compared with its sha256."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import http.client
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
ATTEMPTS, PAUSE = 5, 1.0  # in a row without a byte of progress; seconds before the second, then doubled
AGENT = {"User-Agent": f"Mozilla/5.0 (compatible; rtx/{__version__})"}  # some mirrors refuse Python's own name
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
        return path.is_file() and path.stat().st_size == self.size and file_sha256(path) == self.sha256


def download(remote: Remote, folder: Path, report: Report) -> Path:
    """Return `folder/<name>` with the content of `remote`, fetched unless it is there.

    Bytes go to `<name>.part`, which a later call goes on with; only a file of the right size and sha256 gets its name.

    Raises:
        RunFailed: no network, a server that refuses or offers another file, a full disk.
        UserError: `folder` cannot be written.
    """
    target, part = folder / remote.name, folder / f"{remote.name}.part"
    with disk_errors(folder):
        if remote.matches(target):
            return target
        report(f"fetching {remote.url} ({remote.size:,} bytes)")
        if problem := unreachable(remote.url):
            raise RunFailed(f"{remote.url}: cannot be fetched: {problem}; {INSTEAD}")
        folder.mkdir(parents=True, exist_ok=True)
        part.touch()
        failures = 0
        while (have := part.stat().st_size) < remote.size:
            reason = receive(remote, part)
            failures = 0 if part.stat().st_size > have else failures + 1
            if failures == ATTEMPTS:
                raise RunFailed(f"{remote.url}: cannot be fetched: {reason}; {INSTEAD}")
            if reason:
                wait, here = PAUSE * 2**failures, part.stat().st_size
                report(f"{remote.name}: {reason} at {here:,} of {remote.size:,} bytes; again in {wait:.0f} s")
                time.sleep(wait)
        if not remote.matches(part):
            found = file_sha256(part)
            part.unlink()
            raise RunFailed(f"{remote.url}: expected sha256 {remote.sha256}, found {found}; {INSTEAD}")
        return part.replace(target)


def receive(remote: Remote, part: Path) -> str:
    """Append to `part` what one connection delivers; return what ended it early, or ""; raises as `download`."""
    have, opener = part.stat().st_size, urllib.request.build_opener(SameScheme)
    headers = {**AGENT, "Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    try:
        request = urllib.request.Request(remote.url, headers=headers)
        with opener.open(request, timeout=SILENCE) as response, open(part, "ab") as file:
            if response.status != 206:  # all anew
                file.truncate(have := 0)
            if response.length is not None and have + response.length != remote.size:
                found = f"{have + response.length:,} ({response.headers.get('Content-Type', 'of no stated type')})"
                raise RunFailed(f"{remote.url}: expected {remote.size:,} bytes, found {found}; {INSTEAD}")
            with progress_bar("bytes") as show:
                while have < remote.size and (chunk := response.read1(1 << 18)):  # a break later costs none of it
                    have += file.write(chunk[: remote.size - have])
                    show(have, remote.size)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code < 500 and error.code not in (408, 425, 429):
            raise RunFailed(f"{remote.url}: {reason_of(error)}; {INSTEAD}") from error
        return reason_of(error)
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, OSError) and (is_full(error) or error.filename):
            raise
        return reason_of(error)
    return "the connection ended early" if have < remote.size else ""


class SameScheme(urllib.request.HTTPRedirectHandler):
    """Follows no redirect from https to http or to a file."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        if urlsplit(newurl).scheme != req.type:
            refused = f"refused, only {req.type} is fetched; {INSTEAD}"
            raise RunFailed(f"{req.full_url}: the server redirects to {newurl}: {refused}")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def hub_files(repository: str, patterns: Sequence[str], revision: str | None, report: Report) -> Path:
    """Return the folder, named after its commit, with the files of a hub data set that match `patterns`.

    Without a network they are taken from the hub's own cache, which names large files by the sha256 they must have.

    Raises:
        RunFailed: they are neither there nor to be had, or one is not what the hub said.
    """
    from huggingface_hub import constants, snapshot_download

    where = f"hf://datasets/{repository}{f'@{revision}' if revision else ''}"
    problem = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else unreachable(constants.ENDPOINT)
    report(f"{where}: {problem or 'fetching'}; what is in {constants.HF_HUB_CACHE} is taken from there")
    options = {"allow_patterns": list(patterns), "local_files_only": problem is not None}
    try:
        folder = Path(snapshot_download(repository, repo_type="dataset", revision=revision, **options))
        files = [path for pattern in patterns for path in folder.glob(pattern)]
        if not files:
            raise FileNotFoundError(f"it has no {' or '.join(patterns)}")
    except Exception as error:  # those of whichever HTTP library it uses among them, which are no OSError
        raise RunFailed(f"{where}: cannot be fetched: {problem or reason_of(error)[:300]}; {INSTEAD}") from error
    for path in files:
        blob = path.resolve()
        if re.fullmatch("[0-9a-f]{64}", blob.name) and (found := file_sha256(path)) != blob.name:
            raise RunFailed(f"{path}: expected sha256 {blob.name}, found {found}; delete {blob}, then again")
    return folder


def unreachable(address: str) -> str | None:
    """Return why nothing answers at `address`, or None; said in time, for which a look-up of names needs a thread."""
    reasons: list[str | None] = [f"no answer within {ANSWER_WITHIN:.0f} s"]

    def ask() -> None:
        try:  # with the proxies of now: urlopen remembers those of its first call
            request = urllib.request.Request(address, headers=AGENT, method="HEAD")
            urllib.request.build_opener().open(request, timeout=ANSWER_WITHIN).close()
            reasons.append(None)
        except urllib.error.HTTPError:
            reasons.append(None)
        except Exception as error:
            reasons.append(f"{urlsplit(address).hostname}: {reason_of(getattr(error, 'reason', error))}")

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(ANSWER_WITHIN)
    return reasons[-1]


def reason_of(error: object) -> str:
    """Return what an error says, in one line."""
    said = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return " ".join(said.split())


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file's bytes, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def disk_errors(root: Path) -> Iterator[None]:
    """Turn what a full or closed disk raises below `root` into a RunFailed or UserError of one line."""
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:  # `datasets` puts errors of its own around what went wrong
            if isinstance(cause, UserError | RunFailed):
                raise cause from cause.__cause__
            if isinstance(cause, OSError) and is_full(cause):
                advice = "free some, or set RTX_DATA to a folder on a larger disk"
                raise RunFailed(f"{root}: no space left to write; {advice}") from error
            if isinstance(cause, OSError) and cause.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
                advice = "set RTX_DATA to a folder that you may write"
                raise UserError(f"{cause.filename or root}: {reason_of(cause)}; {advice}") from error
            cause = cause.__cause__ or cause.__context__
        raise
