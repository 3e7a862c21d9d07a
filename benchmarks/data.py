"""How fast data become stores, and batches: every figure promised for preparation, on this machine.

Run `python benchmarks/data.py` on a quiet machine; it writes `benchmarks/results/data-cpu.json`, a row for each figure,
and prints a table. Needs 5 GB below the folder for temporary files (TMPDIR) and no network. Text is Python's standard
library, or `--text FILE`, repeated as often as the sizes ask for, which makes words easier to remember than a text
that goes on: each row says which text it was. `--scale 0.01` tries everything on a hundredth of the sizes.

The loader's share of a training step is in `benchmarks/results/newcomer-cpu.json` (`python benchmarks/newcomer.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from rtx.config import DataConfig
from rtx.data.files import library_files, listed, read_files
from rtx.data.source import Tokenizer

MB = 1_000_000
PIECE = 16 * MB
BATCH, LENGTH = 8, 8_192
BOOK = 400_000
"""Bytes of a made book, about the mean of PG-19's."""
BOOKS_IN_GROUP = 1_000
"""Rows of a row group, as in the hub's files: hundreds of megabytes."""

Row = dict[str, Any]


def arguments() -> argparse.Namespace:
    """Return what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--text", type=Path, help="a file of text; default: Python's standard library")
    parser.add_argument("--gigabytes", type=float, default=2.0, help="text of the books (case books)")
    parser.add_argument("--vocabulary", type=int, default=16_384, help="subwords (cases subwords, books)")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="of all sizes; below 1 nothing is compared with a target"
    )
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "data-cpu.json")
    parser.add_argument("--child", choices=CASES, help=argparse.SUPPRESS)
    return parser.parse_args()


def text_of(args: argparse.Namespace) -> bytes:
    """Return the text that all others are made of."""
    return args.text.read_bytes() if args.text else b"".join(read_files(library_files()))


def repeated(text: bytes, size: int) -> bytes:
    """Return `size` bytes of a text, again and again."""
    return (text * (size // len(text) + 1))[:size]


def cores() -> int:
    """Return how many processes prepare a store unless fewer are asked for."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def said(line: str) -> None:
    """Pass on what a preparation says, beside the rows."""
    print(line, file=sys.stderr)


