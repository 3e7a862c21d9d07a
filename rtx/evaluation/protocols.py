"""How a split is read and scored, and what total nats mean: windows, words, bytes, the released code's reading."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rtx.data.recall import RecallStore
from rtx.data.sets import SETS
from rtx.data.store import TokenStore
from rtx.errors import UserError

if TYPE_CHECKING:
    from rtx.evaluation.scores import Score

SUBWORDS_PER_WORD = 1.248
"""PG-19: the released perplexity is exp(1.248 times the mean nats of a subword)."""
RELEASED = {
    "enwik8": ("bytes", "newlines dropped"),
    "wikitext103": ("words", "blank lines and the last window that is not full dropped"),
    "pg19": ("sentencepiece", f"newlines dropped, perplexity exp({SUBWORDS_PER_WORD} nats / subwords)"),
    "cifar10": ("bytes", "as ours"),
    "imagenet64": ("bytes", "as ours"),
}
"""The units that the paper's released data readers take, and what they do otherwise than score every unit, in words.

Not known, and not reproduced: how lines of enwik-8 were joined, and the cut of Wikitext-103's chunks at line ends.
"""


class Window(NamedTuple):
    """Units `[start, stop)` of a split are read, and of those the units `[first, stop)` are scored."""

    start: int
    stop: int
    first: int


def windows(units: int, length: int, stride: int | None = None) -> list[Window]:
    """Return the windows of `length` units that advance by `stride` (unset: `length`) over a split of `units` units.

    Each window scores only the units that no earlier one scored; the last ends at the split's end (so it may overlap
    more than the stride asks); a split shorter than `length` is one short window. Their scored parts tile the split.
    """
    length = min(length, units)
    stops = [0, *range(length, units, stride or length), units]
    return [Window(stop - length, stop, before) for before, stop in itertools.pairwise(stops)]


def read_as_released(store: TokenStore | RecallStore, split: str, length: int) -> tuple[np.ndarray, str]:
    """Return a split as the paper's released code reads it, for windows of `length` units, and what that leaves out.

    Raises:
        UserError: the released code did not read such data, or not in such units.
    """
    if store.name not in RELEASED or isinstance(store, RecallStore):
        raise UserError(f"eval.protocol=released: known of {', '.join(RELEASED)}, not of data={store.name}")
    tokens, (units, habits) = store.split(split), RELEASED[store.name]
    if store.image is not None:
        return tokens, habits
    if (found := store.tokenizer.name) != units:
        raise UserError(f"eval.protocol=released: {store.name} was read as {units}, not data.tokenizer={found}")
    is_newline = tokens == store.tokenizer.encode(b"\n")[0]
    if store.name == "wikitext103":  # blank lines alone; the first one is blank where the text begins with a newline
        is_newline[1:] &= is_newline[:-1].copy()
    tokens = tokens[~is_newline]
    if store.name == "wikitext103":
        tokens = tokens[: len(tokens) // length * length]
    if not len(tokens):
        raise UserError(f"eval.protocol=released: split {split} has not one whole window of {length:,} units")
    return tokens, habits


def measures(
    store: TokenStore | RecallStore,
    split: str,
    tokens: np.ndarray,
    scored: Sequence[Window],
    score: Score,
    partial: bool = False,
    habits: str = "",
) -> dict[str, Any]:
    """Return a score in every measure that its text has, as JSON values: bits per unit and byte, perplexity per word.

    Args:
        store: of any set.
        split: the split's name.
        tokens: the split as it was read, unsigned integers `[units]`.
        scored: windows of them.
        score: what they scored.
        partial: whether they are only a sample of the windows.
        habits: what was left out or counted otherwise, in words; empty: every unit is scored.
    """
    result: dict[str, Any] = {f"bits_per_{store.unit}": score.bits}
    if isinstance(store, RecallStore) or store.image is not None:
        return result
    all_of_it = not partial and not habits
    if store.unit == "subword":  # words are no account of the bytes between and in them
        text_bytes = store.facts[split]["bytes"] if all_of_it else sum(map(len, texts(store, tokens, scored)))
        result["bits_per_byte"] = score.nats / text_bytes / math.log(2)
    if (words := words_scored(store, split, tokens, scored, all_of_it, habits)) is not None:
        count, note, comparable = words
        perplexity = math.exp(score.nats / count) if score.nats / count < 700 else math.inf  # beyond float64
        result |= {"perplexity_per_word": perplexity, "words": count, "words_are": note, "words_comparable": comparable}
    return result


def words_scored(
    store: TokenStore, split: str, tokens: np.ndarray, scored: Sequence[Window], all_of_it: bool, habits: str
) -> tuple[float, str, bool] | None:
    """Return the words that the scored windows stand for, whose count it is, and whether published perplexities of the
    split are over the same words; None where no perplexity per word is published.
    """
    units = sum(window.stop - window.first for window in scored)
    published = SETS[store.name].words if store.name in SETS else {}
    if habits and store.name == "pg19":
        return units / SUBWORDS_PER_WORD, "as the released code converts its own subwords", False
    if store.unit == "word" and (habits or not published):
        return units, "its own words and line ends", False
    if not published:
        return None
    if all_of_it and store.stamps.get("complete") is not False:
        return published[split], "the published count of the split", True
    words = sum(len(text.split()) for text in texts(store, tokens, scored))
    if store.stamps.get("complete") is False:
        return max(1, words), "between blanks of the text scored", False
    share = words / max(1, store.facts[split]["words"])
    return max(1.0, published[split] * share), "the split's published count times the share scored", False


def texts(store: TokenStore, tokens: np.ndarray, scored: Sequence[Window]) -> Iterator[bytes]:
    """Yield the text that each window scores; a word cut by the border of two counts twice."""
    yield from (store.tokenizer.decode(tokens[window.first : window.stop]) for window in scored)


def further_lines(unit: str, result: Mapping[str, Any]) -> list[str]:
    """Return what `measures` holds besides bits per unit, a line each."""
    lines = []
    if "perplexity_per_word" in result:
        foreign = "" if result["words_comparable"] else ", not comparable"
        over = f"exp(nats / {result['words']:,.0f} words), {result['words_are']}{foreign}"
        lines.append(f"{result['perplexity_per_word']:.4g} perplexity per word: {over}")
    if unit != "byte" and "bits_per_byte" in result:
        lines.append(f"{result['bits_per_byte']:.5f} bits/byte of text")
    return lines


def stamp_phrases(stamps: Mapping[str, Any], split: str) -> list[str]:
    """Return what the facts of protocol that stand on a store mean for a score on a split, in words."""
    phrases = {
        "newlines dropped": stamps.get("newlines") == "drop",
        "lossy JPEG, not comparable": stamps.get("lossy"),
        f"scaled to {stamps.get('scaled')}, not comparable": "scaled" in stamps,
        "not the PixelRNN images, not comparable": stamps.get("variant") == "other",
        "not the whole published set, not comparable": stamps.get("complete") is False,
        "valid is the published test split": stamps.get("valid") == "test" and split == "valid",
    }
    return [phrase for phrase, holds in phrases.items() if holds]
