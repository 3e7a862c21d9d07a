"""Text <-> token ids: bytes, words, or subwords.

Words and subwords are learned from split train and written to a file, or are those of a model that
exists.
"""

import contextlib
import hashlib
import io
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np

from rtx.data.sets import Report
from rtx.disk import is_file_inside, read_inside, read_named, write_inside, write_json
from rtx.errors import UserError, shorten
from rtx.paths import expand_path
from rtx.settings.schema import DataConfig

RECORD = "tokenizer.json"
LARGEST_RECORD = 1 << 20
LARGEST_MODEL = 1 << 28
"""The most bytes of the record and of the file of a tokenizer."""
EOS = b"<eos>"
UNK = b"<unk>"
UNKNOWN = "\N{REPLACEMENT CHARACTER}".encode()
WORD_BLOCK = re.compile(rb"(?s).{1,4194304}\S*")
"""Text whose words are found at once: 4 MiB, up to the next blank or newline."""
FEW_BYTES = 1 << 16
"""Below this size, pyarrow's calls take longer than they save."""
BLANKS = bytes.maketrans(b"\t\r\v\f", b"    ")

SUBWORD_BLOCK = re.compile(rb"(?s).{1,65536}[^ \n]*")
"""Text whose subwords are found at once: what fits the processor's cache, up to the next blank."""
RUN = re.compile(rb" ?[^ \n]{1,252}[\x80-\xbf]{0,3}| |\n")
"""A part of a text that is encoded separately: a newline, or a blank with what follows it.

No subword spans two of them, because sentencepiece learns none that does. So the result is that of
the whole text, and that of a run can be cached. Runs without a blank are cut after 252 bytes, at
the end of a UTF-8 character.
"""
BLANK = "▁"
"""How sentencepiece writes a blank."""
SPECIAL = re.compile(b"[\t\0\n\r]|" + BLANK.encode())
"""Characters with another meaning in what sentencepiece learns from."""
LARGEST_CACHE = 1 << 19
"""Runs in the cache of an encoder, about 100 MB."""
LONGEST_LINE = 1024
LONGEST_PIECE = 1 << 16
SHORTEST_PIECE = 256
PIECES = 256
"""A sample has about this many pieces of text, within the limits of their length."""


class Tokenizer:
    """Bytes of text <-> unsigned integers below `vocabulary`; in this class one a byte."""

    name = "bytes"
    file = ""
    """The name of the file that learned tokenizers need."""
    vocabulary = 256

    def __init__(
        self,
        unit: str = "byte",
        content: bytes = b"",
        settings: dict[str, Any] | None = None,
    ) -> None:
        self.unit = unit
        self.content = content
        """The content of `file`."""
        self.settings = settings or {}
        self.table = [bytes([value]) for value in range(256)]
        """The bytes of each id."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest unsigned type that holds every id."""
        return np.min_scalar_type(self.vocabulary - 1)

    def encode(self, text: bytes) -> np.ndarray:
        """Return the ids of a text, unsigned `[ids]`.

        They are those of its parts where it is cut before blanks or newlines.
        """
        return np.frombuffer(text, dtype=np.uint8)

    def decode(self, ids: Any) -> bytes:
        """Return the bytes of `ids`: a list, array or tensor of integers."""
        values = np.asarray(ids, dtype=np.int64)
        if values.size:
            assert values.min() >= 0, "a negative id"
            assert values.max() < self.vocabulary, "ids beyond the vocabulary"
        return b"".join([self.table[value] for value in values.tolist()])

    def describe(self) -> dict[str, Any]:
        """Return name, unit and vocabulary, and how a learned one was learned, as JSON values."""
        described = {"name": self.name, "unit": self.unit, "vocabulary": self.vocabulary}
        if self.content:
            described["settings"] = self.settings
            described["file"] = self.file
            described["sha256"] = hashlib.sha256(self.content).hexdigest()
        return described


