"""Sets of text, exact to the byte: your files, Python's library, enwik8, Wikitext-103, PG-19."""

from __future__ import annotations

import contextlib
import hashlib
import sysconfig
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

from rtx.data.download import Remote, download
from rtx.data.files import Pieces, files_of, identity_of, rows_of, table_rows, walk
from rtx.data.origins import local_files, origin_of, row_count
from rtx.data.sets import FACTS, WORDS, Report, Source, column_text
from rtx.disk import open_named, read_named
from rtx.errors import UserError
from rtx.paths import expand_path
from rtx.settings.schema import DataConfig

if TYPE_CHECKING:
    import datasets

PIECE = 1 << 22
"""Bytes after which a document is cut at the end of a line, or after 17 times as many in a line."""
BLOCK = 1 << 20
"""Bytes after which Wikitext is cut at the end of a line."""
NOT_LIBRARY = ("test", "tests", "site-packages", "dist-packages")
CUTS = {"train": (0, 90), "valid": (90, 95), "test": (95, 100)}
"""From and to which percent of the bytes each split goes."""

ENWIK8 = Remote(**FACTS["enwik8"]["archive"])
ENWIK8_TEXT = FACTS["enwik8"]["text"]
"""Size and sha256 of the only member of the archive."""
WIKITEXT = Remote(**FACTS["wikitext103"]["archive"])
WIKITEXT_HUB = FACTS["wikitext103"]["hub"]
WIKITEXT_FACTS: dict[str, dict[str, int | str]] = FACTS["wikitext103"]["texts"]
"""Lines, bytes of those that are not blank, and the md5 of each file (unpublished for train)."""
PG19_HUB = FACTS["pg19"]["hub"]
PG19_BOOKS = FACTS["pg19"]["books"]
"""Books of each split; one of train, 90.txt, is empty and counts."""


def own_files(data: DataConfig, root: Path, report: Report) -> Source:
    """Return the bytes of all files in order, cut into splits at 90% and 95%.

    Files below `root`, where the stores are, are left out. Of a folder with train.txt, valid.txt
    and test.txt each of these is a split, and nothing else is read.
    """
    split_files: list[Path] = []
    if data.name == "stdlib":
        paths = library_files()
    else:
        folder = expand_path(data.path or "", "data.path")
        split_files = own_splits(folder) if data.path else []
        paths = split_files or files_of(data.path or "", root)
    identity = identity_of(paths)
    sizes = [path.stat().st_size for path in paths]
    total = sum(sizes)
    cuts = file_cuts(sizes) if split_files else percent_cuts(total)
    for split, (start, stop) in cuts.items():
        if stop - start < 2:
            expected = f"at least 2 bytes in split {split}, found {stop - start}"
            raise UserError(f"{data.path}: expected {expected}; give more text")

    def load(split: str, work: Path) -> datasets.Dataset:
        pieces = byte_range(paths, sizes, *cuts[split])
        rows = rows_of(pieces, work / "cache" / split)
        if identity_of(paths) != identity:
            raise UserError(f"{data.path}: changed while it was read; prepare it again")
        return rows

    place = {
        "place": data.path or "the standard library",
        "files": len(paths),
        "bytes": total,
    }
    names = [path.name for path in split_files]
    return Source(data.name, [*identity, *names], place, load)


def file_cuts(sizes: Sequence[int]) -> dict[str, tuple[int, int]]:
    """Return where splits start and end that are a file each."""
    cuts = {}
    start = 0
    for split, size in zip(CUTS, sizes, strict=True):
        cuts[split] = (start, start + size)
        start += size
    return cuts


