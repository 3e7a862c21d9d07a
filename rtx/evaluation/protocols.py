"""How a split is read, what total nats of it mean (bits, words, bytes), and what it costs without a neural network."""

from __future__ import annotations

import itertools
import lzma
import math
import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rtx.data.sets import SETS
from rtx.data.store import Store
from rtx.errors import UserError
from rtx.runs.records import Measures
from rtx.settings.schema import TEXTS, Config

if TYPE_CHECKING:
    from rtx.evaluation.scores import Score

SUBWORDS_PER_WORD = (
    1.248  # PG-19: the released perplexity is exp(1.248 times the mean nats of a subword)
)
REPEATED = 8  # units before one that must have stood before for it to be repeated
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
"""The units that the paper's released data readers take, and what they do otherwise than score every unit, in words."""


class Window(NamedTuple):
    """Units `[start, stop)` of a split are read, and of those the units `[first, stop)` are scored."""

    start: int
    stop: int
    first: int


def windows(units: int, length: int, stride: int | None = None) -> list[Window]:
    """Return the windows of `length` units that advance by `stride` (unset: `length`) over a split of `units` units.

    Each scores the units that no earlier one did; the last ends with the split; a split below `length` is one window.
    """
    length = min(length, units)
    stops = [0, *range(length, units, stride or length), units]
    return [Window(stop - length, stop, before) for before, stop in itertools.pairwise(stops)]


def local_reach(config: Config) -> int | None:
    """Return how many units back stacked local heads read, of texts: layers x model.window, whatever the heads."""
    return config.model.layers * config.model.window if config.data.name in TEXTS else None


def far_repeated(tokens_BN: np.ndarray, reach: int) -> np.ndarray:
    """Return which units of windows follow `REPEATED` units that stood in the window before, boolean `[B, N]`.

    Their last occurrence lies more than `reach` units back. Runs of 2, 4 and 8 units get numbers by sorting.
    """
    B, N = tokens_BN.shape
    found_BN = np.zeros((B, N), bool)
    if N <= REPEATED:
        return found_BN
    run_BS = tokens_BN + np.arange(B)[:, None] * (
        tokens_BN.max() + 1
    )  # S starts; the windows of a batch apart
    for size in (1, 2, 4):
        pair_BS = run_BS[:, :-size] * (run_BS.max() + 1) + run_BS[:, size:]
        run_BS = np.unique(pair_BS, return_inverse=True)[1].reshape(pair_BS.shape)
    order = run_BS.ravel().argsort(kind="stable")
    far = np.zeros(len(order), bool)
    far[order[1:]] = (np.diff(run_BS.ravel()[order]) == 0) & (np.diff(order) > reach)
    found_BN[:, REPEATED:] = far.reshape(run_BS.shape)[:, :-1]
    return found_BN


def read_as_released(store: Store, split: str, length: int) -> tuple[np.ndarray, str]:
    """Return a split as the paper's released code reads it, for windows of `length` units, and what that leaves out."""
    if store.name not in RELEASED or store.tokenizer is None:
        raise UserError(
            f"protocol=released: known of {', '.join(RELEASED)}, not of data={store.name}"
        )
    tokens, (units, habits) = store.split(split), RELEASED[store.name]
    if store.image is not None:
        return tokens, habits
    if (found := store.tokenizer.name) != units:
        raise UserError(
            f"protocol=released: {store.name} was read as {units}, not data.tokenizer={found}"
        )
    is_newline = tokens == store.tokenizer.encode(b"\n")[0]
    if (
        store.name == "wikitext103"
    ):  # blank lines alone; the first one is blank where the text begins with a newline
        is_newline[1:] &= is_newline[:-1].copy()
    tokens = tokens[~is_newline]
    if store.name == "wikitext103":
        tokens = tokens[: len(tokens) // length * length]
    if not len(tokens):
        raise UserError(
            f"protocol=released: split {split} has not one whole window of {length:,} units"
        )
    return tokens, habits


def measures(
    store: Store,
    split: str,
    score: Score,
    *,
    is_sample: bool = False,
    released: bool = False,
) -> Measures:
    """Return a score in the measures that its data have; a sample of windows has few of them."""
    values = store.answer_values
    if values is not None:
        accuracies = score.accuracies()
        return Measures(
            accuracy=score.accuracy,
            chance=1 / values,
            accuracy_by_distance=accuracies["distance"],
            accuracy_by_pairs=accuracies["pairs"],
            baselines={"chance": math.log2(values)},
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
    """Return bits per byte and perplexity per word of a text that was scored as a whole."""
    numbers: dict[str, Any] = {}
    if store.unit == "subword" and not released:
        # Words do not account for the bytes between and in them.
        numbers["bits_per_byte"] = score.nats / store.facts[split]["bytes"] / math.log(2)
    counted = words_scored(store, split, score.units, released)
    if counted is not None:
        count, note, comparable = counted
        nats_per_word = score.nats / count
        # Beyond 700 it is more than a float64 can be.
        perplexity = math.exp(nats_per_word) if nats_per_word < 700 else math.inf
        numbers["perplexity_per_word"] = perplexity
        numbers["words"] = count
        numbers["words_are"] = note
        numbers["words_comparable"] = comparable
    return numbers


def words_scored(
    store: Store, split: str, units: int, released: bool
) -> tuple[float, str, bool] | None:
    """Return how many words a split has, whose count that is, and whether published perplexities are over the same."""
    published = SETS[store.name].words if store.name in SETS else {}
    if released and store.name == "pg19":
        return units / SUBWORDS_PER_WORD, "as the released code converts its own subwords", False
    if store.unit == "word" and (released or not published):
        return units, "its own words and line ends", False
    if not published:
        return None
    if store.stamps.get("complete") is False:
        return max(1, store.facts[split]["words"]), "between blanks of the text scored", False
    return published[split], "the published count of the split", True


def baselines(held_out: np.ndarray) -> dict[str, float]:
    """Return bits/byte of bytes (uint8) under zlib (level 9) and xz (preset 9), which start from nothing."""
    data = held_out.tobytes()
    # A dictionary no larger than the data need gives what preset 9 gives, in less memory.
    dictionary = min(1 << 26, max(1 << 16, 1 << (len(data) - 1).bit_length()))
    packed = lzma.compress(
        data, filters=[{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": dictionary}]
    )
    return {"zlib": 8 * len(zlib.compress(data, 9)) / len(data), "xz": 8 * len(packed) / len(data)}
