"""The enwik-8 benchmark: the first 100,000,000 bytes of the English Wikipedia's XML dump of 3 March 2006."""

from __future__ import annotations

import hashlib
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from rtx.data.disk import Report, file_sha256
from rtx.data.download import Remote, download
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


def read_enwik8(path: str | None, root: Path, report: Report) -> Iterator[bytes]:
    """Yield all bytes of enwik-8 from a local copy, or from the archive fetched to `root/downloads`.

    Raises:
        UserError: what was found is not enwik-8, by size or sha256; known for certain only at the end.
        RunFailed: the download failed.
    """
    source = download(ARCHIVE, root / "downloads", report) if path is None else local_copy(path)
    try:
        if _is_zip(source):
            with zipfile.ZipFile(source) as archive, archive.open(_member(archive, source)) as file:
                yield from _checked(file, source)
        else:
            with open(source, "rb") as file:
                yield from _checked(file, source)
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


def _checked(file: IO[bytes], source: Path) -> Iterator[bytes]:
    """Yield the bytes of `file`, never more than enwik-8 has; raise UserError at the end if they are others."""
    size, digest = 0, hashlib.sha256()
    while chunk := file.read(CHUNK):
        size += len(chunk)
        if size > SIZE:
            raise UserError(f"{source}: expected {SIZE:,} bytes, found more; {_published()}")
        digest.update(chunk)
        yield chunk
    if size != SIZE or digest.hexdigest() != SHA256:
        raise _refused(source, size, digest.hexdigest())


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
    return UserError(
        f"{path}: not enwik-8: expected {SIZE:,} bytes with sha256 {SHA256}, found {size:,} bytes with sha256 {sha256}"
        f"; to train on this file: data=text data.path={path}"
    )


def _published() -> str:
    return f"the published archive, {ARCHIVE.url}, has {ARCHIVE.size:,} bytes and sha256 {ARCHIVE.sha256}"
