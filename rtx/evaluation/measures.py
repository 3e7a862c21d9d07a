"""What the total nats of a split mean, and what it costs without a neural network.

Total nats become bits per unit, and where the text has them, perplexity per word and bits per byte.
"""

import lzma
import math
import zlib
from typing import Any, NamedTuple

import numpy as np

from rtx.data.sets import WORDS
from rtx.data.store import Store
from rtx.data.synthetic import chance_bits, chance_of
from rtx.errors import UserError
from rtx.evaluation.scores import Score
from rtx.runs.records import Measures

SUBWORDS_PER_WORD = 1.248
"""The released perplexity of PG-19 is exp(1.248 times the mean nats of a subword)."""

RELEASED = {
    "enwik8": ("bytes", "newlines dropped"),
    "wikitext103": ("words", "blank lines and the last window that is not full dropped"),
    "pg19": (
        "sentencepiece",
        f"newlines dropped, perplexity exp({SUBWORDS_PER_WORD} nats / subwords)",
    ),
    "cifar10": ("bytes", "as ours"),
    "imagenet64": ("bytes", "as ours"),
}
"""The tokenizer of the paper's released data readers, and where they do not score all units."""

MAX_LOG_PERPLEXITY = 700
"""exp of more than this is beyond float64."""


def read_as_released(store: Store, split: str, length: int) -> tuple[np.ndarray, str]:
    """Return a split as the paper's released code reads it, and what that leaves out.

    Args:
        length: units of a window.

    Raises:
        UserError: the released code did not read this data, or not by this tokenizer.
    """
    if store.name not in RELEASED or store.tokenizer is None:
        names = ", ".join(RELEASED)
        raise UserError(f"protocol=released: known of {names}, not of data={store.name}")
    tokenizer, habits = RELEASED[store.name]
    tokens = store.split(split)
    if store.image is not None:
        return tokens, habits
    if store.tokenizer.name != tokenizer:
        problem = f"{store.name} was read as {tokenizer}, not data.tokenizer={store.tokenizer.name}"
        raise UserError(f"protocol=released: {problem}")
    newline = store.tokenizer.encode(b"\n")[0]
    if store.name == "wikitext103":
        tokens = without_blank_lines(tokens, newline)
        tokens = tokens[: len(tokens) // length * length]
    else:
        tokens = tokens[tokens != newline]
    if not len(tokens):
        problem = f"split {split} has not one whole window of {length:,} units"
        raise UserError(f"protocol=released: {problem}")
    return tokens, habits


def without_blank_lines(tokens: np.ndarray, newline: int) -> np.ndarray:
    """Return a text without the newlines that end a blank line.

    A newline at the start of the text ends a blank line, too.
    """
    is_newline = tokens == newline
    ends_blank_line = is_newline.copy()
    ends_blank_line[1:] &= is_newline[:-1]
    return tokens[~ends_blank_line]


def measures(
    store: Store,
    split: str,
    score: Score,
    *,
    is_sample: bool = False,
    released: bool = False,
) -> Measures:
    """Return a score in the measures that its data have.

    Args:
        is_sample: the score is of a sample of windows, which has no words or bytes of its own.
        released: the split was read as the released code reads it.
    """
    values = store.answer_values
    if values is not None:
        accuracies = score.accuracies()
        return Measures(
            accuracy=score.accuracy,
            chance=chance_of(values),
            accuracy_by_distance=accuracies["distance"],
            accuracy_by_depth=accuracies["depth"],
            accuracy_by_hops=accuracies["hops"],
            accuracy_by_pairs=accuracies["pairs"],
            baselines={"chance": chance_bits(values)},
        )
    numbers = far_measures(score)
    if store.image is None and not is_sample:
        numbers |= text_measures(store, split, score, released)
    return Measures(**numbers)


def far_measures(score: Score) -> dict[str, Any]:
    """Return the bits of far-repeated units and their share, where they were counted."""
    if score.far_K2 is None or not score.far_K2[:, 0].any():
        return {}
    units, nats = score.far_K2.sum(0)
    bits = float(nats / units) / math.log(2)
    return {"bits_far_repeated": bits, "far_repeated": float(units / score.units)}


def text_measures(store: Store, split: str, score: Score, released: bool) -> dict[str, Any]:
    """Return the score of a whole split of a text per byte and per word, if it has such a count."""
    result: dict[str, Any] = {}
    # Words account neither for the bytes between them nor for those within.
    if store.unit == "subword" and not released:
        result["bits_per_byte"] = score.nats / store.facts[split]["bytes"] / math.log(2)
    words = words_scored(store, split, score.units, released)
    if words is not None:
        nats_of_word = score.nats / words.number
        perplexity = math.inf
        if nats_of_word < MAX_LOG_PERPLEXITY:
            perplexity = math.exp(nats_of_word)
        result["perplexity_per_word"] = perplexity
        result["words"] = words.number
        result["words_are"] = words.note
        result["words_comparable"] = words.comparable
    return result


class Words(NamedTuple):
    """The number of words of a split."""

    number: float
    note: str
    """What counts as a word."""
    comparable: bool
    """Whether published perplexities are over the same number."""


def words_scored(store: Store, split: str, units: int, released: bool) -> Words | None:
    """Return how many words a score of a whole split is over; None if it has no words."""
    published = WORDS.get(store.name)
    if released and store.name == "pg19":
        note = "as the released code converts its own subwords"
        return Words(units / SUBWORDS_PER_WORD, note, False)
    if store.unit == "word" and (released or not published):
        return Words(units, "its own words and line ends", False)
    if not published:
        return None
    if store.stamps.get("complete") is False:
        count = max(1, store.facts[split]["words"])
        return Words(count, "between blanks of the text scored", False)
    return Words(published[split], "the published count of the split", True)


def baselines(split: np.ndarray) -> dict[str, float]:
    """Return the bits per byte of a split of bytes under zlib and xz, which see nothing else."""
    data = split.tobytes()
    # A dictionary no larger than the data gives the result of preset 9 in less memory.
    data_bits = (len(data) - 1).bit_length()
    dictionary = min(1 << 26, max(1 << 16, 1 << data_bits))
    preset = {"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": dictionary}
    packed = {
        "zlib": zlib.compress(data, 9),
        "xz": lzma.compress(data, filters=[preset]),
    }
    return {name: 8 * len(compressed) / len(data) for name, compressed in packed.items()}
