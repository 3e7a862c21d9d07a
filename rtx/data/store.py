"""The token store: the splits of a data set on disk, one raw memory-mapped file each, with a record of what they are.

    <root>/<name>-<key>/    <split>.bin     unsigned integers, nothing else
                            <split>.docs    where documents start, and the end: int64 (not for images)
                            store.json      source, tokenizer, sizes, checksums, fingerprint
                            .verified       sizes and times of the files when every byte of them was last checked here
                            and the file of a trained tokenizer

The key names the source and the settings (for files: their paths, sizes and times), so a changed source gets a store of
its own. The fingerprint names the content, the tokenizer and the stamps alone: it is the same on every machine.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rtx.data.checksums import difference, file_sums
from rtx.data.recipe import FORMAT
from rtx.data.source import Tokenizer
from rtx.data.tokenizers import load_tokenizer
from rtx.errors import UserError, nearest

RECORD = "store.json"
VERIFIED = ".verified"


class DamagedStore(UserError):
    """A store on disk that is not what its record says, or has no record that can be read."""


@dataclass(frozen=True)
class SplitFacts:
    """What is in a split."""

    units: int
    bytes: int
    """Bytes of the source's text (of images: sub-pixels), before the tokenizer."""
    words: int
    """Whitespace-separated words of the text; of images 0."""
    documents: int


@dataclass(frozen=True)
class TokenStore:
    """An open store: splits as read-only memory maps of unsigned integers `[units]`."""

    name: str
    folder: Path
    splits: dict[str, np.ndarray]
    tokenizer: Tokenizer
    fingerprint: str
    """sha256 over the tokenizer, the stamps, and the size and content of every split: equal means the same data."""
    source: dict[str, Any]
    """Where the data came from, for people to read."""
    stamps: dict[str, Any] = field(default_factory=dict)
    """Facts of protocol that stand on every result."""
    image: tuple[int, int] | None = None
    """Height and width of every image; None: text."""
    answers: None = None
    """Positions of a sequence that alone are scored; None: all of them (see RecallStore)."""
    all_facts: dict[str, SplitFacts] = field(default_factory=dict)
    starts: dict[str, np.ndarray] = field(default_factory=dict, repr=False)

    @property
    def vocabulary(self) -> int:
        """Number of different token ids."""
        return self.tokenizer.vocabulary

    @property
    def unit(self) -> str:
        """What one token is, in words: byte, word, subword or dim."""
        return self.tokenizer.unit

    def split(self, name: str) -> np.ndarray:
        """Return the tokens of split train, valid or test: unsigned integers `[units]`, read-only.

        Raises:
            UserError: the store has no such split.
        """
        if name not in self.splits:
            allowed = ", ".join(self.splits)
            raise UserError(f"{self.name} has no split {name!r}: one of {allowed}{nearest(name, self.splits)}")
        return self.splits[name]

    def count(self, name: str) -> int:
        """Return how many units of a split are scored: all."""
        return len(self.split(name))

    def facts(self, name: str) -> SplitFacts:
        """Return the sizes of a split; raises as `split`."""
        self.split(name)
        return self.all_facts[name]

    def documents(self, name: str) -> np.ndarray:
        """Return where a split's documents start, and its end, in units: int64 `[documents + 1]`; raises as `split`."""
        tokens = self.split(name)
        if self.image is None:
            return self.starts[name]
        return np.arange(0, len(tokens) + 1, self.image[0] * self.image[1] * 3, dtype=np.int64)

    def describe(self) -> dict[str, Any]:
        """Return what a run records of its data, as JSON values."""
        return {
            "name": self.name,
            "fingerprint": self.fingerprint,
            "tokenizer": self.tokenizer.describe(),
            "vocabulary": self.vocabulary,
            "unit": self.unit,
            "splits": {name: len(tokens) for name, tokens in self.splits.items()},
            "stamps": self.stamps,
            **({"image": list(self.image)} if self.image else {}),
            "source": self.source,
            "folder": str(self.folder),
        }


def open_store(folder: Path, options: str) -> TokenStore:
    """Open the store in `folder`, checking the sizes of its files but not their bytes.

    Args:
        options: the command-line options that ask for it, for messages.

    Raises:
        DamagedStore: a file is missing, cut short or unreadable; the message says which, and how to mend it.
    """
    record = read_record(folder, options)
    splits, starts, facts = {}, {}, {}
    for name, split in record["splits"].items():
        splits[name] = _mapped(folder / f"{name}.bin", record["dtype"], split["units"], options)
        if split["starts"]:
            starts[name] = _mapped(folder / f"{name}.docs", "int64", split["documents"] + 1, options)
        facts[name] = SplitFacts(*(split[key] for key in ("units", "bytes", "words", "documents")))
    try:
        tokenizer = load_tokenizer(record["tokenizer"], folder)
    except ValueError as error:
        raise DamagedStore(f"{folder}: damaged: {error}; {_mend(options)}") from error
    image = tuple(record["image"]) if record["image"] else None
    store = TokenStore(
        name=record["name"],
        folder=folder,
        splits=splits,
        tokenizer=tokenizer,
        fingerprint=record["fingerprint"],
        source=record["source"],
        stamps=record["stamps"],
        image=image,
        all_facts=facts,
        starts=starts,
    )
    _hold(store)
    return store