def percent_cuts(total: int) -> dict[str, tuple[int, int]]:
    """Return where the splits of `total` bytes start and end."""
    cuts = {}
    for split, (start, stop) in CUTS.items():
        cuts[split] = (total * start // 100, total * stop // 100)
    return cuts


def own_splits(folder: Path) -> list[Path]:
    """Return train.txt, valid.txt and test.txt of a folder; [] for none; UserError for two."""
    files = [folder / f"{split}.txt" for split in CUTS]
    present = [path for path in files if path.is_file()]
    if len(present) == 2:
        names = " and ".join(path.name for path in present)
        rule = "splits of your own are train.txt, valid.txt and test.txt"
        advice = "a glob reads all files as one text"
        raise UserError(f"data.path={folder}: found {names} alone; {rule}; {advice}")
    return present if len(present) == 3 else []


def library_files() -> list[Path]:
    """Return the `*.py` files of Python's standard library, without tests and site-packages."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return [path for path in walk(folder, NOT_LIBRARY) if path.suffix == ".py"]


def byte_range(paths: Sequence[Path], sizes: Sequence[int], start: int, stop: int) -> Pieces:
    """Yield bytes `[start, stop)` of files, as `line_pieces` does; a file is a document."""
    offset = 0
    for path, size in zip(paths, sizes, strict=True):
        first = max(0, start - offset)
        last = min(stop - offset, size)
        if first < size and last > 0:
            with open_named(path) as stream:
                yield from line_pieces(stream, first, last)
        offset += size


def line_pieces(stream: IO[bytes], start: int, stop: int) -> Pieces:
    """Yield bytes `[start, stop)` of a document in pieces of whole lines, and whether it starts."""
    stream.seek(start)
    at = start
    while piece := stream.read(min(PIECE, stop - at)):
        piece += stream.readline(min(16 * PIECE, stop - at - len(piece)))
        yield piece, at == start
        at += len(piece)


@contextlib.contextmanager
def open_member(path: Path, member: str) -> Iterator[IO[bytes]]:
    """Open a file, or one member of a zip archive, which is never extracted."""
    with open_named(path) as file:
        if path.suffix != ".zip":
            yield file
            return
        # by path: an open file
        with zipfile.ZipFile(file) as archive, archive.open(member) as stream:
            yield stream


def enwik8(data: DataConfig, root: Path, report: Report) -> Source:
    """Return the first 10**8 bytes of the English Wikipedia of 2006.

    A store that exists needs neither a network nor a local copy.
    """
    size, sha256 = ENWIK8_TEXT
    local = None
    if data.path:
        forms = ({"all": ENWIK8.name}, {"all": "enwik8"})
        (local,) = local_files(data.path, forms)["all"]

    def load(split: str, work: Path) -> datasets.Dataset:
        path = local or download(ENWIK8, root / "downloads", report)
        expected = ENWIK8 if path.suffix == ".zip" else Remote("enwik8", *ENWIK8_TEXT)
        expected.check(path)
        start, stop = CUTS[split]
        with open_member(path, "enwik8") as stream:
            pieces = line_pieces(stream, size * start // 100, size * stop // 100)
            if data.newlines == "drop":
                pieces = without_newlines(pieces)
            return rows_of(pieces, work / "cache" / split)

    place = {"place": ENWIK8.url, "sha256": sha256}
    stamps = {"newlines": data.newlines}
    return Source("enwik8", [sha256], place, load, stamps=stamps)


def without_newlines(pieces: Pieces) -> Pieces:
    """Yield pieces of a document without their newlines."""
    for piece, is_first in pieces:
        yield piece.replace(b"\n", b""), is_first


def wikitext(data: DataConfig, root: Path, report: Report) -> Source:
    """Return Wikitext-103 (Merity et al. 2016): its files wiki.{train,valid,test}.tokens."""
    forms = [
        {split: f"wiki.{split}.tokens" for split in CUTS},
        dict.fromkeys(CUTS, WIKITEXT.name),
    ]
    origin = origin_of(data, root, report, forms, WIKITEXT_HUB, WIKITEXT)

    def load(split: str, work: Path) -> datasets.Dataset:
        cache = work / "cache" / split
        return rows_of(wikitext_text(origin.files()[split], split, cache), cache)

    return Source("wikitext103", origin.identity, origin.place, load)


def wikitext_text(files: Sequence[Path], split: str, cache: Path) -> Pieces:
    """Yield a split in blocks of lines, and whether each is the first.

    UserError at its end where the text is another.
    """
    counts = Counter[str]()
    digest = hashlib.md5(usedforsecurity=False)
    for block in blocks_of_lines(files, split, cache):
        yield block, not counts
        lines = block.count(b"\n")
        blank = block.split(b"\n").count(b" ")
        counts["lines"] += lines
        counts["bytes"] += len(block) - 2 * blank
        # The end of a line is a word, <eos>.
        counts["words"] += len(block.split()) + lines
        digest.update(block)
    expected = {**WIKITEXT_FACTS[split], "words": WORDS["wikitext103"][split]}
    actual = {key: counts[key] for key in expected}
    if "md5" in expected:
        actual |= {"md5": digest.hexdigest()}
    if actual != expected:
        difference = f"expected {expected}; found {actual}"
        advice = "other text: data=text data.tokenizer=words data.path=<your files>"
        raise UserError(
            f"data=wikitext103: split {split} is not that of Wikitext-103: {difference}; {advice}"
        )


def blocks_of_lines(files: Sequence[Path], split: str, cache: Path) -> Iterator[bytes]:
    """Yield the text of a split in whole lines.

    The hub has a row for each line, and an empty one for a blank line.
    """
    if files[0].suffix == ".parquet":
        rows = table_rows(files, ["text"], cache).with_format("arrow")
        for table in rows.iter(batch_size=10_000):
            yield b"".join(line or b" \n" for line in column_text(table))
        return
    if files[0].suffix == ".zip":
        WIKITEXT.check(files[0])
    member = f"wikitext-103/wiki.{split}.tokens"
    with open_member(files[0], member) as stream:
        while block := stream.read(BLOCK):
            yield block + stream.readline()


def pg19(data: DataConfig, root: Path, report: Report) -> Source:
    """Return books from before 1919 (Rae et al. 2020), with LF for newlines.

    The stamps record the number of books, and whether data.path has all of them.
    """
    forms = [{"train": "train/*.txt", "valid": "validation/*.txt", "test": "test/*.txt"}]
    origin = origin_of(data, root, report, forms, PG19_HUB, archive=None)
    books = PG19_BOOKS
    if data.path:
        books = {split: row_count(paths) for split, paths in origin.files().items()}

    def load(split: str, work: Path) -> datasets.Dataset:
        paths = origin.files()[split]
        actual = row_count(paths)
        if actual != books[split]:
            expected = f"expected {books[split]:,} books of split {split}, found {actual:,}"
            raise UserError(f"{paths[0].parent}: {expected}")
        if paths[0].suffix == ".parquet":
            return table_rows(paths, ["text"], work / "cache" / split)
        return rows_of(books_of(paths), work / "cache" / split)

    stamps = {"books": books, "complete": books == PG19_BOOKS}
    return Source("pg19", origin.identity, origin.place, load, stamps=stamps)


def books_of(paths: Sequence[Path]) -> Pieces:
    """Yield books, each a document."""
    for path in paths:
        yield read_named(path).replace(b"\r\n", b"\n").replace(b"\r", b"\n"), True
