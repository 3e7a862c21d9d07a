"""The data sets by name, and their stores: open (preparing on demand), prepare, verify."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from rtx.config import DataConfig
from rtx.data import enwik8
from rtx.data.disk import Report, disk_errors, locked
from rtx.data.files import SourceFile, library_files, read_files, text_files
from rtx.data.recall import RecallStore
from rtx.data.store import DamagedStore, Recipe, TokenStore, build_store, open_store, verify_store
from rtx.errors import UserError, nearest

Store = TokenStore | RecallStore

SHORTEST_TEXT = 31  # bytes: from here on 5% are at least two


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


def check_source(data: DataConfig, root: Path, report: Report = print) -> None:
    """Check that there is something to make the store of `data` from; raises as make_recipe does."""
    if data.name != "recall":
        make_recipe(data, root, report)


def open_data(data: DataConfig, root: Path, report: Report = print) -> Store:
    """Return the store of `data`: of files as `open_files`; data=recall has none, it is made when it is read."""
    return RecallStore(data) if data.name == "recall" else open_files(data, root, report)


def prepare_data(data: DataConfig, root: Path, report: Report = print) -> Store:
    """Return the store of `data`: of files as `prepare_files`; for data=recall there is nothing to prepare."""
    return RecallStore(data) if data.name == "recall" else prepare_files(data, root, report)


def verify_data(data: DataConfig, root: Path, report: Report = print) -> Store:
    """Return the store of `data`: of files as `verify_files`; for data=recall say that there is nothing on disk."""
    if data.name != "recall":
        return verify_files(data, root, report)
    store = RecallStore(data)
    report(f"data=recall: made on the fly, nothing on disk to verify; fingerprint {store.fingerprint}")
    return store


def open_files(data: DataConfig, root: Path, report: Report = print) -> TokenStore:
    """Return the store of `data` below `root`, preparing it first where it is missing or its source has changed.

    Safe in several processes at once. Sizes are checked, bytes are not (verify_files does).

    Raises:
        UserError: no such source, too little of it, or a damaged store; one line that says what to do.
        RunFailed: a download or a full disk.
    """
    recipe = make_recipe(data, root, report)
    if not recipe.folder(root).exists():
        return _prepare(recipe, root, report)
    return open_store(root, recipe)


def prepare_files(data: DataConfig, root: Path, report: Report = print) -> TokenStore:
    """Return the store of `data`, written anew if it is missing or a byte of it is wrong; raises as open_files does."""
    return _prepare(make_recipe(data, root, report), root, report)


def verify_files(data: DataConfig, root: Path, report: Report = print) -> TokenStore:
    """Compare every byte of the store of `data` with its recorded sha256.

    Raises:
        UserError: it has not been prepared from this source, or it is damaged.
    """
    recipe = make_recipe(data, root, report)
    if not recipe.folder(root).exists():
        raise UserError(f"{recipe.folder(root)}: not prepared; to prepare it: rtx data prepare {recipe.options}")
    store = verify_store(root, recipe)
    report(f"{store.folder}: every byte as recorded; fingerprint {store.fingerprint}")
    return store


def _prepare(recipe: Recipe, root: Path, report: Report) -> TokenStore:
    folder = recipe.folder(root)
    with disk_errors(root):
        root.mkdir(parents=True, exist_ok=True)
        with locked(root / f".{folder.name}.lock", recipe.options, report):
            if folder.exists():
                try:
                    return verify_store(root, recipe)
                except DamagedStore as damage:
                    report(str(damage).partition("; to rebuild")[0] + "; rebuilding the store")
            sizes = ", ".join(f"{name} {units:,}" for name, units in recipe.splits.items())
            report(f"preparing {recipe.options}: {recipe.units:,} bytes ({sizes}) -> {folder}")
            build_store(root, recipe)
    return open_store(root, recipe)


def make_recipe(data: DataConfig, root: Path, report: Report = print) -> Recipe:
    """Return what the store of `data` is to hold, without writing anything.

    Raises:
        UserError: the source is missing, unreadable, or too short for its splits or for one sequence.
    """
    if data.name == "stdlib":
        recipe = _files_recipe("stdlib", "data=stdlib", "the standard library", library_files())
    elif data.name == "text":
        options = f"data=text data.path={shlex.quote(data.path or '')}"
        recipe = _files_recipe("text", options, data.path or "", text_files(data.path or "", root))
    elif data.name == "enwik8":
        recipe = _enwik8_recipe(data, root, report)
    else:
        known = ("stdlib", "text", "enwik8")
        raise UserError(f"data={data.name}: must be one of {', '.join(known)}{nearest(data.name, known)}")
    _check_length(recipe, data.length)
    return recipe


def _files_recipe(name: str, options: str, place: str, files: list[SourceFile]) -> Recipe:
    """Bytes of all files in order, cut at 90% and 95%."""
    total = sum(file.size for file in files)
    train, valid = total * 90 // 100, total * 95 // 100
    splits = {"train": train, "valid": valid - train, "test": total - valid}
    if total < SHORTEST_TEXT:
        found = f"{total:,} in {len(files):,} file{'s' if len(files) > 1 else ''}"
        raise UserError(f"{place}: expected at least {SHORTEST_TEXT} bytes (cut 90/5/5), found {found}; give more text")
    return Recipe(
        name=name,
        options=options,
        splits=splits,
        identity=[[str(file.path), file.size, file.modified_ns] for file in files],
        source={"place": place, "files": len(files), "bytes": total},
        chunks=lambda: read_files(files),
    )


def _enwik8_recipe(data: DataConfig, root: Path, report: Report) -> Recipe:
    """The content is known beforehand, so a store that is there needs neither network nor local copy."""
    options = "data=enwik8"
    if data.path is not None:
        options += f" data.path={shlex.quote(data.path)}"
        if os.path.exists(os.path.expanduser(data.path)):
            enwik8.local_copy(data.path)
    return Recipe(
        name="enwik8",
        options=options,
        splits=enwik8.SPLITS,
        identity=[enwik8.SHA256],
        source={"place": enwik8.ARCHIVE.url, "sha256": enwik8.SHA256},
        chunks=lambda: enwik8.read_enwik8(data.path, root, report),
    )


def _check_length(recipe: Recipe, length: int) -> None:
    train = recipe.splits["train"]
    if train < length:
        raise UserError(
            f"{recipe.source['place']}: expected at least one sequence of data.length={length} bytes in the training "
            f"split, found {train:,}; give more text or data.length={train}"
        )
