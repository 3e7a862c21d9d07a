"""Zip and tar archives read as streams: nothing is ever extracted, and a member that is not what it says is refused.

A member's name is only compared, never opened as a path; one that leads out of the archive's folder, a link or a device
is refused all the same, and the archive with it: whoever packed it had something else in mind.
"""

from __future__ import annotations

import contextlib
import gzip
import lzma
import re
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from rtx.data.files import found_instead
from rtx.errors import UserError

CHUNK = 1 << 20
LARGEST_READ = 1 << 26  # a header that asks for more at once (a false size) is refused before memory is spent on it
MOST_PADDING = 1 << 24  # bytes behind the end mark of a gzipped tar
ANEW = "get it anew from its publisher"


class MemberStream:
    """The content of a member of a tar; what goes wrong is a UserError that names archive and member."""

    def __init__(self, path: Path, name: str, file: IO[bytes]) -> None:
        self.path, self.name, self.file = path, name, file

    def read(self, size: int) -> bytes:
        """Return the next `size` bytes, fewer only at the end."""
        with _archive_errors(self.path, self.name):
            return self.file.read(size)

    def skip(self, size: int) -> None:
        """Go on `size` bytes further in."""
        with _archive_errors(self.path, self.name):
            self.file.seek(size, 1)


class Member(NamedTuple):
    """A regular file in an archive."""

    name: str
    size: int
    """Bytes, as the archive states them; what is read is checked against it."""
    offset: int
    """Where its header begins in the (uncompressed) tar; 0 in a zip."""


def zip_members(path: Path, limit: int) -> dict[str, int]:
    """Return name and stated size of every regular file in a zip archive.

    Args:
        limit: bytes that all members together may have.

    Raises:
        UserError: it is no whole zip archive, or a member is refused: its name leads out of the folder or comes twice,
            it is a link or encrypted, or it is too large.
    """
    with _archive_errors(path), zipfile.ZipFile(path) as archive:
        members: dict[str, int] = {}
        for info in archive.infolist():
            check_name(path, info.filename)
            kind = info.external_attr >> 16
            if stat.S_IFMT(kind) not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise _refused(path, info.filename, "is a link or a device")
            if info.flag_bits & 1:
                raise _refused(path, info.filename, "is encrypted")
            if info.filename in members:
                raise _refused(path, info.filename, "is in it twice")
            if not info.is_dir():
                members[info.filename] = info.file_size
                _check_total(path, info.filename, sum(members.values()), limit)
        return members


def read_zip(path: Path, name: str, limit: int) -> Iterator[bytes]:
    """Yield the bytes of one member in chunks; raises as `zip_members`, also where its stated size is a lie."""
    size = zip_members(path, limit)[name]
    with _archive_errors(path, name), zipfile.ZipFile(path) as archive, archive.open(name) as file:
        yield from _exactly(file, size, path, name)


def tar_members(path: Path, limit: int, offset: int = 0) -> Iterator[tuple[Member, MemberStream]]:
    """Yield the regular files of a tar archive, plain or gzipped, in its own order, each with a stream of its content.

    A stream is for use before the next member is asked for; `read_member` reads it checked. Hidden files
    (such as `._x.png`) are left out.

    Args:
        limit: bytes that all members together may have.
        offset: of the header to begin at, from a `Member` of an earlier reading.

    Raises:
        UserError: it is no whole tar archive, or a member is refused: as in `zip_members`.
    """
    total = 0
    with _archive_errors(path), _tar_stream(path) as stream:
        stream.seek(offset)
        with tarfile.open(fileobj=stream, mode="r:") as archive:  # type: ignore[arg-type]
            while (info := archive.next()) is not None:
                archive.members.clear()  # type: ignore[attr-defined]  # a million of them would take a gigabyte
                check_name(path, info.name)
                if not (info.isfile() or info.isdir()) or info.issparse():
                    raise _refused(path, info.name, "is a link, a device or a sparse file")
                total += info.size
                if info.size < 0:
                    raise _refused(path, info.name, f"has a size of {info.size}")
                _check_total(path, info.name, total, limit)
                file = archive.extractfile(info)
                if file is not None and not info.name.rpartition("/")[2].startswith("."):
                    yield Member(info.name, info.size, info.offset), MemberStream(path, info.name, file)
            _check_end(path, stream, archive.offset)  # type: ignore[attr-defined]


