"""Preparation: the rows of a source through a tokenizer into the files of a store, by `datasets`, in bounded memory.

Everything is written to `<root>/.<name>-<key>.work`, which a preparation that ends early leaves and the next one goes
on with, and which gets the store's name by a rename when it is whole. The bytes are the same for any number of
processes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rtx.config import DataConfig
from rtx.data.fetch import disk_errors, size_of
from rtx.data.sets import SPLITS, Report, Source, rows_at_once, texts
from rtx.data.store import FORMAT, RECORD, write_record
from rtx.data.tokenizers import Tokenizer, learned
from rtx.disk import replace_file, sync_folder, write_json
from rtx.errors import UserError

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

CACHE = "cache"
"""Folder in that of a preparation with all that it can do without, but would make again."""
PAYS = {"byte": 1 << 28}
PAYS_OTHERWISE = 1 << 23
"""Bytes of a split from which on several processes pay: copying text takes less time than starting one."""
IS_BLANK = np.isin(np.arange(256), list(b" \t\n\r\v\f"))


def store_key(source: Source, data: DataConfig) -> str:
    """Return what tells a store from another, 12 digits: its source, its tokenizer, and the version of its files."""
    subwords = [data.vocabulary, data.tokenizer_sample] if data.tokenizer == "sentencepiece" else []
    tokenizer = ["bytes", "dim"] if source.image else [data.tokenizer, *subwords]
    text = json.dumps([FORMAT, source.name, source.identity, tokenizer, source.stamps, source.image])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def work_folder(folder: Path) -> Path:
    """Return where the store that will stand at `folder` is made."""
    return folder.with_name(f".{folder.name}.work")


def build_store(folder: Path, source: Source, data: DataConfig, options: str, report: Report) -> None:
    """Write the store at `folder`, in the place of what stands there; the caller holds the lock.

    Whatever ends it leaves what is finished to the next one; a source that is not what it should be leaves nothing.

    Raises:
        RunFailed: the disk is full, or a download failed.
        UserError: the source is not what it should be, or the folder cannot be written.
    """
    work = work_folder(folder)
    try:
        with disk_errors(folder.parent):
            if not (work / RECORD).exists():
                fill(work, source, data, options, report)
            shutil.rmtree(work / CACHE, ignore_errors=True)
            sync_folder(work)
            shutil.rmtree(folder, ignore_errors=True)
            os.rename(work, folder)
            sync_folder(folder.parent)
    except UserError:
        shutil.rmtree(work, ignore_errors=True)
        raise


def fill(work: Path, source: Source, data: DataConfig, options: str, report: Report) -> None:
    """Write all files of the store into `work`, its record last."""
    import datasets

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    (work / CACHE).mkdir(parents=True, exist_ok=True)
    for leftover in (work / CACHE).glob("tmp*"):
        leftover.unlink()
    processes = data.processes or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
    tokenizer: Tokenizer | None = Tokenizer("dim" if source.image else "byte")
    if data.tokenizer != "bytes":
        train = source.load("train", work)
        tokenizer = learned(data, texts(train, source), work, options, report)
    splits = {}
    for split in SPLITS:
        path = work / CACHE / f"{split}.json"
        if not path.exists():
            encoder = Encoder(tokenizer, source)
            write_json(path, write_split(work, split, encoder, options, processes or 1, report))
            shutil.rmtree(work / CACHE / split, ignore_errors=True)
        splits[split] = json.loads(path.read_bytes())
    facts = {"name": source.name, "options": options, "source": source.place, "stamps": source.stamps}
    facts |= {"image": source.image, "tokenizer": tokenizer.describe(), "unit": tokenizer.unit}
    facts |= {"vocabulary": tokenizer.vocabulary, "dtype": tokenizer.dtype.name, "splits": splits}
    write_record(work, facts)


@contextlib.contextmanager
def forks_end_with_us() -> Iterator[None]:
    """Let processes that are forked meanwhile end soon after this one is gone: those of `map` would live on."""
    global forking
    forking = os.getpid()
    try:
        yield
    finally:
        forking = 0


def watch_parent() -> None:
    """End this process, just forked while rows are encoded, when the one that started it is gone."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    if parent := forking:
        threading.Thread(target=watch, daemon=True).start()


forking = 0
os.register_at_fork(after_in_child=watch_parent)