def _hold(store: TokenStore) -> None:
    """Share a lock on the record for as long as the store is open, so that nobody removes it meanwhile."""
    with contextlib.suppress(OSError):  # a file system without locks, or someone who is removing it already
        handle = os.open(store.folder / RECORD, os.O_RDONLY)
        weakref.finalize(store, os.close, handle)
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)


def _mapped(path: Path, dtype: str, count: int, options: str) -> np.ndarray:
    """Return the memory map `[count]` of a file that has just that many numbers."""
    kind = np.dtype(dtype).newbyteorder("<")
    expected = count * kind.itemsize
    try:
        if (found := path.stat().st_size) != expected:
            raise _damaged(options, path, f"{expected:,} bytes", f"{found:,}")
        return np.memmap(path, dtype=kind, mode="r")
    except OSError as error:
        raise _damaged(options, path, f"{expected:,} bytes", error.strerror) from error


def verify_store(folder: Path, options: str) -> TokenStore:
    """Open the store in `folder` and compare every byte of it with the recorded checksums; raises as open_store does.

    What was found right is noted beside the store where that can be written, for `is_verified`.
    """
    store = open_store(folder, options)  # the tokenizer's file is compared with its hash here
    record = read_record(folder, options)
    for name, split in record["splits"].items():
        for path, sums in ((folder / f"{name}.bin", split), (folder / f"{name}.docs", split["starts"])):
            if sums is None:
                continue
            try:
                wrong = difference(sums, file_sums(path, record["block"]), path.name)
            except OSError as error:
                raise _damaged(options, path, "a file that can be read", error.strerror) from error
            if wrong:
                raise _damaged(options, path, *wrong)
    mark_verified(folder)
    return store


def is_verified(folder: Path) -> bool:
    """Whether every byte was compared on this machine since the files were last written, moved or copied."""
    try:
        return json.loads((folder / VERIFIED).read_bytes()) == _looks(folder)
    except (OSError, ValueError):
        return False


def mark_verified(folder: Path) -> None:
    """Note that every byte of the store in `folder` is right as of now; where nothing can be written, do nothing."""
    temporary = folder / f"{VERIFIED}.tmp-{os.getpid()}"
    with contextlib.suppress(OSError):
        temporary.write_text(json.dumps(_looks(folder)))
        os.replace(temporary, folder / VERIFIED)


def _looks(folder: Path) -> dict[str, list[int]]:
    """Return size, time of change and inode of each file of a store: a copy or a touched file has others."""
    files = {path.name: path.stat() for path in sorted(folder.iterdir()) if not path.name.startswith(".")}
    return {name: [status.st_size, status.st_mtime_ns, status.st_ino] for name, status in files.items()}


def read_record(folder: Path, options: str) -> dict[str, Any]:
    """Return the record of the store in `folder`.

    Raises:
        DamagedStore: it is missing, not a record, or not of this version; or its fingerprint is of other splits.
    """
    path = folder / RECORD
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        kind = record["format"]
        if kind != FORMAT:
            raise _damaged(options, path, f"format {FORMAT}", str(kind))
        name, _ = fingerprint(record), [record[key] for key in ("name", "source", "block", "fingerprint", "sum")]
    except OSError as error:
        raise _damaged(options, path, "the record of the store", error.strerror) from error
    except (KeyError, TypeError, AttributeError, UnicodeError, json.JSONDecodeError) as error:
        found = f"{path.stat().st_size:,} bytes that are not one"
        raise _damaged(options, path, "the record of the store", found) from error
    if name != record["fingerprint"]:
        raise _damaged(options, path, f"fingerprint {name}", str(record["fingerprint"]))
    if (found := record_sum(record)) != record["sum"]:
        raise _damaged(options, path, f"a record with sha256 {record['sum']}", found)
    return record


def record_sum(record: dict[str, Any]) -> str:
    """Return the sha256 of what a record says but for its time: counts of words and bytes are in no other checksum."""
    text = json.dumps({key: value for key, value in record.items() if key not in ("made", "sum")}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def fingerprint(record: dict[str, Any]) -> str:
    """Return the sha256 that names a store's content, tokenizer and stamps, and nothing of where it came from."""
    splits = {
        name: [split["units"], split["documents"], split["sha256"], (split["starts"] or {}).get("sha256")]
        for name, split in record["splits"].items()
    }
    facts = [record[key] for key in ("format", "tokenizer", "dtype", "stamps", "image")]
    text = json.dumps([*facts, splits], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _mend(options: str) -> str:
    return f"to rebuild the store: rtx data prepare {options}"


def _damaged(options: str, path: Path, expected: str, found: str | None) -> DamagedStore:
    return DamagedStore(f"{path}: damaged: expected {expected}, found {found}; {_mend(options)}")
