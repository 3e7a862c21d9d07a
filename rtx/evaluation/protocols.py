"""How a split is read, what its total nats mean, and what it costs without a neural network.

Total nats become bits per unit, and where the text has them, perplexity per word and bits per byte.

Shapes: B windows, N units of a window, S positions at which runs of units start.
"""

from __future__ import annotations

import itertools
import lzma
import math
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rtx.data.sets import SETS
from rtx.data.store import Store
from rtx.errors import UserError
from rtx.settings.schema import TEXTS, Config

if TYPE_CHECKING:
    from rtx.evaluation.scores import Score

SUBWORDS_PER_WORD = 1.248
"""The released perplexity of PG-19 is exp(1.248 times the mean nats of a subword)."""

REPEATED = 8
"""A unit is repeated if the 8 units before it occurred together earlier."""

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


class Window(NamedTuple):
    """The units from `start` to `stop` - 1 of a split; those from `first` on are scored."""

    start: int
    stop: int
    first: int


def windows(
    units: int,
    length: int,
    stride: int | None = None,
) -> list[Window]:
    """Return windows that together score each unit of a split once.

    Each window scores the units that no earlier window scored. The last one ends with the split. A
    split shorter than `length` is one window.

    Args:
        units: of the split.
        length: units of a window.
        stride: units from one window to the next; None: `length`.
    """
    length = min(length, units)
    stops = [0, *range(length, units, stride or length), units]
    cut = []
    for before, stop in itertools.pairwise(stops):
        cut.append(Window(start=stop - length, stop=stop, first=before))
    return cut


def local_reach(config: Config) -> int | None:
    """Return how many units back stacked local heads read; None for data that is no text.

    It is layers times model.window, whatever the heads of this model are.
    """
    if config.data.name not in TEXTS:
        return None
    return config.model.layers * config.model.window


def far_repeated(tokens_BN: np.ndarray, reach: int) -> np.ndarray:
    """Return which units of windows are far-repeated, boolean `[B, N]`.

    The `REPEATED` units before such a unit occurred together earlier in the window, and last did so
    more than `reach` units back.
    """
    is_far_BN = np.zeros(tokens_BN.shape, bool)
    if tokens_BN.shape[1] <= REPEATED:
        return is_far_BN
    run_BS = numbered_runs(tokens_BN)
    # Sorted by run, equal runs are neighbours, in the order of their positions.
    order = run_BS.ravel().argsort(kind="stable")
    is_same_run = np.diff(run_BS.ravel()[order]) == 0
    distance = np.diff(order)
    is_far = np.zeros(len(order), bool)
    is_far[order[1:]] = is_same_run & (distance > reach)
    # The last run ends with the window: no unit follows it.
    is_far_BN[:, REPEATED:] = is_far.reshape(run_BS.shape)[:, :-1]
    return is_far_BN


def numbered_runs(tokens_BN: np.ndarray) -> np.ndarray:
    """Return a number for the run of `REPEATED` units from each position on, `[B, S]`.

    Equal runs of a window have the same number. Runs of different windows have different ones.
    """
    window_B1 = np.arange(len(tokens_BN))[:, None]
    run_BS = tokens_BN + window_B1 * (tokens_BN.max() + 1)
    size = 1
    while size < REPEATED:
        # Two neighbouring runs of `size` units are a run of twice as many.
        pair_BS = run_BS[:, :-size] * (run_BS.max() + 1) + run_BS[:, size:]
        _, number = np.unique(pair_BS, return_inverse=True)
        run_BS = number.reshape(pair_BS.shape)
        size *= 2
    return run_BS


def spans(values: Mapping[str, Any]) -> tuple[int, int]:
    """Return length and stride of the windows of a configuration.

    With a memory, a window starts with as many units as the memory reads, which are not scored.

    Args:
        values: the configuration by its dotted keys.
    """
    length = values["data.length"]
    stride = values["trainer.val_stride"] or length
    memory = values.get("model.memory") or 0
    compressed = values.get("model.compressed") or 0
    rate = values.get("model.compression_rate") or 1
    memory += compressed * rate
    if memory:
        length = stride + memory
    return length, stride