class WordTokenizer(Tokenizer):
    """An id for each word between blanks and one (`<eos>`) for each newline; else `<unk>`.

    Decoding writes a blank before every word and newline, as Wikitext has them. `content` has a
    word a line, by id.
    """

    name = "words"
    file = "words.txt"

    def __init__(self, content: bytes, settings: dict[str, Any]) -> None:
        super().__init__("word", content, settings)
        words = content.split(b"\n")[:-1]
        if not all(0 <= settings[key] < len(words) for key in ("eos", "unk")):
            raise ValueError(f"its settings are of another file: {settings}")
        # No word between blanks is a newline.
        words[settings["eos"]] = b"\n"
        self.vocabulary = len(words)
        self.table = [b" " + word for word in words]
        self.ids = {word: number for number, word in enumerate(words)}

    def encode(self, text: bytes) -> np.ndarray:
        blocks = [np.empty(0, self.dtype)]
        for words, indices in words_of(text):
            ids = map(self.ids.get, words, repeat(self.settings["unk"]))
            blocks.append(np.fromiter(ids, self.dtype)[indices])
        return np.concatenate(blocks)


def words_of(text: bytes) -> Iterator[tuple[list[bytes], np.ndarray]]:
    """Yield, for blocks of a text, words with newlines among them, and the order of their indices.

    A large block has each of its words once.
    """
    from pyarrow import array, compute, large_binary

    for block in WORD_BLOCK.findall(text):
        spaced = block.translate(BLANKS).replace(b"\n", b" \n ")
        if len(spaced) < FEW_BYTES:
            words = [word for word in spaced.split(b" ") if word]
            yield words, np.arange(len(words))
        else:
            row = array([spaced], large_binary())
            blank = compute.SplitPatternOptions(" ")
            column = compute.call_function("split_pattern", [row], blank).flatten()
            is_word = compute.call_function("not_equal", [column, b""])
            column = column.filter(is_word).dictionary_encode()
            yield column.dictionary.to_pylist(), column.indices.to_numpy()


def learn_words(texts: Iterable[bytes], options: str, report: Report) -> WordTokenizer:
    """Return the tokenizer of all words in `texts`, by falling count, then by their bytes.

    UserError where there are none.
    """
    counts = count_words(texts)
    total = counts.total()
    newlines = counts.pop(b"\n", 0)
    if not counts:
        advice = "use data.tokenizer=bytes"
        raise UserError(f"{options}: expected words in the training split, found none; {advice}")
    # In the order of ids: falling count, then the bytes in a text.
    entries = [(-count, word) for word, count in counts.items()]
    entries.append((-newlines, b"\n"))
    words = [word for _, word in sorted(entries)]
    has_unk = UNK in counts
    if not has_unk:
        words.append(UNK)
    eos = words.index(b"\n")
    settings = {
        "words": total,
        "eos": eos,
        "unk": words.index(UNK),
        "unk_added": not has_unk,
    }
    size = f"{len(words):,} words with <eos> and <unk>, from {total:,} in split train"
    report(f"{options}: vocabulary of {size}")
    words[eos] = EOS
    return WordTokenizer(b"".join([word + b"\n" for word in words]), settings)


def count_words(texts: Iterable[bytes]) -> Counter[bytes]:
    """Return how often each word occurs, and (as b"\\n") each newline."""
    counts: Counter[bytes] = Counter()
    for text in texts:
        for words, indices in words_of(text):
            for word, count in zip(words, np.bincount(indices).tolist(), strict=True):
                counts[word] += count
    return counts


