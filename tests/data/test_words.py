from __future__ import annotations

import pickle
from collections import Counter

import numpy as np
import pytest
from corpora import REAL, MadePart, articles, cut, prose
from hypothesis import given
from hypothesis import strategies as st

from rtx.data import words
from rtx.data.words import WordTokenizer
from rtx.errors import UserError

VALID = REAL / "wikitext-103/wiki.valid.tokens"
TEXT = articles(12)


def trained(*texts: bytes, processes: int = 1) -> WordTokenizer:
    return WordTokenizer.train([MadePart((text,)) for text in texts], "data=made", lambda line: None, processes)


def ids_of(tokenizer: WordTokenizer, text: bytes, size: int) -> list[int]:
    return [number for ids in tokenizer.encode(cut(text, size)) for number in ids.tolist()]


def test_words_are_ordered_by_falling_count_then_by_bytes():
    tokenizer = trained(b" b a b \n c a b <unk> \n")
    assert tokenizer.content.split(b"\n") == [b"b", b"<eos>", b"a", b"<unk>", b"c", b""]
    assert tokenizer.settings == {"words": 9, "eos": 1, "unk": 3, "unk_added": False}
    assert tokenizer.encode(b" a b \n").tolist() == [2, 0, 1]
    assert tokenizer.vocabulary == 5 and tokenizer.encode(b"a").dtype == np.uint8


def test_the_vocabulary_is_that_of_a_plain_count():
    counts = Counter(word for line in TEXT.decode().splitlines() for word in [*line.split(), "<eos>"])
    tokenizer = trained(TEXT)
    assert sorted(tokenizer.content.decode().split("\n")[:-1]) == sorted(counts)
    assert tokenizer.settings["words"] == counts.total() == len(tokenizer.encode(TEXT))


def test_every_newline_is_a_word_blank_lines_too_and_a_last_line_without_one_has_none():
    tokenizer = trained(b" a \n \n b <unk>")
    eos = tokenizer.settings["eos"]
    assert tokenizer.encode(b" a \n \n b").tolist().count(eos) == 2
    assert tokenizer.decode(tokenizer.encode(b" a \n \n b")) == b" a \n \n b"


def test_wikitext_comes_back_to_the_byte_but_for_words_that_train_lacks():
    tokenizer = trained(TEXT)
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.decode(tokenizer.encode(b" Article zyzzyva = \n")) == b" Article <unk> = \n"
    assert tokenizer.decode(tokenizer.encode(b"Article\t of\r\n")) == b" Article of \n"


def test_a_missing_unk_is_added_and_said():
    said: list[str] = []
    tokenizer = WordTokenizer.train([MadePart((b"a b\n",))], "data=made", said.append)
    assert tokenizer.settings["unk_added"] and tokenizer.settings["unk"] == 3 == tokenizer.encode(b"new")[0]
    assert any("no <unk>; one is added" in line for line in said)


def test_a_word_spelt_like_the_newline_is_not_one():
    tokenizer = trained(b"<eos> a <unk>\n<eos> <eos>\n")
    assert tokenizer.encode(b"<eos>\n").tolist() == [0, tokenizer.settings["eos"]] and tokenizer.settings["eos"] != 0
    assert tokenizer.decode(tokenizer.encode(b" <eos> \n a \n")) == b" <eos> \n a \n"


@given(st.binary(max_size=200), st.integers(1, 50))
def test_the_same_ids_however_a_text_is_cut(text, size):
    tokenizer = trained(b" a b \n<unk>" + text)
    assert ids_of(tokenizer, text, size) == tokenizer.encode(text).tolist()


def test_many_blocks_and_one_process_or_two_give_the_same(monkeypatch):
    texts = [prose(30_000, seed) for seed in range(3)]
    monkeypatch.setattr(words, "PAYS", 0)
    one, two = trained(*texts), trained(*texts, processes=2)
    assert one.describe() == two.describe()
    assert ids_of(one, texts[0], 1 << 20) == ids_of(two, texts[0], 999)
    again = pickle.loads(pickle.dumps(one))
    assert again.describe() == one.describe() and again.encode(texts[1]).tolist() == one.encode(texts[1]).tolist()


def test_text_that_is_none_is_refused():
    with pytest.raises(UserError, match="expected words in the training split, found none"):
        trained(b" \n \n")
    with pytest.raises(UserError, match=r"expected words between blanks, found 1,.* bytes without one"):
        trained(b"x" * (1 << 21))


def test_too_many_words_are_refused(monkeypatch):
    monkeypatch.setattr(words, "MOST", 10)
    with pytest.raises(UserError, match="expected at most 10 different words, found more"):
        trained(prose(100))


@pytest.mark.skipif(not VALID.exists(), reason="the real wiki.valid.tokens is not here")
def test_the_real_validation_split_has_the_published_words_and_comes_back_to_the_byte():
    text = VALID.read_bytes()
    tokenizer = trained(text)
    ids = tokenizer.encode(text)
    assert len(ids) == 217_646 == tokenizer.settings["words"]
    assert np.count_nonzero(ids == tokenizer.settings["eos"]) == 3_760
    assert tokenizer.decode(ids) == text
