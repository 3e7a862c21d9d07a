"""Checksums of long files: one sha256 of all their bytes, and a crc32 of each block, so that damage has a place."""

from __future__ import annotations

import hashlib
import zlib
from pathlib import Path
from typing import Any

BLOCK = 1 << 24
"""Bytes of a block."""
CHUNK = 1 << 20


class Sums:
    """The checksums of bytes that come in pieces."""

    def __init__(self, block: int = BLOCK) -> None:
        self.size, self.block = 0, block
        self._digest = hashlib.sha256()
        self._blocks: list[int] = []

    def update(self, data: bytes | memoryview) -> None:
        """Take the next bytes."""
        self._digest.update(data)
        view = memoryview(data)
        while len(view):
            inside = self.size % self.block
            if not inside:
                self._blocks.append(0)
            piece = view[: self.block - inside]
            self._blocks[-1] = zlib.crc32(piece, self._blocks[-1])
            self.size += len(piece)
            view = view[len(piece) :]

    @property
    def blocks(self) -> list[str]:
        """The crc32 of each block in order, 8 hexadecimal digits each; the last block may be short."""
        return [f"{crc:08x}" for crc in self._blocks]

    def describe(self) -> dict[str, Any]:
        """Return sha256 and the blocks' sums, as JSON values: {"sha256": "...", "blocks": "1a2b3c4d ..."}."""
        return {"sha256": self._digest.hexdigest(), "blocks": " ".join(self.blocks)}


def file_sums(path: Path, block: int = BLOCK) -> Sums:
    """Return the checksums of a file's bytes."""
    sums = Sums(block)
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            sums.update(chunk)
    return sums


def difference(expected: dict[str, Any], found: Sums, name: str) -> tuple[str, str] | None:
    """Return what was expected and what was found where a file differs from its recorded sums; None: it is the same.

    Args:
        expected: as `Sums.describe` returned it.
        name: of the file, for the message.
    """
    for number, (old, new) in enumerate(zip(expected["blocks"].split(), found.blocks, strict=False)):
        if old != new:
            return f"crc32 {old} in block {number} of {name}", new
    described = found.describe()
    if described["sha256"] != expected["sha256"]:
        return f"sha256 {expected['sha256']}", described["sha256"]
    return None
