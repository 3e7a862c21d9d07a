"""Text <-> token ids: bytes, words, or subwords; the last two are learned from split train and kept in a file."""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import io
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rtx.config import DataConfig
from rtx.data.sets import Report
from rtx.disk import replace_file, write_json
from rtx.errors import UserError

RECORD = "tokenizer.json"
BLOCK = 1 << 16  # bytes encoded at once: what is made of them stays in a cache
NEWLINE = b"\n"  # among words between blanks it cannot stand for anything else
EOS, UNK = b"<eos>", b"<unk>"
BLANKS = bytes.maketrans(b"\t\r\v\f", b"    ")
MOST_WORDS = 10_000_000  # more are no text, and would not fit in memory
LONGEST_WORD = 1 << 20

# What is encoded on its own: a newline, or a blank and what follows it up to the next one. No piece ever spans two of
# them (sentencepiece learns none that does), so encoding them apart loses nothing and can be remembered. Runs without
# a blank are cut after 252 bytes, at the end of a UTF-8 character.
RUN = re.compile(rb" ?[^ \n]{1,252}[\x80-\xbf]{0,3}| |\n")
LONGEST_RUN = 256
BLANK = "▁"  # how sentencepiece writes a blank
FEWEST = 300  # the smallest data.vocabulary; 257 ids are bytes and <unk>
REMEMBERED = 1 << 19  # runs, about 100 MB


