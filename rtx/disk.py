"""What writing to a disk needs wherever it is done: names that last, and the errors of a full disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a disk that is full, a quota that is spent, and a file over its size limit."""


def is_full(error: OSError) -> bool:
    """Tell whether an error means that no more can be written."""
    return error.errno in FULL


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk (a file's bytes are synced by whoever writes them)."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
