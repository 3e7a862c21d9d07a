from __future__ import annotations

import functools
import pickle
import random
import time

import numpy as np
import pytest
from corpora import MadePart, cut, prose
from hypothesis import given
from hypothesis import strategies as st

from rtx.data.pieces import SentencepieceTokenizer
from rtx.errors import UserError

TEXT = prose(20_000)
NASTY = [
    b"",
    b"\n",
    b" ",
    b"   leading and  runs   of blanks  ",
    b"\ttabs\t\tand\r\nCRLF\r\n\r\n\rlone\x0b\x0c",
    b"NUL \x00\x00 in\x00side",
    "U+2581 ▁▁ in the▁text ▁".encode(),
    b"invalid \xff\xfe UTF-8 \xe2\x96 \xc3",
    b"<unk> <s> </s> <0x41> <0x0A> <pad>\n",
    "combining e\u0301 \ufb01 \uff12 \u200b\ufeff \U0001f600 漢字かな\u3000全角\u00a0nbsp".encode(),
    bytes(range(256)) * 3,
    "\u2028\u2029\u0085line separators".encode(),
]


@functools.cache
def trained() -> SentencepieceTokenizer:
    return learned(500)


def learned(vocabulary: int, *texts: bytes, sample: int = 10**6) -> SentencepieceTokenizer:
    parts = [MadePart((text,)) for text in texts or (TEXT,)]
    return SentencepieceTokenizer.train(parts, vocabulary, sample, "data=made", lambda line: None)


def ids_of(text: bytes, size: int) -> list[int]:
    return [number for ids in trained().encode(cut(text, size)) for number in ids.tolist()]


def test_text_becomes_fewer_ids_and_comes_back():
    ids = trained().encode(TEXT)
    assert trained().vocabulary == 500 and ids.dtype == np.uint16 and ids.max() < 500
    assert len(ids) < 0.5 * len(TEXT)
    assert trained().decode(ids) == TEXT
    assert trained().decode(ids.tolist()) == TEXT


@pytest.mark.parametrize("text", NASTY)
def test_whatever_the_bytes_they_come_back(text):
    assert trained().decode(trained().encode(text)) == text
    both = TEXT[:300] + text + TEXT[300:600]
    assert trained().decode(trained().encode(both)) == both
    for size in (1, 3, 7):
        assert ids_of(both, size) == trained().encode(both).tolist()


@given(st.binary(max_size=300), st.integers(1, 40))
def test_any_bytes_come_back_and_their_ids_do_not_know_the_chunks(text, size):
    assert trained().decode(trained().encode(text)) == text
    assert ids_of(text, size) == trained().encode(text).tolist()


@given(st.text(max_size=100) | st.text("ab \n▁é\t", max_size=100), st.integers(1, 20))
def test_any_text_comes_back_and_its_ids_do_not_know_the_chunks(text, size):
    raw = text.encode("utf-8", errors="surrogatepass")
    assert trained().decode(trained().encode(raw)) == raw
    assert ids_of(raw, size) == trained().encode(raw).tolist()


def test_decoding_is_by_id():
    ids = trained().encode(TEXT[:1000]).tolist()
    assert b"".join(trained().decode([number]) for number in ids) == TEXT[:1000]
    assert trained().decode([0]) == "\ufffd".encode()
    with pytest.raises(AssertionError):
        trained().decode([500])


@pytest.mark.parametrize("unit", [b"ab", "漢é".encode(), b"\xff\x80\x80\x80\x80", b"ab "])
def test_a_line_of_ten_megabytes_takes_bounded_time_and_the_same_ids(unit):
    text = b"start " + unit * (10_000_000 // len(unit)) + b" end"
    start = time.process_time()
    whole = np.concatenate(list(trained().encode([text])))
    pieces = np.concatenate(list(trained().encode(cut(text, 300_001))))
    assert time.process_time() - start < 60
    assert np.array_equal(whole, pieces)
    assert trained().decode(whole) == text


def test_training_twice_gives_the_same_bytes_and_another_text_another_model():
    one, two = learned(500), learned(500)
    assert one.content == two.content and one.describe() == two.describe()
    assert learned(500, TEXT[::-1]).describe()["sha256"] != one.describe()["sha256"]


def test_the_sample_is_stated():
    tokenizer = learned(400, TEXT, sample=30_000)
    settings = tokenizer.settings
    assert settings["kind"] == "bpe" and settings["sample"] == 30_000 and settings["from"] == len(TEXT)
    assert 29_000 < settings["sampled"] <= 30_000
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


def test_a_pickled_tokenizer_is_the_same():
    again = pickle.loads(pickle.dumps(trained()))
    assert again.describe() == trained().describe() and again.encode(TEXT).tolist() == trained().encode(TEXT).tolist()


def test_a_vocabulary_that_does_not_fit_is_refused_with_one_that_does():
    with pytest.raises(
        UserError, match=r"data\.vocabulary=90000: expected at most .*use data\.vocabulary=\d+"
    ) as error:
        learned(90_000)
    assert "\n" not in str(error.value)
    fits = int(str(error.value).rpartition("use data.vocabulary=")[2].partition(",")[0])
    assert learned(fits).vocabulary == fits
    draw = random.Random(0)
    many = "".join(chr(draw.randint(0x4E00, 0x5FFF)) for _ in range(9000)).encode()
    with pytest.raises(UserError, match=r"data\.vocabulary=300: expected at least [\d,]+") as error:
        learned(300, many)
    fits = int(str(error.value).rpartition("use data.vocabulary=")[2].partition(" ")[0])
    assert learned(fits, many).vocabulary == fits


@pytest.mark.parametrize("text", [b"", b"\xff\xfe\xff", b"\n\n\n"])
def test_nothing_to_learn_from_is_refused(text):
    with pytest.raises(UserError, match="expected text in the training split, found none in"):
        learned(300, text)


def test_text_without_a_blank_still_spells_blanks():
    tokenizer = learned(300, TEXT.replace(b" ", b"").replace(b"\n", b""))
    assert tokenizer.decode(tokenizer.encode(b"a b  c\n ")) == b"a b  c\n "


def test_no_vocabulary_is_advised_that_is_not_allowed():
    with pytest.raises(UserError, match=r"expected at most \d+ subwords .*; use data\.tokenizer=bytes, or more text"):
        learned(300, b"ab " * 10_000)
