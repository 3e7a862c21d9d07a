"""The data sets by name, and their stores: open (preparing on demand), prepare, verify, list, remove."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import shlex
import shutil
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from rtx.config import DataConfig
from rtx.data.build import build_store, store_key, work_folder
from rtx.data.fetch import disk_errors
from rtx.data.recall import RecallStore, vocabulary
from rtx.data.sets import SETS, Report, Source
from rtx.data.store import DamagedStore, TokenStore, is_verified, open_store, read_record, verify_store
from rtx.errors import UserError, nearest

Store = TokenStore | RecallStore

STORE = re.compile(r"[a-z0-9_]+-[0-9a-f]{12}")
"""Names of stores; nothing else is ever removed."""


def data_root() -> Path:
    """Return the folder of all stores: RTX_DATA, or `data` below the current folder.

    Raises:
        UserError: something else than a folder is there.
    """
    root = Path(os.environ.get("RTX_DATA") or "data").expanduser()
    if root.exists() and not root.is_dir():
        name = "RTX_DATA=" if os.environ.get("RTX_DATA") else ""
        raise UserError(f"{name}{root}: is not a folder; set RTX_DATA to a folder that you may write")
    return root


def make_source(data: DataConfig, root: Path, report: Report = print) -> Source:
    """Return what the store of `data` is made from, without writing anything.

    Raises:
        UserError: the source is missing, unreadable, or too short for its splits or for one sequence.
    """
    known = SETS.get(data.name)
    source = importlib.import_module(f"rtx.data.{known.module if known else f'own.{data.name}'}").source(
        data, root, report
    )
    if source.units and data.tokenizer == "bytes":
        check_length(source.units["train"], data, source.place["place"])
    check_image(source.image, data)
    return source


def check_source(data: DataConfig, root: Path, report: Report = print) -> None:
    """Check that there is something to make the store of `data` from; raises as make_source does."""
    if data.name != "recall":
        make_source(data, root, report)


def store_folder(data: DataConfig, root: Path, source: Source | None = None) -> Path:
    """Return where the store of `data` lies below `root`; raises as make_source does."""
    source = source or make_source(data, root)
    return root / f"{source.name}-{store_key(source, data)}"


def prepared_folder(data: DataConfig, root: Path) -> Path:
    """Return the folder of a store that is there; `UserError` where it is not."""
    folder = store_folder(data, root)
    if not folder.exists():
        raise UserError(f"{folder}: not prepared; to prepare it: rtx data prepare {options_of(data)}")
    return folder


def options_of(data: DataConfig) -> str:
    """Return the command-line options that ask for a store, for messages."""
    known, usual = SETS.get(data.name), DataConfig(name=data.name)
    if known:
        usual.tokenizer, usual.vocabulary = known.tokenizer, known.vocabulary or usual.vocabulary
        usual.held_out = 50_000 if data.name == "imagenet64" else usual.held_out
    kept = ("name", "length", "verify", "processes", *(() if data.tokenizer == "sentencepiece" else ("vocabulary",)))
    words = [f"data={data.name}"]
    for key in (field.name for field in fields(data) if field.name not in kept):
        if (value := getattr(data, key)) != getattr(usual, key):
            words.append(f"data.{key}={shlex.quote(str(value))}")
    if known and known.image and data.length != 3 * (known.side or 32) ** 2:
        words.append(f"data.length={data.length}")
    return " ".join(words)


def open_data(data: DataConfig, root: Path, report: Report = print) -> Store:
    """Return the store of `data` below `root`, preparing it first where it is missing or its source has changed.

    Safe in several processes at once. Sizes are checked, and bytes as data.verify asks: where it is `once`, only in a
    store that was never read in full on this machine, or was moved, copied or changed since. data=recall has no store
    on disk.

    Raises:
        UserError: no such source, too little of it, or a damaged store; one line that says what to do.
        RunFailed: a download or a full disk.
    """
    if data.name == "recall":
        return RecallStore(data)
    source = make_source(data, root, report)
    folder, options = store_folder(data, root, source), options_of(data)
    if not folder.exists():
        return _prepare(data, source, root, report)
    store = open_store(folder, options)
    if data.verify != "never":
        with locked(folder, options, report):  # ranks that wait find it verified
            if data.verify == "always" or not is_verified(folder):
                store = verify_store(folder, options)
    return check_units(store, data)


def prepare_data(data: DataConfig, root: Path, report: Report = print) -> Store:
    """Return the store of `data`, written anew if it is missing or a byte of it is wrong; raises as open_data does."""
    return RecallStore(data) if data.name == "recall" else _prepare(data, make_source(data, root, report), root, report)


def verify_data(data: DataConfig, root: Path, report: Report = print) -> Store:
    """Compare every byte of the store of `data` with its recorded checksums.

    Raises:
        UserError: it has not been prepared from this source, or it is damaged.
    """
    if data.name == "recall":
        store: Store = RecallStore(data)
        report(f"data=recall: made on the fly, nothing on disk to verify; fingerprint {store.fingerprint}")
        return store
    folder = prepared_folder(data, root)
    store = verify_store(folder, options_of(data))
    report(f"{folder}: every byte as recorded; fingerprint {store.fingerprint}")
    return store


def vocabulary_size(data: DataConfig) -> int:
    """Return the number of different units of `data`, without preparing anything.

    Raises:
        UserError: words of a text whose store is not prepared.
    """
    if data.name == "recall":
        return vocabulary(data)
    if data.tokenizer == "sentencepiece":
        return data.vocabulary
    if data.tokenizer == "words":
        known = SETS[data.name].kinds if data.name in SETS else None
        return known or open_store(prepared_folder(data, data_root()), options_of(data)).vocabulary
    return 256


def _prepare(data: DataConfig, source: Source, root: Path, report: Report) -> TokenStore:
    folder, options = store_folder(data, root, source), options_of(data)
    with disk_errors(root):
        root.mkdir(parents=True, exist_ok=True)
        with locked(folder, options, report):
            if folder.exists():
                try:
                    return check_units(verify_store(folder, options), data)
                except DamagedStore as damage:
                    report(f"{damage.what}; rebuilding the store")
            report(f"preparing {options} -> {folder}")
            build_store(folder, source, data, options, report)
            return check_units(verify_store(folder, options), data)


@contextlib.contextmanager
def locked(folder: Path, options: str, report: Report) -> Iterator[None]:
    """Let one process at a time work on the store at `folder`; where nothing can be written, go on without a lock."""
    from filelock import FileLock, Timeout

    path = folder.with_name(f".{folder.name}.lock")
    lock = FileLock(path, thread_local=False)
    try:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            report(f"{options}: waiting for another process, which is preparing it")
            lock.acquire()
    except OSError:
        if not folder.exists():
            raise
    try:
        yield
    finally:
        if lock.is_locked:
            path.unlink(missing_ok=True)  # who waits for it sees that it is gone, and makes another
        lock.release()


def check_units(store: TokenStore, data: DataConfig) -> TokenStore:
    """Return the store, if sequences of data.length can be cut from it.

    Raises:
        UserError: its training split is too short, or its images have another size.
    """
    if "train" in store.splits:
        check_length(store.count("train"), data, store.source.get("place", store.name))
    check_image(store.image, data)
    return store


def check_image(size: tuple[int, int] | None, data: DataConfig) -> None:
    """Refuse another sequence length than that of an image; `size`: height and width."""
    if size and data.length != (dims := size[0] * size[1] * 3):
        found = f"data.length={data.length}: expected {dims} for images of {size[0]} x {size[1]} x 3"
        raise UserError(f"{found}: one image is one sequence; give data.length={dims}")


def check_length(train: int, data: DataConfig, place: str) -> None:
    """Refuse a training split that is shorter than one sequence."""
    if train < data.length:
        wanted = f"expected at least one sequence of data.length={data.length} units in the training split"
        raise UserError(f"{place}: {wanted}, found {train:,}; give more text or data.length={train}")


# What lies below the folder of the stores


def listing(root: Path) -> list[str]:
    """Return a line for each store, unfinished preparation and download below `root`, and the sum."""
    entries: list[tuple[Path, str]] = []
    for path in sorted(root.glob("*")):
        if path.is_dir() and STORE.fullmatch(path.name):
            entries.append((path, state(path)))
    for path in sorted(root.glob(".*.work")):
        entries.append((path, "unfinished; the same rtx data prepare goes on with it"))
    for path in sorted((root / "downloads").glob("*")):
        entries.append(
            (path, "unfinished download; the next one goes on with it" if path.suffix == ".part" else "download")
        )
    if not entries:
        return [f"{root}: no data yet"]
    names = [str(path.relative_to(root)) for path, _ in entries]
    lines = [f"{root}: {shown_size(sum(disk_size(path) for path, _ in entries))}"]
    for name, (path, says) in zip(names, entries, strict=True):
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(path.stat().st_mtime))
        lines.append(f"  {name:<{max(map(len, names))}}  {shown_size(disk_size(path)):>9}  {when}  {says}")
    return lines


def state(folder: Path) -> str:
    """Return splits of a store, and whether it is complete; its bytes are not read."""
    try:
        record = read_record(folder, "")
        store = open_store(folder, record["options"])
    except DamagedStore as damage:
        return damage.what
    splits = ", ".join(f"{name} {len(tokens):,}" for name, tokens in store.splits.items())
    checked = "complete" if is_verified(folder) else "complete, bytes not compared since it was moved or changed"
    return f"{splits} {store.unit}s; {checked}; {record['options']}"


def disk_size(path: Path) -> int:
    """Return the bytes of a file, or of all files below a folder."""
    return sum(file.lstat().st_size for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file())


def shown_size(size: int) -> str:
    """Return a number of bytes for people: 36.4 MB."""
    for power, unit in ((9, "GB"), (6, "MB"), (3, "kB")):
        if size >= 10**power:
            return f"{size / 10**power:,.1f} {unit}"
    return f"{size:,} bytes"


def named_store(root: Path, name: str) -> Path:
    """Return the store that `name`, as `rtx data list` prints it, means, or where an unfinished one would stand."""
    plain = Path(name).name.removeprefix(".").removesuffix(".work")
    folder = root / plain
    if not STORE.fullmatch(plain) or not (folder.is_dir() or work_folder(folder).is_dir()):
        known = [path.name for path in root.glob("*-*")]
        raise UserError(f"{name}: no store of this name in {root}{nearest(plain, known)}; rtx data list names them")
    return folder


def remove_store(root: Path, folder: Path, report: Report = print) -> None:
    """Remove a store, and an unfinished preparation of it; raises UserError where neither is there."""
    there = [path for path in (folder, work_folder(folder)) if path.is_dir()]
    if not there:
        raise UserError(f"{folder}: nothing to remove: no such store")
    with disk_errors(root), locked(folder, folder.name, report):
        size = sum(disk_size(path) for path in there)
        for path in there:
            shutil.rmtree(path)
    report(f"{folder}: removed, {shown_size(size)}")