class Tokenizer:
    """Bytes of text <-> unsigned integers below `vocabulary`, here one id a byte: exact on any input.

    Args:
        unit: what one id is, in words: byte, or dim for the sub-pixels of images.
    """

    name = "bytes"
    vocabulary = 256

    def __init__(self, unit: str = "byte") -> None:
        self.unit = unit

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest unsigned type that holds every id."""
        return np.min_scalar_type(self.vocabulary - 1)

    def encode(self, text: bytes) -> np.ndarray:
        """Return the ids of a text, unsigned `[ids]`; of a text cut before a blank or newline its parts have the same.

        Raises:
            UserError: it is no text of the tokenizer's kind.
        """
        return np.frombuffer(text, dtype=np.uint8)

    def decode(self, ids: Any) -> bytes:
        """Return the bytes that `ids` stand for: a list, array or tensor of integers."""
        values = np.asarray(ids)
        assert values.size == 0 or (values.min() >= 0 and values.max() < self.vocabulary), "ids beyond the vocabulary"
        return values.astype(np.uint8).tobytes()

    def describe(self) -> dict[str, Any]:
        """Return name, unit and vocabulary; of a learned one also settings, file and sha256; JSON values."""
        return {"name": self.name, "unit": self.unit, "vocabulary": self.vocabulary}


class LearnedTokenizer(Tokenizer):
    """What words and subwords share: they are learned, kept in a file, and each id stands for fixed bytes."""

    file: str
    table: list[bytes]
    """The bytes of each id."""

    def __init__(self, content: bytes, settings: dict[str, Any]) -> None:
        self.content, self.settings = content, settings

    def decode(self, ids: Any) -> bytes:
        values = np.asarray(ids).reshape(-1)
        assert values.size == 0 or (values.min() >= 0 and values.max() < self.vocabulary), "ids beyond the vocabulary"
        return b"".join(map(self.table.__getitem__, values.tolist()))

    def describe(self) -> dict[str, Any]:
        kept = {"file": self.file, "sha256": hashlib.sha256(self.content).hexdigest()}
        return {**super().describe(), "settings": self.settings, **kept}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.content, self.settings)


class WordTokenizer(LearnedTokenizer):
    """One id per word, one (`<eos>`) per newline, blank lines too; words that are not in the vocabulary: `<unk>`.

    Case is kept; a word is what stands between blanks (space, tab, CR, VT, FF). A last line without a newline has no
    `<eos>`. Decoding writes a blank before every word and every newline, which is how the lines of Wikitext look
    (" word word \\n", " \\n"): there only words without an id are lost.

    Args:
        content: the vocabulary, a word a line, the number of the line being its id.
        settings: `eos` and `unk`, the ids of the newline and of words without an id; the rest is for people.
    """

    name, unit, file = "words", "word", "words.txt"

    def __init__(self, content: bytes, settings: dict[str, Any]) -> None:
        super().__init__(content, settings)
        words = content.split(b"\n")[:-1]
        self.vocabulary, self.unit = len(words), "word"
        self.table = [b" " + word for word in words]
        self.table[settings["eos"]] = b" \n"
        words[settings["eos"]] = NEWLINE
        self.ids = KnownWords(zip(words, range(len(words)), strict=True))
        self.ids.unk = settings["unk"]

    def encode(self, text: bytes) -> np.ndarray:
        dtype, take = self.dtype, self.ids.__getitem__
        found = [np.fromiter(map(take, words), dtype, len(words)) for words in words_of(text)]
        return np.concatenate([np.empty(0, dtype), *found])


class KnownWords(dict[bytes, int]):
    """The ids of words; every other word has that of `<unk>`."""

    unk = 0

    def __missing__(self, word: bytes) -> int:
        return self.unk


def words_of(text: bytes) -> Iterator[list[bytes]]:
    """Yield the words of a text in order, newlines among them, some thousands at a time."""
    for block in blocks(text):
        words = list(filter(None, block.translate(BLANKS).replace(b"\n", b" \n ").split(b" ")))
        if len(block) > LONGEST_WORD and len(longest := max(words, key=len, default=b"")) > LONGEST_WORD:
            raise UserError(
                f"data.tokenizer=words: expected words between blanks, found {len(longest):,} bytes without one (they "
                f"start with {longest[:20]!r}); use data.tokenizer=sentencepiece or bytes"
            )
        yield words


def blocks(text: bytes) -> Iterator[bytes]:
    """Yield a text in blocks of about `BLOCK` bytes, each of which ends before a blank or newline, or at the end."""
    start = 0
    while len(text) - start > BLOCK:
        stop = max(text.rfind(mark, start + 1, start + BLOCK) for mark in (b" ", b"\n"))
        if stop < 0:  # one long run
            stop = min(at if at >= 0 else len(text) for at in (text.find(mark, start + 1) for mark in (b" ", b"\n")))
        yield text[start:stop]
        start = stop
    yield text[start:]


def learn_words(texts: Iterable[bytes], options: str, report: Report) -> WordTokenizer:
    """Return the tokenizer of all words in `texts`, ordered by falling count, then by their bytes.

    Args:
        options: the command-line options that ask for the data set, for messages.

    Raises:
        UserError: no words there, or far too many for a text.
    """
    counts: Counter[bytes] = Counter()
    for text in texts:
        for words in words_of(text):
            counts.update(words)
        if len(counts) > MOST_WORDS:
            raise UserError(
                f"{options}: expected at most {MOST_WORDS:,} different words, found more; use "
                "data.tokenizer=sentencepiece or bytes"
            )
    total, newlines = counts.total(), counts.pop(NEWLINE, 0)
    if not counts:
        raise UserError(f"{options}: expected words in the training split, found none; use data.tokenizer=bytes")
    entries = [(word, count, word) for word, count in counts.items()] + [(NEWLINE, newlines, EOS)]
    entries.sort(key=lambda entry: (-entry[1], entry[0]))
    if UNK not in counts:
        entries.append((UNK, 0, UNK))
        report(f"{options}: the training split has no <unk>; one is added for words that only valid and test have")
    places = {word: number for number, (word, _, _) in enumerate(entries)}
    settings = {"words": total, "eos": places[NEWLINE], "unk": places[UNK], "unk_added": UNK not in counts}
    report(f"{options}: vocabulary of {len(entries):,} words with <eos> and <unk>, from {total:,} in split train")
    return WordTokenizer(b"".join(spelt + b"\n" for _, _, spelt in entries), settings)


class SentencepieceTokenizer(LearnedTokenizer):
    """Subwords learned by byte-pair encoding; what they cannot spell, and every newline, is made of single bytes.

    Text -> ids -> text is exact for any bytes: each id stands for fixed bytes, and a run whose ids do not spell it
    (invalid UTF-8, U+2581) is encoded byte by byte.

    Args:
        content: sentencepiece's own file, with byte_fallback.
        settings: what it was trained with, for people to read.
    """

    name, unit, file = "sentencepiece", "subword", "sentencepiece.model"

    def __init__(self, content: bytes, settings: dict[str, Any]) -> None:
        from sentencepiece import SentencePieceProcessor

        super().__init__(content, settings)
        self.unit, self.model = "subword", SentencePieceProcessor(model_proto=content)
        self.vocabulary = self.model.get_piece_size()
        pieces: list[str] = self.model.id_to_piece(list(range(self.vocabulary)))
        self.table = [piece.replace(BLANK, " ").encode() for piece in pieces]
        self.bytes = [self.model.piece_to_id(f"<0x{value:02X}>") for value in range(256)]
        for value, number in enumerate(self.bytes):
            self.table[number] = bytes([value])
        self.table[self.model.unk_id()] = "\ufffd".encode()  # never in encoded text; a model may still choose it
        self.memo: dict[bytes, bytes] = {}

    def encode(self, text: bytes) -> np.ndarray:
        found = []
        for block in blocks(text):
            runs = RUN.findall(block)
            if len(self.memo) > REMEMBERED:
                self.memo.clear()
            self.remember([run for run in set(runs) if run not in self.memo])
            found.append(b"".join(map(self.memo.__getitem__, runs)))
        return np.frombuffer(b"".join(found), dtype=self.dtype)

    def remember(self, runs: Iterable[bytes]) -> None:
        """Work out the ids of runs, all in one call, and keep them packed."""
        dtype = self.dtype
        known = {run: as_text for run in runs if (as_text := decoded(run)) is not None}
        ids = dict(zip(known, self.model.encode(list(known.values())), strict=True)) if known else {}
        for run in runs:
            spelt = ids.get(run, [])
            if b"".join(map(self.table.__getitem__, spelt)) != run:
                spelt = [self.bytes[value] for value in run]
            self.memo[run] = np.array(spelt, dtype).tobytes()


def decoded(run: bytes) -> str | None:
    """Return bytes as text; None where they are not UTF-8."""
    try:
        return run.decode()
    except UnicodeDecodeError:
        return None


def learn_subwords(
    texts: Iterable[bytes], vocabulary: int, sample: int, options: str, report: Report
) -> SentencepieceTokenizer:
    """Return the tokenizer of exactly `vocabulary` ids learned from `sample` bytes taken evenly from `texts`.

    Byte-pair encoding, not the unigram model, which takes some ten times as long. It is given each different run of the
    sample once, with its count, and always learns the same model.

    Args:
        options: the command-line options that ask for the data set, for messages.

    Raises:
        UserError: the sample is too small, or too varied, for the vocabulary; the message says what would fit.
    """
    kept, total = even_sample(texts, sample)
    size = sum(len(block) for block, _, _ in kept)
    report(f"{options}: learning {vocabulary:,} subwords from {size:,} of {total:,} bytes of split train")
    content = train_sentencepiece(count_runs(kept), vocabulary, size, options)
    return SentencepieceTokenizer(content, {"kind": "bpe", "sample": sample, "sampled": size, "from": total})


def even_sample(texts: Iterable[bytes], size: int) -> tuple[list[tuple[bytes, bool, bool]], int]:
    """Return blocks of at most `size` bytes together, each with whether a text starts and ends with it, and all bytes.

    The texts are cut into blocks of 64 KiB (fewer for a small sample). Of n blocks those stay whose numbers, bits
    reversed, are smallest: every second, fourth, eighth ... one, and some of those halfway between. No more than `size`
    bytes are held at a time.
    """
    length = max(256, min(BLOCK, size // 256))
    kept: list[tuple[int, int, tuple[bytes, bool, bool]]] = []  # a heap: the first to go is the first
    held = total = number = 0
    for text in texts:
        total += len(text)
        for start in range(0, len(text), length):
            content = text[start : start + length]
            rank = -int(f"{number:064b}"[::-1], 2)
            if held + len(content) <= size or rank > kept[0][0]:
                heapq.heappush(kept, (rank, number, (content, start == 0, start + length >= len(text))))
                held += len(content)
            while held > size:
                held -= len(heapq.heappop(kept)[2][0])
            number += 1
    return [block for _, _, block in sorted(kept, key=lambda entry: entry[1])], total


def count_runs(kept: Iterable[tuple[bytes, bool, bool]]) -> Counter[bytes]:
    """Count the runs (a blank and what follows it) of a sample; those that a block's border cuts are left out."""
    words: Counter[bytes] = Counter()
    for content, first, last in kept:
        found = content.split(b" ")
        if not last and len(found) > 1:
            found.pop()
        if first:
            words[found[0]] += 1
        words.update(b" " + word for word in found[1:])
    counts: Counter[bytes] = Counter()
    for word, times in words.items():
        for run in RUN.findall(word):
            counts[run] += times
    counts.pop(b"\n", None)
    return counts


