"""How a split is read, what total nats of it mean (bits, words, bytes), and what it costs without a neural network."""

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


def spans(values: Mapping[str, Any]) -> tuple[int, int]:
    """Return length and stride of the windows of a configuration, by its dotted keys.

    A model with a memory reads as many units before those that a window scores.
    """
    length, stride = values["data.length"], values["trainer.val_stride"] or values["data.length"]
    memory = values.get("model.memory") or 0
    memory += (values.get("model.compressed") or 0) * (values.get("model.compression_rate") or 1)
    return (stride + memory if memory else length), stride


def memory_phrases(values: Mapping[str, Any]) -> list[str]:
    """Return how a model with a memory reads a window, in words; nothing of others. `values` as for `spans`."""
    if not (memory := values.get("model.memory")):
        return []
    said = f"segments of {values['data.length']:,} with a memory of {memory:,}"
    said += f" and {kept:,} compressed" if (kept := values.get("model.compressed")) else ""
    said += f", distances clamped at {clamp:,}" if (clamp := values.get("model.clamp")) else ""
    return [said + ", the same length for all" * bool(values.get("model.same_length"))]


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
    partial: bool = False,
    released: bool = False,
) -> dict[str, Any]:
    """Return a score in every measure that its text has; a sample of windows (`partial`) has bits per unit alone."""
    result: dict[str, Any] = {f"bits_per_{store.unit}": score.bits}
    if store.answer_values is not None:
        result |= {f"accuracy_by_{kind}": found for kind, found in score.accuracies().items()}
        chance = {
            "chance": 1 / store.answer_values,
            "baselines": {"chance": math.log2(store.answer_values)},
        }
        return result | {"accuracy": score.accuracy, **chance}
    if score.far_K2 is not None and score.far_K2[:, 0].any():
        units, nats = score.far_K2.sum(0)
        result |= {
            "bits_far_repeated": nats / units / math.log(2),
            "far_repeated": units / score.units,
        }
    if store.image is not None or partial:
        return result
    if (
        store.unit == "subword" and not released
    ):  # words are no account of the bytes between and in them
        result["bits_per_byte"] = score.nats / store.facts[split]["bytes"] / math.log(2)
    if (words := words_scored(store, split, score.units, released)) is not None:
        count, note, comparable = words
        perplexity = (
            math.exp(score.nats / count) if score.nats / count < 700 else math.inf
        )  # beyond float64
        result |= {
            "perplexity_per_word": perplexity,
            "words": count,
            "words_are": note,
            "words_comparable": comparable,
        }
    return result


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


def further_lines(unit: str, result: Mapping[str, Any]) -> list[str]:
    """Return what `measures` holds besides bits per unit, a line each."""
    lines = []
    if "perplexity_per_word" in result:
        foreign = "" if result["words_comparable"] else ", not comparable"
        over = f"exp(nats / {result['words']:,.0f} words), {result['words_are']}{foreign}"
        lines.append(f"{result['perplexity_per_word']:.4g} perplexity per word: {over}")
    if unit != "byte" and "bits_per_byte" in result:
        lines.append(f"{result['bits_per_byte']:.5f} bits/byte of text")
    if "bits_far_repeated" in result:
        far = f"bits/{unit} on far-repeated units, {result['far_repeated']:.2%} of all"
        lines.append(f"{result['bits_far_repeated']:.5f} {far}")
    if "accuracy" in result:
        lines.append(
            f"{result['accuracy']:.2%} of the answers right (chance {result['chance']:.2%})"
        )
    for kind in ("distance", "pairs"):
        found = result.get(f"accuracy_by_{kind}", {})
        told = ", ".join(
            f"{value}{'+' * (kind == 'distance')}: {share:.1%}"
            for value, (share, _) in found.items()
        )
        lines += [f"accuracy by {kind}: {told}"] if len(found) > 1 else []
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


def baselines(held_out: np.ndarray) -> dict[str, float]:
    """Return bits/byte of bytes (uint8) under zlib (level 9) and xz (preset 9), which start from nothing."""
    data = held_out.tobytes()
    # A dictionary no larger than the data need gives what preset 9 gives, in less memory.
    dictionary = min(1 << 26, max(1 << 16, 1 << (len(data) - 1).bit_length()))
    packed = lzma.compress(
        data, filters=[{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": dictionary}]
    )
    return {"zlib": 8 * len(zlib.compress(data, 9)) / len(data), "xz": 8 * len(packed) / len(data)}
