"""Windows of text for a pretrained model, in tokens of its own tokenizer.

Shapes: N tokens of a window, B windows.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rtx.data.store import Store
from rtx.disk import read_named
from rtx.errors import UserError
from rtx.paths import expand_path

SPLITS = ("train", "valid", "test")
"""The text of a data set is that of its splits, in this order."""
UNITS_PER_TOKEN = 16
"""Bytes of a file, or tokens of a data set, that are read for each token of the model.

That is more than a token of the model has, so that a text fills its window.
"""

Reader = Callable[[int, int], bytes]
"""Returns the text between two units: bytes of a file, or tokens of a data set."""


@dataclass(frozen=True)
class WindowSize:
    """How many windows are taken from a text, and how many tokens each has."""

    count: int
    length: int


def measured_windows(store: Store, tokenizer: Any, size: WindowSize) -> Tensor:
    """Return windows of the second half of the text of a data set, `[B, N]`.

    Raises:
        UserError: the text is too short.
    """
    total = text_length(store)
    texts = spread_texts(text_reader(store), total // 2, total, size)
    return first_tokens(texts, tokenizer, size.length, f"data={store.name}")


def windows_of_first_half(store: Store, tokenizer: Any, size: WindowSize) -> Tensor:
    """Return windows of the first half of the text of a data set, `[B, N]`.

    Raises:
        UserError: the text is too short.
    """
    texts = spread_texts(text_reader(store), 0, text_length(store) // 2, size)
    return first_tokens(texts, tokenizer, size.length, f"data={store.name}")


def windows_of_file(path: str, tokenizer: Any, size: WindowSize) -> Tensor:
    """Return windows of the text file that the option `fit` names, `[B, N]`.

    Raises:
        UserError: the text is too short.
    """
    content = read_named(expand_path(path, "fit"))
    texts = spread_texts(bytes_reader(content), 0, len(content), size)
    return first_tokens(texts, tokenizer, size.length, f"fit={path}")


def text_length(store: Store) -> int:
    """Return the number of tokens of all splits of a data set."""
    return sum(len(split) for split in splits_of(store))


def splits_of(store: Store) -> list[np.ndarray]:
    """Return the tokens of each split that a data set has, in the order of `SPLITS`."""
    splits = []
    for name in SPLITS:
        # A data set without this split raises UserError.
        with contextlib.suppress(UserError):
            splits.append(store.split(name))
    return splits


def text_reader(store: Store) -> Reader:
    """Return a function from two token numbers to the text between them.

    Tokens are numbered through all splits of the data set.
    """

    def read(start: int, stop: int) -> bytes:
        pieces = []
        offset = 0  # the number of the first token of the split
        for split in splits_of(store):
            first = max(0, start - offset)
            end = max(0, stop - offset)
            pieces.append(split[first:end])
            offset += len(split)
        tokens = np.concatenate(pieces).tolist()
        assert store.tokenizer is not None
        return store.tokenizer.decode(tokens)

    return read


def bytes_reader(content: bytes) -> Reader:
    """Return a function from two byte numbers to the content between them."""

    def read(start: int, stop: int) -> bytes:
        return content[start:stop]

    return read


def spread_texts(read: Reader, first: int, end: int, size: WindowSize) -> Iterator[str]:
    """Yield texts for windows that are spread evenly over a span and do not overlap.

    Each begins with the first whole line after its place, if it has one. It has enough units for
    the tokens of its window, if the span has.

    Args:
        first, end: the first unit of the span, and the one after its last.
    """
    step = (end - first) // size.count
    units = min(step, UNITS_PER_TOKEN * size.length)
    for number in range(size.count):
        start = first + number * step
        text = read(start, start + units).decode("utf-8", "replace")
        rest_of_line, newline, whole_lines = text.partition("\n")
        yield whole_lines if newline else rest_of_line


def first_tokens(texts: Iterator[str], tokenizer: Any, length: int, source: str) -> Tensor:
    """Return the first N tokens of each text, `[B, N]`.

    Args:
        length: N.
        source: the option that names the text, and its value, for the error message.

    Raises:
        UserError: a text has fewer than N tokens.
    """
    windows = []
    for text in texts:
        ids = tokenizer(text).input_ids[:length]
        if len(ids) < length:
            shortage = f"has {len(ids):,} tokens, fewer than {length:,}"
            advice = "give more text, fewer windows, or a smaller length"
            raise UserError(f"{source}: a part of its text for one window {shortage}; {advice}")
        windows.append(torch.tensor(ids))
    return torch.stack(windows)
