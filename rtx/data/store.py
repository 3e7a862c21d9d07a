"""Stores: what a run trains on and is scored on.

A token store is a folder `<root>/<name>-<key>` with the token ids of each split in a raw file, the
starts of documents, the tokenizer and a record. The key names source and settings; the fingerprint
depends on content, tokenizer and protocol stamps alone.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np

from rtx.data.files import disk_size, sha256_of, text_sha256
from rtx.data.sampler import ContiguousStreams, Sampler, ShuffledWindows
from rtx.data.store_record import check_store_record
from rtx.data.tokenizers import Tokenizer, load_tokenizer
from rtx.disk import (
    LinkRefused,
    make_folder,
    open_inside,
    read_inside,
    write_inside,
)
from rtx.errors import DAMAGED, RunFailed, UserError, nearest
from rtx.paths import cache_folder
from rtx.settings.schema import Config, DataConfig

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = 3
"""Version of what is written for the same settings; raise it whenever that changes."""
RECORD = "store.json"
LARGEST_RECORD = 1 << 24
"""The most bytes of the record."""
HEADER_BYTES = 1 << 12
"""More than the header of an array in a file has."""
LARGEST_NOTE = 1 << 16
"""The most bytes of the note on a verified store."""


class FoundAnswers(NamedTuple):
    """The answers of sequences, int64 `[B, A]`; a sequence with fewer than A has them first."""

    position_BA: Tensor
    """Positions, ascending; -1: no answer."""
    distance_BA: Tensor
    """How far before the answer the token is that it repeats; 0: no answer, or no such token."""
    hops_BA: Tensor
    """How many pairs lead from the question to the answer; 0: no answer."""


Answers = Callable[["Tensor"], FoundAnswers]
"""Finds the answers of token ids `[B, N]`."""


class Store(ABC):
    """Splits of token ids, and how they are sampled, scored and recorded."""

    name: str
    """The data set's name."""
    fingerprint: str
    """Equal fingerprints mean equal data."""
    stamps: Mapping[str, Any]
    """Deviations from the published data, which every result records."""
    image: tuple[int, int] | None = None
    """Height and width of every image; None for text."""
    facts: Mapping[str, Mapping[str, Any]] = {}
    """Numbers of tokens ("units"), documents, bytes and words of each split, where recorded."""
    tokenizer: Tokenizer | None
    """The mapping between bytes and token ids; None for synthetic data."""

    @property
    @abstractmethod
    def vocabulary(self) -> int:
        """Number of different token ids."""

    @property
    @abstractmethod
    def unit(self) -> str:
        """What a score is an average over: byte, word, subword, dim (a sub-pixel) or answer."""

    @property
    def tokenizer_file(self) -> Path | None:
        """The file of a learned tokenizer; None where the tokenizer has none."""
        return None

    @property
    def answers(self) -> Answers | None:
        """How to find the tokens that alone are scored; None where all tokens are scored."""
        return None

    @property
    def answer_values(self) -> Sequence[int] | None:
        """Numbers of values that the first, second, ... answer of a sequence may have.

        One number: it is that of all answers. None: all tokens are scored.
        """
        return None

    def scored_tokens(self, tokens: np.ndarray) -> int:
        """Return how many tokens of a split a score is over."""
        return len(tokens)

    @abstractmethod
    def split(self, name: str) -> np.ndarray:
        """Return the token ids of a split `[tokens]`; UserError where the store lacks it."""

    def document_starts(self, name: str, data: DataConfig) -> np.ndarray | None:
        """Return where the documents of a split start, ascending; None if they are not kept apart.

        Raises UserError where the store has no documents.
        """
        if not data.documents:
            return None
        raise UserError(f"data.documents=true: data={self.name} has no documents")

    @abstractmethod
    def training_sampler(self, config: Config) -> Sampler:
        """Return the training sequences; UserError where the data do not fit `config`."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return what a run records of its data, as JSON values."""

    @abstractmethod
    def summary(self) -> list[str]:
        """Return lines for `rtx data info`."""


class DamagedStore(UserError):
    """A store on disk whose files or record are not as recorded, or cannot be read."""

    def __init__(self, options: str, path: Path | str, expected: str, actual: object) -> None:
        self.damage = f"{path}: damaged: expected {expected}, found {actual}"
        super().__init__(f"{self.damage}; to rebuild the store: rtx data prepare {options}")


