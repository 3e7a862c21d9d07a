"""The stores of data sets by name: open (and prepare on demand), verify, list and remove."""

import contextlib
import errno
import json
import os
import re
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from rtx.data.files import disk_errors, disk_size, text_sha256
from rtx.data.long_context import LongContextStore
from rtx.data.preparation import build_store
from rtx.data.sets import KINDS, Report, Source
from rtx.data.store import (
    FORMAT,
    DamagedStore,
    Store,
    TokenStore,
    is_verified,
    open_store,
    read_record,
)
from rtx.data.synthetic import HELD_OUT, SyntheticStore
from rtx.data.tokenizers import PretrainedTokenizer, read_pretrained
from rtx.disk import make_folder, names_inside, read_named, remove_file, remove_tree, status_inside
from rtx.errors import RunFailed, UserError, nearest, printable
from rtx.paths import expand_path, refuse_non_utf8
from rtx.settings.data_sets import LONG_CONTEXT, MADE, SETS
from rtx.settings.fields import imported
from rtx.settings.presets import preset
from rtx.settings.schema import DataConfig
from rtx.tables import aligned

STORE_NAME = re.compile(r"[a-z0-9_]+-[0-9a-f]{12}")
"""Names of stores; nothing else is ever removed."""


def data_root() -> Path:
    """Return the folder of all stores: RTX_DATA, or `data` in the current folder.

    UserError where it is a file, a link to nothing, a name that is not UTF-8, or may not be read.
    """
    root = expand_path(os.environ.get("RTX_DATA") or "data", "RTX_DATA")
    refuse_non_utf8("RTX_DATA", str(root))
    try:
        is_there = root.exists() or root.is_symlink()
        if is_there and not root.is_dir():
            advice = "set RTX_DATA to a folder that you may write"
            raise UserError(f"RTX_DATA={root}: is not a folder; {advice}")
        names_inside(root)
    except OSError as error:
        advice = "set RTX_DATA to a folder that you may read"
        raise UserError(f"RTX_DATA={root}: {error.strerror}; {advice}") from error
    return root


def check_source(data: DataConfig, root: Path, report: Report = print) -> Source | None:
    """Return what a store is made from; None for a set that is made on the fly.

    UserError where the source is missing or unreadable.
    """
    if data.name in MADE:
        return None
    source = imported(SETS[data.name].origin)(data, root, report)
    if bool(source.image) != SETS[data.name].image:
        rule = "side= of register_data is for images, whose Source says image="
        raise UserError(f"data={data.name}: {rule}")
    if source.image:
        height, width = source.image
        length = 3 * height * width
        if data.length != length:
            rule = "for one image is one sequence"
            raise UserError(f"data.length={data.length}: expected {length}, {rule}")
    return source


def made_store(data: DataConfig) -> SyntheticStore:
    """Return the store of a set that is made on the fly."""
    return imported(MADE[data.name])(data)


def long_enough(store: TokenStore, data: DataConfig) -> TokenStore:
    """Return `store`; UserError where its training split is shorter than one sequence."""
    tokens = len(store.split("train"))
    if tokens < data.length:
        raise UserError(
            f"data={data.name}: expected at least one sequence of data.length={data.length} "
            f"tokens in the training split, found {tokens:,}; give more text or "
            f"data.length={tokens}"
        )
    return store


def store_folder(data: DataConfig, root: Path, source: Source | None = None) -> Path:
    """Return the folder of a store; its name depends on source, tokenizer and file version."""
    source = source or check_source(data, root)
    if source is None:
        raise UserError(f"data={data.name}: made on the fly, nothing on disk")
    tokenizer: list[Any] = [data.tokenizer]
    if source.image:
        tokenizer = ["bytes", "dim"]
    elif data.tokenizer == "sentencepiece":
        tokenizer += [data.vocabulary, data.tokenizer_sample]
    elif data.tokenizer == "pretrained":
        tokenizer.append(pretrained(data).describe()["sha256"])
    key = [
        FORMAT,
        source.name,
        source.identity,
        tokenizer,
        source.stamps,
        source.image,
    ]
    digest = text_sha256(json.dumps(key))
    return root / f"{source.name}-{digest[:12]}"


def options_of(data: DataConfig) -> str:
    """Return the command-line options of a store, for messages: what differs from conf/data."""
    path = preset("data", data.name)
    defaults = yaml.safe_load(read_named(path)) if path else SETS[data.name].defaults
    default = DataConfig(**(defaults or {}))
    hidden = {"name", "verify", "processes", "documents"}
    if data.tokenizer != "sentencepiece":
        hidden.add("vocabulary")
    if not SETS[data.name].image:
        hidden.add("length")
    options = [f"data={data.name}"]
    for key, value in vars(data).items():
        if key not in hidden and value != getattr(default, key):
            options.append(f"data.{key}={shlex.quote(str(value))}")
    return " ".join(options)


def open_data(data: DataConfig, root: Path, report: Report = print) -> Store:
    """Return the store of `data` below `root`; a missing store is prepared.

    Several processes may call this at once. Checksums are compared as data.verify says; `once`
    compares those of a store that was moved, copied or changed since they were compared. Raises
    UserError for a bad source, too little data, or a damaged store; RunFailed for a failed download
    or a full disk.
    """
    source = check_source(data, root, report)
    if source is None:
        return made_store(data)
    folder = store_folder(data, root, source)
    if not folder.exists():
        return prepare_data(data, root, report, source)
    verify = data.verify == "always"
    if data.verify == "once":
        verify = not is_verified(folder)
    return long_enough(open_store(folder, options_of(data), verify), data)


