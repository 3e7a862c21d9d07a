"""A token store: a folder with the ids of each split in a raw file, where documents start, tokenizer and record.

`<root>/<name>-<key>` is made in `<root>/.<name>-<key>.work` and renamed once it is whole; the key names source and
settings, the fingerprint content, tokenizer and stamps alone. Both are the same for any number of processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import json
import os
import shutil
import signal
import stat
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from rtx.data.files import disk_errors, file_sha256
from rtx.data.sets import SPLITS, Report, Source
from rtx.data.tokenizers import Tokenizer, learned, load_tokenizer
from rtx.disk import read_file, refuse_link, replace_file, write_json
from rtx.errors import DAMAGED, RunFailed, UserError, nearest
from rtx.machine import cores
from rtx.settings.schema import DataConfig

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

FORMAT = 3  # version of what is written for the same settings; raise it whenever that changes
RECORD = "store.json"
PAYS = (
    1 << 23
)  # bytes of a split from which on several processes pay; where bytes are copied they never do
forking: list[bool] = []  # something, while processes that are forked work for this one alone


class DamagedStore(UserError):
    """A store on disk that is not what its record says, or has no record that can be read."""

    def __init__(self, options: str, path: Path | str, expected: str, found: object) -> None:
        self.what = f"{path}: damaged: expected {expected}, found {found}"
        super().__init__(f"{self.what}; to rebuild the store: rtx data prepare {options}")


@dataclass(frozen=True)
class TokenStore:
    """An open store: splits as read-only memory maps of unsigned integers `[units]`.

    `stamps` are facts of protocol that stand on every result, `image` height and width of every image (None: text),
    `facts` units, documents, bytes (of images: sub-pixels) and words of each split. `answers`: see RecallStore.
    """

    name: str
    folder: Path
    splits: dict[str, np.ndarray]
    tokenizer: Tokenizer
    fingerprint: str
    source: dict[str, Any]
    stamps: dict[str, Any] = field(default_factory=dict)
    image: tuple[int, int] | None = None
    answers: None = None
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def vocabulary(self) -> int:
        """Number of different token ids."""
        return self.tokenizer.vocabulary

    @property
    def unit(self) -> str:
        """What one token is, in words: byte, word, subword or dim."""
        return self.tokenizer.unit

    def split(self, name: str) -> np.ndarray:
        """Return the tokens of split train, valid or test; UserError where there is no such split."""
        if name not in self.splits:
            allowed = ", ".join(self.splits)
            raise UserError(
                f"{self.name} has no split {name!r}: one of {allowed}{nearest(name, self.splits)}"
            )
        return self.splits[name]

    def describe(self) -> dict[str, Any]:
        """Return what a run records of its data, as JSON values."""
        keys = ("name", "fingerprint", "vocabulary", "unit", "stamps", "source")
        described: dict[str, Any] = {key: getattr(self, key) for key in keys}
        described["splits"] = {name: len(tokens) for name, tokens in self.splits.items()}
        image = {"image": list(self.image)} if self.image else {}
        return {
            **described,
            "tokenizer": self.tokenizer.describe(),
            "folder": str(self.folder.absolute()),
            **image,
        }


def open_store(folder: Path, options: str, verify: bool = False) -> TokenStore:
    """Open the store in `folder`, checking the sizes of its splits, and with `verify` every byte of all its files.

    `options` of the command line stand in messages. Raises DamagedStore, or UserError where there is no store.
    """
    record, splits = read_record(folder, options), {}
    try:
        dtype = np.dtype(record["dtype"])
        for name, facts in record["splits"].items():
            path, size = folder / f"{name}.bin", facts["units"] * dtype.itemsize
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):
                raise DamagedStore(options, path, f"{size:,} bytes", "no regular file")
            if status.st_size != size:
                raise DamagedStore(options, path, f"{size:,} bytes", f"{status.st_size:,}")
            splits[name] = np.memmap(path, dtype, mode="r")
            for kind, sha256 in facts["sha256"].items() if verify else ():
                if (found := file_sha256(path := folder / f"{name}.{kind}")) != sha256:
                    raise DamagedStore(options, path, f"sha256 {sha256}", found)
        tokenizer = load_tokenizer(record["tokenizer"], folder)  # compared with its sha256
        kept = {key: record[key] for key in ("name", "fingerprint", "source", "stamps")}
        kept["image"] = tuple(map(int, record["image"])) if record["image"] else None
        bytes.fromhex(record["fingerprint"])  # names of files have a part of it
    except (OSError, RuntimeError, *DAMAGED) as error:
        raise unreadable(folder, options, "what its record says", error) from error
    if verify:
        note, look = note_of(folder)
        with contextlib.suppress(OSError):
            note.parent.mkdir(parents=True, exist_ok=True)
            replace_file(note, lambda file: file.write(look.encode()), durable=False)
    return TokenStore(
        **kept, folder=folder, splits=splits, tokenizer=tokenizer, facts=record["splits"]
    )


def is_verified(folder: Path) -> bool:
    """Tell whether every byte was compared here since the files were written, moved or copied.

    A note that is a link or no regular file counts as none.
    """
    path, look = note_of(folder)
    with contextlib.suppress(OSError):
        return not path.is_symlink() and read_file(path) == look.encode()
    return False


def note_of(folder: Path) -> tuple[Path, str]:
    """Return where it is noted that a store is right, and the note: sizes, times and inodes, which no copy shares."""
    paths = sorted(folder.glob("[!.]*"))
    # A link may lead nowhere.
    files = {path.name: path.stat(follow_symlinks=path.exists()) for path in paths}
    look = {
        name: [status.st_size, status.st_mtime_ns, status.st_ino] for name, status in files.items()
    }
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    elsewhere = (
        cache / "rtx" / "verified" / hashlib.sha256(str(folder.resolve()).encode()).hexdigest()
    )
    return folder / ".verified" if os.access(folder, os.W_OK) else elsewhere, json.dumps(look)


def read_record(folder: Path, options: str) -> dict[str, Any]:
    """Return the record of the store in `folder`; raises as `open_store`."""
    if not folder.exists():
        raise UserError(f"{folder}: not prepared; to prepare it: rtx data prepare {options}")
    try:
        record = json.loads(read_file(folder / RECORD))
        if (record["format"], record["sha256"]) != (FORMAT, record_sha256(record)):
            raise ValueError("by its format or sha256")
    except (OSError, *DAMAGED) as error:
        expected = f"a record of format {FORMAT} with its own sha256"
        raise unreadable(folder / RECORD, options, expected, error) from error
    return record


def unreadable(path: Path, options: str, expected: str, error: Exception) -> Exception:
    """Return what to raise for a store that cannot be opened: damaged, unless the system alone would not read it."""
    if isinstance(error, UserError):
        return error
    if not isinstance(error, OSError):
        return DamagedStore(options, path, expected, f"another ({error})")
    path = error.filename or path
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL):
        return DamagedStore(options, path, "a file that can be read", error.strerror)
    return RunFailed(
        f"{path} cannot be read ({error.strerror}); nothing was changed: mend that first"
    )


def record_sha256(record: dict[str, Any]) -> str:
    """Return the sha256 of all that a record says."""
    said = {key: value for key, value in record.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def build_store(
    folder: Path, source: Source, data: DataConfig, options: str, report: Report
) -> None:
    """Write the store at `folder`, whose lock the caller holds.

    All errors but UserError leave what is finished. UserError, before anything is written, where
    the folder or the one to work in is none, or one of them or what is in the latter is a link.
    """
    work = folder.with_name(f".{folder.name}.work")
    for path in (folder, work):
        refuse_link(path)
        if path.exists() and not path.is_dir():
            raise UserError(f"{path}: is no folder; remove it, then again")
    for path in (*work.glob("*"), *work.glob("cache/*")):
        refuse_link(path)
    try:
        with disk_errors(folder.parent):
            if not (work / RECORD).exists():
                fill(work, source, data, options, report)
            shutil.rmtree(work / "cache", ignore_errors=True)
            shutil.rmtree(folder, ignore_errors=True)
            os.rename(work, folder)
    except UserError:
        shutil.rmtree(work, ignore_errors=True)
        raise


def fill(work: Path, source: Source, data: DataConfig, options: str, report: Report) -> None:
    """Write all files of the store into `work`, its record last; splits that are finished there stay."""
    import datasets

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    cache, splits, loaded = work / "cache", {}, {}
    cache.mkdir(parents=True, exist_ok=True)
    for leftover in cache.glob("tmp*"):
        leftover.unlink()
    for read in (*SPLITS, "tables"):  # by a preparation that was killed: it is read anew
        shutil.rmtree(cache / read, ignore_errors=True)
    tokenizer: Tokenizer = Tokenizer("dim" if source.image else "byte")
    if data.tokenizer != "bytes":

        def texts() -> Iterator[bytes]:
            loaded["train"] = rows = source.load("train", work)
            for batch in rows.with_format("arrow").iter(rows_at_once(rows)):
                yield from source.read(batch)

        tokenizer = learned(data, texts(), work, options, report)
    for split in SPLITS:
        finished = cache / f"{split}.json"
        if not finished.is_file():
            rows = loaded.pop(split) if split in loaded else source.load(split, work)
            report(
                f"{options}: split {split}, {len(rows):,} rows, {rows.data.nbytes / 1e6:,.1f} MB"
            )
            encoded = encode(rows, tokenizer, source, data.processes, cache / f"{split}.arrow")
            write_json(finished, write_split(encoded, work / split, tokenizer, options))
            for path in cache.glob(f"{split}*.arrow"):
                path.unlink()
            shutil.rmtree(cache / split, ignore_errors=True)
        splits[split] = json.loads(read_file(finished))
    write_record(work, source, tokenizer, options, splits)


def write_record(
    work: Path, source: Source, tokenizer: Tokenizer, options: str, splits: dict[str, Any]
) -> None:
    """Write the record of a store, with fingerprint, time and its own sha256."""
    content = {"tokenizer": tokenizer.describe(), "dtype": tokenizer.dtype.name}
    content |= {"stamps": source.stamps, "image": source.image}
    sizes = {split: [facts["units"], facts["sha256"]] for split, facts in splits.items()}
    fingerprint = hashlib.sha256(
        json.dumps([FORMAT, *content.values(), sizes], sort_keys=True).encode()
    ).hexdigest()
    record = {
        "format": FORMAT,
        "name": source.name,
        "options": options,
        "source": source.place,
        "splits": splits,
    }
    record |= {
        **content,
        "fingerprint": fingerprint,
        "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    write_json(work / RECORD, {**record, "sha256": record_sha256(record)})


def rows_at_once(rows: datasets.Dataset) -> int:
    """Return how many rows make about 4 MiB: so many are encoded at once."""
    return max(1, min(1_000, (1 << 22) * len(rows) // max(1, rows.data.nbytes)))


def encode(
    rows: datasets.Dataset, tokenizer: Tokenizer, source: Source, processes: int | None, cache: Path
) -> datasets.Dataset:
    """Return the ids and sizes of rows, encoded by `processes` (unset: one for each core) where it pays."""
    processes = min(processes or cores(), len(rows))
    several = processes > 1 and rows.data.nbytes > PAYS and tokenizer.unit != "byte"
    forking.append(True)
    encoded = rows.with_format("arrow").map(
        encode_rows,
        fn_kwargs={"tokenizer": tokenizer, "source": source},
        batched=True,
        batch_size=rows_at_once(rows),
        writer_batch_size=rows_at_once(rows),
        remove_columns=rows.column_names,
        num_proc=processes if several else None,
        cache_file_name=str(cache),
        new_fingerprint=f"{cache.parents[1].name}-{cache.stem}",
        desc=f"{source.name} {cache.stem}",
    )
    forking.clear()
    return encoded


def end_with_parent() -> None:
    """End this process, forked while rows are encoded, with the one that forked it, also where that is killed."""
    if forking and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


os.register_at_fork(after_in_child=end_with_parent)


def encode_rows(table: pa.Table, tokenizer: Tokenizer, source: Source) -> pa.Table:
    """Return columns ids, bytes, words and first of some rows."""
    import pyarrow as pa

    read = list(source.read(table))
    ids = [tokenizer.encode(text) for text in read]
    ends = np.cumsum([0, *map(len, ids)], dtype=np.int64)
    values = np.concatenate([np.empty(0, tokenizer.dtype), *ids])
    columns: dict[str, Any] = {
        "ids": pa.LargeListArray.from_arrays(pa.array(ends), pa.array(values))
    }
    columns["bytes"] = pa.array(map(len, read), pa.int64())
    columns["words"] = pa.array(
        [0 if source.image else len(text.split()) for text in read], pa.int64()
    )
    columns["first"] = (
        table["first"] if "first" in table.column_names else pa.array([True] * len(read))
    )
    return pa.table(columns)


def write_split(
    encoded: datasets.Dataset, path: Path, tokenizer: Tokenizer, options: str
) -> dict[str, Any]:
    """Write `<path>.bin`, the ids of all rows, and of text where documents start; return sizes and checksums."""
    digest, lengths = hashlib.sha256(), [np.zeros(0, np.int64)]

    def write(file: BinaryIO) -> None:
        for chunk in encoded.data.column("ids").chunks if len(encoded) else ():
            ids = chunk.flatten().to_numpy()
            file.write(ids.data)
            digest.update(ids.data)
            lengths.append(np.diff(chunk.offsets))

    replace_file(path.with_suffix(".bin"), write)
    ends = np.cumsum(np.concatenate(lengths))
    if not len(ends) or not ends[-1]:
        raise UserError(
            f"{options}: expected at least one unit in split {path.name}, found none; give more"
        )
    sizes, words, first = (
        np.asarray(encoded.data.column(name)) for name in ("bytes", "words", "first")
    )
    starts = (ends - np.concatenate(lengths))[first & (sizes > 0)]
    facts = {
        "units": int(ends[-1]),
        "bytes": int(sizes.sum()),
        "words": int(words.sum()),
        "documents": len(starts),
    }
    checksums = {"bin": digest.hexdigest()}
    if tokenizer.unit != "dim":
        table = path.with_suffix(".starts.npy")
        replace_file(
            table, lambda file: np.save(file, np.append(starts, ends[-1]), allow_pickle=False)
        )
        checksums["starts.npy"] = file_sha256(table)
    return {**facts, "sha256": checksums}
