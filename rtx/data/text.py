"""Sets of text: your own files, Python's library, enwik-8, Wikitext-103 and PG-19, each exact to the byte."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import re
import sys
import sysconfig
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rtx.config import DataConfig
from rtx.data.fetch import Remote, download, file_sha256, hub_files
from rtx.data.files import NAMES, column_of, files_of, identity_of, listed, parquet_splits, rows_of, table_rows, walk
from rtx.data.sets import SETS, SPLITS, Report, Source, column_text
from rtx.errors import UserError

if TYPE_CHECKING:
    import datasets

Chunks = Iterable[bytes]

CHUNK = 1 << 20
PIECE = 1 << 22
"""Bytes from which on a document is cut at a blank, so that no row is long."""
LONGEST_PIECE = 1 << 26
"""Bytes from which on it is cut anywhere: it is no text."""
SHORTEST_TEXT = 31
"""Bytes: from here on 5% are at least two."""
NOT_LIBRARY = ("test", "tests", "site-packages", "dist-packages")
CUTS = {"train": (0, 90), "valid": (90, 95), "test": (95, 100)}
"""Percent of the bytes."""

ENWIK8 = Remote(
    "https://mattmahoney.net/dc/enwik8.zip",
    size=36_445_475,
    sha256="547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc",
)
ENWIK8_TEXT = (100_000_000, "2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8")
"""Bytes and sha256 of the archive's only member."""

WIKITEXT = Remote(
    "https://wikitext.smerity.com/wikitext-103-v1.zip",
    size=190_229_076,
    sha256="242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590",
)
WIKITEXT_HUB = ("Salesforce/wikitext", "b08601e04326c79dfdd32d625aee71d232d685c3")
WIKITEXT_CONFIG = "wikitext-103-v1"
WIKITEXT_FACTS: Mapping[str, tuple[int, int, str]] = {
    "train": (1_801_350, 537_936_515, ""),
    "valid": (3_760, 1_139_711, "b465742f79b17b85bad5699479b13301"),
    "test": (4_358, 1_278_143, "f202e4c8148839782adc13e7d1ca58e0"),
}
"""Lines of a split, bytes of those that are not blank, and the md5 of its file; of train no sum was published."""
# An article begins with the line " = Title = " after a blank line; " = = Section = = " is within one.
TITLE = re.compile(rb"(?<=\n \n)(?= = (?!= )[^\n]*(?<! =) = \n)")

PG19_HUB = "emozilla/pg19"
PG19_BOOKS = {"train": 28_602, "valid": 50, "test": 100}
"""Published books; one of train, 90.txt, has no text and counts here."""


def source(data: DataConfig, root: Path, report: Report) -> Source:
    """Return the text that `data` names; files below `root`, the folder of the stores, are left out.

    Raises:
        UserError: nothing is there, it cannot be read, is not what it should be, or is too short to be cut in three.
    """
    make = {"enwik8": enwik8, "wikitext103": wikitext, "pg19": pg19}.get(data.name, own_files)
    return make(data, root, report)


# Files of one's own, and the standard library: in order, cut 90/5/5 by bytes