def read_member(member: Member, stream: MemberStream) -> bytes:
    """Return all bytes of a member of `tar_members`; raises UserError where there are fewer than stated."""
    return b"".join(_exactly(stream, member.size, stream.path, member.name))


def check_name(path: Path, name: str) -> None:
    """Refuse a member whose name leads out of the folder into which the archive `path` would be extracted.

    Raises:
        UserError: the name is absolute, begins with a drive, or goes up by `..`.
    """
    parts = name.replace("\\", "/").split("/")
    if not name or parts[0] == "" or ".." in parts or re.match(r"[A-Za-z]:", name):
        raise _refused(path, name, "leads out of the archive's folder")


def is_gzip(path: Path) -> bool:
    """Tell whether a file begins as gzip does."""
    with open(path, "rb") as file:
        return file.read(2) == b"\x1f\x8b"


class _Careful:
    """A stream for tarfile that refuses to read without measure: a header may state any size."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file

    def read(self, size: int) -> bytes:
        if not 0 <= size <= LARGEST_READ:
            raise tarfile.ReadError(f"a header asks for {size:,} bytes at once")
        return self.file.read(size)

    def seek(self, offset: int, whence: int = 0) -> int:
        return self.file.seek(offset, whence)

    def tell(self) -> int:
        return self.file.tell()

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        self.file.close()


@contextlib.contextmanager
def _tar_stream(path: Path) -> Iterator[_Careful]:
    with gzip.open(path) if is_gzip(path) else open(path, "rb") as file:
        yield _Careful(file)  # type: ignore[arg-type]


def _check_end(path: Path, stream: _Careful, offset: int) -> None:
    """Refuse an archive without its end mark: tarfile takes any damaged header, and the file's end, for one."""
    stream.seek(offset)
    block = stream.read(tarfile.BLOCKSIZE)
    if block != bytes(tarfile.BLOCKSIZE):
        found = f"a damaged header at byte {offset:,}" if block else "its end without the mark of one"
        raise UserError(f"{path}: expected a whole tar archive, found {found}; {ANEW}")
    if is_gzip(path):  # its checksum is compared at its very end, behind the padding
        for _ in range(MOST_PADDING // CHUNK):
            if not stream.read(CHUNK):
                return
        raise UserError(f"{path}: expected nothing behind the end of the archive, found more; {ANEW}")


def _exactly(file: IO[bytes] | MemberStream, size: int, path: Path, name: str) -> Iterator[bytes]:
    left = size
    while chunk := file.read(CHUNK):
        left -= len(chunk)
        if left < 0:
            break
        yield chunk
    if left:
        found = "more" if left < 0 else f"{size - left:,}"
        raise _refused(path, name, f"states {size:,} bytes and has {found}")


def _check_total(path: Path, name: str, total: int, limit: int) -> None:
    if total > limit:
        raise _refused(path, name, f"makes it {total:,} bytes unpacked, more than the {limit:,} that it may have")


@contextlib.contextmanager
def _archive_errors(path: Path, name: str = "") -> Iterator[None]:
    """Turn what the readers of archives raise into one line that names the archive and the member."""
    broken: Any = (zipfile.BadZipFile, tarfile.TarError, gzip.BadGzipFile, zlib.error, lzma.LZMAError, EOFError)
    try:
        yield
    except (*broken, NotImplementedError, RuntimeError, ValueError, OverflowError) as error:
        if isinstance(error, UserError):
            raise
        member = f" with member {name}" if name else ""
        found = found_instead(path)
        found = found if "HTML" in found else f"one that is cut short or altered ({error})"
        raise UserError(f"{path}: expected a whole archive{member}, found {found}; {ANEW}") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error


def _refused(path: Path, name: str, what: str) -> UserError:
    return UserError(f"{path}: refused: member {name!r} {what}; {ANEW}")
