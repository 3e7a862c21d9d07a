"""Text <-> token ids: the tokenizers by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rtx.config import DataConfig
from rtx.data.disk import Report
from rtx.data.source import Document, Part, Source, Tokenizer
from rtx.errors import UserError


class ByteTokenizer:
    """Every byte is its own token: 256 ids, exact on any input, valid UTF-8 or not; of images, every sub-pixel."""

    name = "bytes"
    vocabulary = 256

    def __init__(self, unit: str = "byte") -> None:
        self.unit = unit

    def encode(self, document: Document) -> Iterator[np.ndarray]:
        """Yield the ids of a document, uint8: its bytes."""
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


def tokenizer_for(
    data: DataConfig, source: Source, train: Sequence[Part], folder: Path, report: Report, processes: int
) -> Tokenizer:
    """Return the tokenizer that `data` asks for, trained on the parts of split train and saved in `folder` if need be.

    One that a killed preparation left in `folder`, whole and with the same settings, is used again.

    Raises:
        UserError: it cannot be trained on this source.
        RunFailed: a full disk.
    """
    if source.image:
        return ByteTokenizer("dim")
    if data.tokenizer == "bytes":
        return ByteTokenizer()
    raise UserError(f"data.tokenizer={data.tokenizer}: must be bytes")


def load_tokenizer(described: dict[str, Any], folder: Path) -> Tokenizer:
    """Return the tokenizer that a store's record describes, its file, if it has one, read from `folder`.

    Raises:
        ValueError: the file is missing or another; a sentence says what was expected and found.
    """
    if described["name"] == "bytes":
        return ByteTokenizer(described["unit"])
    raise ValueError(f"a tokenizer named {described['name']!r} is not known")
