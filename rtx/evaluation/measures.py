"""What total nats mean: bits per unit, bits per byte of text, perplexity per word, and what to say beside them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rtx.evaluation.protocols import WordCount

LARGEST_EXPONENT = 700.0
"""exp of more than this is beyond float64."""


def measures(
    unit: str, nats: float, units: int, *, text_bytes: float | None = None, words: WordCount | None = None
) -> dict[str, Any]:
    """Return a score in every measure that its text has, as JSON values.

    Args:
        unit: what one scored token is: byte, word, subword, dim, answer.
        nats: in total.
        units: scored.
        text_bytes: bytes of the scored text, where known; of byte units they are the units.
        words: what the perplexity per word is taken over, exp(nats / words); None: no perplexity.
    """
    result: dict[str, Any] = {f"bits_per_{unit}": nats / units / math.log(2)}
    if text_bytes and unit != "byte":
        result["bits_per_byte"] = nats / text_bytes / math.log(2)
    if words is not None:
        exponent = nats / words.count
        result["perplexity_per_word"] = math.exp(exponent) if exponent < LARGEST_EXPONENT else math.inf
        result |= {"words": words.count, "words_are": words.note, "words_comparable": words.comparable}
    return result


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
