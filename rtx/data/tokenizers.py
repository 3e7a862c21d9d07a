"""Text <-> token ids: bytes, words, or subwords; the last two are learned from split train and kept in a file."""

import contextlib
import hashlib
import io
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np

from rtx.data.sets import Report
from rtx.disk import read_file, replace_file, write_json
from rtx.errors import UserError
from rtx.settings.schema import DataConfig

RECORD = "tokenizer.json"
# How much is encoded at once, up to the next blank or newline: subwords of what stays in a cache, words by the 4 MiB.
BLOCK, MEGABYTES = re.compile(rb"(?s).{1,65536}[^ \n]*"), re.compile(rb"(?s).{1,4194304}\S*")
EOS, UNK = b"<eos>", b"<unk>"
BLANKS = bytes.maketrans(b"\t\r\v\f", b"    ")

# What is encoded on its own: a newline, or a blank and what follows it up to the next one. No piece ever spans two of
# them (sentencepiece learns none that does), so encoding them apart loses nothing and can be remembered. Runs without
# a blank are cut after 252 bytes, at the end of a UTF-8 character.
RUN = re.compile(rb" ?[^ \n]{1,252}[\x80-\xbf]{0,3}| |\n")
BLANK = "▁"  # how sentencepiece writes a blank
MARKS = re.compile(
    b"[\t\0\n\r]|" + BLANK.encode()
)  # what stands for something else in the text that it learns from
REMEMBERED = 1 << 19  # runs, about 100 MB