@dataclass
class Encoder:
    """Rows -> their ids and sizes, as `Dataset.map` asks for it, also in other processes."""

    tokenizer: Tokenizer
    source: Source

    def __call__(self, table: pa.Table) -> pa.Table:
        """Return columns ids, bytes, words and first of a batch of rows."""
        import pyarrow as pa

        read = list(self.source.read(table))
        ids = [self.tokenizer.encode(text) for text in read]
        ends = np.cumsum([0, *map(len, ids)], dtype=np.int64)
        values = pa.array(np.concatenate([np.empty(0, self.tokenizer.dtype), *ids]))
        first = table["first"].combine_chunks() if "first" in table.column_names else pa.array([True] * len(read))
        columns = {"ids": pa.LargeListArray.from_arrays(pa.array(ends), values), "first": first}
        columns["bytes"] = pa.array([len(text) for text in read], pa.int64())
        columns["words"] = pa.array([0 if self.source.image else count_words(text) for text in read], pa.int64())
        return pa.table(columns)


def count_words(text: bytes) -> int:
    """Return how many words between blanks a text has."""
    is_blank = IS_BLANK[np.frombuffer(text, dtype=np.uint8)]
    return int(np.count_nonzero(is_blank[:-1] & ~is_blank[1:])) + (len(text) > 0 and not is_blank[0])


def write_split(
    work: Path, split: str, encoder: Encoder, options: str, processes: int, report: Report
) -> dict[str, Any]:
    """Encode a split, write its files and return what is recorded of it; finished rows of a killed try are kept."""
    import datasets

    rows = encoder.source.load(split, work)
    tokenizer, size = encoder.tokenizer, rows.data.nbytes
    several = processes > 1 and size > PAYS.get(tokenizer.unit, PAYS_OTHERWISE)
    shown = f", {processes} processes" if several else ""
    report(f"{options}: split {split}, {len(rows):,} rows, {size / 1e6:,.1f} MB{shown}")
    with forks_end_with_us():
        encoded = rows.with_format("arrow").map(
            encoder,
            batched=True,
            batch_size=(at_once := rows_at_once(rows)),
            writer_batch_size=at_once,
            remove_columns=rows.column_names,
            features=datasets.Features(
                {
                    "ids": datasets.LargeList(datasets.Value(tokenizer.dtype.name)),
                    **{
                        "first": datasets.Value("bool"),
                        "bytes": datasets.Value("int64"),
                        "words": datasets.Value("int64"),
                    },
                }
            ),
            num_proc=min(processes, len(rows)) if several else None,
            cache_file_name=str(work / CACHE / f"{split}.arrow"),
            new_fingerprint=f"{work.name}-{split}",
            desc=f"{encoder.source.name} {split}",
        )
    facts = flatten(encoded, work, split, encoder)
    known = (encoder.source.units or {}).get(split, facts["bytes"])
    if known != facts["bytes"]:
        found = f"expected {known:,} bytes of split {split}, found {facts['bytes']:,}"
        raise UserError(f"{options}: the source changed while it was read: {found}; prepare it again")
    if not facts["units"]:
        raise UserError(f"{options}: expected at least one unit in split {split}, found none; give more")
    for cache in (work / CACHE).glob(f"{split}*.arrow"):
        cache.unlink()
    return facts


def flatten(encoded: datasets.Dataset, work: Path, split: str, encoder: Encoder) -> dict[str, Any]:
    """Write the ids of all rows one behind the other, and where documents start; return sizes and checksums."""
    digest = hashlib.sha256()

    def write(file: Any) -> None:
        for chunk in encoded.data.column("ids").chunks:
            ids = chunk.flatten().to_numpy(zero_copy_only=True)
            file.write(ids.data)
            digest.update(ids.data)

    replace_file(work / f"{split}.bin", write)
    first, sizes, words = (np.asarray(encoded.data.column(name)) for name in ("first", "bytes", "words"))
    lengths = np.concatenate([np.zeros(0, np.int64), *(row_lengths(encoded))])
    units, begins = int(lengths.sum()), (np.cumsum(lengths) - lengths)[first & (sizes > 0)]
    facts: dict[str, Any] = {"units": units, "bytes": int(sizes.sum())}
    facts |= {"words": int(words.sum()), "documents": len(begins)}
    assert size_of(work / f"{split}.bin") == units * encoder.tokenizer.dtype.itemsize
    facts["sha256"] = {"bin": digest.hexdigest()}
    if not encoder.source.image:
        starts = np.append(begins, units).astype("<i8")
        path = work / f"{split}.starts.npy"
        replace_file(path, lambda file: np.save(file, starts, allow_pickle=False))
        facts["sha256"]["starts.npy"] = hashlib.sha256(path.read_bytes()).hexdigest()
    return facts


def row_lengths(encoded: datasets.Dataset) -> Iterator[np.ndarray]:
    """Yield how many ids each row has, chunk by chunk."""
    for chunk in encoded.data.column("ids").chunks:
        yield np.diff(chunk.offsets.to_numpy())
