"""Preparing a token store: rows of a source -> token ids on disk.

A store is written to `<root>/.<name>-<key>.work` and renamed when it is whole. An interrupted
preparation continues with the splits that are finished. The bytes of a store are the same for any
number of processes.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import signal
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from rtx.data.files import disk_errors, sha256_of, text_sha256
from rtx.data.sets import SPLITS, Report, Source
from rtx.data.store import FORMAT, LARGEST_RECORD, RECORD, record_sha256
from rtx.data.tokenizers import Tokenizer, learned
from rtx.disk import (
    is_file_inside,
    make_folder,
    names_inside,
    open_inside,
    read_inside,
    remove_file,
    remove_tree,
    rename_inside,
    replace_inside,
    status_inside,
    write_json,
)
from rtx.errors import UserError
from rtx.machine import cores
from rtx.settings.schema import DataConfig

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

PARALLEL_BYTES = 1 << 23
"""Size of a split from which on several processes are faster; copying bytes never is."""
BATCH_BYTES = 1 << 22
"""About how many bytes of rows are encoded at once."""
encoders: list[bool] = []
"""Not empty while this process forks workers that encode rows."""


def build_store(
    folder: Path,
    source: Source,
    data: DataConfig,
    options: str,
    report: Report,
) -> None:
    """Write the store at `folder`, whose lock the caller holds.

    All errors but UserError leave the splits that are finished. UserError, before anything is
    written, where `folder` or the work folder is no folder, or one of them or what is in the latter
    is a link.
    """
    work = folder.with_name(f".{folder.name}.work")
    root = folder.parent
    check_folders(root, folder.name, work.name)
    try:
        with disk_errors(root):
            if not is_file_inside(*in_root(work, RECORD)):
                write_store(work, source, data, options, report)
            remove_tree(*in_root(work, "cache"), ignore_errors=True)
            remove_tree(root, folder.name, ignore_errors=True)
            rename_inside(root, work.name, folder.name)
    except UserError:
        remove_tree(root, work.name, ignore_errors=True)
        raise


def check_folders(root: Path, name: str, work: str) -> None:
    """Raise UserError where a store or its work folder is no folder or has links."""
    for folder in (name, work):
        status = status_inside(root, folder)
        if status is not None and not stat.S_ISDIR(status.st_mode):
            raise UserError(f"{root / folder}: is no folder; remove it, then again")
    for inner in (work, f"{work}/cache"):
        for entry in names_inside(root, inner):
            status_inside(root, f"{inner}/{entry}")


def in_root(work: Path, name: str) -> tuple[Path, str]:
    """Return the folder of all stores, and the name below it of what is in a work folder."""
    return work.parent, f"{work.name}/{name}"


def write_store(work: Path, source: Source, data: DataConfig, options: str, report: Report) -> None:
    """Write all files of a store into `work`, the record last; finished splits stay."""
    import datasets

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    clear_cache(work)
    rows = Rows(source, work)
    tokenizer = Tokenizer("dim" if source.image else "byte")
    if data.tokenizer != "bytes":
        tokenizer = learned(data, rows.training_texts(), work, options, report)
    splits = {}
    for split in SPLITS:
        root, finished = in_root(work, f"cache/{split}.json")
        if not is_file_inside(root, finished):
            facts = prepare_split(split, rows, tokenizer, data.processes, options, report)
            write_json(root, finished, facts)
            remove_cache(work, split)
        splits[split] = json.loads(read_inside(root, finished, LARGEST_RECORD))
    write_record(work, source, tokenizer, options, splits)


def clear_cache(work: Path) -> None:
    """Remove what an interrupted preparation was reading, which is read again."""
    root, cache = in_root(work, "cache")
    make_folder(root, cache)
    for leftover in names_inside(root, cache, "tmp*"):
        remove_file(root, f"{cache}/{leftover}")
    for name in (*SPLITS, "tables"):
        remove_tree(root, f"{cache}/{name}", ignore_errors=True)


def remove_cache(work: Path, split: str) -> None:
    """Remove what was cached for a split that is finished."""
    root, cache = in_root(work, "cache")
    for name in names_inside(root, cache, f"{split}*.arrow"):
        remove_file(root, f"{cache}/{name}")
    remove_tree(root, f"{cache}/{split}", ignore_errors=True)


class Rows:
    """The rows of a source; those of split train, once read for a tokenizer, are read once."""

    def __init__(self, source: Source, work: Path) -> None:
        self.source = source
        self.work = work
        self.train: datasets.Dataset | None = None

    def training_texts(self) -> Iterator[bytes]:
        """Yield the documents of split train."""
        self.train = self.source.load("train", self.work)
        for batch in self.train.with_format("arrow").iter(batch_rows(self.train)):
            yield from self.source.read(batch)

    def take(self, split: str) -> datasets.Dataset:
        """Return the rows of a split, which this object then forgets."""
        if split == "train" and self.train is not None:
            rows = self.train
            self.train = None
            return rows
        return self.source.load(split, self.work)


def prepare_split(
    split: str,
    rows: Rows,
    tokenizer: Tokenizer,
    processes: int | None,
    options: str,
    report: Report,
) -> dict[str, Any]:
    """Write the token ids of a split; return its sizes and checksums."""
    taken = rows.take(split)
    size = f"{len(taken):,} rows, {taken.data.nbytes / 1e6:,.1f} MB"
    report(f"{options}: split {split}, {size}")
    cache = rows.work / "cache" / f"{split}.arrow"
    encoded = encode(taken, tokenizer, rows.source, processes, cache)
    return write_split(encoded, rows.work, split, tokenizer, options)


def write_record(
    work: Path,
    source: Source,
    tokenizer: Tokenizer,
    options: str,
    splits: dict[str, Any],
) -> None:
    """Write the record of a store, with fingerprint, time and its own sha256."""
    content = {
        "tokenizer": tokenizer.describe(),
        "dtype": tokenizer.dtype.name,
        "stamps": source.stamps,
        "image": source.image,
    }
    sizes = {}
    for split, facts in splits.items():
        sizes[split] = [facts["units"], facts["sha256"]]
    identity = [FORMAT, *content.values(), sizes]
    record = {
        "format": FORMAT,
        "name": source.name,
        "options": options,
        "source": source.place,
        "splits": splits,
        **content,
        "fingerprint": text_sha256(json.dumps(identity, sort_keys=True)),
        "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    record["sha256"] = record_sha256(record)
    write_json(*in_root(work, RECORD), record)


def batch_rows(rows: datasets.Dataset) -> int:
    """Return how many rows are encoded at once, 1 to 1,000: about BATCH_BYTES of them."""
    bytes_each = max(1, rows.data.nbytes)
    return max(1, min(1_000, BATCH_BYTES * len(rows) // bytes_each))


def encode(
    rows: datasets.Dataset,
    tokenizer: Tokenizer,
    source: Source,
    processes: int | None,
    cache: Path,
) -> datasets.Dataset:
    """Return the ids and sizes of rows, encoded by `processes` (None: all cores) where it pays."""
    processes = min(processes or cores(), len(rows))
    is_large = rows.data.nbytes > PARALLEL_BYTES
    is_parallel = processes > 1 and is_large and tokenizer.unit != "byte"
    encoders.append(True)
    encoded = rows.with_format("arrow").map(
        encode_rows,
        fn_kwargs={"tokenizer": tokenizer, "source": source},
        batched=True,
        batch_size=batch_rows(rows),
        writer_batch_size=batch_rows(rows),
        remove_columns=rows.column_names,
        num_proc=processes if is_parallel else None,
        cache_file_name=str(cache),
        new_fingerprint=f"{cache.parents[1].name}-{cache.stem}",
        desc=f"{source.name} {cache.stem}",
    )
    encoders.clear()
    return encoded


def end_with_parent() -> None:
    """Let Linux kill this forked process when its parent ends, even by SIGKILL."""
    if encoders and sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


os.register_at_fork(after_in_child=end_with_parent)


def encode_rows(table: pa.Table, tokenizer: Tokenizer, source: Source) -> pa.Table:
    """Return columns ids, bytes, words and first (a document starts here) of some rows."""
    import pyarrow as pa

    texts = list(source.read(table))
    ids = [tokenizer.encode(text) for text in texts]
    ends = np.cumsum([0, *map(len, ids)], dtype=np.int64)
    values = np.concatenate([np.empty(0, tokenizer.dtype), *ids])
    words = [0] * len(texts)
    if not source.image:
        words = [len(text.split()) for text in texts]
    first = pa.array([True] * len(texts))
    if "first" in table.column_names:
        first = table["first"]
    columns: dict[str, Any] = {
        "ids": pa.LargeListArray.from_arrays(pa.array(ends), pa.array(values)),
        "bytes": pa.array(map(len, texts), pa.int64()),
        "words": pa.array(words, pa.int64()),
        "first": first,
    }
    return pa.table(columns)


def write_split(
    encoded: datasets.Dataset,
    work: Path,
    split: str,
    tokenizer: Tokenizer,
    options: str,
) -> dict[str, Any]:
    """Write `<split>.bin`, the ids of all rows, and for text `<split>.starts.npy`.

    The latter has where documents start, and the number of tokens. Return sizes and checksums.
    """
    lengths, sha256 = write_ids(encoded, *in_root(work, f"{split}.bin"))
    ends = np.cumsum(lengths)
    if not len(ends) or not ends[-1]:
        expected = f"expected at least one token in split {split}, found none"
        raise UserError(f"{options}: {expected}; give more")
    sizes = np.asarray(encoded.data.column("bytes"))
    words = np.asarray(encoded.data.column("words"))
    is_first = np.asarray(encoded.data.column("first"))
    starts = (ends - lengths)[is_first & (sizes > 0)]
    checksums = {"bin": sha256}
    if tokenizer.unit != "dim":
        root, table = in_root(work, f"{split}.starts.npy")
        offsets = np.append(starts, ends[-1])
        replace_inside(root, table, lambda file: np.save(file, offsets, allow_pickle=False))
        with open_inside(root, table) as file:
            checksums["starts.npy"] = sha256_of(file)
    return {
        "units": int(ends[-1]),
        "bytes": int(sizes.sum()),
        "words": int(words.sum()),
        "documents": len(starts),
        "sha256": checksums,
    }


def write_ids(encoded: datasets.Dataset, root: Path, name: str) -> tuple[np.ndarray, str]:
    """Write the ids of all rows; return the number of ids of each row `[rows]`, and the sha256."""
    digest = hashlib.sha256()
    lengths = [np.zeros(0, np.int64)]
    chunks = encoded.data.column("ids").chunks if len(encoded) else []

    def write(file: BinaryIO) -> None:
        for chunk in chunks:
            ids = chunk.flatten().to_numpy()
            file.write(ids.data)
            digest.update(ids.data)
            lengths.append(np.diff(chunk.offsets))

    replace_inside(root, name, write)
    return np.concatenate(lengths), digest.hexdigest()
