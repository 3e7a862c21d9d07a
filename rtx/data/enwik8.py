"""The enwik-8 benchmark: the first 100,000,000 bytes of the English Wikipedia's XML dump of 3 March 2006."""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import os
import shlex
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from rtx.config import DataConfig
from rtx.data.disk import Report, file_sha256
from rtx.data.download import Remote, download
from rtx.data.files import SourceFile, found_instead, listed
from rtx.data.source import Document, Source
from rtx.errors import UserError

ARCHIVE = Remote(
    url="https://mattmahoney.net/dc/enwik8.zip",
    size=36_445_475,
    sha256="547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc",
)
SIZE = 100_000_000
SHA256 = "2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8"
SPLITS = {"train": 90_000_000, "valid": 5_000_000, "test": 5_000_000}
MEMBER = "enwik8"
CHUNK = 1 << 20
LARGEST_HASHED = 1 << 30  # a wrong file larger than this is refused by its size alone


@dataclass(frozen=True)
class Copy:
    """A file or an archive that was found to be enwik-8."""

    file: SourceFile
    content: bytes | None = field(default=None, repr=False)
    """What the archive holds, so that this process inflates it once; another one has to do so again."""

    def __reduce__(self) -> tuple[type[Copy], tuple[SourceFile]]:
        return Copy, (self.file,)

    @contextlib.contextmanager
    def open(self) -> Iterator[IO[bytes]]:
        """Open the content, and say in one line what is wrong with it."""
        if self.content is not None:
            yield io.BytesIO(self.content)  # shares the bytes
        else:
            with readable(self.file.path) as file:
                yield file


@dataclass(frozen=True)
class Enwik8Part:
    """One split: bytes `[start, stop)`."""

    copy: Copy
    start: int
    stop: int
    drop_newlines: bool

    @property
    def size(self) -> int:
        """Bytes of the split."""
        return self.stop - self.start

    def documents(self) -> Iterator[Document]:
        """Yield the split, one document.

        Raises:
            UserError: the file cannot be read, or is not the one that was checked.
        """
        yield self._chunks()

    def _chunks(self) -> Iterator[bytes]:
        with self.copy.open() as file:
            file.seek(self.start)
            left = self.size
            while left > 0 and (chunk := file.read(min(CHUNK, left))):
                left -= len(chunk)
                if self.drop_newlines:
                    chunk = chunk.replace(b"\n", b"")
                if chunk:
                    yield chunk
        if left or listed(self.copy.file.path) != self.copy.file:
            raise UserError(f"{self.copy.file.path}: changed while it was read; prepare it again")


def source(data: DataConfig, root: Path, report: Report) -> Source:
    """Return the benchmark; its content is known, so a store that is there needs neither network nor local copy.

    Raises:
        UserError: what `data.path` names is there and is not enwik-8 by its size.
    """
    options = "data=enwik8"
    if data.path is not None:
        options += f" data.path={shlex.quote(data.path)}"
        if os.path.exists(os.path.expanduser(data.path)):
            local_copy(data.path)
    drop = data.newlines == "drop"
    return Source(
        name="enwik8",
        options=options + (" data.newlines=drop" if drop else ""),
        identity=[SHA256],
        place={"place": ARCHIVE.url, "sha256": SHA256},
        parts=lambda: checked_parts(data.path, drop, root, report),
        stamps={"newlines": data.newlines},
        units=None if drop or data.tokenizer != "bytes" else dict(SPLITS),
    )


def checked_parts(path: str | None, drop_newlines: bool, root: Path, report: Report) -> dict[str, list[Enwik8Part]]:
    """Read all of a local copy, or of the archive fetched to `root/downloads`, and return its splits.

    Raises:
        UserError: what was found is not enwik-8, by size or sha256.
        RunFailed: the download failed.
    """
    place = download(ARCHIVE, root / "downloads", report) if path is None else local_copy(path)
    file = listed(place)
    with readable(place) as content:
        copy = Copy(file, check(content, place, keep=not isinstance(content, io.BufferedReader)))
    ends = itertools.accumulate(SPLITS.values())
    return {
        split: [Enwik8Part(copy, end - size, end, drop_newlines)]
        for (split, size), end in zip(SPLITS.items(), ends, strict=True)
    }


