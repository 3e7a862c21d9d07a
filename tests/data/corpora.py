"""Small texts, parts and files in the schemas of the text benchmarks."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rtx.data.source import Document, Source
from rtx.data.wikitext import Published

REAL = Path(__file__).parents[2] / "../shared/data"


@dataclass(frozen=True)
class MadePart:
    """Documents in memory, each in chunks of `chunk` bytes."""

    texts: tuple[bytes, ...]
    chunk: int = 1000

    @property
    def size(self) -> int:
        return sum(map(len, self.texts))

    def documents(self) -> Iterator[Document]:
        for text in self.texts:
            yield cut(text, self.chunk)


@dataclass(frozen=True)
class BrokenPart:
    """A part that must not be read."""

    size: int = 0
    error: Exception = field(default_factory=lambda: AssertionError("it was read"))

    def documents(self) -> Iterator[Document]:
        raise self.error


def cut(text: bytes, size: int) -> list[bytes]:
    """Return `text` in chunks of `size` bytes."""
    return [text[start : start + size] for start in range(0, len(text), size)]


def made_source(parts: Sequence[Any], identity: str = "made", image: tuple[int, int] | None = None) -> Source:
    """A source of nothing but a training split."""
    return Source("made", "data=made", [identity], {}, lambda: {"train": parts}, image=image)


def prose(words: int, seed: int = 0, different: int = 400) -> bytes:
    """Return lines of made words, some frequent, some rare, some not ASCII."""
    draw = random.Random(seed)
    stems = random.Random(7)
    known = ["".join(stems.choices("abcdefghijklmnoprstuvwy", k=stems.randint(2, 9))) for _ in range(different)]
    known[::25] = [f"{word}é" for word in known[::25]]
    chosen = draw.choices(known, weights=[1 / (rank + 1) for rank in range(different)], k=words)
    lines = [" ".join(chosen[start : start + 11]) for start in range(0, words, 11)]
    return "\n".join(line.capitalize() + "." for line in lines).encode() + b"\n"


def articles(count: int, seed: int = 0) -> bytes:
    """Return text in Wikitext's layout: a blank line, headings between blank lines, paragraphs, ` <unk> ` words."""
    draw = random.Random(seed)
    lines = [b" "]
    for number in range(count):
        lines += [b" = Article %d of %d = " % (number, seed), b" "]
        for section in range(draw.randint(1, 3)):
            lines += [b" = = Section %d = = " % section, b" "] if section else []
            text = prose(draw.randint(20, 60), draw.randint(0, 10**6)).replace(b"\n", b" ").strip()
            lines += [b" " + text.replace(b".", b" .") + b" <unk> ", b" "]
    return b"\n".join(lines) + b"\n"


def wikitext_facts(text: bytes, small: bool) -> Published:
    """Return what a plain reading finds in a split of Wikitext; `small`: words and md5, too."""
    lines = text.split(b"\n")[:-1]
    kept = sum(len(line) + 1 for line in lines if line != b" ")
    words = sum(len(line.split()) + 1 for line in lines)
    if not small:
        return Published(len(lines), kept)
    return Published(len(lines), kept, words, hashlib.md5(text).hexdigest())


def write_rows(path: Path, rows: Sequence[bytes], group: int = 1000, **columns: Sequence[Any]) -> Path:
    """Write a parquet file with column `text` (bytes that need not be UTF-8), and others, `group` rows to a group."""
    import pyarrow as pa
    from pyarrow import parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    text = pa.array(rows, pa.binary()).view(pa.string())
    parquet.write_table(pa.table({**columns, "text": text}), path, row_group_size=group)
    return path


def write_books(path: Path, texts: Sequence[bytes], group: int = 2) -> Path:
    """Write books in the schema of PG-19 on the hub."""
    import pyarrow as pa

    titles = [f"Book {number}" for number in range(len(texts))]
    years = pa.array([1800] * len(texts), pa.int32())
    return write_rows(path, texts, group, short_book_title=titles, publication_date=years, url=titles)


def read(parts: Sequence[Any]) -> list[bytes]:
    """Return the documents of all parts."""
    return [b"".join(document) for part in parts for document in part.documents()]
