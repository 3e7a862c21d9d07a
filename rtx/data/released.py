"""How the paper's released code reads a split, so that its numbers can be matched under their own name.

Known from its data readers: enwik-8 and PG-19 are read line by line without their newlines; Wikitext-103 loses its
blank lines and the last chunk that is not full; a subword of PG-19 counts for 1 / 1.248 words. Images are read as here.
Not known, and not reproduced: how lines of enwik-8 were joined, and the cut of Wikitext-103's chunks at line ends.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

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
"""What differs from scoring every unit of the text, in words."""

UNITS = {"enwik8": "bytes", "wikitext103": "words", "pg19": "sentencepiece"}
"""The units in which the released code reads a text."""


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
    """Return a split as the released code reads it, for windows of `length` units.

    Raises:
        UserError: the released code did not read such data, or not in such units.
    """
    if store.name not in HABITS:
        known = ", ".join(HABITS)
        raise UserError(f"eval.protocol=released: known of {known}, not of data={store.name}")
    tokens = store.split(split)
    if store.image is not None:
        return Reading(tokens, HABITS[store.name])
    found = store.tokenizer.name
    if found != UNITS[store.name]:
        raise UserError(
            f"eval.protocol=released: {store.name} was read as {UNITS[store.name]}, not data.tokenizer={found}"
        )
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
    newline = int(np.concatenate(list(store.tokenizer.encode([b"\n"])))[0])
    is_newline = tokens == newline
    if store.name == "wikitext103":
        is_newline[1:] &= is_newline[:-1].copy()  # the first line is blank where the text begins with a newline
    return is_newline