@contextlib.contextmanager
def readable(source: Path) -> Iterator[IO[bytes]]:
    """Open the content of an archive or a plain file, and say in one line what is wrong with it."""
    try:
        if _is_zip(source):
            with zipfile.ZipFile(source) as archive, archive.open(_member(archive, source)) as file:
                yield file
        else:
            with open(source, "rb") as file:
                yield file
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        found = f"{source.stat().st_size:,} bytes that are not one ({error})"
        raise UserError(f"{source}: expected a whole zip archive, found {found}; {_published()}") from error
    except OSError as error:
        raise UserError(f"{source}: cannot be read: {error.strerror}") from error


def local_copy(path: str) -> Path:
    """Return the archive or the extracted file that `path`, itself or the folder that holds it, names.

    Raises:
        UserError: nothing is there, or an extracted file has another size than enwik-8.
    """
    place = Path(path).expanduser()
    try:
        if place.is_dir():
            held = [place / name for name in (MEMBER, ARCHIVE.name) if (place / name).is_file()]
            if not held:
                raise UserError(f"data.path={path}: expected a folder with enwik8 or enwik8.zip, found neither in it")
            place = held[0]
        if not place.is_file():
            raise UserError(f"data.path={path}: expected enwik8.zip, the file enwik8 or a folder with one, found none")
        size = place.stat().st_size
        if size != SIZE and not _is_zip(place):
            raise _refused(place, size, file_sha256(place) if size <= LARGEST_HASHED else "not computed")
    except OSError as error:
        raise UserError(f"{place}: cannot be read: {error.strerror}") from error
    return place


def check(file: IO[bytes], source: Path, keep: bool) -> bytes | None:
    """Read `file`, never more than enwik-8 has, and return it if it is to be kept: 100 MB.

    Raises:
        UserError: it is something else.
    """
    size, digest, kept = 0, hashlib.sha256(), []
    while chunk := file.read(CHUNK):
        size += len(chunk)
        if size > SIZE:
            raise UserError(f"{source}: expected {SIZE:,} bytes, found more; {_published()}")
        digest.update(chunk)
        if keep:
            kept.append(chunk)
    if size != SIZE or digest.hexdigest() != SHA256:
        raise _refused(source, size, digest.hexdigest())
    return b"".join(kept) if keep else None


def _member(archive: zipfile.ZipFile, source: Path) -> zipfile.ZipInfo:
    """Return the archive's only member. It is read as a stream and never extracted, so its name can lead nowhere."""
    names = archive.namelist()
    if names != [MEMBER]:
        found = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "") if names else "none"
        raise UserError(f"{source}: expected one member, {MEMBER}, found {found}; {_published()}")
    member = archive.infolist()[0]
    if member.flag_bits & 1:
        raise UserError(f"{source}: expected a plain archive, found an encrypted one; {_published()}")
    if member.file_size != SIZE:
        raise UserError(f"{source}: expected {SIZE:,} bytes in {MEMBER}, found {member.file_size:,}; {_published()}")
    return member


def _is_zip(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(2) == b"PK"


def _refused(path: Path, size: int, sha256: str) -> UserError:
    if "HTML" in (found := found_instead(path)):
        return UserError(f"{path}: expected enwik8.zip or the file enwik8, found {found}; {_published()}")
    return UserError(
        f"{path}: not enwik-8: expected {SIZE:,} bytes with sha256 {SHA256}, found {size:,} bytes with sha256 {sha256}"
        f"; to train on this file: data=text data.path={path}"
    )


def _published() -> str:
    return f"the published archive, {ARCHIVE.url}, has {ARCHIVE.size:,} bytes and sha256 {ARCHIVE.sha256}"
