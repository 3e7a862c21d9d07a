"""The checksum at the end of a checkpoint, which tells a whole file from a damaged one without reading it as such."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

TAG = b"rtx sha256 "
COMMENT_BYTES = len(TAG) + 64
"""Length of the zip comment that holds the checksum."""

PIECE = 1 << 22
"""Bytes read at once for a checksum."""


class Damaged(Exception):
    """A checkpoint file that is not what was written."""


def is_whole(path: Path) -> bool:
    """Whether a checkpoint is there and as it was written."""
    try:
        verify(path)
    except (Damaged, OSError):
        return False
    return True


def verify(path: Path) -> None:
    """Check a file against its checksum.

    Raises:
        Damaged: it is cut short or altered.
        FileNotFoundError: there is none.
    """
    with open(path, "rb") as file:
        left = os.fstat(file.fileno()).st_size - COMMENT_BYTES
        digest = hashlib.sha256()
        while left > 0 and (piece := file.read(min(left, PIECE))):
            digest.update(piece)
            left -= len(piece)
        comment = file.read()
    if comment != TAG + digest.hexdigest().encode():
        raise Damaged(f"{path} is damaged (its checksum does not match)")


def any_whole(folder: Path) -> bool:
    """Whether a run's checkpoints folder holds a file to go on from that is as it was written."""
    return any(is_whole(path) for path in resumable(folder))


def resumable(folder: Path) -> list[Path]:
    """Return the files of a run's checkpoints folder that it may go on from, the newest first; some may be missing."""
    return [folder / "last.ckpt", folder / "previous.ckpt", *older(folder)]


def older(folder: Path) -> list[Path]:
    """Return the checkpoints before `previous.ckpt` that are kept, the newest first."""
    return sorted(folder.glob("step_[0-9]*.ckpt"), key=lambda path: (len(path.name), path.name), reverse=True)
