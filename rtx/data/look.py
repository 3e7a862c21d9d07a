"""What is in a store, for people: sizes, coverage, where it came from, and examples of text or images."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np

from rtx.data.inventory import disk_size, shown_size
from rtx.data.store import TokenStore
from rtx.report.text import printable

EXAMPLES = 3
SHOWN = 400
"""Units of an example."""
CHUNK = 1 << 22
PICTURES = 64

LICENCES = {
    "stdlib": "Python Software Foundation License",
    "text": "that of your own files",
    "images": "that of your own files",
    "enwik8": "GFDL (Wikipedia of 2006; later CC BY-SA)",
    "wikitext103": "CC BY-SA 3.0 and GFDL",
    "pg19": "Apache-2.0 for the collection; the books are in the public domain in the US",
    "cifar10": "none stated; cite Krizhevsky 2009",
    "imagenet64": "ImageNet's terms: research, not for commercial use",
}


def summary(store: TokenStore, root: Path) -> list[str]:
    """Return the lines of `rtx data info`; of images it writes a sheet beside the store and says where."""
    tokenizer = store.tokenizer.describe()
    lines = [
        f"{store.folder}: {store.name}, {shown_size(disk_size(store.folder))} on disk",
        f"  source       {_pairs(store.source)}",
        f"  licence      {LICENCES.get(store.name, 'not known')}",
        f"  tokenizer    {_pairs(tokenizer)}",
        f"  fingerprint  {store.fingerprint}",
    ]
    if store.stamps:
        lines.append(f"  stamps       {_pairs(store.stamps)}")
    if store.image:
        lines.append(f"  images       {store.image[0]} x {store.image[1]} x 3, one a sequence")
    return [*lines, "", *_table(store), "", *_examples(store, root)]


def _pairs(values: dict[str, Any]) -> str:
    shown = []
    for key, value in values.items():
        if isinstance(value, dict):
            shown.append(f"{key} ({_pairs(value)})")
        else:
            shown.append(f"{key} {value:,}" if type(value) is int else f"{key} {value}")
    return ", ".join(shown)


def _table(store: TokenStore) -> list[str]:
    """Return a line for each split: its sizes, and how many of the ids occur in it."""
    documents = "images" if store.image else "documents"
    rows = [("split", f"{store.unit}s", documents, "bytes", *(() if store.image else ("words",)), "ids that occur")]
    for name in store.splits:
        facts = store.facts(name)
        words = () if store.image else (f"{facts.words:,}",)
        occur = f"{int(np.count_nonzero(uses(store, name))):,} of {store.vocabulary:,}"
        rows.append((name, f"{facts.units:,}", f"{facts.documents:,}", f"{facts.bytes:,}", *words, occur))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def uses(store: TokenStore, split: str) -> np.ndarray:
    """Return how often each id occurs in a split: int64 `[vocabulary]`."""
    tokens = store.split(split)
    counts = np.zeros(store.vocabulary, dtype=np.int64)
    for first in range(0, len(tokens), CHUNK):
        counts += np.bincount(tokens[first : first + CHUNK], minlength=store.vocabulary)
    return counts


def _examples(store: TokenStore, root: Path) -> list[str]:
    split = "train" if "train" in store.splits else next(iter(store.splits))
    if store.image:
        sheet = importlib.import_module("rtx.data.sheet")  # draws with Pillow
        path = root / f"{store.folder.name}-{split}.png"
        sheet.contact_sheet(store.split(split), store.image, path, count=PICTURES)
        return [f"{path}: {min(PICTURES, store.facts(split).documents)} images of split {split}"]
    tokens = store.split(split)
    lines = []
    for start in sorted(np.random.default_rng(0).integers(0, max(1, len(tokens) - SHOWN), EXAMPLES)):
        text = store.tokenizer.decode(tokens[start : start + SHOWN]).decode("utf-8", "replace")
        lines += [f"{split}, from {store.unit} {start:,} on:"]
        lines += [f"  | {line}" for line in printable(text[: 2 * SHOWN]).split("\n")]
    return lines
