"""Which files of a run are its checkpoints, and whether each is as it was written. No torch."""

import hashlib
from pathlib import Path

from rtx.disk import read_file
from rtx.errors import RunFailed

TAG = b"rtx sha256 "
"""Begins the comment at the end of a checkpoint; the SHA-256 of all bytes before it follows."""
COMMENT_BYTES = len(TAG) + 64


def resumable(folder: Path) -> list[Path]:
    """Return the files that a run may go on from, the newest first; either may be missing."""
    return [folder / "last.ckpt", folder / "previous.ckpt"]


def is_whole(path: Path) -> bool:
    """Return whether a file exists and its checksum matches.

    Raises `RunFailed` where the system cannot read it.
    """
    try:
        content = read_file(path)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise RunFailed(
            f"{path} cannot be read ({error.strerror}); nothing was changed: mend that first"
        ) from error
    digest = hashlib.sha256(memoryview(content)[:-COMMENT_BYTES])
    return content[-COMMENT_BYTES:] == TAG + digest.hexdigest().encode()
