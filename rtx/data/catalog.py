"""The data sets by name, and their stores: open (preparing on demand), prepare, verify."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

from rtx.config import DataConfig
from rtx.data.build import build_store
from rtx.data.disk import Report, disk_errors, locked
from rtx.data.published import VOCABULARY
from rtx.data.recall import RecallStore, vocabulary
from rtx.data.recipe import Recipe
from rtx.data.store import DamagedStore, TokenStore, is_verified, open_store, verify_store
from rtx.errors import UserError, nearest

Store = TokenStore | RecallStore

BYTES = 256
"""Vocabulary of every data set that is read as bytes."""

# Each module has `source(data: DataConfig, root: Path, report: Report) -> Source`.
MODULES = {
    "stdlib": "text",
    "text": "text",
    "enwik8": "enwik8",
    "wikitext103": "wikitext",
    "pg19": "pg19",
    "cifar10": "cifar10",
    "imagenet64": "imagenet64",
    "images": "images",
}


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

    Safe in several processes at once. Sizes are checked, and bytes as data.verify asks: where it is `once`, only in a
    store that was never read in full on this machine, or was moved, copied or changed since.

    Raises:
        UserError: no such source, too little of it, or a damaged store; one line that says what to do.
        RunFailed: a download or a full disk.
    """
    recipe = make_recipe(data, root, report)
    folder = recipe.folder(root)
    store = open_store(folder, recipe.options) if folder.exists() else _prepare(recipe, root, report)
    if data.verify == "always" or (data.verify == "once" and not is_verified(folder)):
        store = verify_store(folder, recipe.options)
    return check_units(store, data)


def prepare_files(data: DataConfig, root: Path, report: Report = print) -> TokenStore:
    """Return the store of `data`, written anew if it is missing or a byte of it is wrong; raises as open_files does."""
    return _prepare(make_recipe(data, root, report), root, report)


def verify_files(data: DataConfig, root: Path, report: Report = print) -> TokenStore:
    """Compare every byte of the store of `data` with its recorded checksums.

    Raises:
        UserError: it has not been prepared from this source, or it is damaged.
    """
    recipe = make_recipe(data, root, report)
    folder = prepared_folder(recipe, root)
    store = verify_store(folder, recipe.options)
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
        return VOCABULARY.get(data.name) or prepared_vocabulary(data, data_root())
    return BYTES


def prepared_vocabulary(data: DataConfig, root: Path) -> int:
    """Return how many different ids the store of `data` has; raises as `prepared_folder` and `open_store` do."""
    recipe = make_recipe(data, root)
    return open_store(prepared_folder(recipe, root), recipe.options).vocabulary


def prepared_folder(recipe: Recipe, root: Path) -> Path:
    """Return the folder of a store that is there.

    Raises:
        UserError: it is not.
    """
    folder = recipe.folder(root)
    if not folder.exists():
        raise UserError(f"{folder}: not prepared; to prepare it: rtx data prepare {recipe.options}")
    return folder


def _prepare(recipe: Recipe, root: Path, report: Report) -> TokenStore:
    folder = recipe.folder(root)
    with disk_errors(root):
        root.mkdir(parents=True, exist_ok=True)
        with locked(root / f".{folder.name}.lock", recipe.options, report):
            if folder.exists():
                try:
                    return check_units(verify_store(folder, recipe.options), recipe.data)
                except DamagedStore as damage:
                    report(str(damage).partition("; to rebuild")[0] + "; rebuilding the store")
            report(f"preparing {recipe.options}: {_sizes(recipe)}-> {folder}")
            build_store(root, recipe, report)
    return check_units(open_store(folder, recipe.options), recipe.data)


def _sizes(recipe: Recipe) -> str:
    units = recipe.source.units
    if not units:
        return ""
    unit = "dims" if recipe.source.image else "bytes" if recipe.data.tokenizer == "bytes" else "units"
    return f"{sum(units.values()):,} {unit} ({', '.join(f'{name} {count:,}' for name, count in units.items())}) "


def make_recipe(data: DataConfig, root: Path, report: Report = print) -> Recipe:
    """Return what the store of `data` is to hold, without writing anything.

    Raises:
        UserError: the source is missing, unreadable, or too short for its splits or for one sequence.
    """
    if data.name not in MODULES:
        known = ", ".join(MODULES)
        raise UserError(f"data={data.name}: must be one of {known}{nearest(data.name, MODULES)}")
    module = importlib.import_module(f"rtx.data.{MODULES[data.name]}")
    recipe = Recipe(module.source(data, root, report), data)
    units = (recipe.source.units or {}).get("train")
    if units is not None:
        unit = "dim" if recipe.source.image else "byte"
        check_length(units, unit, data, recipe.source.place.get("place", recipe.options))
    check_image(recipe.source.image, data)
    return recipe


def check_units(store: TokenStore, data: DataConfig) -> TokenStore:
    """Return the store, if sequences of data.length can be cut from it.

    Raises:
        UserError: its training split is too short, or its images have another size.
    """
    if "train" in store.splits:
        check_length(store.count("train"), store.unit, data, store.source.get("place", store.name))
    check_image(store.image, data)
    return store


def check_image(size: tuple[int, int] | None, data: DataConfig) -> None:
    """Refuse another sequence length than that of an image; `size`: height and width.

    Raises:
        UserError: says which it must be.
    """
    if size and data.length != (dims := size[0] * size[1] * 3):
        raise UserError(
            f"data.length={data.length}: expected {dims} for images of {size[0]} x {size[1]} x 3: one image is one "
            f"sequence; give data.length={dims}"
        )


def check_length(train: int, unit: str, data: DataConfig, place: str) -> None:
    """Refuse a training split that is shorter than one sequence.

    Raises:
        UserError: says how long it is.
    """
    if train < data.length:
        raise UserError(
            f"{place}: expected at least one sequence of data.length={data.length} {unit}s in the training split, "
            f"found {train:,}; give more text or data.length={train}"
        )
