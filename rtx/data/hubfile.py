"""One file of a data set on the Hugging Face hub: from its cache where it is there, checked by size and sha256."""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from rtx.data.disk import Report, file_sha256
from rtx.data.download import AGENT, ANSWER_WITHIN, _within
from rtx.errors import RunFailed


@dataclass(frozen=True)
class HubFile:
    """A file of a public data set on the hub."""

    repository: str
    """Owner and name: "uoft-cs/cifar10"."""
    path: str
    """Inside the repository."""
    size: int
    sha256: str
    revision: str = "main"

    @property
    def address(self) -> str:
        """What messages call it: hf://datasets/..."""
        return f"hf://datasets/{self.repository}/{self.path}"


def fetch_hub_file(wanted: HubFile, report: Report, instead: str) -> Path:
    """Return the path of a hub file in the hub's own cache (HF_HOME), fetched unless it is there.

    Without a network this fails at once: the hub's own client would try for 23 seconds. Its cache answers for any
    revision while there is no network, so the content is always compared with the sha256.

    Args:
        instead: what to do where it cannot be had, for messages.

    Raises:
        RunFailed: it is not in the cache and cannot be fetched, or it is another file.
    """
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    def place(local: bool) -> Path:
        found = hf_hub_download(
            *(wanted.repository, wanted.path),
            repo_type="dataset",
            revision=wanted.revision,
            local_files_only=local,
        )
        return Path(found)

    try:
        path = place(local=True)
    except LocalEntryNotFoundError:
        if constants.HF_HUB_OFFLINE:
            raise RunFailed(
                f"{wanted.address}: not in the hub's cache, and HF_HUB_OFFLINE keeps from fetching it; {instead}"
            ) from None
        _check_reachable(wanted, constants.ENDPOINT, instead)
        report(f"fetching {wanted.address} ({wanted.size:,} bytes)")
        try:
            path = place(local=False)
        except Exception as error:  # of httpx, of the hub's client, or of the file system: no common ancestor
            reason = (" ".join(str(error).split()) or type(error).__name__)[:300]
            raise RunFailed(f"{wanted.address}: cannot be fetched: {reason}; {instead}") from error
    size = os.stat(path).st_size
    found = file_sha256(path) if size == wanted.size else "not computed"
    if found != wanted.sha256:
        raise RunFailed(
            f"{wanted.address}: expected {wanted.size:,} bytes with sha256 {wanted.sha256}, found {size:,} bytes with "
            f"sha256 {found} at {path}; to use that file all the same, name its folder: data.path={path.parent}"
        )
    return path


def _check_reachable(wanted: HubFile, endpoint: str, instead: str) -> None:
    """Ask the hub for anything, once and with patience for seconds only; any answer will do."""
    request = urllib.request.Request(endpoint, headers={"User-Agent": AGENT}, method="HEAD")
    try:
        _within(ANSWER_WITHIN, lambda: urllib.request.urlopen(request, timeout=ANSWER_WITHIN).close())
    except urllib.error.HTTPError as error:
        error.close()
    except (OSError, ValueError) as error:
        cause = error.reason if isinstance(error, urllib.error.URLError) else error
        reason = getattr(cause, "strerror", None) or str(cause)
        raise RunFailed(f"{wanted.address}: {endpoint} cannot be reached: {reason}; {instead}") from error
