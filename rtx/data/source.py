"""What a data set is before it is a store: splits of parts, parts of documents, documents of bytes.

A source module (enwik8, wikitext, cifar10, ...) makes a `Source`; a tokenizer turns its documents into unsigned
integers; `rtx/data/build.py` writes them. A document is a book or a file of text, or the raw pixels of one image.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

Document = Iterable[bytes]
"""The bytes of one document, in chunks of at most a few MiB that may break anywhere, never empty."""


class Part(Protocol):
    """A piece of a split that is read on its own, maybe in another process: it pickles, and is small.

    Parts are cut by content alone, never by the number of processes, so that a store is the same for any number.
    """

    @property
    def size(self) -> int:
        """Bytes that it delivers, about: for progress, the disk space asked for, and the number of processes."""
        ...

    def documents(self) -> Iterator[Document]:
        """Yield the documents in order; each is used up before the next is asked for.

        Raises:
            UserError: the source cannot be read, or is not what it should be.
            RunFailed: a download or a full disk.
        """
        ...


@dataclass(frozen=True)
class Source:
    """All that decides what a store holds, but for the tokenizer; nothing is read before `parts` is called."""

    name: str
    """Data set: the first part of the store's folder."""
    options: str
    """The command-line options that ask for it, for messages: "data=text data.path=book.txt"."""
    identity: list[Any]
    """What tells this source from another or an older one, as JSON values."""
    place: dict[str, Any]
    """What the store is made from, for people to read, as JSON values."""
    parts: Callable[[], Mapping[str, Sequence[Part]]] = field(repr=False)
    """Fetches and checks what is needed, and returns the parts of each split in order: train, valid, test.

    A set may lack a split; two splits may have the same parts.
    """
    stamps: dict[str, Any] = field(default_factory=dict)
    """Facts of protocol that stand on every result, as JSON values: {"newlines": "drop"}, {"variant": "..."}."""
    units: dict[str, int] | None = None
    """Units of each split where they are known beforehand (bytes, sub-pixels, published counts); they are checked."""
    image: tuple[int, int] | None = None
    """Height and width of every image; None: text."""


class Tokenizer(Protocol):
    """Bytes of documents <-> unsigned integers below `vocabulary`."""

    name: str
    """bytes, words or sentencepiece."""
    unit: str
    """What one id is, in words: byte, word, subword; dim for the sub-pixels of images."""
    vocabulary: int
    """Number of different ids."""

    def encode(self, document: Document) -> Iterator[np.ndarray]:
        """Yield the ids of a document, unsigned integers; the same ones however the document is cut into chunks."""
        ...

    def decode(self, ids: Any) -> bytes:
        """Return the bytes that `ids` stand for: a list, array or tensor of integers."""
        ...

    def describe(self) -> dict[str, Any]:
        """Return name, unit, vocabulary, settings, and of a trained tokenizer its file and sha256, as JSON values."""
        ...
