"""Sets of text: your own files, Python's library, enwik-8, Wikitext-103 and PG-19, each exact to the byte."""

from __future__ import annotations

import hashlib
import sysconfig
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rtx.data.files import (
    Remote,
    download,
    files_of,
    hub_files,
    identity_of,
    rows_of,
    table_rows,
    tables_of,
    walk,
)
from rtx.data.sets import FACTS, SETS, Report, Source, column_text
from rtx.errors import UserError
from rtx.settings.schema import DataConfig

if TYPE_CHECKING:
    import datasets

Files = dict[str, list[Path]]  # of each split
Forms = Sequence[Mapping[str, str]]  # ways to name the files of each split, by patterns
PIECE = (
    1 << 22
)  # bytes from which on a document is cut, behind a newline unless a line has 16 times as many
NOT_LIBRARY = ("test", "tests", "site-packages", "dist-packages")
CUTS = {"train": (0, 90), "valid": (90, 95), "test": (95, 100)}  # percent of the bytes

ENWIK8 = Remote(**FACTS["enwik8"]["archive"])
ENWIK8_TEXT = FACTS["enwik8"]["text"]  # bytes and sha256 of its only member
WIKITEXT, WIKITEXT_HUB = Remote(**FACTS["wikitext103"]["archive"]), FACTS["wikitext103"]["hub"]
# Lines, bytes of those that are not blank, and the md5 of the file; of train no sum was published.
WIKITEXT_FACTS: dict[str, dict[str, int | str]] = FACTS["wikitext103"]["texts"]
PG19_HUB = FACTS["pg19"]["hub"]
PG19_BOOKS = FACTS["pg19"]["books"]  # one of train, 90.txt, has no text and counts here


