"""Every data set of files, small: files in the schema of each, the constants they need, the options that mean them."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from corpora import articles, prose, wikitext_facts, write_books
from image_cases import encoded, random_images, write_table

from rtx.data import enwik8, text, wikitext
from rtx.data.files import listed
from rtx.data.published import DOCUMENTS, WORDS

Made = list[str]
"""The options of a set."""


def made_text(folder: Path, patch: pytest.MonkeyPatch) -> Made:
    """A file of its own."""
    (folder / "book.txt").write_bytes(prose(700))
    return ["data=text", f"data.path={folder / 'book.txt'}", "data.length=32"]


def made_library(folder: Path, patch: pytest.MonkeyPatch) -> Made:
    """A library of two modules."""
    for name in ("a.py", "b.py"):
        (folder / name).write_bytes(prose(300, ord(name[0])))
    patch.setattr(text, "library_files", lambda: [listed(folder / name) for name in ("a.py", "b.py")])
    return ["data=stdlib", "data.length=32"]


def made_enwik8(folder: Path, patch: pytest.MonkeyPatch) -> Made:
    """A zip of 4,000 bytes, 3,600 of them for training."""
    content = prose(1_000)[:4_000]
    with zipfile.ZipFile(folder / "enwik8.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("enwik8", content)
    patch.setattr(enwik8, "SIZE", len(content))
    patch.setattr(enwik8, "SHA256", hashlib.sha256(content).hexdigest())
    patch.setattr(enwik8, "SPLITS", {"train": 3_600, "valid": 200, "test": 200})
    return ["data=enwik8", f"data.path={folder / 'enwik8.zip'}", "data.length=32"]


def made_wikitext(folder: Path, patch: pytest.MonkeyPatch) -> Made:
    """The three extracted files, and their words as the published ones."""
    texts = {"train": articles(30, 1), "valid": articles(3, 2), "test": articles(4, 3)}
    for split, content in texts.items():
        (folder / f"wiki.{split}.tokens").write_bytes(content)
    facts = {split: wikitext_facts(content, split != "train") for split, content in texts.items()}
    patch.setattr(wikitext, "PUBLISHED", facts)
    patch.setitem(WORDS, "wikitext103", {split: fact.words for split, fact in facts.items()})
    return ["data=wikitext103", f"data.path={folder}", "data.length=32"]


def made_pg19(folder: Path, patch: pytest.MonkeyPatch) -> Made:
    """Parquet files of seven, two and three books, as the hub has them; the published counts are of as many."""
    counts = {"train": 7, "valid": 2, "test": 3}
    for seed, (split, count) in enumerate(counts.items()):
        name = {"valid": "validation"}.get(split, split)
        books = [prose(200, 10 * seed + number) for number in range(count)]
        write_books(folder / f"{name}-00000-of-00001.parquet", books)
    patch.setitem(DOCUMENTS, "pg19", counts)
    patch.setitem(WORDS, "pg19", {"train": 1_390, "valid": 390, "test": 590})
    return ["data=pg19", f"data.path={folder}", "data.length=32", "data.vocabulary=400"]


def made_cifar10(folder: Path, patch: pytest.MonkeyPatch) -> Made:
    """Parquet files of PNGs."""
    for split, count in (("train", 9), ("test", 3)):
        images = [encoded(image) for image in random_images(count, seed=count)]
        write_table(folder / f"{split}-00000-of-00001.parquet", images)
    return ["data=cifar10", f"data.path={folder}", "data.held_out=2"]


def made_imagenet64(folder: Path, patch: pytest.MonkeyPatch) -> Made:
    """Arrays, scaled down so that a sequence is short."""
    for split, count in (("train", 9), ("valid", 3)):
        np.save(folder / f"imagenet64-{split}.npy", random_images(count, 64, 64, seed=count))
    return ["data=imagenet64", f"data.path={folder}", "data.held_out=2", "data.size=8"]


def made_images(folder: Path, patch: pytest.MonkeyPatch) -> Made:
    """PNG files that are not square."""
    for number, image in enumerate(random_images(20, 4, 6)):
        (folder / f"{number:02d}.png").write_bytes(encoded(image))
    return ["data=images", f"data.path={folder}", "data.length=72"]


SETS: dict[str, Callable[[Path, pytest.MonkeyPatch], Made]] = {
    "text": made_text,
    "stdlib": made_library,
    "enwik8": made_enwik8,
    "wikitext103": made_wikitext,
    "pg19": made_pg19,
    "cifar10": made_cifar10,
    "imagenet64": made_imagenet64,
    "images": made_images,
}
