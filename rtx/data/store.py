"""The token store: the splits of a data set on disk, one raw memory-mapped file each, with a record of what they are.

    <root>/<name>-<key>/    <split>.bin           unsigned integers, nothing else
                            <split>.starts.npy    where documents start, and the end: int64 (not for images)
                            store.json            source, tokenizer, sizes, checksums, fingerprint
                            .verified             sizes and times of the files when every byte was last checked here
                            and the file of a learned tokenizer

The key names the source and the settings (for files: their paths, sizes and times), so a changed source gets a store of
its own. The fingerprint names the content, the tokenizer and the stamps alone: it is the same on every machine.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rtx.data.fetch import file_sha256
from rtx.data.tokenizers import Tokenizer, load_tokenizer
from rtx.disk import replace_file, write_json
from rtx.errors import UserError, nearest

FORMAT = 3
"""Version of what is written for the same settings; raise it whenever that changes."""
RECORD = "store.json"
VERIFIED = ".verified"


class DamagedStore(UserError):
    """A store on disk that is not what its record says, or has no record that can be read."""

    def __init__(self, options: str, path: Path, expected: object, found: object) -> None:
        self.what = f"{path}: damaged: expected {expected}, found {found}"
        super().__init__(f"{self.what}; to rebuild the store: rtx data prepare {options}")


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
            return np.load(self.folder / f"{name}.starts.npy", mmap_mode="r", allow_pickle=False)
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
    itemsize = np.dtype(record["dtype"]).itemsize
    splits = {}
    for path, facts in files_of(folder, record):
        try:
            found = path.stat().st_size
            size = facts["units"] * itemsize if path.suffix == ".bin" else found
            if found != size:
                raise DamagedStore(options, path, f"{size:,} bytes", f"{found:,}")
            if path.suffix == ".bin":
                splits[path.stem] = np.memmap(path, dtype=record["dtype"], mode="r")
        except OSError as error:
            raise DamagedStore(options, path, "a file that can be read", error.strerror or error) from error
    try:
        tokenizer = load_tokenizer(record["tokenizer"], folder)
    except ValueError as error:
        raise DamagedStore(options, folder, "its tokenizer", f"another: {error}") from error
    return TokenStore(
        name=record["name"],
        folder=folder,
        splits=splits,
        tokenizer=tokenizer,
        fingerprint=record["fingerprint"],
        source=record["source"],
        stamps=record["stamps"],
        image=tuple(record["image"]) if record["image"] else None,
        all_facts={
            name: SplitFacts(*(split[key] for key in ("units", "bytes", "words", "documents")))
            for name, split in record["splits"].items()
        },
    )


def files_of(folder: Path, record: dict[str, Any]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the files of every split, each with what is recorded of its split."""
    for name, split in record["splits"].items():
        for file in split["sha256"]:
            yield folder / f"{name}.{file}", split


def verify_store(folder: Path, options: str) -> TokenStore:
    """Open the store in `folder` and compare every byte of it with the recorded sha256; raises as open_store does.

    What was found right is noted for `is_verified`.
    """
    store = open_store(folder, options)  # the tokenizer's file is compared with its hash here
    for path, split in files_of(folder, read_record(folder, options)):
        expected = split["sha256"][path.name.partition(".")[2]]
        try:
            found = file_sha256(path)
        except OSError as error:
            raise DamagedStore(options, path, "a file that can be read", error.strerror) from error
        if found != expected:
            raise DamagedStore(options, path, f"sha256 {expected}", found)
    note = json.dumps(looks(folder)).encode()
    for path in notes_on(folder):
        with contextlib.suppress(OSError):  # a store that only others may write has its note in the user's own cache
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, lambda file: file.write(note), durable=False)
            break
    return store


def is_verified(folder: Path) -> bool:
    """Whether every byte was compared on this machine since the files were last written, moved or copied."""
    for path in notes_on(folder):
        with contextlib.suppress(OSError, ValueError):
            if json.loads(path.read_bytes()) == looks(folder):
                return True
    return False


def notes_on(folder: Path) -> tuple[Path, Path]:
    """Return where it may be noted that a store is right: in it, or in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    name = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:24]
    return folder / VERIFIED, cache / "rtx" / "verified" / f"{name}.json"


def looks(folder: Path) -> dict[str, list[int]]:
    """Return size, time of change and inode of each file of a store: a copy or a touched file has others."""
    files = {path.name: path.stat() for path in sorted(folder.iterdir()) if not path.name.startswith(".")}
    return {name: [status.st_size, status.st_mtime_ns, status.st_ino] for name, status in files.items()}


def read_record(folder: Path, options: str) -> dict[str, Any]:
    """Return the record of the store in `folder`.

    Raises:
        DamagedStore: it is missing, not a record, not of this version, or was changed.
    """
    path = folder / RECORD
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        found = {"format": record["format"], "sha256": record["sha256"]}
    except OSError as error:
        raise DamagedStore(options, path, "the record of the store", error.strerror) from error
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedStore(options, path, "the record of the store", "something else") from error
    if found["format"] != FORMAT:
        raise DamagedStore(options, path, f"format {FORMAT}", found["format"])
    if found["sha256"] != (expected := record_sha256(record)):
        raise DamagedStore(options, path, f"a record with sha256 {expected}", found["sha256"])
    return record


def record_sha256(record: dict[str, Any]) -> str:
    """Return the sha256 of all that a record says."""
    said = {key: value for key, value in record.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def write_record(folder: Path, facts: dict[str, Any]) -> None:
    """Write the record of a store, with fingerprint, time and its own sha256."""
    content = [facts[key] for key in ("tokenizer", "dtype", "stamps", "image")]
    splits = {name: [split["units"], split["sha256"]] for name, split in facts["splits"].items()}
    named = json.dumps([FORMAT, *content, splits], sort_keys=True)
    record = {"format": FORMAT, **facts, "fingerprint": hashlib.sha256(named.encode()).hexdigest()}
    record["made"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    write_json(folder / RECORD, {**record, "sha256": record_sha256(json.loads(json.dumps(record)))})
