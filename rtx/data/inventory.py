"""What lies below the folder of the stores, and how one of them is removed."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rtx.data.build import work_folder
from rtx.data.disk import Report, disk_errors, locked, temporary_sibling
from rtx.data.store import RECORD, DamagedStore, is_verified, open_store, read_record
from rtx.errors import UserError, nearest

STORE = re.compile(r"([a-z0-9]+)-[0-9a-f]{12}")
"""Names of stores; nothing else is ever removed."""


@dataclass(frozen=True)
class Entry:
    """A store, the unfinished preparation of one, or a downloaded file."""

    name: str
    size: int
    """Bytes on disk."""
    changed: float
    """When it was made or last written, seconds since 1970."""
    says: str
    """What it is, and whether it is complete."""


def inventory(root: Path) -> list[Entry]:
    """Return what lies below `root`: stores, unfinished preparations, downloads."""
    entries = []
    for path in sorted(root.glob("*")):
        if path.is_dir() and STORE.fullmatch(path.name):
            entries.append(_entry(path, path.name, _state(path)))
    for path in sorted(root.glob(".*.work")):
        if STORE.fullmatch(path.name[1:].removesuffix(".work")):
            entries.append(_entry(path, path.name, "unfinished; the same rtx data prepare goes on with it"))
    for path in sorted((root / "downloads").glob("*")):
        whole = "unfinished download; the next one goes on with it" if path.suffix == ".part" else "download"
        entries.append(_entry(path, f"downloads/{path.name}", whole))
    return entries


def _entry(path: Path, name: str, says: str) -> Entry:
    return Entry(name, disk_size(path), path.stat().st_mtime, says)


def _state(folder: Path) -> str:
    """Return splits, and whether the store is complete; its bytes are not read."""
    try:
        options = read_record(folder, "").get("options", "")
        store = open_store(folder, options)
    except DamagedStore as damage:
        return str(damage).partition("; to rebuild")[0]
    splits = ", ".join(f"{name} {len(tokens):,}" for name, tokens in store.splits.items())
    checked = "complete" if is_verified(folder) else "complete, bytes not compared since it was moved or changed"
    return f"{splits} {store.unit}s; {checked}; {options}"


def disk_size(path: Path) -> int:
    """Return the bytes of a file, or of all files below a folder."""
    files: Iterable[Path] = path.rglob("*") if path.is_dir() else [path]
    return sum(file.lstat().st_size for file in files if file.is_file())


def listing(root: Path) -> list[str]:
    """Return `inventory` in lines, with the sum."""
    entries = inventory(root)
    if not entries:
        return [f"{root}: no data yet"]
    width = max(len(entry.name) for entry in entries)
    lines = [f"{root}: {shown_size(sum(entry.size for entry in entries))}"]
    for entry in entries:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.changed))
        lines.append(f"  {entry.name:<{width}}  {shown_size(entry.size):>9}  {when}  {entry.says}")
    return lines


def shown_size(size: int) -> str:
    """Return a number of bytes for people: 36.4 MB."""
    for power, unit in ((9, "GB"), (6, "MB"), (3, "kB")):
        if size >= 10**power:
            return f"{size / 10**power:,.1f} {unit}"
    return f"{size:,} bytes"


def named_store(root: Path, name: str) -> Path:
    """Return the store that `name`, as `rtx data list` prints it, means, or where an unfinished one would stand.

    Raises:
        UserError: there is none.
    """
    plain = Path(name).name.removeprefix(".").removesuffix(".work")
    known = [entry.name for entry in inventory(root) if not entry.name.startswith("downloads/")]
    folder = root / plain
    if not STORE.fullmatch(plain) or not (folder.is_dir() or work_folder(folder).is_dir()):
        raise UserError(f"{name}: no store of this name in {root}{nearest(plain, known)}; rtx data list names them")
    return folder


def remove_store(root: Path, folder: Path, report: Report = print) -> None:
    """Remove a store, an unfinished preparation of it, and the sheets of its images.

    Raises:
        UserError: neither is there, or the store is a link or in use.
        RunFailed: it is being prepared.
    """
    there = [path for path in (folder, work_folder(folder)) if path.is_dir()]
    if not there or not STORE.fullmatch(folder.name):
        raise UserError(f"{folder}: nothing to remove: no such store; rtx data list says what is there")
    if any(path.is_symlink() for path in there):
        raise UserError(f"{folder}: is a link to a folder elsewhere; remove it yourself")
    with disk_errors(root), locked(root / f".{folder.name}.lock", str(folder), report, timeout=0.0):
        for path in there:
            size = disk_size(path)
            handle = _claim(path)
            try:
                aside = temporary_sibling(folder, "old")
                os.rename(path, aside)  # from here on nobody opens it
                shutil.rmtree(aside)
            finally:
                if handle is not None:
                    os.close(handle)
            report(f"{path}: removed, {shown_size(size)}")
        for sheet in root.glob(f"{folder.name}-*.png"):  # those of `rtx data info`
            sheet.unlink()


def _claim(folder: Path) -> int | None:
    """Take the record's lock for ourselves, where there is a record; an open store shares it.

    Raises:
        UserError: the store is open somewhere.
    """
    if not (folder / RECORD).is_file():
        return None
    handle = os.open(folder / RECORD, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise UserError(f"{folder}: in use by another process; nothing was removed; end it, then try again") from None
    except OSError:
        pass  # a file system without locks
    return handle