def train_sentencepiece(counts: Counter[bytes], vocabulary: int, size: int, options: str) -> bytes:
    """Return the model file of sentencepiece for counted runs of a sample of `size` bytes."""
    from sentencepiece import SentencePieceTrainer

    marks = ("\t", "\0", "\n", "\r", BLANK)  # what stands for something else in its input
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    named = [(text, count) for run, count in ordered if (text := decoded(run)) is not None]
    rows = [f"{text}\t{count}" for text, count in named if not any(mark in text for mark in marks)]
    if not rows:
        raise UserError(f"{options}: expected text in the training split, found none in {size:,} bytes")
    model = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=iter(rows),
            input_format="tsv",
            model_writer=model,
            model_type="bpe",
            vocab_size=vocabulary,
            hard_vocab_limit=True,
            byte_fallback=True,
            character_coverage=0.9995,
            required_chars=BLANK,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            max_sentence_length=4 * LONGEST_RUN,
            unk_id=0,
            bos_id=-1,
            eos_id=-1,
            pad_id=-1,
            num_threads=1,  # it stands in the model, and so in its sha256
            minloglevel=3,
        )
    except RuntimeError as error:
        raise UserError(unfit(" ".join(str(error).split()), vocabulary, size, options)) from error
    return model.getvalue()