def prepare_data(
    data: DataConfig, root: Path, report: Report = print, source: Source | None = None
) -> Store:
    """Return the store of `data`, written anew where it is missing or damaged.

    Raises as `open_data`.
    """
    source = source or check_source(data, root, report)
    if source is None:
        return made_store(data)
    folder = store_folder(data, root, source)
    options = options_of(data)
    with disk_errors(root):
        make_folder(root)
        with locked(folder, options, report):
            reason = reason_to_build(folder, options)
            if reason:
                report(f"{reason} {options} -> {folder}")
                build_store(folder, source, data, options, report)
            return long_enough(open_store(folder, options, verify=bool(reason)), data)


def reason_to_build(folder: Path, options: str) -> str:
    """Return why a store is built, for the user; "" for a whole one, all of which is compared."""
    try:
        open_store(folder, options, verify=True)
    except DamagedStore as error:
        return f"{error.damage}; rebuilding the store:"
    except UserError:
        return "preparing"
    return ""


def find_data(data: DataConfig, root: Path) -> Store:
    """Return the store of `data`, which must exist; UserError where it does not."""
    if data.name in MADE:
        return made_store(data)
    return open_store(store_folder(data, root), options_of(data))


def verify_data(data: DataConfig, root: Path, report: Report = print) -> Store:
    """Compare every byte of a store with its recorded checksums; UserError for a missing store.

    Of a long-context task every answer is derived from its prompt instead.
    """
    if data.name in LONG_CONTEXT:
        return verify_answers(data, report)
    store = open_store(store_folder(data, root), options_of(data), verify=True)
    report(f"{store.folder}: every byte as recorded; fingerprint {store.fingerprint}")
    return store


def verify_answers(data: DataConfig, report: Report) -> Store:
    """Derive every held-out answer of a long-context task from its prompt, and return its store."""
    store = made_store(data)
    assert isinstance(store, LongContextStore)
    for split in HELD_OUT:
        answers = store.solved(split)
        report(f"data={data.name}: all {answers:,} answers of {split} follow from their prompts")
    return store


def pretrained(data: DataConfig) -> PretrainedTokenizer:
    """Return the tokenizer that data.tokenizer_path names; UserError where it cannot be read."""
    assert data.tokenizer_path is not None
    return read_pretrained(data.tokenizer_path)


def vocabulary_size(data: DataConfig) -> int:
    """Return the number of different tokens; UserError for words of a text without a store."""
    kinds = KINDS.get(data.name)
    if data.name in MADE:
        return made_store(data).vocabulary
    if data.tokenizer == "bytes":
        return 256
    if data.tokenizer == "sentencepiece":
        return data.vocabulary
    if data.tokenizer == "pretrained":
        return pretrained(data).vocabulary
    if kinds is None:
        return find_data(data, data_root()).vocabulary
    return kinds


@contextlib.contextmanager
def locked(folder: Path, options: str, report: Report) -> Iterator[None]:
    """Let one process at a time work on the store at `folder`.

    Other than the lock of a run, this one waits. UserError on a file system that refuses locks.
    """
    from filelock import FileLock, Timeout

    root = folder.parent
    path = root / f".{folder.name}.lock"
    status = status_inside(root, path.name)
    if status is not None and not stat.S_ISREG(status.st_mode):
        raise UserError(f"{path}: is no regular file; remove it, then again")
    # by path: filelock follows no link, either
    lock = FileLock(path, thread_local=False)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        report(f"{options}: waiting for another process, which is preparing it")
        lock.acquire()
    except OSError as error:
        if error.errno != errno.ENOLCK:
            raise
        advice = "set RTX_DATA to a folder on a disk with locks"
        raise UserError(f"{path}: {error.strerror}; {advice}") from error
    try:
        yield
    finally:
        # A waiting process notices that the file is gone, and creates another one.
        remove_file(root, path.name)
        lock.release()


def listing(root: Path) -> list[str]:
    """Return a line for each store, unfinished preparation and download: size, name, what it is."""
    notes: dict[Path, str] = {}
    for path in root.glob(".*.work"):
        notes[path] = "unfinished; the same rtx data prepare goes on with it"
    for path in root.glob("downloads/*"):
        notes[path] = "unfinished" if path.suffix == ".part" else "download"
    for path in root.glob("*-*"):
        if STORE_NAME.fullmatch(path.name):
            notes[path] = store_note(path)
    if not notes:
        return [f"{root}: no data yet"]
    rows = []
    for path in sorted(notes):
        texts = (disk_size(path), str(path.relative_to(root)), notes[path])
        rows.append([printable(text) for text in texts])
    return aligned(rows, right={0})


def store_note(folder: Path) -> str:
    """Return the options of a store, or why its record cannot be read."""
    try:
        return read_record(folder, "")["options"]
    except DamagedStore as error:
        return error.damage
    except RunFailed as error:
        return str(error)


def remove_store(root: Path, name: str, report: Report = print) -> None:
    """Remove the store `name`, as `rtx data list` prints it, and its unfinished preparation."""
    plain = name.removeprefix(".").removesuffix(".work")
    names = stored_names(root, plain)
    if not names:
        near = nearest(plain, [path.name for path in root.glob("*-*")])
        raise UserError(f"{name}: no store of this name in {root}{near}; rtx data list names them")
    with disk_errors(root), locked(root / plain, plain, report):
        for stored in names:
            size = disk_size(root / stored)
            remove_tree(root, stored)
            report(f"{root / stored}: removed, {size}")


def stored_names(root: Path, name: str) -> list[str]:
    """Return the names of a store and its unfinished preparation that exist.

    UserError where one of them is a link.
    """
    if not STORE_NAME.fullmatch(name):
        return []
    stored = []
    for candidate in (name, f".{name}.work"):
        status = status_inside(root, candidate)
        if status is not None and stat.S_ISDIR(status.st_mode):
            stored.append(candidate)
    return stored
