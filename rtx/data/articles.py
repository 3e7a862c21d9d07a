"""The text of Wikitext in whichever file it lies, as documents: one for each article."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rtx.data.archives import read_zip
from rtx.data.parquet import text_rows
from rtx.data.source import Document
from rtx.errors import UserError

CHUNK = 1 << 20
ROWS = 1000  # lines decoded at once
# An article begins with the line " = Title = " after a blank line; " = = Section = = " is within one.
TITLE = re.compile(rb"\n \n(?= = (?!= )[^\n]*(?<! =) = \n)")
BEFORE = 3  # bytes before a title that tell it from another line


class Text(Protocol):
    """The text of a split, or of a piece of one."""

    def chunks(self) -> Iterator[bytes]:
        """Yield its bytes.

        Raises:
            UserError: it cannot be read, or is not what it should be.
        """
        ...


@dataclass(frozen=True)
class FileText:
    """Bytes `[start, stop)` of an extracted file; stop unset: to its end."""

    path: Path
    start: int = 0
    stop: int | None = None

    @property
    def size(self) -> int:
        """Bytes."""
        return (self.path.stat().st_size if self.stop is None else self.stop) - self.start

    def chunks(self) -> Iterator[bytes]:
        """Yield its bytes; raises UserError."""
        try:
            left = self.size
            with open(self.path, "rb") as file:
                file.seek(self.start)
                while left and (chunk := file.read(min(CHUNK, left))):
                    left -= len(chunk)
                    yield chunk
        except OSError as error:
            raise UserError(f"{self.path}: cannot be read: {error.strerror}") from error
        if left:
            raise UserError(f"{self.path}: changed while it was read: {left:,} bytes are missing; try again")


@dataclass(frozen=True)
class ZipText:
    """A member of a zip archive."""

    path: Path
    member: str
    limit: int
    """Bytes that all members together may have."""

    def chunks(self) -> Iterator[bytes]:
        """Yield its bytes; raises UserError."""
        return read_zip(self.path, self.member, self.limit)


@dataclass(frozen=True)
class ParquetText:
    """The hub's rows: one for each line, with its newline, but "" for a blank one."""

    paths: tuple[Path, ...]
    """The shards in order."""

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes of the file that the rows were made from; raises UserError."""
        for path in self.paths:
            rows = text_rows(path, "text", rows=ROWS)
            while lines := list(itertools.islice(rows, ROWS)):
                yield b"".join(line or b" \n" for line in lines)


@dataclass(frozen=True)
class ArticlesPart:
    """Consecutive articles."""

    text: Text
    size: int
    """Bytes."""

    def documents(self) -> Iterator[Document]:
        """Yield each article, with what stands before the first; raises UserError."""
        return split_articles(self.text.chunks())


def split_articles(chunks: Iterator[bytes]) -> Iterator[Document]:
    """Yield the articles of a text in chunks; each is used up before the next is asked for."""
    for _, pieces in itertools.groupby(_numbered(chunks), key=lambda piece: piece[0]):
        yield (piece for _, piece in pieces)


def _numbered(chunks: Iterator[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield the bytes of `chunks` cut at titles, each piece with the number of its article."""
    number = 0
    before = rest = b""
    for chunk in chunks:
        text = rest + chunk
        end = text.rfind(b"\n") + 1 or (len(text) if len(text) > CHUNK else 0)  # whole lines, unless one is very long
        start = 0
        for title in TITLE.finditer(before + text[:end]):
            at = title.end() - len(before)
            if at > start:
                yield number, text[start:at]
            number += 1
            start = at
        if end > start:
            yield number, text[start:end]
        before, rest = (before + text[:end])[-BEFORE:], text[end:]
    if rest:
        yield number, rest


def article_ranges(path: Path, size: int) -> list[FileText]:
    """Cut a file at the first title after every `size` bytes; raises UserError where it cannot be read."""
    try:
        total = path.stat().st_size
        cuts = [0]
        with open(path, "rb") as file:
            for start in range(size, total, size):
                file.seek(start)
                window, title = b"", None
                while title is None and len(window) < size and (chunk := file.read(CHUNK)):
                    window += chunk
                    title = TITLE.search(window)
                if title is not None and start + title.end() > cuts[-1]:
                    cuts.append(start + title.end())
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    return [FileText(path, start, stop) for start, stop in zip(cuts, [*cuts[1:], total], strict=True)]
