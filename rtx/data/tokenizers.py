"""Text <-> token ids."""

from __future__ import annotations

from typing import Any

import numpy as np


class ByteTokenizer:
    """Every byte is its own token: 256 ids, exact on any input, valid UTF-8 or not."""

    name = "bytes"
    unit = "byte"
    vocabulary = 256

    def encode(self, text: bytes | str) -> np.ndarray:
        """Return the ids of `text`, uint8 `[bytes]`: a str in UTF-8, undecodable bytes (surrogates) as they were."""
        raw = text.encode("utf-8", errors="surrogateescape") if isinstance(text, str) else text
        return np.frombuffer(raw, dtype=np.uint8)

    def decode(self, ids: Any) -> bytes:
        """Return the bytes that `ids` stand for: a list, array or tensor of integers 0..255."""
        values = np.asarray(ids)
        assert values.size == 0 or (values.min() >= 0 and values.max() < self.vocabulary), "ids beyond 0..255"
        return values.astype(np.uint8).tobytes()