@contextlib.contextmanager
def made_enwik8(folder: Path, args: argparse.Namespace) -> Iterator[Path]:
    """Make a zip that passes for enwik-8's, and patch what the real one is told by."""
    from rtx.data import enwik8

    splits = {name: int(size * args.scale) for name, size in enwik8.SPLITS.items()}
    content = repeated(text_of(args), sum(splits.values()))
    with zipfile.ZipFile(folder / "enwik8.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("enwik8", content)
    enwik8.SIZE, enwik8.SPLITS = len(content), splits
    enwik8.SHA256 = hashlib.sha256(content).hexdigest()
    yield folder / "enwik8.zip"


def case_bytes(folder: Path, args: argparse.Namespace) -> list[Row]:
    """A zip as large as enwik-8 to its store; then random batches from that store."""
    from rtx.data.catalog import prepare_files
    from rtx.data.sampler import TrainingItems, training_batches

    with made_enwik8(folder, args) as path:
        begin = time.perf_counter()
        store = prepare_files(DataConfig(name="enwik8", path=str(path), length=LENGTH), folder / "data", said)
        seconds = time.perf_counter() - begin
    size = sum(map(len, store.splits.values()))
    rows: list[Row] = [row("enwik-8's zip to its store", seconds, "s", 5.0, bytes=size)]
    items = TrainingItems(store.split("train"), LENGTH, seed=0, batch_size=BATCH)
    steps = max(20, int(2_000 * args.scale))
    for batches in (training_batches(items, 0, 20), training_batches(items, 20, 20 + steps)):  # the first ones warm up
        begin, units = time.perf_counter(), 0
        for batch in batches:
            units += batch.numel()
        seconds = time.perf_counter() - begin
    rows.append(row(f"random batches of {BATCH} x {LENGTH:,}", units / seconds / 1e6, "million tokens/s", 100.0))
    return rows


def case_words(folder: Path, args: argparse.Namespace) -> list[Row]:
    """Words of a long text: counted, then encoded by one process and by all."""
    from rtx.data.words import WordTokenizer

    parts = text_parts(folder, args, 200 * MB)
    size = sum(part.size for part in parts)
    rates: list[Row] = []
    for processes in sorted({1, cores()}):
        begin = time.perf_counter()
        tokenizer = WordTokenizer.train(parts, "data=text", said, processes)
        counted = time.perf_counter() - begin
        encoded = encoding_seconds(tokenizer, parts, folder, processes)
        rates.append(row("words encoded", size / encoded / MB, "MB/s", 20.0, processes=processes))
        whole = size / (counted + encoded) / MB
        rates.append(row("words counted and encoded", whole, "MB/s", None, processes=processes))
    return [{**rate, "bytes": size, "vocabulary": tokenizer.vocabulary} for rate in rates]


def case_subwords(folder: Path, args: argparse.Namespace) -> list[Row]:
    """Subwords of a long text, encoded by one process and by all; learning them is timed apart."""
    from rtx.data.pieces import SentencepieceTokenizer

    parts = text_parts(folder, args, 200 * MB)
    size = sum(part.size for part in parts)
    begin = time.perf_counter()
    tokenizer = SentencepieceTokenizer.train(parts, args.vocabulary, int(100 * MB * args.scale), "data=text", said)
    rows = [row("subwords learned", time.perf_counter() - begin, "s", None)]
    for processes in sorted({1, cores()}):
        rate = size / encoding_seconds(tokenizer, parts, folder, processes) / MB
        target = 5.0 if processes == cores() else None
        rows.append(row("subwords encoded", rate, "MB/s", target, processes=processes))
    return [{**rate, "bytes": size, "vocabulary": args.vocabulary} for rate in rows]


def text_parts(folder: Path, args: argparse.Namespace, size: int) -> list[Any]:
    """Write a long text and return it in parts of 16 MB."""
    from rtx.data.text import Piece, TextPart

    (folder / "text").write_bytes(repeated(text_of(args), int(size * args.scale)))
    file = listed(folder / "text")
    cuts = range(0, file.size, PIECE)
    return [TextPart((Piece(file, start, min(start + PIECE, file.size)),)) for start in cuts]


def encoding_seconds(tokenizer: Tokenizer, parts: list[Any], folder: Path, processes: int) -> float:
    """Return the time in which the parts are encoded and written with their checksums, as a preparation does it."""
    from rtx.data.build import smallest_type
    from rtx.data.parts import Place, work_on_part
    from rtx.data.workers import Job, run_jobs

    work = folder / f"work-{processes}"
    (work / "parts").mkdir(parents=True)
    described = tokenizer.describe()
    (work / described["file"]).write_bytes(tokenizer.content)  # type: ignore[attr-defined]
    kind, told = smallest_type(tokenizer.vocabulary), json.dumps(described)
    jobs: list[Job] = [
        (work_on_part, (part, told, work, kind, False, Place(work, "train", number, len(parts))))
        for number, part in enumerate(parts)
    ]
    begin = time.perf_counter()
    for _ in run_jobs(jobs, processes):
        pass
    return time.perf_counter() - begin


def case_books(folder: Path, args: argparse.Namespace) -> list[Row]:
    """Books in parquet files to a store of subwords; its memory is what counts, learning on a small sample."""
    from rtx.data.catalog import prepare_files

    code = "import sys, pathlib; sys.path[:0] = sys.argv[1:3]; import data; data.write_books(*sys.argv[3:])"
    here = Path(__file__).parent
    size = str(int(args.gigabytes * args.scale * 1e9))
    place = [str(here), str(here.parent), str(folder / "books"), size, str(args.text or "")]
    subprocess.run([sys.executable, "-c", code, *place], check=True)  # its memory is not ours
    options = {"tokenizer": "sentencepiece", "vocabulary": args.vocabulary, "tokenizer_sample": 10 * MB}
    data = DataConfig(name="pg19", path=str(folder / "books"), length=LENGTH, **options)
    begin = time.perf_counter()
    print("measure", flush=True)  # from here on memory counts
    store = prepare_files(data, folder / "data", said)
    seconds = time.perf_counter() - begin
    total = sum(store.facts(name).bytes for name in store.splits)
    return [row("PG-19-like books to their store", seconds, "s", None, bytes=total, vocabulary=args.vocabulary)]


def write_books(folder: str, size: str, text: str) -> None:
    """Write parquet files with PG-19's columns: a row group of 1,000 books a file, and two of one book."""
    import pyarrow as pa
    from pyarrow import parquet

    content = text_of(argparse.Namespace(text=Path(text) if text else None)).decode("utf-8", "replace")
    count, place = max(1, int(size) // BOOK), Path(folder)
    place.mkdir()
    twice = content * (BOOK // len(content) + 2)
    files = -(-count // BOOKS_IN_GROUP)
    groups = [("train", k, files, min(BOOKS_IN_GROUP, count - k * BOOKS_IN_GROUP)) for k in range(files)]
    for split, number, of, books in [*groups, ("validation", 0, 1, 1), ("test", 0, 1, 1)]:
        starts = [(number * BOOKS_IN_GROUP + k) * 7_919 % len(content) for k in range(books)]
        columns = {name: [""] * books for name in ("short_book_title", "url")}
        table = {**columns, "publication_date": [1900] * books, "text": [twice[at : at + BOOK] for at in starts]}
        parquet.write_table(pa.table(table), place / f"{split}-{number:05d}-of-{of:05d}.parquet")


def case_images(folder: Path, args: argparse.Namespace) -> list[Row]:
    """As many images as CIFAR-10 has, from PNGs in parquet files to their store."""
    from rtx.data.catalog import prepare_files

    (folder / "images").mkdir()
    counts = {"train": int(50_000 * args.scale), "test": int(10_000 * args.scale)}
    for seed, (split, count) in enumerate(counts.items()):
        write_images(folder / "images" / f"{split}-00000-of-00001.parquet", count, seed)
    held = counts["train"] // 10
    data = DataConfig(name="cifar10", path=str(folder / "images"), length=3_072, held_out=held)
    begin = time.perf_counter()
    prepare_files(data, folder / "data", said)
    seconds = time.perf_counter() - begin
    images = sum(counts.values())
    size = sum(path.stat().st_size for path in (folder / "images").iterdir())
    return [row("CIFAR-like PNGs in parquet to their store", seconds, "s", 15.0, images=images, bytes=size)]


def write_images(path: Path, count: int, seed: int) -> None:
    """Write PNGs of 32 x 32 in the hub's schema that compress about as well as photographs (2.4 kB each)."""
    import io

    import pyarrow as pa
    from PIL import Image
    from pyarrow import parquet

    draw, rows = np.random.default_rng(seed), []
    for _ in range(count):
        coarse = draw.integers(0, 224, (8, 8, 3)).repeat(4, 0).repeat(4, 1)
        target = io.BytesIO()
        Image.fromarray((coarse + draw.integers(0, 32, coarse.shape)).astype(np.uint8)).save(target, "PNG")
        rows.append({"bytes": target.getvalue(), "path": None})
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    parquet.write_table(pa.table({"img": pa.array(rows, kind), "label": [0] * count}), path, row_group_size=1_000)


def row(what: str, value: float, unit: str, target: float | None, **facts: Any) -> Row:
    """Return a figure: seconds are to stay below their target, rates to reach it."""
    return {"what": what, "value": float(f"{value:.4g}"), "unit": unit, "target": target, **facts}


CASES = {
    "bytes": case_bytes,
    "words": case_words,
    "subwords": case_subwords,
    "books": case_books,
    "images": case_images,
}


class Memory(threading.Thread):
    """Watches the resident memory of a process and of all below it: the largest single one, and the largest sum."""

    def __init__(self, process: int) -> None:
        super().__init__(daemon=True)
        self.process, self.largest, self.sum, self.over = process, 0, 0, False

    def run(self) -> None:
        """Look twenty times a second."""
        while not self.over:
            sizes = [resident(number) for number in family(self.process)]
            self.largest, self.sum = max(self.largest, *sizes, 0), max(self.sum, sum(sizes))
            time.sleep(0.05)

    def forget(self) -> None:
        """Begin anew."""
        self.largest = self.sum = 0


def family(process: int) -> list[int]:
    """Return the numbers of a process and of all below it."""
    try:
        found = [int(n) for path in Path(f"/proc/{process}/task").glob("*/children") for n in path.read_text().split()]
    except OSError:
        found = []
    return [process, *(number for child in found for number in family(child))]


def resident(process: int) -> int:
    """Return the resident bytes of a process; 0: it is gone."""
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def measured(name: str, words: list[str], full: bool) -> list[Row]:
    """Run a case in a process of its own; return its rows, each with the memory that the case took.

    Pages that several processes share count in the sum as often as they are mapped. `full`: of the real sizes.
    """
    command = [sys.executable, __file__, *words, "--child", name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        memory = Memory(child.pid)
        memory.start()
        assert child.stdout is not None
        rows: list[Row] = []
        for line in child.stdout:
            if line == "measure\n":
                memory.forget()
            else:
                rows.append(json.loads(line))
        memory.over = True
    if child.returncode:
        sys.exit(f"case {name} ended with {child.returncode}")
    peaks = {"peak_mib_largest_process": memory.largest >> 20, "peak_mib_all_processes": memory.sum >> 20}
    rows = [{"case": name, **found, **peaks} for found in rows]
    if name == "books":
        peak = row("PG-19-like books, memory of all processes", memory.sum / 2**30, "GiB", 1.5 if full else None)
        rows.append({"case": name, **peak, **peaks})
    return rows


def shown(found: Row) -> str:
    """Return a line of the table."""
    value, target = found["value"], found["target"]
    verdict = ""
    if target is not None:
        below = found["unit"] in ("s", "GiB")
        verdict = f"{'<' if below else '>'} {target:g}: {'yes' if (value < target) == below else 'no'}"
    number = found.get("processes")
    processes = f" ({number} process{'es' if number > 1 else ''})" if number else ""
    return f"{found['what'] + processes:<48} {value:>9,.4g} {found['unit']:<17} {verdict}"


def main() -> None:
    """Measure every case, print the table and write the rows."""
    args = arguments()
    if args.child:
        with tempfile.TemporaryDirectory() as folder:
            for found in CASES[args.child](Path(folder), args):
                print(json.dumps(found if args.scale >= 1 else {**found, "target": None}), flush=True)
        return
    words = ["--gigabytes", str(args.gigabytes), "--vocabulary", str(args.vocabulary), "--scale", str(args.scale)]
    words += ["--text", str(args.text)] if args.text else []
    text = f"{args.text.name if args.text else 'standard library'}, {len(text_of(args)):,} bytes, repeated"
    common: Row = {
        "text": text,
        "scale": args.scale,
        "cores": cores(),
        "machine": f"{platform.machine()}, {platform.system()}",
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("numpy", "pyarrow", "sentencepiece", "pillow", "torch")},
    }
    rows = []
    for name in args.cases:
        for found in measured(name, words, args.scale >= 1):
            print(shown(found), flush=True)
            rows.append({**found, **common})
    args.output.write_text(json.dumps(rows, indent=1) + "\n")
    print(f"text: {text}; {args.output}")


if __name__ == "__main__":
    main()
