"""Files of the Hugging Face hub: fetched into its own cache (HF_HOME), and without a network taken from there, at once.

The hub's client tries for 23 seconds before it says that there is no network; here the hub is asked once, beforehand.
Its cache answers for any revision while there is no network, so what has a published hash is compared with it.
"""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from rtx.data.disk import Report, file_sha256
from rtx.data.download import AGENT, reason_of, within
from rtx.errors import RunFailed

ANSWER_WITHIN = 8.0  # seconds for a name look-up, a connection and the first line of an answer
INSTEAD = "fetch it some other way and name it: data.path=<a folder>"


@dataclass(frozen=True)
class HubFile:
    """A file of a public data set on the hub."""

    repository: str
    """Owner and name: "uoft-cs/cifar10"."""
    path: str
    """Inside the repository."""
    size: int
    sha256: str

    @property
    def address(self) -> str:
        """What messages call it: hf://datasets/..."""
        return f"hf://datasets/{self.repository}/{self.path}"


def hub_file(wanted: HubFile, report: Report, instead: str = INSTEAD) -> Path:
    """Return the path of a file in the hub's cache, fetched unless it is there, its content checked.

    Args:
        instead: what to do where it cannot be had, for messages.

    Raises:
        RunFailed: it is not in the cache and cannot be fetched, or it is another file.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    def place(local: bool) -> Path:
        return Path(hf_hub_download(wanted.repository, wanted.path, repo_type="dataset", local_files_only=local))

    try:
        path = place(local=True)
    except LocalEntryNotFoundError:
        if problem := no_hub():
            raise _failed(wanted.address, f"{problem}, and it is not in the hub's cache", instead) from None
        report(f"fetching {wanted.address} ({wanted.size:,} bytes)")
        path = _asked(wanted.address, lambda: place(local=False), instead)
    size = os.stat(path).st_size
    found = file_sha256(path) if size == wanted.size else "not computed"
    if found != wanted.sha256:
        raise RunFailed(
            f"{wanted.address}: expected {wanted.size:,} bytes with sha256 {wanted.sha256}, found {size:,} bytes with "
            f"sha256 {found} at {path}; to use that file all the same, name its folder: data.path={path.parent}"
        )
    return path


def hub_files(repository: str, patterns: list[str], report: Report) -> Path:
    """Return the folder of the hub's cache with the files of data set `repository` that match `patterns`.

    Raises:
        RunFailed: they are neither in the cache nor to be had: no network (said within seconds), HF_HUB_OFFLINE=1, or
            an error of the hub.
    """
    from huggingface_hub import constants, snapshot_download

    where, problem = f"hf://datasets/{repository}", no_hub()
    if problem is None:
        report(f"{where}: fetching what is not in {constants.HF_HUB_CACHE}")
    else:
        report(f"{where}: {problem}; looking in {constants.HF_HUB_CACHE}")

    def place() -> Path:
        local = problem is not None
        return Path(snapshot_download(repository, repo_type="dataset", allow_patterns=patterns, local_files_only=local))

    folder = _asked(where, place, INSTEAD, problem)
    if not any(path.is_file() for pattern in patterns for path in folder.glob(pattern)):
        raise _failed(where, problem or f"it has no {' or '.join(patterns)}", INSTEAD)
    return folder


def no_hub() -> str | None:
    """Return why the hub is not to be asked, or None where it answers."""
    from huggingface_hub import constants

    return "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else unreachable(constants.ENDPOINT)


def unreachable(address: str) -> str | None:
    """Return why nothing answers at `address` (through the proxy, where there is one), or None: any answer will do."""
    request = urllib.request.Request(address, headers={"User-Agent": AGENT}, method="HEAD")
    opener = urllib.request.build_opener()  # with the proxies of now: urlopen remembers those of its first call
    try:
        within(ANSWER_WITHIN, lambda: opener.open(request, timeout=ANSWER_WITHIN).close())
    except urllib.error.HTTPError as error:
        error.close()
    except (OSError, ValueError) as error:
        cause = error.reason if isinstance(error, urllib.error.URLError) else error
        return f"{urlsplit(address).hostname}: {reason_of(cause)}"
    return None


def _asked(where: str, place: Callable[[], Path], instead: str, problem: str | None = None) -> Path:
    """Return what the hub's client says; whatever it raises becomes a line that names `problem`, or its own reason."""
    try:
        return place()
    except Exception as error:  # those of whichever HTTP library it uses among them, which are no OSError
        reason = problem or " ".join(str(error).split())[:300] or type(error).__name__
        raise _failed(where, reason, instead) from error


def _failed(where: str, reason: str, instead: str) -> RunFailed:
    return RunFailed(f"{where}: cannot be fetched: {reason}; {instead}")
