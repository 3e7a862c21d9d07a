"""Bytes that a model wrote, as text that does a terminal no harm."""

from __future__ import annotations

import codecs

from rtx.wording import printable


class TextStream:
    """Decodes UTF-8 as its bytes come; a broken sequence becomes a replacement character."""

    def __init__(self) -> None:
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes, final: bool = False) -> str:
        """Return the text that is complete with these bytes."""
        return printable(self.decoder.decode(data, final))
