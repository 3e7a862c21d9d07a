"""Wikitext-103 (Merity et al. 2016): from its archive, its extracted files, or the hub's parquet files, to the byte."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rtx.config import DataConfig
from rtx.data.archives import zip_members
from rtx.data.articles import ArticlesPart, FileText, ParquetText, Text, ZipText, article_ranges
from rtx.data.disk import Report, file_sha256
from rtx.data.download import Remote, download
from rtx.data.hub import hub_files
from rtx.data.parquet import missing_shards, shards
from rtx.data.published import WORDS
from rtx.data.source import Part, Source
from rtx.errors import UserError

ARCHIVE = Remote(
    url="https://wikitext.smerity.com/wikitext-103-v1.zip",
    size=190_229_076,
    sha256="242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590",
)
HUB = "Salesforce/wikitext"
CONFIG = "wikitext-103-v1"
LARGEST = 1 << 30  # bytes that an archive may unpack to; the published one has half of it
PART = 1 << 24  # bytes of a part of an extracted file


@dataclass(frozen=True)
class Published:
    """What one split holds, newlines and all."""

    lines: int
    """Lines, blank ones too."""
    text: int
    """Bytes of the lines that are not blank, newlines included: what the hub's rows hold."""
    words: int | None = None
    """Words between blanks and one for every newline."""
    md5: str | None = None
    """Of the file; train has other witnesses: lines, bytes, and the archive's sha256."""


PUBLISHED: Mapping[str, Published] = {
    "train": Published(1_801_350, 537_936_515),
    "valid": Published(3_760, 1_139_711, WORDS["wikitext103"]["valid"], "b465742f79b17b85bad5699479b13301"),
    "test": Published(4_358, 1_278_143, WORDS["wikitext103"]["test"], "f202e4c8148839782adc13e7d1ca58e0"),
}
ON_HUB = {"train": ("train",), "valid": ("validation", "valid"), "test": ("test",)}


def source(
    data: DataConfig,
    root: Path,
    report: Report,
    published: Mapping[str, Published] | None = None,
    archive: Remote | None = None,
) -> Source:
    """Return Wikitext-103: a document for each article, the text as in its files wiki.{train,valid,test}.tokens.

    Args:
        published: what the splits must hold; unset: PUBLISHED.
        archive: the archive of its author; unset: ARCHIVE.

    Raises:
        UserError: `data.path` names nothing, or lacks a split.
    """
    published, archive = published or PUBLISHED, archive or ARCHIVE
    options = "data=wikitext103"
    if data.path is not None:
        options += f" data.path={shlex.quote(data.path)}"
        files = local_files(data.path, archive)
        place = str(Path(data.path).expanduser())
        if [path.stat().st_size for path in files] == [archive.size] and files[0].suffix == ".zip":
            identity: list[Any] = ["archive", archive.sha256]  # checked before anything is made of it
        else:
            identity = [[str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns] for path in files]
    elif data.fetch == "archive":
        options += " data.fetch=archive"
        identity, place = ["archive", archive.sha256], archive.url
    else:
        identity, place = ["hub", HUB, CONFIG], f"hf://datasets/{HUB}/{CONFIG}"

    def parts() -> dict[str, list[Part]]:
        return _parts(_texts(data, root, report, archive), options, published)

    return Source("wikitext103", options, identity, {"place": place}, parts)


def local_files(path: str, archive: Remote = ARCHIVE) -> list[Path]:
    """Return what `data.path` means: the archive alone, the three extracted files, or all parquet files.

    A folder may hold them itself or in a folder named as the archive or the hub names it.

    Raises:
        UserError: there is none of these, or a split or a part of one is missing.
    """
    place = Path(path).expanduser()
    wanted = f"{archive.name}, wiki.{{train,valid,test}}.tokens, or the hub's parquet files of {CONFIG}"
    if place.is_file():
        if place.suffix != ".zip":
            raise UserError(f"data.path={path}: expected a folder or {archive.name}, found another file")
        return [place]
    folders = [place, place / "wikitext-103", place / CONFIG]
    lacking: list[tuple[Path, list[str]]] = []
    for folder in folders:
        for found in (_extracted(folder), _parquet(folder)):
            if all(found.values()):
                return [file for files in found.values() for file in files]
            if any(found.values()):
                lacking.append((folder, [split for split, files in found.items() if not files]))
    if (place / archive.name).is_file():
        return [place / archive.name]
    if lacking:
        folder, splits = lacking[0]
        raise UserError(f"data.path={path}: missing split: {' and '.join(splits)}; expected in {folder}: {wanted}")
    raise UserError(f"data.path={path}: expected {wanted}; found none of them")


