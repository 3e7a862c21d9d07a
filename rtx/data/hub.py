"""Files of the Hugging Face hub: fetched into its own cache, and without a network taken from there, at once."""

from __future__ import annotations

import socket
import threading
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

from rtx.data.disk import Report
from rtx.errors import RunFailed

ANSWER_WITHIN = 5.0  # seconds for a name look-up and a connection


def hub_files(repository: str, patterns: list[str], report: Report) -> Path:
    """Return the folder of the hub's cache with the files of data set `repository` that match `patterns`.

    Raises:
        RunFailed: they are neither in the cache nor to be had: no network (said within seconds), HF_HUB_OFFLINE=1, or
            an error of the hub.
    """
    from huggingface_hub import constants, snapshot_download

    problem = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else unreachable(constants.ENDPOINT)
    where = f"hf://datasets/{repository}"
    if problem is None:
        report(f"{where}: fetching what is not in {constants.HF_HUB_CACHE}")
    else:
        report(f"{where}: {problem}; looking in {constants.HF_HUB_CACHE}")
    try:
        # Without this check the hub's client tries for 23 seconds before it says that there is no network.
        place = snapshot_download(
            repository, repo_type="dataset", allow_patterns=patterns, local_files_only=problem is not None
        )
    except Exception as error:  # those of whichever HTTP library it uses among them, which are no OSError
        reason = problem or " ".join(str(error).split())[:200] or type(error).__name__
        raise _failed(where, reason) from error
    folder = Path(place)
    if not any(path.is_file() for pattern in patterns for path in folder.glob(pattern)):
        raise _failed(where, problem or f"it has no {' or '.join(patterns)}")
    return folder


def _failed(where: str, reason: str) -> RunFailed:
    return RunFailed(f"{where}: cannot be fetched: {reason}; fetch it some other way and name it: data.path=<a folder>")


def unreachable(address: str) -> str | None:
    """Return why nothing answers at `address` (or at the proxy on the way there), or None where something does."""
    proxy = urllib.request.getproxies().get(urlsplit(address).scheme)
    bypassed = urllib.request.proxy_bypass(urlsplit(address).hostname or "")
    target = urlsplit(proxy if proxy and not bypassed else address)
    host, port = target.hostname or "", target.port or (443 if target.scheme == "https" else 80)
    found: list[str | None] = []

    def connect() -> None:
        try:
            socket.create_connection((host, port), timeout=ANSWER_WITHIN).close()
            found.append(None)
        except OSError as error:
            found.append(f"{host}: {error.strerror or error}")

    thread = threading.Thread(target=connect, daemon=True)  # a name look-up knows no time limit of its own
    thread.start()
    thread.join(ANSWER_WITHIN + 1)
    return found[0] if found else f"{host}: no answer within {ANSWER_WITHIN + 1:.0f} s"
