"""Images as files of their own: in a folder, in sorted order, or in a tar, in the tar's order."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from rtx.data.archives import Member, read_member, tar_members
from rtx.data.files import SourceFile
from rtx.data.imageset import PER_PART, Rows, RowsPart
from rtx.data.pixels import HEAD, SUFFIXES, Want, is_lossy, pixels
from rtx.data.source import Document
from rtx.errors import UserError

LARGEST_FILE = 1 << 28  # bytes of one image file


@dataclass(frozen=True)
class ImageFolder:
    """Image files in order."""

    paths: tuple[Path, ...] = field(repr=False)
    per_part: int = PER_PART

    @property
    def images(self) -> int:
        """How many."""
        return len(self.paths)

    def part(self, rows: Rows, want: Want) -> FilesPart:
        """Return the part that reads `rows`."""
        return FilesPart(tuple(self.paths[index] for index in rows), want)


@dataclass(frozen=True)
class FilesPart:
    """Some image files."""

    paths: tuple[Path, ...]
    want: Want

    @property
    def size(self) -> int:
        """Bytes that it delivers."""
        return len(self.paths) * self.want.units

    def documents(self) -> Iterator[Document]:
        """Yield each image; raises UserError naming the file where one cannot be read or has another size."""
        for path in self.paths:
            yield (pixels(read_image(path), str(path), self.want),)


class Listing(NamedTuple):
    """What a folder holds."""

    images: list[SourceFile]
    """Files whose name ends as an image's does, ordered by their path, component by component."""
    others: int
    """How many files were left out, hidden ones not counted."""


def list_images(folder: Path, leave_out: Path | None = None) -> Listing:
    """Return the image files below a folder; hidden ones, and links to folders, are left out.

    Args:
        leave_out: a folder that is not read (that of the stores).

    Raises:
        UserError: the folder, or a file's size, cannot be read.
    """
    found: list[SourceFile] = []
    others, folders = 0, [folder.resolve()]
    try:
        while folders:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    if entry.name.startswith("."):
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        if leave_out is None or Path(entry.path) != leave_out.resolve():
                            folders.append(Path(entry.path))
                    elif os.path.splitext(entry.name)[1].lower() in SUFFIXES and entry.is_file():
                        status = entry.stat()
                        found.append(SourceFile(Path(entry.path), status.st_size, status.st_mtime_ns))
                    else:
                        others += 1
    except OSError as error:
        raise UserError(f"{error.filename or folder}: cannot be read: {error.strerror}") from error
    return Listing(sorted(found, key=lambda file: file.path.parts), others)


def read_image(path: Path) -> bytes:
    """Return the content of an image file.

    Raises:
        UserError: it cannot be read, or is far too large for an image.
    """
    try:
        with open(path, "rb") as file:
            raw = file.read(LARGEST_FILE + 1)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    if len(raw) > LARGEST_FILE:
        raise UserError(f"{path}: expected an image file of at most {LARGEST_FILE:,} bytes, found more; leave it out")
    return raw


@dataclass(frozen=True)
class ImageTar:
    """A tar of image files, read in its own order; it is read through once to find them."""

    path: Path
    limit: int
    """Bytes that it may have unpacked."""
    per_part: int = PER_PART

    @property
    def images(self) -> int:
        """How many."""
        return self._index[0]

    @property
    def lossy(self) -> bool:
        """Whether the first one is."""
        return self._index[1]

    def part(self, rows: Rows, want: Want) -> TarPart:
        """Return the part that reads `rows`, which begin at a multiple of `per_part`."""
        return TarPart(rows, want, self.path, self.limit, self._index[2][rows.first // self.per_part])

    @cached_property
    def _index(self) -> tuple[int, bool, list[int]]:
        """Number of images, whether the first one is lossy, and where the header of each `per_part`-th begins."""
        images, lossy, offsets = 0, False, []
        for member, file in tar_members(self.path, self.limit):
            _check_member(self.path, member)
            if images == 0:
                lossy = is_lossy(file.read(HEAD))
            if images % self.per_part == 0:
                offsets.append(member.offset)
            images += 1
        return images, lossy, offsets


@dataclass(frozen=True)
class TarPart(RowsPart):
    """Some images of a tar, from one whose header is at byte `offset` on."""

    path: Path
    limit: int
    offset: int

    def documents(self) -> Iterator[Document]:
        """Yield each image; raises UserError naming archive and member where one cannot be decoded."""
        members = tar_members(self.path, self.limit, self.offset)
        for index, (member, file) in enumerate(members, self.rows.first):
            if index >= self.rows.stop:
                return
            if self.rows.takes(index):
                _check_member(self.path, member)
                raw = read_member(member, file)
                yield (pixels(raw, f"{self.path}: {member.name}", self.want),)


def _check_member(path: Path, member: Member) -> None:
    if os.path.splitext(member.name)[1].lower() not in SUFFIXES or member.size > LARGEST_FILE:
        raise UserError(
            f"{path}: expected nothing but image files, found {member.name} ({member.size:,} bytes); "
            "give the published archive"
        )