def _extracted(folder: Path) -> dict[str, list[Path]]:
    files = {split: folder / f"wiki.{split}.tokens" for split in ON_HUB}
    return {split: [file] if file.is_file() else [] for split, file in files.items()}


def _parquet(folder: Path) -> dict[str, list[Path]]:
    found = {split: shards(folder, names) if folder.is_dir() else [] for split, names in ON_HUB.items()}
    for files in found.values():
        if missing := missing_shards(files):
            raise UserError(f"{folder}: expected {missing[0]} beside {files[0].name}, found none; fetch it, too")
    return found


def _texts(data: DataConfig, root: Path, report: Report, archive: Remote) -> dict[str, Text]:
    """Fetch what is not here, and return the text of each split."""
    if data.path is not None:
        files = local_files(data.path, archive)
    elif data.fetch == "archive":
        files = [download(archive, root / "downloads", report)]
    else:
        files = local_files(str(hub_files(HUB, [f"{CONFIG}/*.parquet"], report)), archive)
    if files[0].suffix == ".zip":
        return _zipped(files[0], archive)
    if files[0].suffix == ".parquet":
        splits = _parquet(files[0].parent)
        return {split: ParquetText(tuple(paths)) for split, paths in splits.items()}
    return {split: FileText(path) for split, path in zip(ON_HUB, files, strict=True)}


def _zipped(path: Path, archive: Remote) -> dict[str, Text]:
    """Return the three members of a zip archive; one of the published size must have the published sha256."""
    if path.stat().st_size == archive.size and (found := file_sha256(path)) != archive.sha256:
        raise UserError(f"{path}: expected the published archive with sha256 {archive.sha256}, found {found}")
    members = zip_members(path, LARGEST)
    texts: dict[str, Text] = {}
    for split in ON_HUB:
        name = f"wiki.{split}.tokens"
        matches = [member for member in members if member.rpartition("/")[2] == name]
        if len(matches) != 1:
            found = ", ".join(sorted(members)[:4]) or "none"
            raise UserError(f"{path}: missing split {split}: expected one member {name}, found {found}")
        texts[split] = ZipText(path, matches[0], LARGEST)
    return texts


def _parts(texts: Mapping[str, Text], options: str, published: Mapping[str, Published]) -> dict[str, list[Part]]:
    """Check what the splits hold, the small ones first, and cut them into parts."""
    sizes = {}
    for split in ("valid", "test", "train"):
        sizes[split] = _check(texts[split], split, options, published[split])
    parts: dict[str, list[Part]] = {}
    for split in ON_HUB:
        text = texts[split]
        if isinstance(text, FileText):
            parts[split] = [ArticlesPart(piece, piece.size) for piece in article_ranges(text.path, PART)]
        else:
            parts[split] = [ArticlesPart(text, sizes[split])]
    return parts


def _check(text: Text, split: str, options: str, expected: Published) -> int:
    """Compare a split with what was published; return its bytes, or raise UserError."""
    size = lines = blank = words = 0
    digest = hashlib.md5(usedforsecurity=False)
    for block in _lines(text.chunks()):
        size += len(block)
        lines += block.count(b"\n")
        blank += block.split(b"\n").count(b" ")
        if expected.words is not None:
            words += len(block.split())
            digest.update(block)
    found: dict[str, Any] = {"lines": lines, "bytes in lines that are not blank": size - 2 * blank}
    wanted: dict[str, Any] = {"lines": expected.lines, "bytes in lines that are not blank": expected.text}
    if expected.words is not None:
        found |= {"words with <eos>": words + lines, "md5": digest.hexdigest()}
        wanted |= {"words with <eos>": expected.words, "md5": expected.md5}
    if found != wanted:
        raise UserError(
            f"{options}: split {split} is not that of Wikitext-103: expected {_counts(wanted)}; found {_counts(found)}"
            "; to train on other text: data=text data.tokenizer=words data.path=<your files>"
        )
    return size


def _counts(facts: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{value:,} {name}" if isinstance(value, int) else f"{name} {value}" for name, value in facts.items()
    )


def _lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the same bytes in blocks that end with a line, so that none is cut (but for lines of many megabytes)."""
    rest = b""
    for chunk in chunks:
        text = rest + chunk
        end = text.rfind(b"\n") + 1 or (len(text) if len(text) > PART else 0)
        if end:
            yield text[:end]
        rest = text[end:]
    if rest:
        yield rest