def memory_phrases(values: Mapping[str, Any]) -> list[str]:
    """Return how a model with a memory reads a window, in words; an empty list for other models.

    Args:
        values: the configuration by its dotted keys.
    """
    memory = values.get("model.memory")
    if not memory:
        return []
    phrase = f"segments of {values['data.length']:,} with a memory of {memory:,}"
    if compressed := values.get("model.compressed"):
        phrase += f" and {compressed:,} compressed"
    if clamp := values.get("model.clamp"):
        phrase += f", distances clamped at {clamp:,}"
    if values.get("model.same_length"):
        phrase += ", the same length for all"
    return [phrase]


def read_as_released(
    store: Store,
    split: str,
    length: int,
) -> tuple[np.ndarray, str]:
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
    partial: bool = False,
    released: bool = False,
) -> dict[str, Any]:
    """Return a score in every measure that its data has.

    Args:
        partial: the score is of a sample of windows, which has no words or bytes of its own.
        released: the split was read as the released code reads it.
    """
    result: dict[str, Any] = {f"bits_per_{store.unit}": score.bits}
    if store.answer_values is not None:
        return result | answer_measures(store.answer_values, score)
    if score.far_K2 is not None and score.far_K2[:, 0].any():
        units, nats = score.far_K2.sum(0)
        result["bits_far_repeated"] = nats / units / math.log(2)
        result["far_repeated"] = units / score.units
    if store.image is None and not partial:
        result |= text_measures(store, split, score, released)
    return result


def answer_measures(values: int, score: Score) -> dict[str, Any]:
    """Return the accuracies of a recall task, and what guessing among `values` scores."""
    result: dict[str, Any] = {}
    for kind, accuracies in score.accuracies().items():
        result[f"accuracy_by_{kind}"] = accuracies
    result["accuracy"] = score.accuracy
    result["chance"] = 1 / values
    result["baselines"] = {"chance": math.log2(values)}
    return result


def text_measures(
    store: Store,
    split: str,
    score: Score,
    released: bool,
) -> dict[str, Any]:
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


def words_scored(
    store: Store,
    split: str,
    units: int,
    released: bool,
) -> Words | None:
    """Return how many words a score of a whole split is over; None if it has no words."""
    published = {}
    if store.name in SETS:
        published = SETS[store.name].words
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


def further_lines(unit: str, result: Mapping[str, Any]) -> list[str]:
    """Return what `measures` has besides bits per unit, one line for each measure."""
    lines = []
    if "perplexity_per_word" in result:
        lines.append(perplexity_line(result))
    if unit != "byte" and "bits_per_byte" in result:
        lines.append(f"{result['bits_per_byte']:.5f} bits/byte of text")
    if "bits_far_repeated" in result:
        share = f"{result['far_repeated']:.2%} of all"
        bits = f"{result['bits_far_repeated']:.5f} bits/{unit}"
        lines.append(f"{bits} on far-repeated units, {share}")
    if "accuracy" in result:
        chance = f"chance {result['chance']:.2%}"
        lines.append(f"{result['accuracy']:.2%} of the answers right ({chance})")
    for kind in ("distance", "pairs"):
        accuracies = result.get(f"accuracy_by_{kind}", {})
        if len(accuracies) > 1:
            lines.append(accuracy_line(kind, accuracies))
    return lines


def perplexity_line(result: Mapping[str, Any]) -> str:
    """Return the perplexity per word with the words that it is over."""
    line = f"{result['perplexity_per_word']:.4g} perplexity per word: "
    line += f"exp(nats / {result['words']:,.0f} words), {result['words_are']}"
    if not result["words_comparable"]:
        line += ", not comparable"
    return line


def accuracy_line(kind: str, accuracies: Mapping[str, list[float]]) -> str:
    """Return the accuracies by distance or by pairs; a distance is the least of its group."""
    mark = ""
    if kind == "distance":
        mark = "+"
    parts = [f"{value}{mark}: {share:.1%}" for value, (share, _) in accuracies.items()]
    return f"accuracy by {kind}: {', '.join(parts)}"


def stamp_phrases(stamps: Mapping[str, Any], split: str) -> list[str]:
    """Return what the stamps of a store, which say how its data was made, mean for a score."""
    phrases = {
        "newlines dropped": stamps.get("newlines") == "drop",
        "lossy JPEG, not comparable": stamps.get("lossy"),
        f"scaled to {stamps.get('scaled')}, not comparable": "scaled" in stamps,
        "not the PixelRNN images, not comparable": stamps.get("variant") == "other",
        "not the whole published set, not comparable": stamps.get("complete") is False,
        "valid is the published test split": stamps.get("valid") == "test" and split == "valid",
    }
    return [phrase for phrase, holds in phrases.items() if holds]


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
