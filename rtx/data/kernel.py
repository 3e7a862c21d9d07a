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

from rtx.config import DataConfig
from rtx.data.files import Remote, download, identity_of, reason_of, rows_of, walk
from rtx.data.sets import FACTS, Report, Source
from rtx.disk import open_regular
from rtx.errors import UserError

if TYPE_CHECKING:
    import datasets

KERNEL = Remote(**FACTS["kernel"]["archive"])
FOLDERS: list[str] = FACTS["kernel"]["folders"]
"""Top folders that are read; releases of many years have them all."""
TABLES: list[str] = FACTS["kernel"]["tables"]
"""Files and folders that are left out: character sets, fonts and test vectors, all in numbers."""
SUFFIXES = (".c", ".h")
MAKEFILE = "Makefile"  # says which release it is
HELD_OUT_PERCENT = 2  # of the files, in each of valid and test
MOST_BYTES = 1 << 30  # of the files that are read: about 14 times as many as release 6.12 has
COMPRESSED: dict[str, Callable[[IO[bytes]], Any]] = {".xz": lzma.open, ".gz": gzip.open}
TARBALLS = (".tar.xz", ".tar.gz", ".tar")
BROKEN = (tarfile.TarError, EOFError, lzma.LZMAError, zlib.error, OSError)

Files = dict[str, bytes]
"""Contents by path below the top folder, such as fs/ext4/inode.c."""


def source(data: DataConfig, root: Path, report: Report) -> Source:
    """Return the C files of FOLDERS in order of their paths; whole files of them are held out.

    UserError where data.path is neither a tarball nor a folder with FOLDERS.
    """
    local = Path(data.path).expanduser() if data.path is not None else None
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
    """Return the files to read for data.path: a tarball, or those of an unpacked folder.

    UserError for anything else.
    """
    if path.is_dir():
        return folder_inputs(path)
    if not path.exists():
        raise UserError(f"data.path={path}: expected {wanted()}, found none")
    if not path.name.endswith(TARBALLS):
        found = f"a file that ends in none of {', '.join(TARBALLS)}"
        raise UserError(f"data.path={path}: expected {wanted()}, found {found}")
    return [path]


def folder_inputs(folder: Path) -> list[Path]:
    """Return the files to read of an unpacked folder; UserError where it lacks one of FOLDERS."""
    lacking = [name for name in FOLDERS if not is_folder(folder / name)]
    refuse_lacking(folder, lacking)
    paths = [folder / MAKEFILE]
    for name in FOLDERS:
        paths += walk(folder / name)
    return [path for path in paths if is_taken(name_below(folder, path)) and is_file(path)]


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


def refuse_lacking(path: Path, lacking: list[str]) -> None:
    """Raise UserError where `path` lacks folders that are read."""
    if lacking:
        missing = ", ".join(f"{name}/" for name in lacking)
        raise UserError(f"data.path={path}: expected {wanted()}; found no {missing}")


def is_taken(name: str) -> bool:
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
    return {name_below(folder, path): path.read_bytes() for path in paths}


def tarball_files(path: Path) -> Files:
    """Return the contents of the regular files to read of a tarball, in one pass.

    UserError for a tarball that is damaged, that has not one folder at its top or lacks one of
    FOLDERS in it, or of whose files more than MOST_BYTES would be read.
    """
    contents: Files = {}
    tops: set[str] = set()
    size = 0
    with told_broken(path), uncompressed(path) as stream, streamed(stream) as archive:
        for member in archive:
            top, _, name = PurePosixPath(member.name).as_posix().partition("/")
            tops.add(top)
            if member.isreg() and is_taken(name):
                size += member.size
                check_size(path, size)
                contents[name] = cast(IO[bytes], archive.extractfile(member)).read()
    if len(tops) != 1:
        found = ", ".join(sorted(tops)[:5]) or "nothing"
        raise UserError(f"data.path={path}: expected one folder at its top, found {found}")
    refuse_lacking(path, [name for name in FOLDERS if not has_folder(contents, name)])
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
def told_broken(path: Path) -> Iterator[None]:
    """Raise UserError, in one line, where a tarball is damaged or cannot be read."""
    try:
        yield
    except BROKEN as error:
        found = f"another file, or a part of one ({reason_of(error)}); get it anew"
        raise UserError(f"data.path={path}: expected a whole tarball, found {found}") from error


@contextlib.contextmanager
def uncompressed(path: Path) -> Iterator[IO[bytes]]:
    """Open a tarball so that reading it decompresses it; EOFError at the end of one that is cut."""
    with open_regular(path) as file:
        opener = COMPRESSED.get(path.suffix)
        if opener is None:
            yield file
            return
        with opener(file) as stream:
            yield stream


def streamed(stream: IO[bytes]) -> tarfile.TarFile:
    """Return a tar archive that is read from its beginning to its end, without seeking."""
    return tarfile.open(fileobj=stream, mode="r|", bufsize=1 << 20)


def release_of(makefile: bytes) -> str:
    """Return the release that the kernel's Makefile says, as 6.12.0."""
    line = rb"^(VERSION|PATCHLEVEL|SUBLEVEL|EXTRAVERSION) *= *(\S*)"
    said = {key.decode(): value.decode() for key, value in re.findall(line, makefile, re.MULTILINE)}
    numbers = [said.get(key, "?") for key in ("VERSION", "PATCHLEVEL", "SUBLEVEL")]
    return ".".join(numbers) + said.get("EXTRAVERSION", "")


def documents_of(contents: Files, split: str) -> Iterator[tuple[bytes, bool]]:
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