def own_files(data: DataConfig, root: Path, report: Report) -> Source:
    """Return the bytes of all files in order, cut at 90% and 95%; raises as `source`."""
    if data.name == "stdlib":
        paths, place = library_files(), "the standard library"
    else:
        paths, place = files_of(data.path or "", root), data.path or ""
    files = [listed(path) for path in paths]
    total = sum(file.size for file in files)
    if total < SHORTEST_TEXT:
        found = f"{total:,} in {len(files):,} file{'s' if len(files) > 1 else ''}"
        raise UserError(f"{place}: expected at least {SHORTEST_TEXT} bytes (cut 90/5/5), found {found}; give more text")
    cuts = {split: (total * begin // 100, total * end // 100) for split, (begin, end) in CUTS.items()}

    def load(split: str, work: Path) -> datasets.Dataset:
        return rows_of(parts(*cuts[split]), work / "cache" / split)

    def parts(start: int, stop: int) -> Iterator[tuple[bytes, bool]]:
        for file in files:
            if start < file.size and stop > 0:
                with open(file.path, "rb") as stream:
                    yield from pieces(chunks_of(stream, max(0, start), min(stop, file.size)))
                if listed(file.path) != file:
                    raise UserError(f"{file.path}: changed while it was read; prepare it again")
            start, stop = start - file.size, stop - file.size

    units = {split: stop - start for split, (start, stop) in cuts.items()}
    facts = {"place": place, "files": len(files), "bytes": total}
    return Source(data.name, identity_of(paths), facts, load, units=units)


def library_files() -> list[Path]:
    """Return the Python standard library beside the interpreter: real text that is on every machine.

    The `*.py` files below `sysconfig.get_paths()["stdlib"]`, ordered by their path in it (component by component),
    without any that lie, at any depth, in a folder named test, tests, site-packages or dist-packages (where Debian
    installs packages): `lib2to3/tests/...` goes, a file `test.py` stays. 12,602,225 bytes for CPython 3.11.7.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in walk(root, NOT_LIBRARY) if path.suffix == ".py"]
    if not files:
        version = sys.version.split()[0]
        raise UserError(f"{root}: Python {version} has no *.py files here; use data=text data.path=<your files>")
    return files


def chunks_of(stream: IO[bytes], start: int = 0, stop: int | None = None) -> Iterator[bytes]:
    """Yield bytes `[start, stop)` of a stream in chunks; stop unset: to its end."""
    stream.seek(start)
    left = sys.maxsize if stop is None else stop - start
    while left and (chunk := stream.read(min(CHUNK, left))):
        left -= len(chunk)
        yield chunk


def pieces(chunks: Chunks) -> Iterator[tuple[bytes, bool]]:
    """Yield a document in pieces that end before a blank or newline, each with whether it is the first."""
    rest, first = b"", True
    for chunk in chunks:
        rest += chunk
        if len(rest) >= PIECE:
            cut = max(rest.rfind(b" ", 1), rest.rfind(b"\n", 1))
            cut = len(rest) if cut < 0 and len(rest) > LONGEST_PIECE else cut
            if cut > 0:
                yield rest[:cut], first
                rest, first = rest[cut:], False
    if rest:
        yield rest, first


# enwik-8: the first 100,000,000 bytes of the English Wikipedia's XML dump of 3 March 2006


def enwik8(data: DataConfig, root: Path, report: Report) -> Source:
    """Return the benchmark; its content is known, so a store that is there needs neither network nor local copy."""
    size, sha256 = ENWIK8_TEXT
    if data.path is not None:
        local_copy(data.path, (ENWIK8.name, "enwik8"))
    drop = data.newlines == "drop"

    @cache
    def copy() -> Path:
        place = (
            local_copy(data.path, (ENWIK8.name, "enwik8"))
            if data.path
            else download(ENWIK8, root / "downloads", report)
        )
        if place.suffix == ".zip":
            check_archive(place, ENWIK8)
        elif (listed(place).size, file_sha256(place)) != ENWIK8_TEXT:
            raise UserError(
                f"{place}: not enwik-8: expected {size:,} bytes with sha256 {sha256}, found {place.stat().st_size:,} "
                f"bytes with sha256 {file_sha256(place)}; to train on this file: data=text data.path={place}"
            )
        return place

    def load(split: str, work: Path) -> datasets.Dataset:
        start, stop = (size * percent // 100 for percent in CUTS[split])
        with opened(copy(), "enwik8") as stream:
            chunks = chunks_of(stream, start, stop)
            kept = (chunk.replace(b"\n", b"") for chunk in chunks) if drop else chunks
            return rows_of(pieces(kept), work / "cache" / split)

    units = None if drop else {split: size * (end - begin) // 100 for split, (begin, end) in CUTS.items()}
    place = {"place": ENWIK8.url, "sha256": sha256}
    return Source("enwik8", [sha256], place, load, stamps={"newlines": data.newlines}, units=units)


def local_copy(path: str, names: Sequence[str]) -> Path:
    """Return the file that `path`, itself or the folder that holds it under one of `names`, means."""
    place = Path(path).expanduser()
    for found in (place, *(place / name for name in names)):
        if found.is_file():
            return listed(found).path
    raise UserError(f"data.path={path}: expected {' or '.join(names)}, or a folder with one of them, found none")


def check_archive(path: Path, archive: Remote) -> None:
    """Raise UserError for another file than a published archive: no other one is ever opened."""
    if not archive.matches(path):
        wanted = f"{archive.name} ({archive.url}) of {archive.size:,} bytes with sha256 {archive.sha256}"
        found = f"{path.stat().st_size:,} bytes with sha256 {file_sha256(path)}"
        raise UserError(f"{path}: expected {wanted}, found {found}; get it anew, or give its extracted files")


@contextlib.contextmanager
def opened(path: Path, member: str) -> Iterator[IO[bytes]]:
    """Open a file, or one member of a zip archive that was checked; it is streamed, never extracted."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as archive, archive.open(member) as file:
            yield file
    else:
        with open(path, "rb") as file:
            yield file


# Wikitext-103 (Merity et al. 2016): its archive, its extracted files, or the hub's parquet files


def wikitext(data: DataConfig, root: Path, report: Report) -> Source:
    """Return Wikitext-103, a document for each article, the text as in its files wiki.{train,valid,test}.tokens."""
    repository, revision = WIKITEXT_HUB
    if data.path is not None:
        files = wikitext_files(data.path)
        place = {"place": data.path}
        identity: list[Any] = identity_of(itertools.chain(*files.values()))
        fetch = cache(lambda: files)
    elif data.fetch == "archive":
        identity, place = ["archive", WIKITEXT.sha256], {"place": WIKITEXT.url, "sha256": WIKITEXT.sha256}
        fetch = cache(lambda: wikitext_files(str(download(WIKITEXT, root / "downloads", report))))
    else:
        identity = ["hub", repository, revision, WIKITEXT_CONFIG]
        place = {"place": f"hf://datasets/{repository}/{WIKITEXT_CONFIG}", "revision": revision}
        wanted = [f"{WIKITEXT_CONFIG}/*.parquet"]
        fetch = cache(lambda: wikitext_files(str(hub_files(repository, wanted, revision, report))))

    def load(split: str, work: Path) -> datasets.Dataset:
        text = checked(wikitext_lines(fetch()[split], split, work / "cache" / split), split)
        return rows_of(articles(text), work / "cache" / split)

    return Source("wikitext103", identity, place, load)


def wikitext_files(path: str) -> dict[str, list[Path]]:
    """Return the files of each split that `data.path` means: the archive, the extracted files, or parquet files."""
    place = Path(path).expanduser()
    folders = [folder for folder in (place, place / "wikitext-103", place / WIKITEXT_CONFIG) if folder.is_dir()]
    for folder in folders:
        files = {split: [folder / f"wiki.{split}.tokens"] for split in SPLITS}
        if lacking := [split for split, (file,) in files.items() if not file.is_file()]:
            if len(lacking) < len(SPLITS):
                raise UserError(
                    f"data.path={path}: missing split: {' and '.join(lacking)}; expected wiki.<split>.tokens"
                )
        else:
            return files
    if (archive := place / WIKITEXT.name if place.is_dir() else place).is_file():
        check_archive(archive, WIKITEXT)
        return {split: [archive] for split in SPLITS}
    if found := parquet_splits(path, reversed(folders)):
        return found
    wanted = f"{WIKITEXT.name}, wiki.{{train,valid,test}}.tokens, or the hub's parquet files of {WIKITEXT_CONFIG}"
    raise UserError(f"data.path={path}: expected {wanted}; found none of them")


def wikitext_lines(files: Sequence[Path], split: str, cache: Path) -> Iterator[bytes]:
    """Yield the text of a split in whole lines; of the hub's rows, one a line, a blank one is empty."""
    if files[0].suffix == ".parquet":
        rows = table_rows(files, column_of(files, ["text"]), cache).with_format("arrow")
        for table in rows.iter(batch_size=10_000):
            yield b"".join(line or b" \n" for line in column_text(table))
        return
    with opened(files[0], f"wikitext-103/wiki.{split}.tokens") as stream:
        for chunk in chunks_of(stream):
            yield chunk + stream.readline()


def checked(lines: Chunks, split: str) -> Iterator[bytes]:
    """Yield text in whole lines, and at its end raise UserError if it is not that of Wikitext-103."""
    counted = size = blank = words = 0
    digest = hashlib.md5(usedforsecurity=False)
    for block in lines:
        counted += block.count(b"\n")
        size += len(block)
        blank += block.split(b"\n").count(b" ")
        words += len(block.split())
        digest.update(block)
        yield block
    named = ("lines", "bytes in lines that are not blank", "words with <eos>")
    found = [counted, size - 2 * blank, words + counted]
    published_lines, published_bytes, md5 = WIKITEXT_FACTS[split]
    wanted = [published_lines, published_bytes, SETS["wikitext103"].words[split]]
    if found != wanted or (md5 and digest.hexdigest() != md5):
        told = [
            ", ".join(f"{count:,} {name}" for count, name in zip(each, named, strict=True)) for each in (wanted, found)
        ]
        told = (
            [f"{each}, md5 {sum}" for each, sum in zip(told, (md5, digest.hexdigest()), strict=True)] if md5 else told
        )
        raise UserError(
            f"data=wikitext103: split {split} is not that of Wikitext-103: expected {told[0]}; found {told[1]}; to "
            "train on other text: data=text data.tokenizer=words data.path=<your files>"
        )


def articles(lines: Chunks) -> Iterator[tuple[bytes, bool]]:
    """Yield the articles of a text in whole lines, with what stands before the first."""
    rest = b""
    for block in lines:
        *whole, rest = TITLE.split(rest + block)
        yield from ((article, True) for article in whole if article)
    if rest:
        yield rest, True


# PG-19 (Rae et al. 2020): books of Project Gutenberg published before 1919, with LF for newlines


def pg19(data: DataConfig, root: Path, report: Report) -> Source:
    """Return PG-19, whole from the hub, or as many of its books as `data.path` has: the stamps say how many."""
    place: dict[str, Any] = {"place": data.path or f"hf://datasets/{PG19_HUB}"}
    if data.path is None:
        books, identity = dict(PG19_BOOKS), ["hub", PG19_HUB]
    else:
        files = book_files(data.path)
        books = {split: book_count(paths) for split, paths in files.items()}
        identity = identity_of(itertools.chain(*files.values()))

    @cache
    def fetch() -> dict[str, list[Path]]:
        if data.path is not None:
            return book_files(data.path)
        folder = hub_files(PG19_HUB, ["data/*.parquet"], None, report)
        place["revision"] = folder.name
        files = book_files(str(folder))
        if (found := {split: book_count(paths) for split, paths in files.items()}) != PG19_BOOKS:
            raise UserError(f"{folder}: expected {PG19_BOOKS} books; found {found}; fetch it again")
        return files

    def load(split: str, work: Path) -> datasets.Dataset:
        paths = fetch()[split]
        if paths[0].suffix == ".parquet":
            return table_rows(paths, column_of(paths, ["text"]), work / "cache" / split)
        read = (path.read_bytes().replace(b"\r\n", b"\n").replace(b"\r", b"\n") for path in paths)
        return rows_of(zip(read, itertools.repeat(True), strict=False), work / "cache" / split)

    complete = books == PG19_BOOKS
    if not complete:
        report(f"data=pg19: {books} books, of {PG19_BOOKS}: results are not comparable")
    return Source("pg19", identity, place, load, stamps={"books": books, "complete": complete})


def book_files(path: str) -> dict[str, list[Path]]:
    """Return the files of each split below the folder `path`: parquet files, or a file for each book, by name."""
    place = Path(path).expanduser()
    wanted = "parquet files train-*, validation-* and test-*, or the folders train, validation and test with <book>.txt"
    if not place.is_dir():
        raise UserError(
            f"data.path={path}: expected a folder with {wanted}; found {'a file' * place.exists() or 'nothing'}"
        )
    if found := parquet_splits(path, [place]):
        return found
    for split, names in NAMES.items():
        books = (sorted((place / name).glob("[!.]*.txt")) for name in names)
        found[split] = next((paths for paths in books if paths), [])
    if lacking := [split for split, paths in found.items() if not paths]:
        raise UserError(f"data.path={path}: missing split: {' and '.join(lacking)}; expected {wanted}")
    return found


def book_count(paths: Sequence[Path]) -> int:
    """Return how many books some files hold."""
    from pyarrow import parquet

    tables = paths[0].suffix == ".parquet"
    return sum(parquet.read_metadata(path).num_rows for path in paths) if tables else len(paths)
