"""Bytes, words and subwords are exact on any bytes, however a text is cut before its blanks."""

import functools
import json
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rtx.data import tokenizers
from rtx.data.tokenizers import (
    Tokenizer,
    encode_text,
    learn_subwords,
    learn_words,
    learned,
    load_tokenizer,
)
from rtx.errors import UserError
from rtx.settings.schema import DataConfig
from tests.helpers.made_sets import articles, prose

TEXT = prose(20_000)
ARTICLES = articles(12)
NASTY = [
    b"",
    b"   leading and  runs   of blanks  ",
    b"\ttabs\t\tand\r\nCRLF\r\n\r\n\rlone\x0b\x0c",
    b"NUL \x00\x00 in\x00side",
    "U+2581 ▁▁ in the▁text ▁".encode(),
    b"invalid \xff\xfe UTF-8 \xe2\x96 \xc3",
    b"<unk> <s> </s> <0x41> <0x0A> <pad>\n",
    "combining e\u0301 \ufb01 \uff12 \u200b\ufeff \U0001f600 ".encode()
    + "漢字かな\u3000全角\u00a0nbsp \u2028\u2029\u0085".encode(),
    bytes(range(256)) * 3,
    b"runs that are cut " + "漢é".encode() * 300 + b"\xff\x80\x80\x80\x80" * 200 + b"x" * 1_000,
]


def words(*texts: bytes) -> tokenizers.WordTokenizer:
    return learn_words(texts, "data=made", print)


def subwords(
    vocabulary: int, text: bytes = TEXT, sample: int = 10**6
) -> tokenizers.SentencepieceTokenizer:
    return learn_subwords([text], vocabulary, sample, "data=made", print)


@functools.cache
def trained() -> tokenizers.SentencepieceTokenizer:
    return subwords(500)


def ids_of(tokenizer: Tokenizer, text: bytes, size: int) -> list[int]:
    """Encode a text that is cut before the first blank or newline after every `size` bytes."""
    cuts = [0]
    for at in range(1, len(text)):
        if at - cuts[-1] >= size and text[at : at + 1] in (b" ", b"\n"):
            cuts.append(at)
    pieces = [text[a:b] for a, b in zip(cuts, [*cuts[1:], len(text)], strict=True)]
    return [number for piece in pieces for number in tokenizer.encode(piece).tolist()]


def test_any_bytes_survive_a_round_trip_as_bytes():
    tokenizer = Tokenizer()
    raw = bytes(range(256)) + b"\r\n\x00 \xff\xfe"
    ids = tokenizer.encode(raw)
    assert ids.dtype == np.uint8 and ids.tolist() == list(raw)
    assert all(
        tokenizer.decode(each) == raw for each in (ids, ids.tolist(), torch.tensor(ids.tolist()))
    )
    argument = b"caf\xe9".decode("utf-8", errors="surrogateescape")  # as Python hands over sys.argv
    assert (
        tokenizer.decode(encode_text(tokenizer, argument)) == b"caf\xe9"
        and len(encode_text(tokenizer, "")) == 0
    )
    assert encode_text(tokenizer, "€").dtype == np.int64


def test_words_are_ordered_by_falling_count_then_by_bytes():
    tokenizer = words(b" b a b \n c a b <unk> \n")
    assert tokenizer.content.split(b"\n") == [b"b", b"<eos>", b"a", b"<unk>", b"c", b""]
    assert tokenizer.settings == {"words": 9, "eos": 1, "unk": 3, "unk_added": False}
    assert tokenizer.encode(b" a b \n").tolist() == [2, 0, 1]
    assert tokenizer.vocabulary == 5 and tokenizer.encode(b"a").dtype == np.uint8
    counts = Counter(
        word for line in ARTICLES.decode().splitlines() for word in [*line.split(), "<eos>"]
    )
    assert sorted(words(ARTICLES).content.decode().split("\n")[:-1]) == sorted(counts)
    assert (
        words(ARTICLES).settings["words"] == counts.total() == len(words(ARTICLES).encode(ARTICLES))
    )
    with pytest.raises(UserError, match="expected words in the training split, found none"):
        words(b" \n \n")


def test_every_newline_is_a_word_and_only_words_that_train_lacks_are_lost():
    tokenizer = words(b" a \n \n b <unk>")
    assert tokenizer.encode(b" a \n \n b").tolist().count(tokenizer.settings["eos"]) == 2
    assert tokenizer.decode(tokenizer.encode(b" a \n \n b")) == b" a \n \n b"
    spelt = words(
        b"<eos> a <unk>\n<eos> <eos>\n"
    )  # a word that is spelt like the newline is not one
    assert (
        spelt.encode(b"<eos>\n").tolist() == [0, spelt.settings["eos"]]
        and spelt.settings["eos"] != 0
    )
    assert spelt.decode(spelt.encode(b" <eos> \n a \n")) == b" <eos> \n a \n"
    tokenizer = words(ARTICLES)
    assert tokenizer.decode(tokenizer.encode(ARTICLES)) == ARTICLES
    assert tokenizer.decode(tokenizer.encode(b" Article zyzzyva = \n")) == b" Article <unk> = \n"
    assert tokenizer.decode(tokenizer.encode(b"Article\t of\r\n")) == b" Article of \n"
    added = words(b"a b\n")
    assert added.settings["unk_added"] and added.settings["unk"] == 3 == added.encode(b"new")[0]