class SentencepieceTokenizer(Tokenizer):
    """Subwords learned by byte-pair encoding, exact on any bytes: each id has fixed bytes.

    A newline, and a run that its ids do not spell (invalid UTF-8, U+2581), is made of single bytes.
    """

    name = "sentencepiece"
    file = "sentencepiece.model"

    def __init__(self, content: bytes, settings: dict[str, Any]) -> None:
        from sentencepiece import SentencePieceProcessor

        super().__init__("subword", content, settings)
        self.model = SentencePieceProcessor(model_proto=content)
        self.vocabulary = self.model.get_piece_size()
        pieces: list[str] = self.model.id_to_piece(list(range(self.vocabulary)))
        self.table = [piece.replace(BLANK, " ").encode() for piece in pieces]
        # Encoded text never has this id, but a model may choose it.
        self.table[self.model.unk_id()] = UNKNOWN
        self.byte_ids = [self.model.piece_to_id(f"<0x{value:02X}>") for value in range(256)]
        for value, number in enumerate(self.byte_ids):
            self.table[number] = bytes([value])
        self.cache: dict[bytes, bytes] = {}
        """The ids of runs, as the bytes of arrays."""

    def encode(self, text: bytes) -> np.ndarray:
        encoded: list[bytes] = []
        for block in SUBWORD_BLOCK.findall(text):
            runs = RUN.findall(block)
            self.fill_cache(set(runs))
            encoded += [self.cache[run] for run in runs]
        return np.frombuffer(b"".join(encoded), self.dtype)

    def fill_cache(self, runs: set[bytes]) -> None:
        """Encode the runs that are not in the cache."""
        if len(self.cache) > LARGEST_CACHE:
            self.cache.clear()
        new = [run for run in runs if run not in self.cache]
        for run, ids in zip(new, self.model.encode(new), strict=True):
            is_exact = b"".join([self.table[number] for number in ids]) == run
            if not is_exact:
                ids = [self.byte_ids[value] for value in run]
            self.cache[run] = np.array(ids, self.dtype).tobytes()


class PretrainedTokenizer(Tokenizer):
    """Byte-level subwords of a tokenizer.json, as of GPT-2: each id has fixed bytes.

    A text is encoded whole, as the package `tokenizers` does, without special tokens around it. A
    line that is no UTF-8, or that its ids do not spell, is made of single bytes. A byte that has no
    subword is read as U+FFFD, where the package would leave it out. `content` is the
    tokenizer.json.
    """

    name = "pretrained"
    file = "pretrained.json"

    def __init__(self, content: bytes, settings: dict[str, Any]) -> None:
        self.vocabulary = settings["vocabulary"]
        super().__init__("subword", content, settings)
        self.model = byte_level_model(content)
        letters = byte_of_letter()
        self.table = [b""] * self.vocabulary
        for word, number in self.model.get_vocab(with_added_tokens=False).items():
            self.table[number] = bytes([letters[letter] for letter in word])
        for number, added in self.model.get_added_tokens_decoder().items():
            self.table[number] = added.content.encode()
        ids = {word: number for number, word in enumerate(self.table)}
        unknown = [ids[bytes([value])] for value in UNKNOWN]
        self.ids_of_byte = [unknown] * 256
        for value in range(256):
            if bytes([value]) in ids:
                self.ids_of_byte[value] = [ids[bytes([value])]]

    def encode(self, text: bytes) -> np.ndarray:
        ids = self.exact_ids(text)
        if ids is None:
            ids = []
            for line in text.splitlines(keepends=True):
                ids += self.exact_ids(line) or self.ids_of_bytes(line)
        return np.array(ids, self.dtype)

    def ids_of_bytes(self, line: bytes) -> list[int]:
        """Return the ids of a line, byte by byte."""
        ids = []
        for value in line:
            ids += self.ids_of_byte[value]
        return ids

    def exact_ids(self, text: bytes) -> list[int] | None:
        """Return the ids of a text; None where the model has none that spell it."""
        try:
            ids = self.model.encode(text.decode(), add_special_tokens=False).ids
        except UnicodeDecodeError:
            return None
        is_exact = b"".join([self.table[number] for number in ids]) == text
        return ids if is_exact else None


