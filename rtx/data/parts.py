"""Parts on their way into a store: the tokens of each in files of its own, then joined to the files of the splits.

    <work>/parts/<split>-<number>.bin     the ids of a part
                                 .docs    where its documents start, int64 (not for images)
                                 .json    sizes and checksums; written last, so a part that has one is finished

A part is deleted as soon as its bytes stand in the split's file, so that a store needs its size and one part more.
What a killed preparation left is used again where every byte is still as recorded: beside, or already in its place.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rtx.data.checksums import CHUNK, Sums
from rtx.data.source import Document, Part, Tokenizer
from rtx.data.tokenizers import load_tokenizer
from rtx.errors import UserError

BLANK = np.zeros(256, dtype=bool)
BLANK[list(b" \t\n\r\x0b\x0c")] = True  # what bytes.split() takes for white space


@dataclass(frozen=True)
class Place:
    """Where one part goes."""

    folder: Path
    split: str
    number: int
    of: int
    """Parts of the split."""

    def path(self, kind: str) -> Path:
        """Return its file: bin, docs or json."""
        return self.folder / "parts" / f"{self.split}-{self.number:05d}.{kind}"

    @property
    def joined(self) -> Path:
        """The split's file, in which it ends."""
        return self.folder / f"{self.split}.bin"


class Meter:
    """Counts bytes and whitespace-separated words of a document while it is read."""

    def __init__(self, words: bool, advance: Callable[[int], object]) -> None:
        self.bytes, self.words = 0, 0
        self.count_words, self.advance = words, advance

    def reading(self, document: Document) -> Iterator[bytes]:
        """Yield the document's chunks."""
        blank_before = True
        for chunk in document:
            self.bytes += len(chunk)
            if self.count_words:
                blank = BLANK[np.frombuffer(chunk, dtype=np.uint8)]
                self.words += int(np.count_nonzero(blank[:-1] & ~blank[1:])) + bool(blank_before and not blank[0])
                blank_before = bool(blank[-1])
            self.advance(len(chunk))
            yield chunk