def unfit(reason: str, vocabulary: int, size: int, options: str) -> str:
    """Say in one line which vocabulary would fit, from what sentencepiece says."""
    if largest := re.search(r"value <= (\d+)", reason):
        use = f"data.vocabulary={largest[1]}" if int(largest[1]) >= FEWEST else "data.tokenizer=bytes"
        limit = f"expected at most {int(largest[1]):,} subwords of a sample of {size:,} bytes"
        return f"data.vocabulary={vocabulary}: {limit}; use {use}, or more text (data.tokenizer_sample)"
    if smallest := re.search(r"required_chars\. (\d+) vs (\d+)", reason):
        limit = f"expected at least {int(smallest[2]):,}, for 256 bytes and every character that is not rare"
        use = f"use data.vocabulary={int(smallest[2]) + 1} or more"
        return f"data.vocabulary={vocabulary}: {limit} in the sample of {size:,} bytes; {use}"
    return f"{options}: sentencepiece cannot learn {vocabulary:,} subwords of {size:,} bytes: {reason}"


def encode_text(tokenizer: Tokenizer, text: bytes | str) -> np.ndarray:
    """Return the ids of `text`, int64 `[units]`: a str in UTF-8, undecodable bytes (surrogates) as they were."""
    raw = text.encode("utf-8", errors="surrogateescape") if isinstance(text, str) else text
    return tokenizer.encode(raw).astype(np.int64)


def learned(data: DataConfig, texts: Iterable[bytes], folder: Path, options: str, report: Report) -> Tokenizer:
    """Return the tokenizer of words or subwords, learned from `texts` and kept in `folder`, or the one finished there.

    Raises:
        UserError: the texts are not what they should be, or too small for the vocabulary.
    """
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # missing, half or of another format
        return load_tokenizer(json.loads((folder / RECORD).read_bytes()), folder)
    if data.tokenizer == "words":
        tokenizer: LearnedTokenizer = learn_words(texts, options, report)
    else:
        tokenizer = learn_subwords(texts, data.vocabulary, data.tokenizer_sample, options, report)
    replace_file(folder / tokenizer.file, lambda file: file.write(tokenizer.content))
    write_json(folder / RECORD, tokenizer.describe())
    return tokenizer


def load_tokenizer(described: dict[str, Any], folder: Path) -> Tokenizer:
    """Return the tokenizer that its `describe` called `described`; the file of a learned one is in `folder`.

    Raises:
        ValueError: the file is missing, or is another; one sentence that says which.
    """
    name = described.get("name")
    if name == "bytes":
        return Tokenizer(described["unit"])
    if name not in ("words", "sentencepiece"):
        raise ValueError(f"{folder}: expected a tokenizer bytes, words or sentencepiece, found {name!r}")
    path = folder / described["file"]
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: expected the {name} tokenizer of this store, found {error.strerror}") from error
    if (found := hashlib.sha256(content).hexdigest()) != described["sha256"]:
        raise ValueError(f"{path}: expected the {name} tokenizer with sha256 {described['sha256']}, found {found}")
    kind = WordTokenizer if name == "words" else SentencepieceTokenizer
    tokenizer = kind(content, described["settings"])
    if tokenizer.vocabulary != described["vocabulary"]:
        expected = f"a vocabulary of {described['vocabulary']:,}"
        raise ValueError(f"{path}: expected {expected}, found {tokenizer.vocabulary:,}")
    return tokenizer
