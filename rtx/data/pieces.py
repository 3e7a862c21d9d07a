"""Subwords of sentencepiece, exact on any bytes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np

from rtx.data.disk import Report
from rtx.data.sample import count_runs, even_sample
from rtx.data.source import Document, Part
from rtx.data.tokenizers import TrainedTokenizer, blocks_at_blanks, unsigned
from rtx.errors import UserError

# What is encoded on its own: a newline, or a blank and what follows it up to the next one. No piece ever spans two of
# them (sentencepiece learns none that does), so encoding them apart loses nothing, can be remembered, and is the same
# however a document is cut. Runs without a blank are cut after 252 bytes, at the end of a UTF-8 character.
RUN = re.compile(rb" ?[^ \n]{1,252}[\x80-\xbf]{0,3}| |\n")
LONGEST = 256  # bytes a run has at the most
BLANK = "▁"  # how sentencepiece writes a blank
FEWEST = 300  # the smallest data.vocabulary; 257 ids are bytes and <unk>
REMEMBERED = 1 << 19  # runs, about 100 MB


class SentencepieceTokenizer(TrainedTokenizer):
    """Subwords learned by byte-pair encoding; what they cannot spell, and every newline, is made of single bytes.

    Text -> ids -> text is exact for any bytes: each id stands for fixed bytes, and a run whose ids do not spell it
    (invalid UTF-8, U+2581) is encoded byte by byte.
    """

    name = "sentencepiece"
    unit = "subword"
    file = "sentencepiece.model"

    def __init__(self, content: bytes, settings: dict[str, Any]) -> None:
        """Take a trained model.

        Args:
            content: sentencepiece's own file, with byte_fallback.
            settings: what it was trained with, for people to read.
        """
        from sentencepiece import SentencePieceProcessor

        super().__init__(content, settings)
        self._model = SentencePieceProcessor(model_proto=content)
        self.vocabulary = self._model.get_piece_size()
        pieces: list[str] = self._model.id_to_piece(list(range(self.vocabulary)))
        self._table = [piece.replace(BLANK, " ").encode() for piece in pieces]
        self._bytes = [self._model.piece_to_id(f"<0x{value:02X}>") for value in range(256)]
        for value, number in enumerate(self._bytes):
            self._table[number] = bytes([value])
        self._table[self._model.unk_id()] = "\ufffd".encode()  # never in encoded text; a model may still choose it
        self._dtype = unsigned(self.vocabulary)
        self._words = _Remembered(self)
        self._heads: dict[bytes, bytes] = {b"": b""}
        self._newline = self._packed([self._bytes[10]])

    @classmethod
    def train(
        cls, parts: Sequence[Part], vocabulary: int, sample: int, options: str, report: Report
    ) -> SentencepieceTokenizer:
        """Return the tokenizer of exactly `vocabulary` ids learned from `sample` bytes taken evenly from `parts`.

        Byte-pair encoding, not the unigram model, which takes some ten times as long. It is given each different run of
        the sample once, with its count, and always learns the same model. 98,000 subwords of a sample of 100 MB take 22
        s of one core and 0.9 GB of memory, whatever the size of the split.

        Args:
            options: the command-line options that ask for the data set, for messages.

        Raises:
            UserError: the sample is too small, or too varied, for the vocabulary; the message says what would fit.
        """
        blocks, total = even_sample(parts, sample)
        size = sum(len(block.content) for block in blocks)
        report(f"{options}: learning {vocabulary:,} subwords from {size:,} of {total:,} bytes of split train")
        counts = count_runs(blocks, _runs)
        del blocks
        content = _learn(counts, vocabulary, size, options)
        settings = {"kind": "bpe", "sample": sample, "sampled": size, "from": total}
        return cls(content, settings)

    def _encode(self, document: Document) -> Iterator[np.ndarray]:
        take = self._words.__getitem__
        for block in blocks_at_blanks(document, _whole_runs):
            if block:
                words = block.split(b" ")  # every one but the first has a blank before it
                ids = self._head(words[0]) + b"".join(map(take, islice(words, 1, None)))
                yield np.frombuffer(ids, dtype=self._dtype)

    def _head(self, text: bytes) -> bytes:
        """Return the packed ids of a text without blanks: lines of one run each, the first ones after a newline."""
        return self._newline.join(map(self._bare, text.split(b"\n")))

    def _bare(self, word: bytes) -> bytes:
        """Return the packed ids of a word at the start of a line."""
        if (ids := self._heads.get(word)) is None:
            ids = self._spelt(word)
            if len(self._heads) < REMEMBERED // 4 and len(word) <= LONGEST:
                self._heads[word] = ids
        return ids

    def _spelt(self, text: bytes) -> bytes:
        """Return the packed ids of a text without newlines, and without blanks but for one at its start."""
        return b"".join(self._packed(self._run(run)) for run in _runs(text))

    def _run(self, run: bytes) -> list[int]:
        try:
            ids = self._model.encode(run.decode())
        except UnicodeDecodeError:
            ids = []
        if b"".join([self._table[number] for number in ids]) != run:
            ids = [self._bytes[value] for value in run]
        return ids

    def _packed(self, ids: list[int]) -> bytes:
        return np.array(ids, dtype=self._dtype).tobytes()


class _Remembered(dict[bytes, bytes]):
    """Packed ids of words that stand after a blank, worked out at their first use; the first `REMEMBERED` are kept."""

    def __init__(self, tokenizer: SentencepieceTokenizer) -> None:
        self.tokenizer = tokenizer

    def __missing__(self, word: bytes) -> bytes:
        end = word.find(b"\n")
        if end >= 0:  # a line's last word, and what follows it up to the next blank: seldom the same twice
            return self[word[:end]] + self.tokenizer._newline + self.tokenizer._head(word[end + 1 :])
        ids = self.tokenizer._spelt(b" " + word)
        if len(self) < REMEMBERED and len(word) <= LONGEST:
            self[word] = ids
        return ids


def _runs(text: bytes) -> list[bytes]:
    return RUN.findall(text)


def _whole_runs(text: bytes) -> int:
    """Return the length of the runs at the start of `text` that stay what they are whatever follows it."""
    end = 0
    for run in RUN.finditer(text):
        if run.start() + LONGEST > len(text):
            break
        end = run.end()
    return end


def _learn(counts: dict[bytes, int], vocabulary: int, size: int, options: str) -> bytes:
    """Return the model file of sentencepiece for the runs in `counts`."""
    import io

    from sentencepiece import SentencePieceTrainer

    rows = _rows(counts)
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
            max_sentence_length=4 * LONGEST,
            unk_id=0,
            bos_id=-1,
            eos_id=-1,
            pad_id=-1,
            num_threads=1,  # it stands in the model, and so in its sha256
            minloglevel=3,
        )
    except RuntimeError as error:
        raise _refused(error, vocabulary, size, options) from error
    return model.getvalue()


def _rows(counts: dict[bytes, int]) -> list[str]:
    """Return "run<TAB>count" for all runs that sentencepiece can learn from, the most frequent first."""
    rows = []
    for run, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        try:
            text = run.decode()
        except UnicodeDecodeError:
            continue
        if not any(mark in text for mark in ("\t", "\0", "\n", "\r", BLANK)):
            rows.append(f"{text}\t{count}")
    return rows


def _refused(error: RuntimeError, vocabulary: int, size: int, options: str) -> UserError:
    """Say in one line which vocabulary would fit, from what sentencepiece says."""
    if largest := re.search(r"value <= (\d+)", str(error)):
        use = f"data.vocabulary={largest[1]}" if int(largest[1]) >= FEWEST else "data.tokenizer=bytes"
        return UserError(
            f"data.vocabulary={vocabulary}: expected at most {int(largest[1]):,} subwords of a sample of {size:,} "
            f"bytes; use {use}, or more text (data.tokenizer_sample)"
        )
    if smallest := re.search(r"required_chars\. (\d+) vs (\d+)", str(error)):
        return UserError(
            f"data.vocabulary={vocabulary}: expected at least {int(smallest[2]):,}, for 256 bytes and every character "
            f"that is not rare in the sample of {size:,} bytes; use data.vocabulary={int(smallest[2]) + 1} or more"
        )
    reason = " ".join(str(error).split())
    return UserError(f"{options}: sentencepiece cannot learn {vocabulary:,} subwords of {size:,} bytes: {reason}")