@dataclass(frozen=True)
class TokenStore(Store):
    """An open store on disk: splits are read-only memory maps of unsigned integers `[tokens]`."""

    name: str
    folder: Path
    splits: dict[str, np.ndarray]
    tokenizer: Tokenizer  # pyright: ignore[reportIncompatibleVariableOverride] # it never changes
    fingerprint: str
    source: dict[str, Any]
    stamps: Mapping[str, Any] = field(default_factory=dict)
    image: tuple[int, int] | None = None
    facts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def vocabulary(self) -> int:
        return self.tokenizer.vocabulary

    @property
    def unit(self) -> str:
        return self.tokenizer.unit

    @property
    def tokenizer_file(self) -> Path | None:
        name = self.tokenizer.file
        return self.folder / name if name else None

    def split(self, name: str) -> np.ndarray:
        if name not in self.splits:
            allowed = f"one of {', '.join(self.splits)}{nearest(name, self.splits)}"
            raise UserError(f"{self.name} has no split {name!r}: {allowed}")
        return self.splits[name]

    def document_starts(self, name: str, data: DataConfig) -> np.ndarray | None:
        if not data.documents or self.image is not None:
            return super().document_starts(name, data)
        path = self.folder / f"{name}.starts.npy"
        units = len(self.split(name))
        try:
            with open_inside(self.folder, path.name) as file:
                # by path: an open file
                offsets = np.load(file, allow_pickle=False)
        except (OSError, ValueError, *DAMAGED) as error:
            raise open_failure(path, f"data={self.name}", "starts of documents", error) from error
        is_ascending = offsets.ndim == 1 and bool((np.diff(offsets) > 0).all())
        if not is_ascending or not len(offsets) or offsets[-1] != units:
            expected = f"ascending starts of documents, and {units:,}, the number of units"
            raise DamagedStore(f"data={self.name}", path, expected, "other numbers")
        return offsets[:-1]

    def training_sampler(self, config: Config) -> Sampler:
        tokens = self.split("train")
        length = config.data.length
        batch_size = config.trainer.batch_size
        is_image = self.image is not None
        # Recurrent models without a memory read streams, too: runs then differ by the memory alone.
        if is_image or config.model.base != "recurrent":
            starts = self.document_starts("train", config.data)
            return ShuffledWindows(tokens, length, config.seed, batch_size, is_image, starts)
        check_streams(config, len(tokens))
        return ContiguousStreams(tokens, length, config.seed, batch_size)

    def describe(self) -> dict[str, Any]:
        described = {
            "name": self.name,
            "fingerprint": self.fingerprint,
            "vocabulary": self.vocabulary,
            "unit": self.unit,
            "stamps": self.stamps,
            "source": self.source,
            "splits": {name: len(tokens) for name, tokens in self.splits.items()},
            "tokenizer": self.tokenizer.describe(),
            "folder": str(self.folder.absolute()),
        }
        if self.image is not None:
            described["image"] = list(self.image)
        return described

    def summary(self) -> list[str]:
        lines = [f"{self.folder}: {self.name}, {disk_size(self.folder)} on disk"]
        described = {
            "source": self.source,
            "tokenizer": self.tokenizer.describe(),
            "stamps": self.stamps,
        }
        for name, values in described.items():
            text = ", ".join(f"{key} {value}" for key, value in values.items())
            lines.append(f"  {name:<12} {text or 'none'}")
        for name, facts in self.facts.items():
            kinds = ("documents", "bytes", "words")
            sizes = ", ".join(f"{facts[kind]:,} {kind}" for kind in kinds)
            lines.append(f"  {name:<12} {facts['units']:,} {self.unit}s, {sizes}")
        return lines


def check_streams(config: Config, tokens: int) -> None:
    """Raise UserError where the training split is too short for parallel streams."""
    streams = config.trainer.batch_size
    length = config.data.length
    if streams * length > tokens:
        expected = f"{streams} streams of at least data.length={length} tokens"
        raise UserError(
            f"trainer.batch_size={streams}: expected {expected}, "
            f"found {tokens:,} in the training split"
        )
    stream_length = tokens // streams
    if config.model.memory > stream_length:
        raise UserError(
            f"model.memory={config.model.memory} must be at most {stream_length:,}, "
            "the tokens of a stream of text"
        )


def open_store(folder: Path, options: str, verify: bool = False) -> TokenStore:
    """Open the store in `folder`; `verify` compares every byte with the recorded checksums.

    The sizes of the splits are always compared. `options`, of the command line, are part of error
    messages. Raises DamagedStore, or UserError where there is no store.
    """
    record = read_record(folder, options)
    try:
        store = store_of_record(folder, record, options)
        if verify:
            check_checksums(folder, record, options)
            check_ids(store, options)
    except (OSError, RuntimeError, *DAMAGED) as error:
        raise open_failure(folder, options, "what its record says", error) from error
    if verify:
        write_note(folder)
    return store


def store_of_record(folder: Path, record: dict[str, Any], options: str) -> TokenStore:
    """Return the store that a record describes; many kinds of errors where its values are wrong."""
    dtype = np.dtype(record["dtype"])
    splits = {}
    for name, facts in record["splits"].items():
        with open_inside(folder, f"{name}.bin") as file:
            check_size(file, facts["units"] * dtype.itemsize, options)
            # by path: an open file
            splits[name] = np.memmap(file, dtype, mode="r")
    # A part of the fingerprint becomes part of file names.
    bytes.fromhex(record["fingerprint"])
    image = None
    if record["image"]:
        height, width = record["image"]
        image = (height, width)
    return TokenStore(
        name=record["name"],
        folder=folder,
        splits=splits,
        # This compares the tokenizer's file with its sha256.
        tokenizer=load_tokenizer(record["tokenizer"], folder),
        fingerprint=record["fingerprint"],
        source=record["source"],
        stamps=record["stamps"],
        image=image,
        facts=record["splits"],
    )


