"""The token store: the splits of a data set on disk, one raw memory-mapped file each, with a record of what they are.

    <root>/<name>-<key>/    train.bin valid.bin test.bin    unsigned integers, nothing else
                            store.json                      format, source, tokenizer, sizes, sha256, fingerprint

The key names the source and the settings (for files: their paths, sizes and times), so a changed source gets a store of
its own. The fingerprint names the content, the tokenizer and the settings alone: it is the same on every machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rtx.data.disk import disk_errors, file_sha256, install, need_space, remove_leftovers, temporary_sibling
from rtx.data.tokenizers import ByteTokenizer
from rtx.errors import UserError, nearest

FORMAT = 1
RECORD = "store.json"


class DamagedStore(UserError):
    """A store on disk that is not what its record says, or has no record that can be read."""


@dataclass(frozen=True)
class Recipe:
    """All that decides what a store holds, known before anything is read or written."""

    name: str
    """Data set: the first part of the folder's name."""
    options: str
    """The command-line options that ask for it, for messages: "data=text data.path=book.txt"."""
    splits: dict[str, int]
    """Units (here bytes) of each split, in the order in which the source delivers them."""
    identity: list[Any]
    """What tells this source from another or an older one, as JSON values."""
    source: dict[str, Any]
    """What the store is made from, for people to read."""
    chunks: Callable[[], Iterator[bytes]] = field(repr=False)
    """Delivers the source's bytes, never an empty chunk; raises UserError or RunFailed where it cannot."""

    @property
    def units(self) -> int:
        """Units of all splits together."""
        return sum(self.splits.values())

    def folder(self, root: Path) -> Path:
        """Return where the store lies below `root`."""
        text = json.dumps([FORMAT, self.name, ByteTokenizer.name, self.splits, self.identity])
        return root / f"{self.name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


@dataclass(frozen=True)
class TokenStore:
    """An open store: splits as read-only memory maps of unsigned integers `[units]`."""

    name: str
    folder: Path
    splits: dict[str, np.ndarray]
    tokenizer: ByteTokenizer
    fingerprint: str
    """sha256 over the tokenizer and the size and content of every split: equal means the same data."""
    source: dict[str, Any]
    answers: None = None
    """Positions of a sequence that alone are scored; None: all of them (see RecallStore)."""

    @property
    def vocabulary(self) -> int:
        """Number of different token ids."""
        return self.tokenizer.vocabulary

    @property
    def unit(self) -> str:
        """What one token is, in words: byte."""
        return self.tokenizer.unit

    def split(self, name: str) -> np.ndarray:
        """Return the tokens of split train, valid or test: unsigned integers `[units]`, read-only."""
        if name not in self.splits:
            allowed = ", ".join(self.splits)
            raise UserError(f"{self.name} has no split {name!r}: one of {allowed}{nearest(name, self.splits)}")
        return self.splits[name]

    def count(self, name: str) -> int:
        """Return how many units of a split are scored: all."""
        return len(self.split(name))

    def describe(self) -> dict[str, Any]:
        """Return what a run records of its data, as JSON values."""
        return {
            "name": self.name,
            "fingerprint": self.fingerprint,
            "tokenizer": self.tokenizer.name,
            "vocabulary": self.vocabulary,
            "unit": self.unit,
            "splits": {name: len(tokens) for name, tokens in self.splits.items()},
            "source": self.source,
            "folder": str(self.folder),
        }


def open_store(root: Path, recipe: Recipe) -> TokenStore:
    """Open the store of `recipe`, checking the sizes of its files but not their bytes.

    Raises:
        DamagedStore: a file is missing, cut short or unreadable; the message says which, and how to mend it.
    """
    folder = recipe.folder(root)
    record = _read_record(folder, recipe)
    splits = {}
    for name, units in recipe.splits.items():
        path = folder / f"{name}.bin"
        if record["splits"].get(name, {}).get("units") != units:
            raise _damaged(recipe, folder / RECORD, f"a split {name} of {units:,} units", "another")
        expected = units * np.dtype(record["dtype"]).itemsize
        try:
            if (found := path.stat().st_size) != expected:
                raise _damaged(recipe, path, f"{expected:,} bytes", f"{found:,}")
            splits[name] = np.memmap(path, dtype=record["dtype"], mode="r")
        except OSError as error:
            raise _damaged(recipe, path, f"{expected:,} bytes", error.strerror) from error
    return TokenStore(recipe.name, folder, splits, ByteTokenizer(), record["fingerprint"], record["source"])


