"""Sources for tests of the store: documents that are given, and parts that take their time or fail."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rtx.config import DataConfig
from rtx.data.recipe import Recipe
from rtx.data.source import Document, Source
from rtx.errors import RunFailed, UserError


@dataclass(frozen=True)
class Given:
    """A part of the documents that it was made with; each is cut into chunks of `chunk` bytes.

    `fault` may be die, user, failed, full, wrong or sleep: what happens in the middle of the part. `mark`: a file that
    is touched when the part begins.
    """

    texts: tuple[bytes, ...]
    chunk: int = 1000
    fault: str = ""
    mark: Path | None = None

    @property
    def size(self) -> int:
        return sum(len(text) for text in self.texts)

    def documents(self) -> Iterator[Document]:
        if self.mark:
            with open(self.mark, "a") as file:
                file.write("x")
        for text in self.texts:
            yield (text[at : at + self.chunk] for at in range(0, len(text), self.chunk))
            self.fail()

    def fail(self) -> None:
        match self.fault:
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "user":
                raise UserError("a.txt: no text")
            case "failed":
                raise RunFailed("the server is gone")
            case "full":
                raise OSError(28, "No space left on device", "a.bin")
            case "wrong":
                raise ZeroDivisionError
            case "sleep":
                time.sleep(60)


def recipe_of(
    splits: dict[str, Sequence[Given]], units: dict[str, int] | None = None, identity: str = "one", **data: object
) -> Recipe:
    """The recipe of a source with these parts."""
    source = Source(
        name="text",
        options="data=text data.path=book.txt",
        identity=[identity],
        place={"place": "here", "bytes": 1000},
        parts=lambda: splits,
        units=units,
    )
    return Recipe(source, DataConfig(name="text", **data))  # type: ignore
