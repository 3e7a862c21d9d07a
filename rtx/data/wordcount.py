"""How many words a perplexity per word is taken over: the published count of a benchmark's split, or a share of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rtx.data.published import WORDS
from rtx.data.released import Reading
from rtx.data.store import TokenStore
from rtx.data.windows import Window


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
    if reading.words_per_unit is not None:
        return WordCount(units * reading.words_per_unit, "as the released code converts its own subwords", False)
    if store.unit == "word" and (reading.habits or store.name not in WORDS):
        return WordCount(units, "its own words and line ends", False)
    if store.name not in WORDS:
        return None
    published = WORDS[store.name][split]
    whole = not partial and not reading.habits
    if whole and store.stamps.get("complete") is not False:
        return WordCount(published, "the published count of the split", True)
    if store.stamps.get("complete") is False:
        return WordCount(max(1, blank_words(store, reading, windows)), "between blanks of the text scored", False)
    share = blank_words(store, reading, windows) / max(1, store.facts(split).words)
    return WordCount(max(1.0, published * share), "the split's published count times the share scored", False)


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