def write_part(
    part: Part, tokenizer: Tokenizer, dtype: str, images: bool, place: Place, advance: Callable[[int], object]
) -> dict[str, Any]:
    """Tokenize one part to its files and return its record.

    Args:
        dtype: uint8, uint16 or uint32.
        images: whether documents are images: their starts are not written, nor are words counted.
        advance: is told the number of bytes read.

    Raises:
        UserError, RunFailed: what reading the source or the tokenizer raises.
        OSError: it cannot be written.
    """
    meter, sums = Meter(not images, advance), Sums()
    kind = np.dtype(dtype).newbyteorder("<")
    starts = array("q")
    temporary = place.path("tmp")
    with open(temporary, "wb") as file:
        for document in part.documents():
            starts.append(sums.size // kind.itemsize)
            for ids in tokenizer.encode(meter.reading(document)):
                if len(ids):
                    assert ids.dtype == np.uint8 or ids.max() < tokenizer.vocabulary, ids.max()
                    raw = np.ascontiguousarray(ids, dtype=kind).data.cast("B")
                    file.write(raw)
                    sums.update(raw)
    os.replace(temporary, place.path("bin"))
    raw = np.frombuffer(starts, dtype=np.int64).astype("<i8").tobytes()
    if not images:
        place.path("docs").write_bytes(raw)
    record: dict[str, Any] = {"of": place.of, "size": part.size, "units": sums.size // kind.itemsize}
    record |= {"bytes": meter.bytes, "words": meter.words, "documents": len(starts), "stored": sums.size}
    record |= {**sums.describe(), "starts": hashlib.sha256(raw).hexdigest()}
    temporary.write_text(json.dumps(record))
    os.replace(temporary, place.path("json"))
    return record


def work_on_part(
    part: Part, described: str, folder: Path, dtype: str, images: bool, place: Place, advance: Callable[[int], object]
) -> dict[str, Any]:
    """As `write_part`, with the tokenizer named by its description in JSON: for a process that has none yet."""
    return write_part(part, _tokenizer(described, folder), dtype, images, place, advance)


@functools.lru_cache(maxsize=1)
def _tokenizer(described: str, folder: Path) -> Tokenizer:
    return load_tokenizer(json.loads(described), folder)


def finished_parts(parts: Sequence[Part], places: Sequence[Place], images: bool) -> dict[int, dict[str, Any]]:
    """Return the records of a split's parts that are finished, by number; what is not is as if it were not there."""
    finished: dict[int, dict[str, Any]] = {}
    offset: int | None = 0
    for part, place in zip(parts, places, strict=True):
        record = _record(part, place)
        if record is not None and _is_whole(record, place, offset, images):
            finished[place.number] = record
            offset = None if offset is None else offset + record["stored"]
        else:
            offset = None  # nobody knows where the parts behind it would stand
            place.path("json").unlink(missing_ok=True)
    return finished


def _record(part: Part, place: Place) -> dict[str, Any] | None:
    try:
        record = json.loads(place.path("json").read_bytes())
        return record if (record["of"], record["size"]) == (place.of, part.size) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _is_whole(record: dict[str, Any], place: Place, offset: int | None, images: bool) -> bool:
    """Whether every byte of a part is as recorded, in its own file or, `offset` bytes in, in the split's."""
    try:
        if not images and hashlib.sha256(place.path("docs").read_bytes()).hexdigest() != record["starts"]:
            return False
        path, start = (place.path("bin"), 0) if place.path("bin").exists() else (place.joined, offset)
        if start is None:
            return False
        digest = hashlib.sha256()
        for chunk in _range(path, start, record["stored"]):
            digest.update(chunk)
        return digest.hexdigest() == record["sha256"]
    except OSError:
        return False


def _range(path: Path, start: int, size: int) -> Iterator[bytes]:
    """Yield the bytes `[start, start + size)` of a file, as far as it has them."""
    with open(path, "rb") as file:
        file.seek(start)
        while size > 0 and (chunk := file.read(min(CHUNK, size))):
            size -= len(chunk)
            yield chunk


def join_parts(places: Sequence[Place], records: Sequence[dict[str, Any]], images: bool) -> dict[str, Any]:
    """Put a split's parts, all finished, into its file, durably; return the split's record.

    Raises:
        OSError: it cannot be written.
    """
    sums = _join_tokens(places, records)
    total = {key: sum(record[key] for record in records) for key in ("units", "bytes", "words", "documents")}
    joined: dict[str, Any] = {**total, **sums, "starts": None}
    if not images:
        joined["starts"] = _join_starts(places, records)
    return joined


def _join_tokens(places: Sequence[Place], records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    target, first = places[0].joined, places[0].path("bin")
    if len(places) == 1 and first.exists():  # nothing to join: its sums are known
        os.replace(first, target)
        with open(target, "rb+") as file:
            os.fsync(file.fileno())
        return {key: records[0][key] for key in ("sha256", "blocks")}
    sums = Sums()
    with open(target, "rb+" if target.exists() else "wb+") as file:
        for place, record in zip(places, records, strict=True):
            own, start = place.path("bin"), sums.size
            path, offset = (own, 0) if own.exists() else (target, start)
            file.seek(start)
            for chunk in _range(path, offset, record["stored"]):
                if path == own:
                    file.write(chunk)
                sums.update(chunk)
            if sums.size - start != record["stored"]:
                raise UserError(f"{path}: changed while it was read; prepare it again")
            if path == own:
                file.flush()
                os.fsync(file.fileno())
                own.unlink()
        file.truncate(sums.size)
        os.fsync(file.fileno())
    return sums.describe()


def _join_starts(places: Sequence[Place], records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    sums, units = Sums(), 0
    with open(places[0].joined.with_suffix(".docs"), "wb") as file:
        for place, record in zip(places, records, strict=True):
            raw = (np.frombuffer(place.path("docs").read_bytes(), dtype="<i8") + units).astype("<i8").tobytes()
            file.write(raw)
            sums.update(raw)
            units += record["units"]
        end = np.array([units], dtype="<i8").tobytes()
        file.write(end)
        sums.update(end)
        file.flush()
        os.fsync(file.fileno())
    return sums.describe()