def verify_store(root: Path, recipe: Recipe) -> TokenStore:
    """Open the store of `recipe` and compare every byte of it with the recorded sha256; raises as open_store does."""
    store = open_store(root, recipe)
    for name, split in _read_record(store.folder, recipe)["splits"].items():
        path = store.folder / f"{name}.bin"
        if (found := file_sha256(path)) != split["sha256"]:
            raise _damaged(recipe, path, f"sha256 {split['sha256']}", found)
    return store


def _read_record(folder: Path, recipe: Recipe) -> dict[str, Any]:
    path = folder / RECORD
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        kind, name, _ = record["format"], fingerprint(record), record["source"]
    except OSError as error:
        raise _damaged(recipe, path, "the record of the store", error.strerror) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(
            recipe, path, "the record of the store", f"{path.stat().st_size:,} bytes that are not one"
        ) from error
    if kind != FORMAT:
        raise _damaged(recipe, path, f"format {FORMAT}", str(kind))
    if name != record["fingerprint"]:
        raise _damaged(recipe, path, f"fingerprint {name}", str(record["fingerprint"]))
    return record


def _damaged(recipe: Recipe, path: Path, expected: str, found: str | None) -> DamagedStore:
    return DamagedStore(
        f"{path}: damaged: expected {expected}, found {found}; to rebuild the store: rtx data prepare {recipe.options}"
    )


def fingerprint(record: dict[str, Any]) -> str:
    """Return the sha256 that names a store's content, tokenizer and splits, and nothing of where it came from."""
    splits = {name: [split["units"], split["sha256"]] for name, split in record["splits"].items()}
    text = json.dumps([record["format"], record["tokenizer"], record["dtype"], splits], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def build_store(root: Path, recipe: Recipe) -> None:
    """Write the store of `recipe` beside its place and rename it there; the caller holds the lock.

    Raises:
        RunFailed: the disk is full.
        UserError: the source is not what the recipe says, or `root` cannot be written. Nothing is left behind.
    """
    folder = recipe.folder(root)
    temporary = temporary_sibling(folder)
    try:
        with disk_errors(root):
            remove_leftovers(root, folder)
            need_space(root, recipe.units)
            temporary.mkdir()
            record: dict[str, Any] = {"format": FORMAT, "name": recipe.name, "tokenizer": ByteTokenizer.name}
            record |= {"unit": ByteTokenizer.unit, "vocabulary": ByteTokenizer.vocabulary, "dtype": "uint8"}
            record |= {"source": recipe.source, "splits": _write_splits(temporary, recipe)}
            record["fingerprint"] = fingerprint(record)
            write_durably(temporary / RECORD, iter([json.dumps(record, indent=2).encode() + b"\n"]))
            install(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_splits(folder: Path, recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Cut the source's bytes into one file per split; return units and sha256 of each."""
    chunks = recipe.chunks()
    rest = b""
    splits = {}

    def take(units: int) -> Iterator[bytes]:
        nonlocal rest
        while units > 0 and (rest := rest or next(chunks, b"")):
            part, rest = rest[:units], rest[units:]
            units -= len(part)
            yield part

    for name, units in recipe.splits.items():
        size, sha256 = write_durably(folder / f"{name}.bin", take(units))
        splits[name] = {"units": size, "sha256": sha256}
    found = {name: split["units"] for name, split in splits.items()}
    if found != recipe.splits or rest or next(chunks, b""):
        raise UserError(f"{recipe.options}: the source changed while it was read; prepare it again")
    return splits


def write_durably(path: Path, parts: Iterator[bytes]) -> tuple[int, str]:
    """Write `parts` to a new file and sync it; return its size in bytes and its sha256."""
    size, digest = 0, hashlib.sha256()
    with open(path, "xb") as file:
        for part in parts:
            file.write(part)
            digest.update(part)
            size += len(part)
        file.flush()
        os.fsync(file.fileno())
    return size, digest.hexdigest()
