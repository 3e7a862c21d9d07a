"""How a split is read and scored: windows, the released code's reading, words and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, overload

import numpy as np

from rtx.data.sets import SETS
from rtx.data.store import TokenStore
from rtx.errors import UserError

SUBWORDS_PER_WORD = 1.248
"""PG-19: the released perplexity is exp(1.248 times the mean nats of a subword)."""

HABITS = {
    "enwik8": "newlines dropped",
    "wikitext103": "blank lines and the last window that is not full dropped",
    "pg19": f"newlines dropped, perplexity exp({SUBWORDS_PER_WORD} nats / subwords)",
    "cifar10": "as ours",
    "imagenet64": "as ours",
}
"""What the paper's released data readers do otherwise than score every unit of the text, in words.

Not known, and not reproduced: how lines of enwik-8 were joined, and the cut of Wikitext-103's chunks at line ends.
"""

UNITS = {"enwik8": "bytes", "wikitext103": "words", "pg19": "sentencepiece"}
"""The units in which the released code reads a text."""


class Window(NamedTuple):
    """Units `[start, stop)` of a split are read, and of those the units `[first, stop)` are scored."""

    start: int
    stop: int
    first: int


class Windows(Sequence[Window]):
    """All windows of a split in order, made when asked for: a stride of 1 would make a list of millions."""

    def __init__(self, units: int, length: int, stride: int) -> None:
        assert units >= 1 and 1 <= stride <= length, (units, length, stride)
        self.units, self.length, self.stride = units, min(length, units), stride

    def __len__(self) -> int:
        return 1 + -((self.length - self.units) // self.stride)

    @overload
    def __getitem__(self, index: int) -> Window: ...
    @overload
    def __getitem__(self, index: slice) -> list[Window]: ...
    def __getitem__(self, index: int | slice) -> Window | list[Window]:
        if isinstance(index, slice):
            return [self[k] for k in range(*index.indices(len(self)))]
        k = range(len(self))[index]
        stop, before = (min(at * self.stride + self.length, self.units) for at in (k, k - 1))
        return Window(stop - self.length, stop, before if k else 0)


def windows(units: int, length: int, stride: int | None = None) -> Windows:
    """Return the windows of `length` units that advance by `stride` (unset: `length`) over a split of `units` units.

    Each window scores only the units that no earlier one scored; the last ends at the split's end (so it may overlap
    more than the stride asks); a split shorter than `length` is one short window. Their scored parts tile the split.
    """
    return Windows(units, length, length if stride is None else stride)


@dataclass(frozen=True)
class Reading:
    """A split as it is scored."""

    tokens: np.ndarray
    """Unsigned integers `[units]`."""
    habits: str = ""
    """What was left out or counted otherwise, in words; empty: every unit is scored."""
    words_per_unit: float | None = None
    """Words that a unit counts for in the perplexity; None: words are counted."""


def read_as_released(store: TokenStore, split: str, length: int) -> Reading:
    """Return a split as the paper's released code reads it, for windows of `length` units.

    Raises:
        UserError: the released code did not read such data, or not in such units.
    """
    if store.name not in HABITS:
        raise UserError(f"eval.protocol=released: known of {', '.join(HABITS)}, not of data={store.name}")
    tokens = store.split(split)
    if store.image is not None:
        return Reading(tokens, HABITS[store.name])
    if (found := store.tokenizer.name) != (units := UNITS[store.name]):
        raise UserError(f"eval.protocol=released: {store.name} was read as {units}, not data.tokenizer={found}")
    tokens = tokens[~dropped(store, tokens)]
    if not len(tokens):
        raise UserError(f"eval.protocol=released: split {split} has nothing but newlines")
    if store.name == "wikitext103":
        tokens = tokens[: len(tokens) // length * length]
        if not len(tokens):
            raise UserError(f"eval.protocol=released: split {split} has not one whole window of {length:,} units")
    return Reading(tokens, HABITS[store.name], 1 / SUBWORDS_PER_WORD if store.name == "pg19" else None)


def dropped(store: TokenStore, tokens: np.ndarray) -> np.ndarray:
    """Return which units the released reader leaves out, bool `[units]`: of Wikitext-103 blank lines' <eos> alone."""
    is_newline = tokens == store.tokenizer.encode(b"\n")[0]
    if store.name == "wikitext103":
        is_newline[1:] &= is_newline[:-1].copy()  # the first line is blank where the text begins with a newline
    return is_newline


class WordCount(NamedTuple):
    """Words, whose count it is, and whether published perplexities of the split are over the same words."""

    count: float
    note: str
    comparable: bool


def words_scored(
    store: TokenStore, split: str, reading: Reading, windows: Sequence[Window], partial: bool
) -> WordCount | None:
    """Return the words that the scored parts of `windows` stand for; None where no perplexity per word is published.

    Args:
        store: of any set.
        split: the split's name.
        reading: the split as it is scored.
        windows: scored ones, of `reading.tokens`.
        partial: whether they are only a sample of the windows.
    """
    units = sum(window.stop - window.first for window in windows)
    published = SETS[store.name].words if store.name in SETS else {}
    if reading.words_per_unit is not None:
        return WordCount(units * reading.words_per_unit, "as the released code converts its own subwords", False)
    if store.unit == "word" and (reading.habits or not published):
        return WordCount(units, "its own words and line ends", False)
    if not published:
        return None
    if store.stamps.get("complete") is False:
        return WordCount(max(1, blank_words(store, reading, windows)), "between blanks of the text scored", False)
    if not partial and not reading.habits:
        return WordCount(published[split], "the published count of the split", True)
    share = blank_words(store, reading, windows) / max(1, store.facts(split).words)
    note = "the split's published count times the share scored"
    return WordCount(max(1.0, published[split] * share), note, False)


def blank_words(store: TokenStore, reading: Reading, windows: Sequence[Window]) -> int:
    """Return how many words between blanks the scored text has; one cut by two windows' border counts twice."""
    return sum(len(text_of(store, reading, window).split()) for window in windows)


def bytes_scored(store: TokenStore, split: str, reading: Reading, windows: Sequence[Window], partial: bool) -> int:
    """Return the bytes of the scored text."""
    if not partial and not reading.habits:
        return store.facts(split).bytes
    return sum(len(text_of(store, reading, window)) for window in windows)


def text_of(store: TokenStore, reading: Reading, window: Window) -> bytes:
    """Return the text that a window scores."""
    return store.tokenizer.decode(reading.tokens[window.first : window.stop])