def check_size(file: BinaryIO, size: int, options: str) -> None:
    """Raise DamagedStore where a file of a store has another size."""
    actual = os.fstat(file.fileno()).st_size
    if actual != size:
        raise DamagedStore(options, file.name, f"{size:,} bytes", f"{actual:,}")


def check_not_longer(file: BinaryIO, units: int, options: str) -> None:
    """Raise DamagedStore where a file has more bytes than the ids or the starts of all units."""
    most = HEADER_BYTES + 8 * (units + 1)
    actual = os.fstat(file.fileno()).st_size
    if actual > most:
        raise DamagedStore(options, file.name, f"at most {most:,} bytes", f"{actual:,}")


def check_checksums(folder: Path, record: dict[str, Any], options: str) -> None:
    """Raise DamagedStore where a file of a split differs from its recorded sha256."""
    for name, facts in record["splits"].items():
        for kind, sha256 in facts["sha256"].items():
            with open_inside(folder, f"{name}.{kind}") as file:
                check_not_longer(file, facts["units"], options)
                actual = sha256_of(file)
            if actual != sha256:
                raise DamagedStore(options, file.name, f"sha256 {sha256}", actual)


def check_ids(store: TokenStore, options: str) -> None:
    """Raise DamagedStore where a split has a token id that is not in the vocabulary."""
    for name, tokens in store.splits.items():
        if len(tokens) == 0 or np.iinfo(tokens.dtype).max < store.vocabulary:
            continue
        largest = int(tokens.max())
        if largest >= store.vocabulary:
            path = store.folder / f"{name}.bin"
            raise DamagedStore(options, path, f"ids below {store.vocabulary:,}", f"{largest:,}")


def is_verified(folder: Path) -> bool:
    """Return whether every byte was compared since the files were written, moved or copied.

    A note that is a link or no regular file counts as none.
    """
    with contextlib.suppress(OSError, LinkRefused):
        return read_inside(*note_place(folder), LARGEST_NOTE) == note_of(folder)
    return False


def write_note(folder: Path) -> None:
    """Record that every byte of a store was compared; nothing happens where that is impossible."""
    note = note_of(folder)
    with contextlib.suppress(OSError, LinkRefused):
        place, name = note_place(folder)
        make_folder(place, PurePosixPath(name).parent)
        write_inside(place, name, note, durable=False)


def note_place(folder: Path) -> tuple[Path, str]:
    """Return where the note on a verified store is: in the store if it is writable, else cached.

    That is a folder, and the note's name below it.
    """
    cache = cache_folder()
    if cache is None or os.access(folder, os.W_OK):
        return folder, ".verified"
    return cache, f"rtx/verified/{text_sha256(str(folder.resolve()))}"


def note_of(folder: Path) -> bytes:
    """Return sizes, times and inodes of a store's files as JSON; no copy has the same."""
    values = {}
    for path in sorted(folder.glob("[!.]*")):
        status = path.lstat()
        values[path.name] = [status.st_size, status.st_mtime_ns, status.st_ino]
    return json.dumps(values).encode()


def read_record(folder: Path, options: str) -> dict[str, Any]:
    """Return the record of the store in `folder`; raises as `open_store`."""
    if not folder.exists():
        raise UserError(f"{folder}: not prepared; to prepare it: rtx data prepare {options}")
    try:
        record = json.loads(read_inside(folder, RECORD, LARGEST_RECORD))
        if (record["format"], record["sha256"]) != (FORMAT, record_sha256(record)):
            raise ValueError("by its format or sha256")
        check_store_record(record)
    except (OSError, *DAMAGED) as error:
        expected = f"a record of format {FORMAT} with its own sha256"
        raise open_failure(folder / RECORD, options, expected, error) from error
    return record


def record_sha256(record: dict[str, Any]) -> str:
    """Return the sha256 of a record without its entry `sha256`."""
    content = {key: value for key, value in record.items() if key != "sha256"}
    return text_sha256(json.dumps(content, sort_keys=True))


def open_failure(path: Path, options: str, expected: str, error: Exception) -> Exception:
    """Return what to raise for a store that cannot be opened.

    It is DamagedStore, unless the operating system refuses to read a file that may be whole.
    """
    if isinstance(error, LinkRefused):
        return DamagedStore(options, error.path, "a file that can be read", "a link")
    if isinstance(error, UserError):
        return error
    if not isinstance(error, OSError):
        return DamagedStore(options, path, expected, f"another ({error})")
    path = error.filename or path
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL):
        return DamagedStore(options, path, "a file that can be read", error.strerror)
    return RunFailed(f"{path} cannot be read ({error.strerror}); no file was changed")