def own_files(data: DataConfig, root: Path, report: Report) -> Source:
    """Return the bytes of all files in order, cut at 90% and 95%; those below `root`, of the stores, are left out.

    Of a folder with train.txt, valid.txt and test.txt each is a split, and nothing else is read.
    """
    given = own_splits(Path(data.path).expanduser()) if data.path and data.name == "text" else []
    paths = library_files() if data.name == "stdlib" else given or files_of(data.path or "", root)
    identity = identity_of(paths)
    total = sum(sizes := [path.stat().st_size for path in paths])
    ends = accumulate(sizes) if given else (total * end // 100 for _, end in CUTS.values())
    cuts = dict(zip(CUTS, pairwise([0, *ends]), strict=True))
    for split, (start, stop) in cuts.items():
        if stop - start < 2:
            raise UserError(
                f"{data.path}: expected at least 2 bytes in split {split}, found {stop - start}; give more text"
            )

    def load(split: str, work: Path) -> datasets.Dataset:
        rows = rows_of(parts(*cuts[split]), work / "cache" / split)
        if identity_of(paths) != identity:
            raise UserError(f"{data.path}: changed while it was read; prepare it again")
        return rows

    def parts(start: int, stop: int) -> Iterator[tuple[bytes, bool]]:
        for path, size in zip(paths, sizes, strict=True):
            if start < size and stop > 0:
                with open(path, "rb") as stream:
                    yield from line_pieces(stream, max(0, start), min(stop, size))
            start, stop = start - size, stop - size

    place = {"place": data.path or "the standard library", "files": len(paths), "bytes": total}
    return Source(data.name, [*identity, *(path.name for path in given)], place, load)


def own_splits(folder: Path) -> list[Path]:
    """Return the files of a user's own splits, or none; `UserError` where one of three is missing."""
    there = [path for split in CUTS if (path := folder / f"{split}.txt").is_file()]
    if len(there) == 2:
        names = " and ".join(path.name for path in there)
        said = "splits of your own are train.txt, valid.txt and test.txt; a glob reads all files as one text"
        raise UserError(f"data.path={folder}: found {names} alone; {said}")
    return there if len(there) == 3 else []


def library_files() -> list[Path]:
    """Return the `*.py` files of the standard library beside the interpreter, without tests and what was installed."""
    return [
        path
        for path in walk(Path(sysconfig.get_paths()["stdlib"]), NOT_LIBRARY)
        if path.suffix == ".py"
    ]


def line_pieces(stream: IO[bytes], start: int, stop: int) -> Iterator[tuple[bytes, bool]]:
    """Yield bytes `[start, stop)` of a document in pieces of whole lines, with whether it is the first."""
    stream.seek(start)
    at = start
    while piece := stream.read(min(PIECE, stop - at)):
        piece += stream.readline(min(16 * PIECE, stop - at - len(piece)))
        yield piece, at == start
        at += len(piece)


def origin(
    data: DataConfig, root: Path, report: Report, forms: Forms, hub: Sequence[Any], archive: Remote
) -> tuple[list[Any], dict[str, Any], Callable[[], Files]]:
    """Return a set's identity, place, and what gets its files: local, of the hub (id, commit, pattern), an archive."""
    repository, revision, pattern = hub
    tables = str(Path(pattern).parent)
    if data.path is not None:
        files = local_files(data.path, forms, tables)
        return identity_of(chain(*files.values())), {"place": data.path}, lambda: files
    if data.fetch == "archive":
        place = {"place": archive.url, "sha256": archive.sha256}
        fetch = cache(
            lambda: local_files(str(download(archive, root / "downloads", report)), forms)
        )
        return ["archive", archive.sha256], place, fetch
    place = {"place": f"hf://datasets/{repository}", "revision": revision}

    def from_hub() -> Files:
        folder = hub_files(repository, [pattern], revision, report)
        place["revision"] = folder.name
        return tables_of(str(folder), [folder / tables], tuple(forms[0]))

    return ["hub", *hub], place, cache(from_hub)


def local_files(path: str, forms: Forms, tables: str | None = None) -> Files:
    """Return the files at `path`, a folder with them or one of them, of the first whole form, or parquet `tables`."""
    place = Path(path).expanduser()
    folder = place.parent if place.is_file() else place
    for form in forms:
        found = {split: sorted(folder.glob(pattern)) for split, pattern in form.items()}
        found = {
            split: [file for file in files if file.name[0] != "."] for split, files in found.items()
        }
        if all(found.values()) and (place == folder or place in chain(*found.values())):
            return found
    if tables is not None and (
        found := tables_of(path, (folder / tables, folder), tuple(forms[0]))
    ):
        return found
    wanted = [" and ".join(dict.fromkeys(form.values())) for form in forms] + ["parquet files"] * (
        tables is not None
    )
    raise UserError(f"data.path={path}: expected {' or '.join(wanted)}, found none of these")


def opened(path: Path, member: str) -> IO[bytes]:
    """Open a file, or one member of a zip archive that was checked; it is streamed, never extracted."""
    return zipfile.ZipFile(path).open(member) if path.suffix == ".zip" else open(path, "rb")


def enwik8(data: DataConfig, root: Path, report: Report) -> Source:
    """Return the first bytes of the English Wikipedia of 2006; a store that is there needs no network or local copy."""
    size, sha256 = ENWIK8_TEXT
    local = (
        local_files(data.path, ({"all": ENWIK8.name}, {"all": "enwik8"}))["all"][0]
        if data.path
        else None
    )
    drop = data.newlines == "drop"

    def load(split: str, work: Path) -> datasets.Dataset:
        path = local or download(ENWIK8, root / "downloads", report)
        (ENWIK8 if path.suffix == ".zip" else Remote("enwik8", *ENWIK8_TEXT)).check(path)
        start, stop = (size * percent // 100 for percent in CUTS[split])
        with opened(path, "enwik8") as stream:
            parts = (
                (part.replace(b"\n", b"" if drop else b"\n"), first)
                for part, first in line_pieces(stream, start, stop)
            )
            return rows_of(parts, work / "cache" / split)

    place = {"place": ENWIK8.url, "sha256": sha256}
    return Source("enwik8", [sha256], place, load, stamps={"newlines": data.newlines})


def wikitext(data: DataConfig, root: Path, report: Report) -> Source:
    """Return Wikitext-103 (Merity et al. 2016), the text as in its files wiki.{train,valid,test}.tokens."""
    forms = [
        {split: form.format(split) for split in CUTS} for form in ("wiki.{}.tokens", WIKITEXT.name)
    ]
    identity, place, files = origin(data, root, report, forms, WIKITEXT_HUB, WIKITEXT)

    def load(split: str, work: Path) -> datasets.Dataset:
        return rows_of(
            wikitext_text(files()[split], split, work / "cache" / split), work / "cache" / split
        )

    return Source("wikitext103", identity, place, load)


def wikitext_text(files: Sequence[Path], split: str, cache: Path) -> Iterator[tuple[bytes, bool]]:
    """Yield a split in blocks, with whether it is the first; raise UserError at its end if it is another text."""
    counts, digest = Counter[str](), hashlib.md5(usedforsecurity=False)
    for block in blocks_of_lines(files, split, cache):
        rows, blank = block.count(b"\n"), block.split(b"\n").count(b" ")
        yield block, not counts
        counts.update(lines=rows, bytes=len(block) - 2 * blank, words=len(block.split()) + rows)
        digest.update(block)
    wanted = {**WIKITEXT_FACTS[split], "words": SETS["wikitext103"].words[split]}
    found = {key: digest.hexdigest() if key == "md5" else counts[key] for key in wanted}
    if found != wanted:
        told = f"split {split} is not that of Wikitext-103: expected {wanted}; found {found}"
        raise UserError(
            f"data=wikitext103: {told}; other text: data=text data.tokenizer=words data.path=<your files>"
        )


def blocks_of_lines(files: Sequence[Path], split: str, cache: Path) -> Iterator[bytes]:
    """Yield the text of a split in whole lines; of the hub's rows, one a line, a blank one is empty."""
    if files[0].suffix == ".parquet":
        rows = table_rows(files, ["text"], cache).with_format("arrow")
        for table in rows.iter(batch_size=10_000):
            yield b"".join(line or b" \n" for line in column_text(table))
        return
    if files[0].suffix == ".zip":
        WIKITEXT.check(files[0])
    with opened(files[0], f"wikitext-103/wiki.{split}.tokens") as stream:
        while block := stream.read(1 << 20):
            yield block + stream.readline()


def pg19(data: DataConfig, root: Path, report: Report) -> Source:
    """Return books from before 1919 (Rae et al. 2020) with LF for newlines; the stamps say how many `data.path` has."""
    forms = [{"train": "train/*.txt", "valid": "validation/*.txt", "test": "test/*.txt"}]
    identity, place, files = origin(data, root, report, forms, PG19_HUB, ENWIK8)
    books = (
        {split: row_count(paths) for split, paths in files().items()} if data.path else PG19_BOOKS
    )

    def load(split: str, work: Path) -> datasets.Dataset:
        paths = files()[split]
        if (found := row_count(paths)) != books[split]:
            raise UserError(
                f"{paths[0].parent}: expected {books[split]:,} books of split {split}, found {found:,}"
            )
        if paths[0].suffix == ".parquet":
            return table_rows(paths, ["text"], work / "cache" / split)
        read = (
            (path.read_bytes().replace(b"\r\n", b"\n").replace(b"\r", b"\n"), True)
            for path in paths
        )
        return rows_of(read, work / "cache" / split)

    return Source(
        "pg19", identity, place, load, stamps={"books": books, "complete": books == PG19_BOOKS}
    )


def row_count(paths: Sequence[Path]) -> int:
    """Return how many rows (books, images) some files hold: of parquet files as they say, else one each."""
    from pyarrow import parquet

    return sum(
        parquet.read_metadata(path).num_rows if path.suffix == ".parquet" else 1 for path in paths
    )
