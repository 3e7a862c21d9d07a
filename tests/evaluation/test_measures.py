"""Windows score every unit once; what the released code leaves out; words, bytes and baselines."""

import lzma
import math
import random
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rtx.data.sets import WORDS, stamp_phrases
from rtx.data.store import TokenStore
from rtx.data.tokenizers import Tokenizer, WordTokenizer, learn_subwords, learn_words
from rtx.data.windows import windows
from rtx.errors import UserError
from rtx.evaluation.measures import (
    baselines,
    measures,
    read_as_released,
)
from rtx.evaluation.scores import Score
from tests.helpers.made_sets import prose

WIKITEXT = b" \n = A title = \n \n first line <unk> \n second \n \n"


def words(text: bytes) -> WordTokenizer:
    return learn_words([text], "data=made", lambda line: None)


def store(name: str, tokenizer: Any, text: bytes, image: bool = False, **stamps: Any) -> TokenStore:
    tokens = tokenizer.encode(text)
    facts = {"units": len(tokens), "bytes": len(text), "words": len(text.split()), "documents": 1}
    size = (1, 1) if image else None
    return TokenStore(
        name,
        Path("nowhere"),
        {"test": tokens},
        tokenizer,
        "f",
        {},
        stamps,
        size,
        facts={"test": facts},
    )


def released(made: TokenStore, length: int = 4) -> tuple[bytes, str]:
    tokens, habits = read_as_released(made, "test", length)
    return made.tokenizer.decode(tokens), habits


def measured(made: TokenStore, units: int | None = None, **how: bool) -> dict[str, Any]:
    """Return the measures of the split, or of so many units of it, each of which costs two nats."""
    units_K = np.array([float(units or len(made.split("test")))])
    return measures(made, "test", Score(units_K, 2 * units_K), **how).to_json()


def test_what_the_released_code_leaves_out() -> None:
    assert released(store("enwik8", Tokenizer(), b"one\ntwo\n\nthree\n")) == (
        b"onetwothree",
        "newlines dropped",
    )
    made = store("wikitext103", words(WIKITEXT), WIKITEXT)
    kept = b" = A title = \n first line <unk> \n second \n"
    assert released(made, length=1)[0] == kept
    text, _ = released(made, length=4)
    assert len(made.tokenizer.encode(text)) == 8 and kept.startswith(text)
    with pytest.raises(UserError, match="has not one whole window of 12 units"):
        released(made, length=12)
    learned = learn_subwords([prose(3_000)], 400, 10**6, "data=made", lambda line: None)
    assert released(store("pg19", learned, prose(50)))[0] == prose(50).replace(b"\n", b"")
    made = store("cifar10", Tokenizer("dim"), bytes(range(12)), image=True)
    assert released(made)[0] == bytes(range(12)) and measured(made) == {}


@pytest.mark.parametrize(
    ("name", "tokenizer", "told"),
    [
        ("wikitext103", Tokenizer(), "not data.tokenizer=bytes"),
        ("pg19", Tokenizer(), "read as sentencepiece"),
        ("text", Tokenizer(), "known of enwik8, .*data=text"),
    ],
)
def test_what_the_released_code_did_not_read_is_refused(
    name: str, tokenizer: Tokenizer, told: str
) -> None:
    with pytest.raises(UserError, match=told):
        released(store(name, tokenizer, b"a b\n"))


def test_words_are_the_published_ones_of_a_whole_split_its_own_or_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(WORDS["wikitext103"], "test", 20)
    whole = measured(store("wikitext103", Tokenizer(), WIKITEXT))
    assert whole["words_comparable"] and whole["perplexity_per_word"] == pytest.approx(
        math.exp(2 * len(WIKITEXT) / 20)
    )
    part = measured(store("pg19", Tokenizer(), b"one two\nthree ", complete=False))
    assert part["words"] == 3 and part["words_are"] == "between blanks of the text scored"
    own = measured(store("text", words(b"a b\n"), b"a b b\n"))
    assert (own["words"], own["words_are"]) == (4, "its own words and line ends") and not own[
        "words_comparable"
    ]
    assert measured(store("text", Tokenizer(), b"a b b\n")) == {}


def test_every_unit_is_scored_exactly_once_with_the_most_context_the_stride_gives() -> None:
    draw = random.Random(0)
    for _ in range(300):
        length = draw.randint(1, 40)
        stride = draw.choice([None, length, draw.randint(1, length)])
        units = draw.choice(
            [1, length, length + 1, draw.randint(1, 5 * length), length * draw.randint(1, 5)]
        )
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


def test_stamps_in_words() -> None:
    assert (
        stamp_phrases(
            {"newlines": "keep", "complete": True, "variant": "PixelRNN", "valid": "test"}, "test"
        )
        == []
    )
    every = {
        "newlines": "drop",
        "lossy": True,
        "scaled": "8x8",
        "variant": "other",
        "complete": False,
        "valid": "test",
    }
    said = "lossy JPEG; scaled to 8x8; not the PixelRNN images; not the whole published set"
    apart = [f"{phrase}, not comparable" for phrase in said.split("; ")]
    assert stamp_phrases(every, "valid") == [
        "newlines dropped",
        *apart,
        "valid is the published test split",
    ]


def test_compressors_see_the_split_alone_and_xz_is_preset_9() -> None:
    text = np.frombuffer(
        b"".join(b"line %d of a text\n" % (i * i) for i in range(4000)), dtype=np.uint8
    )
    for held_out in (text, text[:1]):
        packed = {
            "zlib": zlib.compress(held_out.tobytes(), 9),
            "xz": lzma.compress(held_out.tobytes(), preset=9),
        }
        assert baselines(held_out) == {
            name: 8 * len(each) / len(held_out) for name, each in packed.items()
        }
