"""Text of one's own, and the Python standard library: files in order, cut 90/5/5 by bytes."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rtx.config import DataConfig
from rtx.data.disk import Report
from rtx.data.files import SourceFile, library_files, read_range, text_files
from rtx.data.source import Document, Source
from rtx.errors import UserError

SHORTEST_TEXT = 31
"""Bytes: from here on 5% are at least two."""
PART = 1 << 26
"""Bytes from which on a part takes no further file."""


@dataclass(frozen=True)
class Piece:
    """Bytes `[start, stop)` of a file: one document."""

    file: SourceFile
    start: int
    stop: int


@dataclass(frozen=True)
class TextPart:
    """Consecutive pieces of one split."""

    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        """Bytes of all pieces."""
        return sum(piece.stop - piece.start for piece in self.pieces)

    def documents(self) -> Iterator[Document]:
        """Yield the bytes of each piece.

        Raises:
            UserError: a file cannot be read, or is no longer what it was when it was listed.
        """
        for piece in self.pieces:
            yield read_range(piece.file, piece.start, piece.stop)


def source(data: DataConfig, root: Path, report: Report) -> Source:
    """Return the files of data=stdlib, or those that `data.path` means; those below `root` are left out.

    Raises:
        UserError: nothing is there, it cannot be read, or it is too short to be cut in three.
    """
    if data.name == "stdlib":
        return files_source("stdlib", "data=stdlib", "the standard library", library_files(), data.tokenizer)
    path = data.path or ""
    options = f"data=text data.path={shlex.quote(path)}"
    return files_source("text", options, path, text_files(path, root), data.tokenizer)


def files_source(name: str, options: str, place: str, files: Sequence[SourceFile], tokenizer: str) -> Source:
    """Return the bytes of all files in order, cut at 90% and 95%; raises as `source`."""
    total = sum(file.size for file in files)
    if total < SHORTEST_TEXT:
        found = f"{total:,} in {len(files):,} file{'s' if len(files) > 1 else ''}"
        raise UserError(f"{place}: expected at least {SHORTEST_TEXT} bytes (cut 90/5/5), found {found}; give more text")
    cuts = {"train": (0, total * 90 // 100), "valid": (total * 90 // 100, total * 95 // 100)}
    cuts["test"] = (total * 95 // 100, total)
    return Source(
        name=name,
        options=options,
        identity=[[str(file.path), file.size, file.modified_ns] for file in files],
        place={"place": place, "files": len(files), "bytes": total},
        parts=lambda: {split: cut_parts(files, start, stop) for split, (start, stop) in cuts.items()},
        units={split: stop - start for split, (start, stop) in cuts.items()} if tokenizer == "bytes" else None,
    )


def cut_parts(files: Sequence[SourceFile], start: int, stop: int) -> list[TextPart]:
    """Return the parts that hold bytes `[start, stop)` of all files together; a file at a border is cut there."""
    parts: list[TextPart] = []
    pieces: list[Piece] = []
    taken, offset = 0, 0
    for file in files:
        piece = Piece(file, max(0, start - offset), min(file.size, stop - offset))
        offset += file.size
        if piece.start >= piece.stop:
            continue
        pieces.append(piece)
        taken += piece.stop - piece.start
        if taken >= PART:
            parts.append(TextPart(tuple(pieces)))
            pieces, taken = [], 0
    return [*parts, TextPart(tuple(pieces))] if pieces else parts
