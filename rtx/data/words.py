"""Words between blanks, with `<eos>` for every newline: the units of Wikitext-103."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from rtx.data.disk import Report
from rtx.data.source import Document, Part
from rtx.data.tokenizers import TrainedTokenizer, blocks_at_blanks, unsigned
from rtx.data.workers import run_jobs
from rtx.errors import UserError

NEWLINE = b"\n"  # among words between blanks it cannot stand for anything else
EOS, UNK = b"<eos>", b"<unk>"
BLANKS = bytes.maketrans(b"\t\r\v\f", b"    ")
MOST = 10_000_000  # different words; more are no text, and would not fit in memory
PAYS = 1 << 23  # bytes that other processes could take over, from which on they are worth starting


class WordTokenizer(TrainedTokenizer):
    """One id per word, one (`<eos>`) per newline, blank lines too; words that are not in the vocabulary: `<unk>`.

    Case is kept; a word is what stands between blanks (space, tab, CR, VT, FF). A last line without a newline has no
    `<eos>`. Decoding writes a blank before every word and every newline, which is how the lines of Wikitext look
    (" word word \\n", " \\n"): there only words without an id are lost. In other text runs of blanks, tabs and CR
    become one blank, lines get one at either end, and the newline at the end of a document is as it was.
    """

    name = "words"
    unit = "word"
    file = "words.txt"

    def __init__(self, content: bytes, settings: dict[str, Any]) -> None:
        """Take the vocabulary file's content: a word a line, the number of the line being its id.

        Args:
            content: the file `words.txt`.
            settings: `eos` and `unk`, the ids of the newline and of words without an id; the rest is for people.
        """
        super().__init__(content, settings)
        words = content.split(b"\n")[:-1]
        self.vocabulary = len(words)
        self._table = [b" " + word for word in words]
        self._table[settings["eos"]] = b" \n"
        words[settings["eos"]] = NEWLINE
        self._ids = _Ids(zip(words, range(len(words)), strict=True))
        self._ids.unk = settings["unk"]
        self._dtype = unsigned(self.vocabulary)

    @classmethod
    def train(cls, parts: Sequence[Part], options: str, report: Report, processes: int = 1) -> WordTokenizer:
        """Return the tokenizer of all words in `parts`, ordered by falling count, then by their bytes.

        Args:
            parts: the training split; counted in as many as `processes` processes at once.
            options: the command-line options that ask for the data set, for messages.

        Raises:
            UserError: no words there, or far too many for a text; or the parts cannot be read.
        """
        report(f"{options}: counting the words of {len(parts):,} part{'s' if len(parts) != 1 else ''}")
        counts: Counter[bytes] = Counter()
        for counted in _counted(parts, processes):
            counts.update(counted)
            if len(counts) > MOST:
                raise _too_many(options)
        newlines = counts.pop(NEWLINE, 0)
        if not counts:
            raise UserError(f"{options}: expected words in the training split, found none; use data.tokenizer=bytes")
        total = counts.total() + newlines
        entries = [(word, count, word) for word, count in counts.items()] + [(NEWLINE, newlines, EOS)]
        entries.sort(key=lambda entry: (-entry[1], entry[0]))
        if UNK not in counts:
            entries.append((UNK, 0, UNK))
            report(f"{options}: the training split has no <unk>; one is added for words that only valid and test have")
        places = {word: number for number, (word, _, _) in enumerate(entries)}
        settings = {"words": total, "eos": places[NEWLINE], "unk": places[UNK], "unk_added": UNK not in counts}
        report(f"{options}: vocabulary of {len(entries):,} words with <eos> and <unk>, from {total:,} in split train")
        return cls(b"".join(spelt + b"\n" for _, _, spelt in entries), settings)

    def _encode(self, document: Document) -> Iterator[np.ndarray]:
        take = self._ids.__getitem__
        for block in blocks_at_blanks(document, _overlong):
            words = _words(block)
            if words:
                yield np.fromiter(map(take, words), self._dtype, len(words))


class _Ids(dict[bytes, int]):
    """The ids of words; every other word has that of `<unk>`."""

    unk = 0

    def __missing__(self, word: bytes) -> int:
        return self.unk


def _words(block: bytes) -> list[bytes]:
    """Return the words of a block in order, newlines among them."""
    return list(filter(None, block.translate(BLANKS).replace(b"\n", b" \n ").split(b" ")))


def _counted(parts: Sequence[Part], processes: int) -> Iterable[Counter[bytes]]:
    """Yield the counts of the words of every part, as they come."""
    several = sum(part.size for part in parts) - max((part.size for part in parts), default=0) > PAYS
    for _, counts in run_jobs([(_count, (part,)) for part in parts], processes if several else 1):
        yield counts


def _count(part: Part, advance: Callable[[int], object]) -> Counter[bytes]:
    counts: Counter[bytes] = Counter()
    for document in part.documents():
        for block in blocks_at_blanks(document, _overlong):
            counts.update(_words(block))
            advance(len(block))
        if len(counts) > MOST:
            raise _too_many("data.tokenizer=words")
    return counts


def _overlong(run: bytes) -> int:
    raise UserError(
        f"data.tokenizer=words: expected words between blanks, found {len(run):,} bytes without one (they start with "
        f"{run[:20]!r}); use data.tokenizer=sentencepiece or bytes"
    )


def _too_many(what: str) -> UserError:
    return UserError(
        f"{what}: expected at most {MOST:,} different words, found more; use data.tokenizer=sentencepiece or bytes"
    )
