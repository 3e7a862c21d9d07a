"""PG-19 (Rae et al. 2020): books of Project Gutenberg published before 1919, a document each, with LF for newlines."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rtx.config import DataConfig
from rtx.data.disk import Report
from rtx.data.hub import hub_files
from rtx.data.parquet import check_columns, missing_shards, shards, text_rows
from rtx.data.published import DOCUMENTS
from rtx.data.source import Document, Part, Source
from rtx.errors import UserError

HUB = "emozilla/pg19"
COLUMNS = ("short_book_title", "publication_date", "url", "text")
NAMES = {"train": ("train",), "valid": ("validation", "valid"), "test": ("test",)}
"""What folders and files of a split are called."""
WANTED = "parquet files train-*, validation-* and test-*, or the folders train, validation and test with <book>.txt"
PART = 1 << 24  # bytes from which on a part takes no further book
CHUNK = 1 << 20


@dataclass(frozen=True)
class RowsPart:
    """The books of one row group of a parquet file."""

    path: Path
    group: int
    size: int
    """Bytes, about."""

    @property
    def memory(self) -> int:
        """Bytes that reading it takes: usual writers make one page of a row group, held packed, plain and as rows."""
        return 3 * self.size

    def documents(self) -> Iterator[Document]:
        """Yield every book but empty ones; raises UserError where the file cannot be read."""
        for text in text_rows(self.path, "text", [self.group]):
            if text:
                yield (text[start : start + CHUNK] for start in range(0, len(text), CHUNK))


@dataclass(frozen=True)
class FilesPart:
    """Consecutive books in files of their own, as published: with CRLF, which becomes LF as on the hub."""

    folder: str
    names: tuple[str, ...]
    size: int
    """Bytes of the files."""

    def documents(self) -> Iterator[Document]:
        """Yield every book; raises UserError where a file cannot be read, or has become empty."""
        for name in self.names:
            yield unix_newlines(_read(os.path.join(self.folder, name)))


def _read(path: str) -> Iterator[bytes]:
    try:
        with open(path, "rb") as file:
            empty = True
            while chunk := file.read(CHUNK):
                empty = False
                yield chunk
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    if empty:
        raise UserError(f"{path}: changed while it was read: it has become empty; try again")


def unix_newlines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the bytes of `chunks` with LF for every CRLF and every CR alone, as Python's text files have it."""
    held = b""
    for chunk in chunks:
        text = held + chunk
        held = b"\r" if text.endswith(b"\r") else b""  # an LF may follow
        text = text[: len(text) - len(held)].replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        if text:
            yield text
    if held:
        yield b"\n"


def source(data: DataConfig, root: Path, report: Report, published: Mapping[str, int] | None = None) -> Source:
    """Return PG-19, whole from the hub, or as many of its books as `data.path` has: the stamps say how many.

    Args:
        published: books of each split; unset: DOCUMENTS.

    Raises:
        UserError: `data.path` names no books, lacks a split, or has parquet files of another schema.
    """
    published = published or DOCUMENTS["pg19"]
    options, place = "data=pg19", f"hf://datasets/{HUB}"
    if data.path is None:
        books: dict[str, int] = dict(published)
        identity: list[Any] = ["hub", HUB]
    else:
        options += f" data.path={shlex.quote(data.path)}"
        place = str(Path(data.path).expanduser())
        identity, books = _listed(local_books(data.path))

    def parts() -> dict[str, list[Part]]:
        path = str(hub_files(HUB, ["data/*.parquet"], report)) if data.path is None else data.path
        files = local_books(path)
        if data.path is None and (found := _listed(files)[1]) != dict(published):
            raise UserError(f"{path}: expected {_told(published)}; found {_told(found)}; fetch it again")
        if books != dict(published):
            report(f"{options}: {_told(books)}, of {_told(published)}: results are not comparable")
        return {split: _parts(split_files, options, report) for split, split_files in files.items()}

    stamps = {"books": books, "complete": books == dict(published)}
    return Source("pg19", options, identity, {"place": place}, parts, stamps)


def local_books(path: str) -> dict[str, list[Path]]:
    """Return the files of each split below the folder `path`: parquet files, or a file for each book, by name.

    Raises:
        UserError: there are none, or only of some splits.
    """
    place = Path(path).expanduser()
    if not place.is_dir():
        raise UserError(f"data.path={path}: expected a folder with {WANTED}; found {_kind(place)}")
    found: dict[str, list[Path]] = {}
    try:
        for folder in (place, place / "data"):
            found = {split: shards(folder, names) for split, names in NAMES.items()} if folder.is_dir() else {}
            if any(found.values()):
                break
        else:
            found = {split: _texts(place, names) for split, names in NAMES.items()}
    except OSError as error:
        raise UserError(f"{error.filename or path}: cannot be read: {error.strerror}") from error
    if not any(found.values()):
        raise UserError(f"data.path={path}: expected a folder with {WANTED}; found neither")
    if lacking := [split for split, files in found.items() if not files]:
        there = " and ".join(split for split, files in found.items() if files)
        raise UserError(
            f"data.path={path}: missing split: {' and '.join(lacking)}; expected {WANTED}; found only {there}"
        )
    return found


def _kind(place: Path) -> str:
    return "a file" if place.exists() else "nothing there"


def _texts(place: Path, names: Sequence[str]) -> list[Path]:
    """Return the books of a split in the order of the published listing: by name, as text."""
    for name in names:
        if (folder := place / name).is_dir():
            with os.scandir(folder) as entries:
                books = [entry.name for entry in entries if entry.name.endswith(".txt") and entry.name[0] != "."]
            return [folder / book for book in sorted(books)]
    return []


def _listed(files: Mapping[str, Sequence[Path]]) -> tuple[list[Any], dict[str, int]]:
    """Return what tells these files from others, and the number of books of each split; the columns are checked."""
    digest = hashlib.sha256()
    books = {}
    for split, paths in files.items():
        for path in paths:
            try:
                status = path.stat()
            except OSError as error:
                raise UserError(f"{path}: cannot be read: {error.strerror}") from error
            digest.update(json.dumps([split, str(path.resolve()), status.st_size, status.st_mtime_ns]).encode())
        if paths[0].suffix == ".parquet":
            books[split] = sum(group.rows for path in paths for group in check_columns(path, COLUMNS))
        else:
            books[split] = len(paths)
    return ["files", digest.hexdigest()], books


def _told(books: Mapping[str, int]) -> str:
    return f"{', '.join(f'{count:,} {split}' for split, count in books.items())} books"


def _parts(files: Sequence[Path], options: str, report: Report) -> list[Part]:
    """Cut a split into parts; empty books are named and left out."""
    if files[0].suffix == ".parquet":
        if missing := missing_shards(files):
            report(f"{options}: {files[0].parent}: {len(missing):,} files are not there, the first {missing[0]}")
        groups = [(path, number, group) for path in files for number, group in enumerate(check_columns(path, COLUMNS))]
        for path in files:
            for row, text in enumerate(text_rows(path, "text", rows=1)):
                if not text:
                    report(f"{path}: row {row} is an empty book; left out")
        return [RowsPart(path, number, group.size) for path, number, group in groups]
    parts: list[Part] = []
    names: list[str] = []
    size = 0
    for number, path in enumerate(files, 1):
        if status := path.stat().st_size:
            names.append(path.name)
            size += status
        else:
            report(f"{path}: is an empty book; left out")
        if names and (size >= PART or number == len(files)):
            parts.append(FilesPart(str(path.parent), tuple(names), size))
            names, size = [], 0
    return parts
