"""Windows score every unit once; what the released code leaves out, and how many words are left."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from made_sets import prose

from rtx.data.sets import SETS
from rtx.data.store import SplitFacts, TokenStore
from rtx.data.tokenizers import SentencepieceTokenizer, Tokenizer, WordTokenizer, learn_subwords, learn_words
from rtx.errors import UserError
from rtx.evaluation.protocols import Reading, Window, bytes_scored, read_as_released, windows, words_scored

WIKITEXT = b" \n = A title = \n \n first line <unk> \n second \n \n"


def words(text: bytes) -> WordTokenizer:
    return learn_words([text], "data=made", lambda line: None)


def subwords() -> SentencepieceTokenizer:
    return learn_subwords([prose(3_000)], 400, 10**6, "data=made", lambda line: None)


def store(name: str, tokenizer: Any, text: bytes, image: bool = False, **stamps: Any) -> TokenStore:
    """A store of one split, test."""
    tokens = tokenizer.encode(text)
    facts = SplitFacts(len(tokens), len(text), len(text.split()), 1)
    size = (1, 1) if image else None
    return TokenStore(
        name, Path("nowhere"), {"test": tokens}, tokenizer, "f", {}, stamps, size, all_facts={"test": facts}
    )


def read_text(made: TokenStore, length: int = 4) -> tuple[bytes, Reading]:
    reading = read_as_released(made, "test", length)
    return made.tokenizer.decode(reading.tokens), reading


def test_enwik8_loses_its_newlines() -> None:
    text, reading = read_text(store("enwik8", Tokenizer(), b"one\ntwo\n\nthree\n"))
    assert text == b"onetwothree" and reading.habits == "newlines dropped"


def test_wikitext_loses_blank_lines_and_the_last_window() -> None:
    made = store("wikitext103", words(WIKITEXT), WIKITEXT)
    kept = b" = A title = \n first line <unk> \n second \n"
    assert read_text(made, length=1)[0] == kept
    assert len(words(WIKITEXT).encode(kept)) == 11
    text, reading = read_text(made, length=4)
    assert len(reading.tokens) == 8 and kept.startswith(text)
    with pytest.raises(UserError, match="has not one whole window of 12 units"):
        read_text(made, length=12)


def test_a_subword_of_pg19_counts_for_less_than_a_word() -> None:
    made = store("pg19", subwords(), prose(50))
    text, reading = read_text(made)
    assert text == prose(50).replace(b"\n", b"")
    found = words_scored(made, "test", reading, windows(len(reading.tokens), 4), False)
    assert found is not None and not found.comparable
    assert found.count == pytest.approx(len(reading.tokens) / 1.248)


def test_images_are_read_as_they_are() -> None:
    made = store("cifar10", Tokenizer("dim"), bytes(range(12)), image=True)
    assert read_text(made)[0] == bytes(range(12))


@pytest.mark.parametrize(
    ("name", "tokenizer"), [("wikitext103", Tokenizer()), ("pg19", Tokenizer()), ("enwik8", words(b"a b\n"))]
)
def test_other_units_than_the_released_ones_are_refused(name: str, tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match=f"was read as .*, not data.tokenizer={tokenizer.name}"):
        read_text(store(name, tokenizer, b"a b\n"))


def test_data_of_ones_own_have_no_released_reading() -> None:
    with pytest.raises(UserError, match="known of enwik8, wikitext103, pg19, cifar10, imagenet64, not of data=text"):
        read_text(store("text", Tokenizer(), b"a b\n"))
    with pytest.raises(UserError, match="split test has nothing but newlines"):
        read_text(store("enwik8", Tokenizer(), b"\n\n"))


@pytest.mark.parametrize("tokenizer", [words(WIKITEXT), Tokenizer()])
def test_a_whole_split_has_the_published_words_and_a_sample_its_share(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SETS["wikitext103"].words, "test", 20)  # type: ignore[arg-type]
    made = store("wikitext103", tokenizer, WIKITEXT)
    reading = Reading(made.split("test"))
    every = windows(len(reading.tokens), 4)
    whole = words_scored(made, "test", reading, every, False)
    assert whole == (20, "the published count of the split", True)
    part = words_scored(made, "test", reading, every[:2], True)
    assert part is not None and not part.comparable and 0 < part.count < 20
    assert "share" in part.note


def test_a_part_of_a_set_counts_its_own_words() -> None:
    made = store("pg19", Tokenizer(), b"one two\nthree ", complete=False)
    reading = Reading(made.split("test"))
    found = words_scored(made, "test", reading, windows(14, 14), False)
    assert found == (3, "between blanks of the text scored", False)


def test_text_of_ones_own_has_its_own_words_or_none() -> None:
    made = store("text", words(b"a b\n"), b"a b b\n")
    reading = Reading(made.split("test"))
    assert words_scored(made, "test", reading, windows(4, 4), False) == (4, "its own words and line ends", False)
    plain = store("text", Tokenizer(), b"a b b\n")
    assert words_scored(plain, "test", Reading(plain.split("test")), windows(6, 4), False) is None


def test_the_bytes_of_a_sample_are_those_of_its_windows() -> None:
    made = store("pg19", subwords(), prose(50))
    reading = Reading(made.split("test"))
    every = windows(len(reading.tokens), 16)
    assert bytes_scored(made, "test", reading, every, False) == len(prose(50))
    assert sum(bytes_scored(made, "test", reading, [window], True) for window in every) == len(prose(50))


def test_every_unit_is_scored_exactly_once_with_the_most_context_the_stride_gives():
    draw = random.Random(0)
    for _ in range(300):
        length = draw.randint(1, 40)
        stride = draw.choice([None, length, draw.randint(1, length)])
        units = draw.choice([1, length, length + 1, draw.randint(1, 5 * length), length * draw.randint(1, 5)])
        found = windows(units, length, stride)
        scored = [unit for window in found for unit in range(window.first, window.stop)]
        assert scored == list(range(units)), (units, length, stride)
        for k, window in enumerate(found):
            assert 0 <= window.start <= window.first < window.stop <= units
            assert window.stop - window.start == min(length, units)
            if 0 < k < len(found) - 1:
                assert window.start == k * (stride or length)
                assert window.first - window.start == length - (stride or length)
        assert found[-1].stop == units


def test_examples():
    assert list(windows(10, 4)) == [Window(0, 4, 0), Window(4, 8, 4), Window(6, 10, 8)]
    assert list(windows(8, 4)) == [Window(0, 4, 0), Window(4, 8, 4)]
    assert list(windows(6, 4, stride=1)) == [Window(0, 4, 0), Window(1, 5, 4), Window(2, 6, 5)]
    assert list(windows(3, 4)) == [Window(0, 3, 0)]


def test_they_are_a_sequence_that_costs_nothing():
    many = windows(5_000_000, 8192, stride=1)
    assert len(many) == 5_000_000 - 8192 + 1
    assert many[-1] == Window(5_000_000 - 8192, 5_000_000, 5_000_000 - 1)
    assert many[2:4] == [many[2], many[3]]
    with pytest.raises(IndexError):
        many[len(many)]


def test_windows_of_images_are_one_image_each():
    length, images = 32 * 32 * 3, 7
    found = windows(length * images, length)
    assert list(found) == [Window(k * length, (k + 1) * length, k * length) for k in range(images)]