class Tokenizer:
    """Bytes of text <-> unsigned integers below `vocabulary`, here one a byte; `content` was learned by `settings`."""

    name, file, vocabulary = "bytes", "", 256

    def __init__(
        self, unit: str = "byte", content: bytes = b"", settings: dict[str, Any] | None = None
    ) -> None:
        self.unit, self.content, self.settings = unit, content, settings or {}
        self.table = [bytes([value]) for value in range(256)]  # the bytes of each id

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest unsigned type that holds every id."""
        return np.min_scalar_type(self.vocabulary - 1)

    def encode(self, text: bytes) -> np.ndarray:
        """Return the ids of a text, unsigned `[ids]`: those of its parts where it is cut before blanks or newlines."""
        return np.frombuffer(text, dtype=np.uint8)

    def decode(self, ids: Any) -> bytes:
        """Return the bytes that `ids` stand for: a list, array or tensor of integers."""
        values = np.asarray(ids, dtype=np.int64)
        assert values.size == 0 or (values.min() >= 0 and values.max() < self.vocabulary), (
            "ids beyond the vocabulary"
        )
        return b"".join(map(self.table.__getitem__, values.tolist()))

    def describe(self) -> dict[str, Any]:
        """Return name, unit and vocabulary; of a learned one also settings, file and sha256; JSON values."""
        said = {"name": self.name, "unit": self.unit, "vocabulary": self.vocabulary}
        kept = {
            "settings": self.settings,
            "file": self.file,
            "sha256": hashlib.sha256(self.content).hexdigest(),
        }
        return said | (kept if self.content else {})


class WordTokenizer(Tokenizer):
    """One id per word between blanks, one (`<eos>`) per newline; words that are not in the vocabulary: `<unk>`.

    Decoding writes a blank before every word and newline, as Wikitext has them. `content` has a word a line, by id.
    """

    name, file = "words", "words.txt"

    def __init__(self, content: bytes, settings: dict[str, Any]) -> None:
        super().__init__("word", content, settings)
        words = content.split(b"\n")[:-1]
        if not all(0 <= settings[key] < len(words) for key in ("eos", "unk")):
            raise ValueError(f"its settings are of another file: {settings}")
        words[settings["eos"]] = b"\n"  # which no word between blanks can be
        self.vocabulary, self.table = len(words), [b" " + word for word in words]
        self.ids = {word: number for number, word in enumerate(words)}

    def encode(self, text: bytes) -> np.ndarray:
        known, unk = self.ids.get, repeat(self.settings["unk"])
        found = [
            np.fromiter(map(known, words, unk), self.dtype)[places]
            for words, places in words_of(text)
        ]
        return np.concatenate([np.empty(0, self.dtype), *found])


def words_of(text: bytes) -> Iterator[tuple[list[bytes], np.ndarray]]:
    """Yield, for some megabytes of a text, words, newlines among them, and which of these stands where."""
    from pyarrow import array, compute, large_binary

    for block in MEGABYTES.findall(text):
        spaced = block.translate(BLANKS).replace(b"\n", b" \n ")
        if len(spaced) < 1 << 16:  # pyarrow's calls would take longer than what they save
            some = list(filter(None, spaced.split(b" ")))
            yield some, np.arange(len(some))
        else:  # each word is looked up once, however often it stands there
            row = array([spaced], large_binary())
            words = compute.call_function(
                "split_pattern", [row], compute.SplitPatternOptions(" ")
            ).flatten()
            words = words.filter(
                compute.call_function("not_equal", [words, b""])
            ).dictionary_encode()
            yield words.dictionary.to_pylist(), words.indices.to_numpy()


def learn_words(texts: Iterable[bytes], options: str, report: Report) -> WordTokenizer:
    """Return the tokenizer of all words in `texts`, by falling count, then by their bytes; UserError for none."""
    counts: Counter[bytes] = Counter()
    for words, places in chain.from_iterable(map(words_of, texts)):
        for word, count in zip(words, np.bincount(places).tolist(), strict=True):
            counts[word] += count
    total, newlines = counts.total(), counts.pop(b"\n", 0)
    if not counts:
        raise UserError(
            f"{options}: expected words in the training split, found none; use data.tokenizer=bytes"
        )
    entries = [*((-count, word, word) for word, count in counts.items()), (-newlines, b"\n", EOS)]
    entries = sorted(entries) + ([] if UNK in counts else [(0, UNK, UNK)])
    words = [word for _, word, _ in entries]
    settings = {
        "words": total,
        "eos": words.index(b"\n"),
        "unk": words.index(UNK),
        "unk_added": UNK not in counts,
    }
    report(
        f"{options}: vocabulary of {len(words):,} words with <eos> and <unk>, from {total:,} in split train"
    )
    return WordTokenizer(b"".join(spelt + b"\n" for _, _, spelt in entries), settings)


class SentencepieceTokenizer(Tokenizer):
    """Subwords learned by byte-pair encoding, exact on any bytes: each id stands for fixed ones.

    A newline, and a run that its ids do not spell (invalid UTF-8, U+2581), is made of single bytes.
    """

    name, file = "sentencepiece", "sentencepiece.model"

    def __init__(self, content: bytes, settings: dict[str, Any]) -> None:
        from sentencepiece import SentencePieceProcessor

        super().__init__("subword", content, settings)
        self.model = SentencePieceProcessor(model_proto=content)
        self.vocabulary = self.model.get_piece_size()
        pieces: list[str] = self.model.id_to_piece(list(range(self.vocabulary)))
        self.table = [piece.replace(BLANK, " ").encode() for piece in pieces]
        self.table[self.model.unk_id()] = (
            "\ufffd".encode()
        )  # never in encoded text; a model may still choose it
        self.bytes = [self.model.piece_to_id(f"<0x{value:02X}>") for value in range(256)]
        for value, number in enumerate(self.bytes):
            self.table[number] = bytes([value])
        self.memo: dict[bytes, bytes] = {}

    def encode(self, text: bytes) -> np.ndarray:
        found, dtype = [], self.dtype
        for block in BLOCK.findall(text):
            runs = RUN.findall(block)
            if len(self.memo) > REMEMBERED:
                self.memo.clear()
            new = [run for run in set(runs) if run not in self.memo]
            for run, spelt in zip(new, self.model.encode(new), strict=True):
                exact = b"".join(map(self.table.__getitem__, spelt)) == run
                self.memo[run] = np.array(
                    spelt if exact else [self.bytes[byte] for byte in run], dtype
                ).tobytes()
            found.append(b"".join(map(self.memo.__getitem__, runs)))
        return np.frombuffer(b"".join(found), dtype)


def learn_subwords(
    texts: Iterable[bytes], vocabulary: int, sample: int, options: str, report: Report
) -> SentencepieceTokenizer:
    """Return the tokenizer of `vocabulary` ids learned from `sample` bytes of `texts`; UserError if it does not fit."""
    from sentencepiece import SentencePieceTrainer

    kept, total = even_sample(texts, sample)
    size, model = sum(map(len, kept)), io.BytesIO()
    report(
        f"{options}: learning {vocabulary:,} subwords from {size:,} of {total:,} bytes of split train"
    )
    counts = Counter(chain.from_iterable(map(RUN.findall, kept)))
    fit = {
        x: n
        for x, n in counts.items()
        if not MARKS.search(x) and x.decode(errors="ignore").encode() == x
    }
    rows = (b"%s\t%d" % row for row in sorted(fit.items(), key=lambda row: (-row[1], row[0])))
    if not fit:
        raise UserError(
            f"{options}: expected text in the training split, found none in {size:,} bytes"
        )
    kind: Any = {
        "model_type": "bpe",
        "byte_fallback": True,
        "character_coverage": 0.9995,
        "required_chars": BLANK,
    }
    exact: Any = {
        "normalization_rule_name": "identity",
        "add_dummy_prefix": False,
        "remove_extra_whitespaces": False,
    }
    exact |= {
        "input_format": "tsv",
        "max_sentence_length": 1024,
        "unk_id": 0,
        "bos_id": -1,
        "eos_id": -1,
        "pad_id": -1,
    }
    kind |= {
        "vocab_size": vocabulary,
        "num_threads": 1,
        "minloglevel": 3,
    }  # threads stand in the model, and its sha256
    try:
        SentencePieceTrainer.train(sentence_iterator=rows, model_writer=model, **kind, **exact)
    except RuntimeError as error:
        reason = str(error).rpartition("] ")[2].strip()  # it names the vocabulary that would fit
        found = f"{size:,} bytes of text cannot make so many subwords, or so few: {reason}"
        raise UserError(
            f"data.vocabulary={vocabulary}: {found} (or use data.tokenizer=bytes)"
        ) from error
    return SentencepieceTokenizer(
        model.getvalue(), {"kind": "bpe", "sample": sample, "sampled": size, "from": total}
    )


def even_sample(texts: Iterable[bytes], size: int) -> tuple[list[bytes], int]:
    """Return pieces from all over `texts` (half of `size` bytes or more, or all), and the bytes of all pieces."""
    kept: list[bytes] = []
    total, step, length = 0, 1, max(256, min(1 << 16, size // 256))
    for number, piece in enumerate((piece for text in texts for piece in samples(text, length)), 1):
        total += len(piece)
        if number % step == 0:
            kept.append(piece[:size])
        if sum(map(len, kept)) > size:
            kept, step = (
                kept[1::2],
                2 * step,
            )  # every second piece goes, and of the following ones, too
    return kept, total


def samples(text: bytes, length: int) -> Iterator[bytes]:
    """Yield a text in pieces of at most `length` bytes, without the runs that their borders cut, if it has blanks."""
    for start in range(0, len(text), length):
        piece = text[start : start + length]
        piece = piece if start + length >= len(text) else piece.rpartition(b" ")[0] or piece
        yield b"".join(piece.partition(b" ")[1:]) or piece if start else piece


def encode_text(tokenizer: Tokenizer, text: bytes | str) -> np.ndarray:
    """Return the ids of `text`, int64 `[units]`: a str in UTF-8, undecodable bytes (surrogates) as they were."""
    raw = text.encode("utf-8", errors="surrogateescape") if isinstance(text, str) else text
    return tokenizer.encode(raw).astype(np.int64)


def learned(
    data: DataConfig, texts: Iterable[bytes], folder: Path, options: str, report: Report
) -> Tokenizer:
    """Return the tokenizer of words or subwords that is in `folder`, learned from `texts` unless it is finished."""
    with contextlib.suppress(OSError, ValueError):  # missing or half
        return load_tokenizer(json.loads(read_file(folder / RECORD)), folder)
    if data.tokenizer == "words":
        tokenizer: Tokenizer = learn_words(texts, options, report)
    else:
        tokenizer = learn_subwords(texts, data.vocabulary, data.tokenizer_sample, options, report)
    replace_file(folder / tokenizer.file, lambda file: file.write(tokenizer.content))
    write_json(folder / RECORD, tokenizer.describe())
    return tokenizer


def load_tokenizer(described: dict[str, Any], folder: Path) -> Tokenizer:
    """Return the tokenizer that its `describe` called `described`; ValueError where `folder` lacks its file."""
    if described["name"] == "bytes":
        return Tokenizer(described["unit"])
    kind = {"words": WordTokenizer, "sentencepiece": SentencepieceTokenizer}[described["name"]]
    path = folder / kind.file
    content = read_file(path) if path.is_file() else b""
    if (found := hashlib.sha256(content).hexdigest()) != described["sha256"]:
        wanted = f"the {described['name']} tokenizer with sha256 {described['sha256']}"
        raise ValueError(f"{path}: expected {wanted}, found {found if content else 'nothing'}")
    return kind(content, described["settings"])
