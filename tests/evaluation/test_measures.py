"""What total nats mean in other measures."""

from __future__ import annotations

import math

import pytest

from rtx.evaluation.measures import further_lines, measures, stamp_phrases
from rtx.evaluation.protocols import WordCount


def test_bytes_have_one_measure_and_subwords_three() -> None:
    assert measures("byte", 20.0, 10, text_bytes=10.0) == {"bits_per_byte": pytest.approx(2 / math.log(2))}
    result = measures("subword", 20.0, 5, text_bytes=40.0, words=WordCount(4, "counted", True))
    assert result["bits_per_subword"] == pytest.approx(4 / math.log(2))
    assert result["bits_per_byte"] == pytest.approx(0.5 / math.log(2))
    assert result["perplexity_per_word"] == pytest.approx(math.exp(5))
    assert further_lines("subword", result) == [
        "148.4 perplexity per word: exp(nats / 4 words), counted",
        f"{0.5 / math.log(2):.5f} bits/byte of text",
    ]


def test_a_count_that_is_not_the_published_one_is_not_comparable() -> None:
    result = measures("word", 3_000.0, 1_000, words=WordCount(1_000.0, "its own words", False))
    assert further_lines("word", result) == [
        "20.09 perplexity per word: exp(nats / 1,000 words), its own words, not comparable"
    ]
    assert "bits_per_byte" not in result


def test_a_perplexity_beyond_all_numbers_is_infinite() -> None:
    assert measures("word", 1e6, 1_000, words=WordCount(1.0, "one", False))["perplexity_per_word"] == math.inf


def test_stamps_in_words() -> None:
    assert stamp_phrases({}, "valid") == stamp_phrases({"newlines": "keep", "complete": True}, "test") == []
    assert stamp_phrases({"variant": "PixelRNN", "images": {"train": 1, "test": 1}}, "test") == []
    assert stamp_phrases({"valid": "test"}, "test") == []
    every = {"newlines": "drop", "lossy": True, "scaled": "8x8", "variant": "other", "complete": False, "valid": "test"}
    assert stamp_phrases(every, "valid") == [
        "newlines dropped",
        "lossy JPEG, not comparable",
        "scaled to 8x8, not comparable",
        "not the PixelRNN images, not comparable",
        "not the whole published set, not comparable",
        "valid is the published test split",
    ]
