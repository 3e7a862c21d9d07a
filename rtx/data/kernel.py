"""data=kernel: C files of the core of the Linux kernel, one document a file.

They come from the published tarball, another release's, or an unpacked folder. A tarball is
streamed: nothing of it is written to disk, and no link is followed.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import lzma
import re
import tarfile
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any, cast

from rtx.data.download import Remote, download
from rtx.data.files import Pieces, identity_of, reason_of, rows_of, walk
from rtx.data.sets import FACTS, Report, Source
from rtx.disk import open_named, read_named
from rtx.errors import UserError
from rtx.paths import expand_path
from rtx.settings.schema import DataConfig

if TYPE_CHECKING:
    import datasets

KERNEL = Remote(**FACTS["kernel"]["archive"])
FOLDERS: list[str] = FACTS["kernel"]["folders"]
"""Top folders that are read; releases of many years have them all."""
TABLES: list[str] = FACTS["kernel"]["tables"]
"""Files and folders that are left out: character sets, fonts and test vectors, all in numbers."""
SUFFIXES = (".c", ".h")
MAKEFILE = "Makefile"  # says which release it is
HELD_OUT_PERCENT = 2  # of the files are valid, and as many test
MOST_BYTES = 1 << 30  # of the files that are read: about 14 times as many as release 6.12 has
MOST_HEADER_BYTES = 1 << 20  # of a long name or of pax records, which tarfile holds in memory
COMPRESSED: dict[str, Callable[[IO[bytes]], Any]] = {".xz": lzma.open, ".gz": gzip.open}
TARBALLS = (".tar.xz", ".tar.gz", ".tar")
HEADERS_WITH_CONTENT = (
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
)
"""Types of members that tell of the next one, or of all later ones."""
DAMAGE = (tarfile.TarError, EOFError, lzma.LZMAError, zlib.error, OSError)
HOSTILE = (ValueError, IndexError, RecursionError, OverflowError)
"""What else tarfile raises for headers that no tar writes."""

Files = dict[str, bytes]
"""Contents by path below the top folder, such as fs/ext4/inode.c."""


def source(data: DataConfig, root: Path, report: Report) -> Source:
    """Return the C files of FOLDERS in order of their paths; whole files of them are held out.

    UserError where data.path is neither a tarball nor a folder with FOLDERS.
    """
    local = expand_path(data.path, "data.path") if data.path is not None else None
    inputs = inputs_of(local) if local is not None else []
    if local is None or is_published(local):
        identity: list[Any] = [KERNEL.sha256]
        place: dict[str, Any] = {"place": KERNEL.url, "sha256": KERNEL.sha256}
    else:
        identity = identity_of(inputs)
        place = {"place": data.path}

    @cache  # one pass over a tarball serves all splits
    def files() -> Files:
        path = local or download(KERNEL, root / "downloads", report)
        if is_published(path):
            KERNEL.check(path)
        contents = folder_files(path, inputs) if path.is_dir() else tarball_files(path)
        if not is_published(path) and identity_of(inputs_of(path)) != identity:
            raise UserError(f"data.path={path}: changed while it was read; prepare it again")
        place["release"] = release_of(contents.pop(MAKEFILE, b""))
        return contents

    def load(split: str, work: Path) -> datasets.Dataset:
        return rows_of(documents_of(files(), split), work / "cache" / split)

    return Source("kernel", [*identity, FOLDERS, TABLES], place, load)


def is_published(path: Path) -> bool:
    """Tell whether a file has the name of the published tarball, and so must have its sha256."""
    return path.name == KERNEL.name and not path.is_dir()


def inputs_of(path: Path) -> list[Path]:
    """Return the files that data.path stands for: one tarball, or the C files of a folder.

    UserError for anything else.
    """
    if path.is_dir():
        return folder_inputs(path)
    if not path.exists():
        raise UserError(f"data.path={path}: expected {wanted()}, found none")
    if not path.name.endswith(TARBALLS):
        actual = f"a file that ends in none of {', '.join(TARBALLS)}"
        raise UserError(f"data.path={path}: expected {wanted()}, found {actual}")
    return [path]


def folder_inputs(folder: Path) -> list[Path]:
    """Return the files to read of an unpacked folder; UserError where it lacks one of FOLDERS."""
    missing = [name for name in FOLDERS if not is_folder(folder / name)]
    refuse_without(folder, missing)
    paths = [folder / MAKEFILE]
    for name in FOLDERS:
        paths += walk(folder / name)
    return [path for path in paths if is_read(name_below(folder, path)) and is_file(path)]


def is_folder(path: Path) -> bool:
    """Tell whether a path is a folder, and no link to one."""
    return path.is_dir() and not path.is_symlink()


def is_file(path: Path) -> bool:
    """Tell whether a path is a regular file, and no link to one."""
    return path.is_file() and not path.is_symlink()


def name_below(folder: Path, path: Path) -> str:
    """Return the path of a file below a folder, with slashes."""
    return path.relative_to(folder).as_posix()


def wanted() -> str:
    """Return in words what data.path may be."""
    folders = ", ".join(f"{name}/" for name in FOLDERS)
    return f"{KERNEL.name}, another release's tarball, or its unpacked folder, with {folders}"


def refuse_without(path: Path, missing: list[str]) -> None:
    """Raise UserError where folders that are read are missing in `path`."""
    if missing:
        names = ", ".join(f"{name}/" for name in missing)
        raise UserError(f"data.path={path}: expected {wanted()}; found no {names}")


def is_read(name: str) -> bool:
    """Tell whether a file is read, by its path below the top folder: C files, and the Makefile.

    Hidden files are not, nor is what leads out of the top folder.
    """
    parts = name.split("/")
    if any(part.startswith(".") for part in parts):
        return False
    if any(name == table or name.startswith(f"{table}/") for table in TABLES):
        return False
    return name == MAKEFILE or (parts[0] in FOLDERS and name.endswith(SUFFIXES))


def folder_files(folder: Path, paths: list[Path]) -> Files:
    """Return the contents of files of an unpacked folder; UserError for more than MOST_BYTES."""
    check_size(folder, sum(path.stat().st_size for path in paths))
    return {name_below(folder, path): read_named(path) for path in paths}


def tarball_files(path: Path) -> Files:
    """Return the contents of the regular files to read of a tarball, in one pass.

    UserError for a tarball that is damaged, that has not one folder at its top or lacks one of
    FOLDERS in it, or of whose files more than MOST_BYTES would be read.
    """
    contents: Files = {}
    tops: set[str] = set()
    size = 0
    with damage_as_user_error(path), uncompressed(path) as stream, streamed(stream) as archive:
        for member in archive:
            if member.size < 0:
                raise tarfile.ReadError("a negative size")
            top, _, name = PurePosixPath(member.name).as_posix().partition("/")
            tops.add(top)
            if member.isreg() and is_read(name):
                size += member.size
                check_size(path, size)
                contents[name] = cast(IO[bytes], archive.extractfile(member)).read()
        read_to_end(stream)
    if len(tops) != 1:
        names = ", ".join(sorted(tops)[:5]) or "nothing"
        raise UserError(f"data.path={path}: expected one folder at its top, found {names}")
    refuse_without(path, [name for name in FOLDERS if not has_folder(contents, name)])
    return contents


def has_folder(contents: Files, folder: str) -> bool:
    """Tell whether some file is below a folder."""
    return any(name.startswith(f"{folder}/") for name in contents)


def check_size(path: Path, size: int) -> None:
    """Raise UserError where more than MOST_BYTES of `path` would be read."""
    if size > MOST_BYTES:
        most = f"at most {MOST_BYTES:,} bytes of C files"
        raise UserError(f"data.path={path}: expected {most}, found {size:,} or more")


@contextlib.contextmanager
def damage_as_user_error(path: Path) -> Iterator[None]:
    """Raise UserError, in one line, where a tarball is damaged or cannot be read."""
    try:
        yield
    except UserError:  # a ValueError, too
        raise
    except (*DAMAGE, *HOSTILE) as error:
        actual = f"another file, or a part of one ({reason_of(error)}); get it anew"
        raise UserError(f"data.path={path}: expected a whole tarball, found {actual}") from error


@contextlib.contextmanager
def uncompressed(path: Path) -> Iterator[IO[bytes]]:
    """Open a tarball so that reading it decompresses it.

    Reading raises EOFError where compressed data end before their end mark.
    """
    with open_named(path) as file:
        opener = COMPRESSED.get(path.suffix)
        if opener is None:
            yield file
            return
        with opener(file) as stream:
            yield stream


class WholeStream:
    """A stream that raises EOFError at its end.

    A whole tarball ends with blocks of zeros, behind which tarfile reads nothing. A cut one it
    would take for a shorter one, and in a member that claims to be huge it would read for ever.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self.stream = stream

    def read(self, size: int) -> bytes:
        content = self.stream.read(size)
        if not content:
            raise EOFError("unexpected end of data")
        return content