def test_text_becomes_fewer_subwords_and_comes_back():
    ids = trained().encode(TEXT)
    assert (
        trained().vocabulary == 500
        and ids.dtype == np.uint16
        and ids.max() < 500
        and len(ids) < 0.5 * len(TEXT)
    )
    assert trained().decode(ids) == TEXT
    assert b"".join(
        trained().decode([number]) for number in ids[:300].tolist()
    ) == trained().decode(ids[:300])
    assert trained().decode([0]) == "\ufffd".encode()
    for wrong in ([500], [-1]):
        with pytest.raises(AssertionError):
            trained().decode(wrong)
    assert " —".encode() in subwords(400, TEXT.replace(b" ", " — ".encode())).table
    spaceless = subwords(310, TEXT.replace(b" ", b"").replace(b"\n", b""))
    assert spaceless.decode(spaceless.encode(b"a b  c\n ")) == b"a b  c\n "


@settings(deadline=None)
@given(
    st.sampled_from(NASTY) | st.binary(max_size=300) | st.text("ab \n▁é\t").map(str.encode),
    st.integers(1, 40),
)
def test_any_bytes_come_back_and_their_ids_do_not_know_the_cuts(text, size):
    assert trained().decode(trained().encode(text)) == text
    assert ids_of(trained(), text, size) == trained().encode(text).tolist()
    tokenizer = words(b" a b \n<unk>" + text)
    assert ids_of(tokenizer, text, size) == tokenizer.encode(text).tolist()


def test_training_twice_gives_the_same_bytes_from_an_even_sample():
    one = subwords(500)
    two = subwords(500)
    assert one.content == two.content and one.describe() == two.describe()
    assert subwords(500, TEXT[::-1]).describe()["sha256"] != one.describe()["sha256"]
    text = b" ".join(b"%08d" % number for number in range(200_000))
    kept, total = tokenizers.even_sample([text], 500_000)
    assert 0.99 * len(text) < total <= len(text) and 240_000 < sum(map(len, kept)) <= 500_000
    places = [text.index(block) for block in kept]
    assert (
        places[0] < len(text) // 8
        and places == sorted(places)
        and len({b - a for a, b in pairwise(places)}) <= 2
    )
    assert 14_000 < subwords(400, sample=30_000).settings["sampled"] <= 30_000


def test_a_vocabulary_that_does_not_fit_is_refused_with_one_that_does():
    many = "".join(map(chr, range(0x4E00, 0x5FFF))).encode()
    for wanted, text, before, after in (
        (90_000, TEXT, "value <= ", "."),
        (300, many, "300 vs ", "."),
    ):
        with pytest.raises(
            UserError, match=rf"data\.vocabulary={wanted}: [\d,]+ bytes of text cannot"
        ) as error:
            subwords(wanted, text)
        assert "\n" not in str(error.value)
        fits = int(str(error.value).rpartition(before)[2].partition(after)[0]) + (wanted == 300)
        assert subwords(fits, text).vocabulary == fits
    for text in (b"", b"\xff\xfe\xff", b"\n\n\n"):
        with pytest.raises(UserError, match="expected text in the training split, found none in"):
            subwords(300, text)


@pytest.mark.parametrize("name", ["words", "sentencepiece"])
def test_a_learned_tokenizer_is_kept_described_and_taken_again_and_no_other(name, tmp_path):
    data = DataConfig(tokenizer=name, vocabulary=400, tokenizer_sample=20_000)
    tokenizer = learned(data, [TEXT], tmp_path, "data=made", print)
    described = json.loads(json.dumps(tokenizer.describe()))
    assert {"name", "unit", "vocabulary", "settings", "file", "sha256"} == set(described)
    file = tmp_path / described["file"]
    record = tmp_path / "tokenizer.json"
    unread = (pytest.fail("it was read") for _ in range(1))
    again = learned(data, unread, tmp_path, "data=made", print)
    for other in (again, load_tokenizer(described, tmp_path)):
        assert other.describe() == tokenizer.describe()
        assert encode_text(other, TEXT).tolist() == encode_text(tokenizer, TEXT).tolist()
    for path, spoilt in [(file, file.read_bytes()[:-5]), (record, record.read_bytes()[:-9])]:
        path.write_bytes(spoilt)
        assert (
            learned(data, [TEXT], tmp_path, "data=made", print).describe() == described
        )  # learned anew
    for spoil in (lambda: file.write_bytes(file.read_bytes() + b"x\n"), file.unlink):
        spoil()
        with pytest.raises(
            ValueError, match=f"expected the {name} tokenizer with sha256 .*, found"
        ) as error:
            load_tokenizer(described, tmp_path)
        assert "\n" not in str(error.value)
