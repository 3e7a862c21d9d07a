"""Text <-> token ids: bytes here, words in `words.py`, subwords in `pieces.py`; trained, saved, and loaded by hash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np

from rtx.config import DataConfig
from rtx.data.disk import Report, write_whole
from rtx.data.source import Document, Part, Source, Tokenizer

RECORD = "tokenizer.json"
BLOCK = 1 << 16  # bytes encoded at once: what is made of them stays in a cache
LONGEST_RUN = 1 << 20  # bytes without a blank after which a run is no longer kept whole


def unsigned(vocabulary: int) -> np.dtype[Any]:
    """Return the smallest of uint8, uint16 and uint32 that holds every id below `vocabulary`."""
    return np.dtype(np.uint8 if vocabulary <= 1 << 8 else np.uint16 if vocabulary <= 1 << 16 else np.uint32)


class TextTokenizer:
    """What all tokenizers share: `encode` takes a whole text at once, or a document in chunks."""

    name: str
    unit: str
    vocabulary: int

    @overload
    def encode(self, document: bytes | str) -> np.ndarray: ...

    @overload
    def encode(self, document: Document) -> Iterator[np.ndarray]: ...

    def encode(self, document: bytes | str | Document) -> np.ndarray | Iterator[np.ndarray]:
        """Return the ids of a text `[ids]`, or yield those of a document in chunks; unsigned integers.

        A str is taken in UTF-8, undecodable bytes (surrogates) as they were. The ids are the same ones however the
        document is cut into chunks.
        """
        if isinstance(document, str):
            document = document.encode("utf-8", errors="surrogateescape")
        if isinstance(document, bytes):
            found = list(self._encode([document]))
            return np.concatenate(found) if found else np.empty(0, unsigned(self.vocabulary))
        return self._encode(document)

    def _encode(self, document: Document) -> Iterator[np.ndarray]:
        raise NotImplementedError


class TrainedTokenizer(TextTokenizer):
    """What words and subwords share: they are learned, kept in a file, and each id stands for fixed bytes."""

    file: str
    """Name of the file."""
    _table: list[bytes]

    def __init__(self, content: bytes, settings: dict[str, Any]) -> None:
        self.content, self.settings = content, settings

    def decode(self, ids: Any) -> bytes:
        """Return the bytes that `ids` stand for: a list, array or tensor."""
        return joined(ids, self._table)

    def describe(self) -> dict[str, Any]:
        """Return name, unit, vocabulary, settings, file and sha256, as JSON values."""
        described = {"name": self.name, "unit": self.unit, "vocabulary": self.vocabulary, "settings": self.settings}
        return described | {"file": self.file, "sha256": hashlib.sha256(self.content).hexdigest()}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.content, self.settings)


class ByteTokenizer(TextTokenizer):
    """Every byte is its own token: 256 ids, exact on any input, valid UTF-8 or not. `unit`: byte, or dim of images."""

    name = "bytes"
    unit = "byte"
    vocabulary = 256

    def __init__(self, unit: str = "byte") -> None:
        self.unit = unit

    def _encode(self, document: Document) -> Iterator[np.ndarray]:
        for chunk in document:
            yield np.frombuffer(chunk, dtype=np.uint8)

    def decode(self, ids: Any) -> bytes:
        """Return the bytes that `ids` stand for: a list, array or tensor of integers 0..255."""
        values = np.asarray(ids)
        assert values.size == 0 or (values.min() >= 0 and values.max() < self.vocabulary), "ids beyond 0..255"
        return values.astype(np.uint8).tobytes()

    def describe(self) -> dict[str, Any]:
        """Return name, unit and vocabulary."""
        return {"name": self.name, "unit": self.unit, "vocabulary": self.vocabulary}


def encode_text(tokenizer: Tokenizer, text: bytes | str) -> np.ndarray:
    """Return the ids of `text`, int64 `[units]`: a str in UTF-8, undecodable bytes (surrogates) as they were."""
    raw = text.encode("utf-8", errors="surrogateescape") if isinstance(text, str) else text
    pieces = list(tokenizer.encode([raw] if raw else []))
    return np.concatenate([np.zeros(0, dtype=np.int64), *pieces]).astype(np.int64)


def blocks_at_blanks(document: Document, overlong: Callable[[bytes], int]) -> Iterator[bytes]:
    """Yield a document in blocks of about `BLOCK` bytes, each of which ends before a blank or newline, or at the end.

    A run without either may be of any length: of one with more than `LONGEST_RUN` bytes, as many as `overlong` says
    when it is given what has been read of it become a block.
    """
    held: list[bytes] = []
    size = 0
    for chunk in document:
        for start in range(0, len(chunk), BLOCK):
            piece = chunk[start : start + BLOCK]
            if (cut := max(piece.rfind(b" "), piece.rfind(b"\n"))) >= 0:
                held.append(piece[:cut])
                yield b"".join(held)
                piece, held, size = piece[cut:], [], 0
            held.append(piece)
            size += len(piece)
            if size > LONGEST_RUN:
                run = b"".join(held)
                taken = overlong(run)
                yield run[:taken]
                held, size = [run[taken:]], size - taken
    yield b"".join(held)


def tokenizer_for(
    data: DataConfig, source: Source, train: Sequence[Part], folder: Path, report: Report, processes: int
) -> Tokenizer:
    """Return the tokenizer of `data` for `source`; words and subwords are learned from `train` and saved in `folder`.

    One that an earlier call with the same settings and source finished there is taken as it is. `processes`: how many
    may count words at once; the tokenizer is the same for any number.

    Raises:
        UserError: the training split is not what it should be, or too small for the vocabulary.
        RunFailed: a download or a full disk, while the training split is read.
    """
    if source.image is not None:
        return ByteTokenizer("dim")
    if data.tokenizer == "bytes":
        return ByteTokenizer()
    key: dict[str, Any] = {"name": data.tokenizer, "source": [source.name, source.identity]}
    if data.tokenizer == "sentencepiece":
        key |= {"vocabulary": data.vocabulary, "sample": data.tokenizer_sample}
    if (finished := _finished(key, folder)) is not None:
        report(f"{folder / RECORD}: taking the tokenizer that is here")
        return finished
    if data.tokenizer == "words":
        from rtx.data.words import WordTokenizer

        tokenizer = WordTokenizer.train(train, source.options, report, processes)
    else:
        from rtx.data.pieces import SentencepieceTokenizer

        tokenizer = SentencepieceTokenizer.train(train, data.vocabulary, data.tokenizer_sample, source.options, report)
    described = tokenizer.describe()
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / described["file"], tokenizer.content)
    write_whole(folder / RECORD, json.dumps({"key": key, "tokenizer": described}, indent=2).encode() + b"\n")
    return tokenizer


def load_tokenizer(described: dict[str, Any], folder: Path) -> Tokenizer:
    """Return the tokenizer that its `describe` called `described`; the file of a trained one is in `folder`.

    Raises:
        ValueError: the file is missing, or is another; one sentence that says which.
    """
    name = described.get("name")
    if name == "bytes":
        return ByteTokenizer(described["unit"])
    if name not in ("words", "sentencepiece"):
        raise ValueError(f"{folder}: expected a tokenizer bytes, words or sentencepiece, found {name!r}")
    path = folder / described["file"]
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: expected the {name} tokenizer of this store, found {error.strerror}") from error
    found = hashlib.sha256(content).hexdigest()
    if found != described["sha256"]:
        raise ValueError(f"{path}: expected the {name} tokenizer with sha256 {described['sha256']}, found {found}")
    if name == "words":
        from rtx.data.words import WordTokenizer as Trained
    else:
        from rtx.data.pieces import SentencepieceTokenizer as Trained
    tokenizer = Trained(content, described["settings"])
    if tokenizer.vocabulary != described["vocabulary"]:
        expected = f"a vocabulary of {described['vocabulary']:,}"
        raise ValueError(f"{path}: expected {expected}, found {tokenizer.vocabulary:,}")
    return tokenizer


def _finished(key: dict[str, Any], folder: Path) -> Tokenizer | None:
    """Return the tokenizer in `folder` if it is whole and was made for `key`."""
    try:
        record = json.loads((folder / RECORD).read_bytes())
        if record["key"] != json.loads(json.dumps(key)):
            return None
        return load_tokenizer(record["tokenizer"], folder)
    except (OSError, ValueError, KeyError, TypeError):  # missing, half or of another format: it is made anew
        return None


def joined(ids: Any, table: Sequence[bytes]) -> bytes:
    """Return the bytes of `ids` (a list, array or tensor of integers below the length of `table`) in a row."""
    values = np.asarray(ids).reshape(-1)
    assert values.size == 0 or (values.min() >= 0 and values.max() < len(table)), f"ids beyond 0..{len(table) - 1}"
    take: Callable[[int], bytes] = table.__getitem__
    return b"".join(map(take, values.tolist()))