def byte_of_letter() -> dict[str, int]:
    """Return the byte that each letter of byte-level subwords stands for.

    Bytes that print as a character of Latin-1 are that character. The others, in order, are the
    characters from 256 on (Radford et al. 2019, the released code of GPT-2).
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [value for value in range(256) if value not in printable]
    letters = {chr(value): value for value in printable}
    for number, value in enumerate(others):
        letters[chr(256 + number)] = value
    return letters


def byte_level_model(content: bytes) -> Any:
    """Return the object of the package `tokenizers` for a tokenizer.json.

    Raises:
        ValueError: the package is missing, or the file is damaged, or its subwords are not those
            of bytes.
    """
    try:
        import tokenizers
    except ImportError:
        raise ValueError("needs the package tokenizers: pip install 'rtx[hf]'") from None
    try:
        model = tokenizers.Tokenizer.from_str(content.decode())
    except Exception as error:
        # The package raises no narrower class.
        raise ValueError(f"no tokenizer.json: {shorten(str(error))}") from error
    letters = byte_of_letter()
    words = model.get_vocab(with_added_tokens=False)
    needed = {letter for letter, value in letters.items() if value in UNKNOWN}
    is_of_bytes = needed <= words.keys() and letters.keys() >= set("".join(words))
    if not is_of_bytes or not isinstance(model.decoder, tokenizers.decoders.ByteLevel):
        kind = "as of GPT-2, Llama 3 and SmolLM2"
        raise ValueError(f"its subwords are not of bytes, {kind}; rtx reads no others")
    # Texts may be longer than the model's context.
    model.no_truncation()
    model.no_padding()
    return model


def read_pretrained(path: str) -> PretrainedTokenizer:
    """Return the tokenizer of a tokenizer.json, or of a folder that has one.

    Raises:
        UserError: there is none, or rtx does not read it.
    """
    where = f"data.tokenizer_path={path}"
    file = expand_path(path, "data.tokenizer_path")
    if file.is_dir():
        file = file / "tokenizer.json"
    try:
        content = read_named(file, LARGEST_MODEL)
        numbers = [*byte_level_model(content).get_vocab().values()]
        settings = {"vocabulary": max(numbers) + 1}
        return PretrainedTokenizer(content, settings)
    except OSError as error:
        raise UserError(f"{where}: expected a tokenizer.json: {shorten(str(error))}") from error
    except ValueError as error:
        raise UserError(f"{where}: {error}") from error


def learn_subwords(
    texts: Iterable[bytes],
    vocabulary: int,
    sample: int,
    options: str,
    report: Report,
) -> SentencepieceTokenizer:
    """Return the tokenizer of `vocabulary` ids learned from `sample` bytes of `texts`.

    UserError where these are too few, or too many, for the text.
    """
    pieces, total = even_sample(texts, sample)
    size = sum(map(len, pieces))
    report(
        f"{options}: learning {vocabulary:,} subwords from {size:,} of {total:,} bytes "
        "of split train"
    )
    counts = count_runs(pieces)
    if not counts:
        raise UserError(
            f"{options}: expected text in the training split, found none in {size:,} bytes"
        )
    try:
        content = train_sentencepiece(counts, vocabulary)
    except RuntimeError as error:
        # The message names the vocabulary that would fit.
        reason = str(error).rpartition("] ")[2].strip()
        problem = f"{size:,} bytes of text cannot make so many subwords, or so few: {reason}"
        advice = "or use data.tokenizer=bytes"
        raise UserError(f"data.vocabulary={vocabulary}: {problem} ({advice})") from error
    settings = {"kind": "bpe", "sample": sample, "sampled": size, "from": total}
    return SentencepieceTokenizer(content, settings)


def count_runs(pieces: Iterable[bytes]) -> Counter[bytes]:
    """Return how often each run occurs that sentencepiece can learn from."""
    counts: Counter[bytes] = Counter()
    for piece in pieces:
        counts.update(RUN.findall(piece))
    for run in list(counts):
        is_utf8 = run.decode(errors="ignore").encode() == run
        if SPECIAL.search(run) or not is_utf8:
            del counts[run]
    return counts


def train_sentencepiece(counts: Counter[bytes], vocabulary: int) -> bytes:
    """Return a model file that sentencepiece learns; RuntimeError where `vocabulary` misfits."""
    from sentencepiece import SentencePieceTrainer

    ordered = sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))
    lines = (b"%s\t%d" % entry for entry in ordered)
    model = io.BytesIO()
    options: dict[str, Any] = {
        "model_type": "bpe",
        "vocab_size": vocabulary,
        "byte_fallback": True,
        "character_coverage": 0.9995,
        "required_chars": BLANK,
        "normalization_rule_name": "identity",
        "add_dummy_prefix": False,
        "remove_extra_whitespaces": False,
        "input_format": "tsv",
        "max_sentence_length": LONGEST_LINE,
        "unk_id": 0,
        "bos_id": -1,
        "eos_id": -1,
        "pad_id": -1,
        # The model file has the number of threads, which must not change its sha256.
        "num_threads": 1,
        "minloglevel": 3,
    }
    SentencePieceTrainer.train(sentence_iterator=lines, model_writer=model, **options)
    return model.getvalue()


def even_sample(texts: Iterable[bytes], size: int) -> tuple[list[bytes], int]:
    """Return pieces from all over `texts`, and the bytes of all pieces.

    The pieces have half of `size` bytes or more, or are all.
    """
    pieces: list[bytes] = []
    total = 0
    step = 1
    length = max(SHORTEST_PIECE, min(LONGEST_PIECE, size // PIECES))
    number = 0
    for text in texts:
        for piece in samples(text, length):
            number += 1
            total += len(piece)
            if number % step == 0:
                pieces.append(piece[:size])
            if sum(map(len, pieces)) > size:
                # Every second piece is dropped, of the following ones, too.
                pieces = pieces[1::2]
                step *= 2
    return pieces, total


def samples(text: bytes, length: int) -> Iterator[bytes]:
    """Yield a text in pieces of at most `length` bytes.

    If a piece has blanks, the runs that its borders cut are left out.
    """
    for start in range(0, len(text), length):
        piece = text[start : start + length]
        is_last = start + length >= len(text)
        if not is_last:
            piece = piece.rpartition(b" ")[0] or piece
        if start > 0:
            _, blank, rest = piece.partition(b" ")
            piece = blank + rest or piece
        yield piece


KINDS: dict[str, type[WordTokenizer | SentencepieceTokenizer | PretrainedTokenizer]] = {
    kind.name: kind for kind in (WordTokenizer, SentencepieceTokenizer, PretrainedTokenizer)
}
"""Tokenizers that have a file, by their names."""


def encode_text(tokenizer: Tokenizer, text: bytes | str) -> np.ndarray:
    """Return the ids of `text`, int64 `[ids]`: of a str in UTF-8, surrogates as their bytes."""
    if isinstance(text, str):
        text = text.encode("utf-8", errors="surrogateescape")
    return tokenizer.encode(text).astype(np.int64)


def learned(
    data: DataConfig,
    texts: Iterable[bytes],
    folder: Path,
    options: str,
    report: Report,
) -> Tokenizer:
    """Return the tokenizer of words or subwords in `folder`, learned where it is not finished.

    One of a model that exists is copied there.
    """
    root = folder.parent
    record = f"{folder.name}/{RECORD}"
    # A missing or unfinished record means that there is none.
    with contextlib.suppress(OSError, ValueError):
        return load_tokenizer(json.loads(read_inside(root, record, LARGEST_RECORD)), folder)
    if data.tokenizer == "pretrained":
        assert data.tokenizer_path is not None
        tokenizer: Tokenizer = read_pretrained(data.tokenizer_path)
    elif data.tokenizer == "words":
        tokenizer = learn_words(texts, options, report)
    else:
        tokenizer = learn_subwords(texts, data.vocabulary, data.tokenizer_sample, options, report)
    write_inside(root, f"{folder.name}/{tokenizer.file}", tokenizer.content)
    write_json(root, record, tokenizer.describe())
    return tokenizer


def load_tokenizer(described: dict[str, Any], folder: Path, *, follow: bool = False) -> Tokenizer:
    """Return the tokenizer whose `describe` returned `described`.

    ValueError where `folder` lacks its file. `follow`: that may be a link, as in the hub's cache.
    """
    name = described["name"]
    if name == "bytes":
        return Tokenizer(described["unit"])
    kind = KINDS[name]
    path = folder / kind.file
    content = b""
    if follow and path.is_file():
        content = read_named(path, LARGEST_MODEL)
    elif is_file_inside(folder, kind.file):
        content = read_inside(folder, kind.file, LARGEST_MODEL)
    actual = hashlib.sha256(content).hexdigest()
    if actual != described["sha256"]:
        expected = f"the {name} tokenizer with sha256 {described['sha256']}"
        if not content:
            actual = "nothing"
        raise ValueError(f"{path}: expected {expected}, found {actual}")
    return kind(content, described["settings"])