class CheckedHeader(tarfile.TarInfo):
    """A header of a member, whose damage is an error: tarfile alone would end the archive there."""

    @classmethod
    def frombuf(cls, buf: Any, encoding: str, errors: str) -> CheckedHeader:
        """Return a header; ReadError for a damaged one, and for too long a name or records."""
        try:
            header = super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            is_end_mark = not any(buf)
            if is_end_mark:
                raise
            raise tarfile.ReadError(str(error)) from error
        if header.type in HEADERS_WITH_CONTENT and header.size > MOST_HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {header.size:,} bytes")
        return header


def streamed(stream: IO[bytes]) -> tarfile.TarFile:
    """Return a tar archive that is read from its beginning to its end, without seeking."""
    whole = cast(Any, WholeStream(stream))
    # by path: an open stream
    return tarfile.open(fileobj=whole, mode="r|", bufsize=1 << 20, tarinfo=CheckedHeader)


def read_to_end(stream: IO[bytes]) -> None:
    """Read what follows an archive: only at its end are compressed data checked by their sum."""
    while stream.read(1 << 20):
        pass


def release_of(makefile: bytes) -> str:
    """Return the release that the kernel's Makefile names, as 6.12.0."""
    line = rb"^(VERSION|PATCHLEVEL|SUBLEVEL|EXTRAVERSION) *= *([\w.+-]*)"
    pairs = re.findall(line, makefile, re.MULTILINE)
    values = {key.decode(): value.decode() for key, value in pairs}
    numbers = [values.get(key) or "?" for key in ("VERSION", "PATCHLEVEL", "SUBLEVEL")]
    return ".".join(numbers) + values.get("EXTRAVERSION", "")


def documents_of(contents: Files, split: str) -> Pieces:
    """Yield the files of a split in order of their paths, each the start of a document."""
    for name in sorted(contents):
        if split_of(name) == split:
            yield contents[name], True


def split_of(name: str) -> str:
    """Return the split of a file, which depends on its path alone: every release has the same."""
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
    percent = int.from_bytes(digest[:8], "big") % 100
    if percent < HELD_OUT_PERCENT:
        return "valid"
    if percent < 2 * HELD_OUT_PERCENT:
        return "test"
    return "train"
