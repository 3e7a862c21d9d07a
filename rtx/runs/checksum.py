"""Which files of a run are its checkpoints, and whether each is as it was written. No torch."""

import hashlib
import os
from pathlib import Path
from typing import BinaryIO

from rtx.disk import open_inside
from rtx.errors import RunFailed

TAG = b"rtx sha256 "
"""Begins the comment at the end of a checkpoint; the SHA-256 of all bytes before it follows."""
COMMENT_BYTES = len(TAG) + 64
PIECE_BYTES = 1 << 20
"""Bytes of a checkpoint that are in memory at once."""


def resumable(folder: Path) -> list[Path]:
    """Return the files that a run may go on from, the newest first; either may be missing."""
    return [folder / "last.ckpt", folder / "previous.ckpt"]


def in_run(path: Path) -> tuple[Path, str]:
    """Return the folder of the run that a checkpoint belongs to, and its name below that."""
    return path.parent.parent, f"{path.parent.name}/{path.name}"


def is_whole(path: Path) -> bool:
    """Return whether a file exists and its checksum matches.

    Raises `RunFailed` where the system cannot read it.
    """
    try:
        with open_inside(*in_run(path)) as file:
            return has_checksum(file)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise RunFailed(f"{path} cannot be read ({error.strerror}); no file was changed") from error


def has_checksum(file: BinaryIO) -> bool:
    """Return whether a file ends with the checksum of all before; one without a TAG is not read."""
    end = file.seek(0, os.SEEK_END) - COMMENT_BYTES
    if end < 0:
        return False
    file.seek(end)
    comment = file.read()
    if not comment.startswith(TAG):
        return False
    file.seek(0)
    digest = hashlib.sha256()
    while end > 0:
        piece = file.read(min(end, PIECE_BYTES))
        if not piece:
            return False
        digest.update(piece)
        end -= len(piece)
    return comment == TAG + digest.hexdigest().encode()
