"""How fast data become stores, and batches: every figure promised for preparation, on this machine.

Run `python benchmarks/data.py` on a quiet machine; it writes `benchmarks/results/data-cpu.json`, a
row for each figure (the median of `--runs`), and prints a table. Needs 12 GB below the folder for
temporary files (TMPDIR) and no network. Text is Python's standard library, or `--text FILE` (lines,
or a parquet file with a column `text`), repeated as often as the sizes ask for but in the case
`subwords`, which encodes it once: each row says which text it was. `--scale 0.01` tries everything
on a hundredth of the sizes.

The loader's share of a training step is in `benchmarks/results/newcomer-cpu.json` (`python
benchmarks/newcomer.py`).
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from ending import children, end_with_children

from rtx.settings.schema import DataConfig

MB = 1_000_000
BATCH = 8
LENGTH = 8_192
BOOK = 400_000
"""Bytes of a made book, about the mean of PG-19's."""
BOOKS_IN_GROUP = 1_000
"""Rows of a row group, as in the hub's files: hundreds of megabytes."""

Row = dict[str, Any]


def arguments() -> argparse.Namespace:
    """Return what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--runs", type=int, default=3, help="of each case; their median counts")
    parser.add_argument(
        "--text", type=Path, help="a file of text; default: Python's standard library"
    )
    parser.add_argument(
        "--gigabytes", type=float, default=2.0, help="text of the books (case books)"
    )
    parser.add_argument("--vocabulary", type=int, default=16_384, help="subwords (case subwords)")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="of all sizes; below 1 no figure has a goal"
    )
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).parent / "results" / "data-cpu.json"
    )
    parser.add_argument("--child", choices=CASES, help=argparse.SUPPRESS)
    return parser.parse_args()


def text_of(args: argparse.Namespace) -> bytes:
    """Return the text that all others are made of."""
    from pyarrow import parquet

    from rtx.data.text import library_files

    if args.text and args.text.suffix == ".parquet":
        return "".join(parquet.read_table(args.text, columns=["text"])["text"].to_pylist()).encode()
    return (
        args.text.read_bytes()
        if args.text
        else b"".join(path.read_bytes() for path in library_files())
    )


def repeated(text: bytes, size: int) -> bytes:
    """Return `size` bytes of a text, again and again."""
    return (text * (size // len(text) + 1))[:size]


def said(line: str) -> None:
    """Pass on what a preparation says, beside the rows."""
    print(line, file=sys.stderr)


def case_bytes(folder: Path, args: argparse.Namespace) -> list[Row]:
    """A zip as large as enwik-8 to its store; then random batches from that store."""
    from rtx.data import text
    from rtx.data.batches import training_batches
    from rtx.data.catalog import prepare_data
    from rtx.data.download import Remote
    from rtx.data.files import file_sha256
    from rtx.data.sampler import ShuffledWindows

    content = repeated(text_of(args), int(100 * MB * args.scale))
    archive = folder / "enwik8.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("enwik8", content)
    text.ENWIK8 = Remote(
        "https://nowhere.invalid/enwik8.zip", archive.stat().st_size, file_sha256(archive)
    )
    text.ENWIK8_TEXT = (len(content), hashlib.sha256(content).hexdigest())
    begin = time.perf_counter()
    store = prepare_data(
        DataConfig(name="enwik8", path=str(archive), length=LENGTH), folder / "data", said
    )
    rows = [
        row("enwik-8's zip to its store", time.perf_counter() - begin, "s", 5.0, bytes=len(content))
    ]
    sampler = ShuffledWindows(store.split("train"), LENGTH, seed=0, batch_size=BATCH)
    steps = max(20, int(2_000 * args.scale))
    for batches in (
        training_batches(sampler, 0, 20),
        training_batches(sampler, 20, 20 + steps),
    ):  # the first ones warm up
        units = 0
        begin = time.perf_counter()
        for batch in batches:
            units += batch.numel()
        seconds = time.perf_counter() - begin
    return [
        *rows,
        row(
            f"random batches of {BATCH} x {LENGTH:,}",
            units / seconds / MB,
            "million tokens/s",
            100.0,
        ),
    ]


def case_words(folder: Path, args: argparse.Namespace) -> list[Row]:
    """Words of a long text, counted and encoded by one process."""
    from rtx.data.tokenizers import learn_words

    text = repeated(text_of(args), int(200 * MB * args.scale))
    begin = time.perf_counter()
    tokenizer = learn_words([text], "data=text", said)
    counted = time.perf_counter()
    tokenizer.encode(text)
    rates = (("counted", counted - begin, None), ("encoded", time.perf_counter() - counted, 20.0))
    facts = {"bytes": len(text), "vocabulary": tokenizer.vocabulary}
    return [
        row(f"words {what}", len(text) / seconds / MB, "MB/s", goal, **facts)
        for what, seconds, goal in rates
    ]


def case_subwords(folder: Path, args: argparse.Namespace) -> list[Row]:
    """Subwords learned from half of a text, then 30 MB of its other half encoded by one process,
    never seen before.
    """
    from rtx.data.tokenizers import learn_subwords

    text = text_of(args)
    half = text.index(b" ", len(text) // 2)
    begin = time.perf_counter()
    tokenizer = learn_subwords([text[:half]], args.vocabulary, 100 * MB, "data=text", said)
    learned = time.perf_counter()
    unseen = text[half : half + int(30 * MB * args.scale)]
    tokenizer.encode(unseen)
    rate = len(unseen) / (time.perf_counter() - learned) / MB
    facts = {"vocabulary": args.vocabulary}
    rows = [row("subwords learned", learned - begin, "s", None, bytes=half, **facts)]
    return [
        *rows,
        row("subwords encoded, text never seen", rate, "MB/s", 3.0, bytes=len(unseen), **facts),
    ]


def case_books(folder: Path, args: argparse.Namespace) -> list[Row]:
    """Books in parquet files to a store of bytes; its memory is what counts."""
    from rtx.data.catalog import prepare_data

    code = (
        "import sys, pathlib; sys.path[:0] = sys.argv[1:3]; import data; "
        "data.write_books(*sys.argv[3:])"
    )
    here = Path(__file__).parent
    size = str(int(args.gigabytes * args.scale * 1e9))
    place = [str(here), str(here.parent), str(folder / "books"), size, str(args.text or "")]
    subprocess.run([sys.executable, "-c", code, *place], check=True)  # its memory is not ours
    data = DataConfig(name="pg19", path=str(folder / "books"), length=LENGTH)
    print("measure", flush=True)  # from here on memory counts
    begin = time.perf_counter()
    store = prepare_data(data, folder / "data", said)
    seconds = time.perf_counter() - begin
    return [
        row(
            "PG-19-like books to their store of bytes",
            seconds,
            "s",
            None,
            bytes=len(store.split("train")),
        )
    ]  # type: ignore[union-attr]


def write_books(folder: str, size: str, text: str) -> None:
    """Write parquet files with PG-19's columns: a row group of 1,000 books a file, and two of one
    book.
    """
    import pyarrow as pa
    from pyarrow import parquet

    content = text_of(argparse.Namespace(text=Path(text) if text else None)).decode(
        "utf-8", "replace"
    )
    count = max(1, int(size) // BOOK)
    place = Path(folder)
    place.mkdir()
    twice = content * (BOOK // len(content) + 2)
    files = -(-count // BOOKS_IN_GROUP)
    groups = [
        ("train", k, files, min(BOOKS_IN_GROUP, count - k * BOOKS_IN_GROUP)) for k in range(files)
    ]
    for split, number, of, books in [*groups, ("validation", 0, 1, 1), ("test", 0, 1, 1)]:
        starts = [(number * BOOKS_IN_GROUP + k) * 7_919 % len(content) for k in range(books)]
        columns = {name: [""] * books for name in ("short_book_title", "url")}
        table = {
            **columns,
            "publication_date": [1900] * books,
            "text": [twice[at : at + BOOK] for at in starts],
        }
        parquet.write_table(pa.table(table), place / f"{split}-{number:05d}-of-{of:05d}.parquet")


def case_images(folder: Path, args: argparse.Namespace) -> list[Row]:
    """As many images as CIFAR-10 has, from PNGs in parquet files to their store."""
    from rtx.data.catalog import prepare_data

    counts = {"train": int(50_000 * args.scale), "test": int(10_000 * args.scale)}
    for seed, (split, count) in enumerate(counts.items()):
        write_images(folder / f"{split}-00000-of-00001.parquet", count, seed)
    data = DataConfig(
        name="cifar10", path=str(folder), length=3_072, held_out=counts["train"] // 10
    )
    begin = time.perf_counter()
    prepare_data(data, folder / "data", said)
    seconds = time.perf_counter() - begin
    return [
        row(
            "CIFAR-like PNGs in parquet to their store",
            seconds,
            "s",
            15.0,
            images=sum(counts.values()),
        )
    ]


def write_images(path: Path, count: int, seed: int) -> None:
    """Write PNGs of 32 x 32 in the hub's schema that compress about as well as photographs (2.4 kB
    each).
    """
    import pyarrow as pa
    from PIL import Image
    from pyarrow import parquet

    draw = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        coarse = draw.integers(0, 224, (8, 8, 3)).repeat(4, 0).repeat(4, 1)
        target = io.BytesIO()
        Image.fromarray((coarse + draw.integers(0, 32, coarse.shape)).astype(np.uint8)).save(
            target, "PNG"
        )
        rows.append({"bytes": target.getvalue(), "path": None})
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    parquet.write_table(
        pa.table({"img": pa.array(rows, kind), "label": [0] * count}), path, row_group_size=1_000
    )


def row(what: str, value: float, unit: str, goal: float | None, **facts: Any) -> Row:
    """Return a figure: seconds are to stay below their goal, rates to reach it."""
    return {"what": what, "value": float(f"{value:.4g}"), "unit": unit, "goal": goal, **facts}


CASES = {
    "bytes": case_bytes,
    "words": case_words,
    "subwords": case_subwords,
    "books": case_books,
    "images": case_images,
}


class Memory(threading.Thread):
    """Watches a process and all below it: the largest sum of their anonymous memory.

    Pages of memory-mapped files do not count: the system takes them back as soon as somebody needs
    the room.
    """

    def __init__(self, process: int) -> None:
        super().__init__(daemon=True)
        self.process = process
        self.largest = 0
        self.over = False

    def run(self) -> None:
        """Look ten times a second."""
        while not self.over:
            now = sum(own_bytes(number) for number in family(self.process))
            self.largest = max(now, self.largest)  # read last: `measured` sets it back meanwhile
            time.sleep(0.1)


def family(process: int) -> list[int]:
    """Return the numbers of a process and of all below it."""
    try:
        found = children(process)
    except OSError:
        found = []
    numbers = [process]
    for child in found:
        numbers += family(child)
    return numbers


def own_bytes(process: int) -> int:
    """Return the anonymous bytes of a process, pages that several share shared out among them; 0:
    it is gone.
    """
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss_Anon:"))
    except (OSError, StopIteration):
        return 0


def measured(name: str, words: list[str], full: bool) -> list[Row]:
    """Run a case in another process; return its rows, each with the memory that it took."""
    command = [sys.executable, __file__, *words, "--child", name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        memory = Memory(child.pid)
        memory.start()
        assert child.stdout is not None
        rows: list[Row] = []
        for line in child.stdout:
            if line == "measure\n":
                memory.largest = 0
            else:
                rows.append(json.loads(line))
        memory.over = True
    if child.returncode:
        sys.exit(f"case {name} ended with {child.returncode}")
    rows = [{"case": name, **found, "peak_mib": memory.largest >> 20} for found in rows]
    if name == "books":
        peak = row(
            "PG-19-like books, memory of all processes",
            memory.largest / 2**30,
            "GiB",
            1.5 if full else None,
        )
        rows.append({"case": name, **peak})
    return rows


def shown(found: Row) -> str:
    """Return a line of the table."""
    value = found["value"]
    goal = found["goal"]
    unit = found["unit"]
    verdict = ""
    if goal is not None:
        below = unit in ("s", "GiB")
        sign = "<" if below else ">"
        met = "yes" if (value < goal) == below else "no"
        verdict = f"{sign} {goal:g}: {met}"
    return f"{found['what']:<48} {value:>9,.4g} {unit:<17} {verdict}"


def main() -> None:
    """Measure every case, print the table and write the rows."""
    args = arguments()
    end_with_children()
    if args.child:
        with tempfile.TemporaryDirectory() as folder:
            for found in CASES[args.child](Path(folder), args):
                print(json.dumps(found if args.scale >= 1 else {**found, "goal": None}), flush=True)
        return
    words = [
        "--gigabytes",
        str(args.gigabytes),
        "--vocabulary",
        str(args.vocabulary),
        "--scale",
        str(args.scale),
    ]
    words += ["--text", str(args.text)] if args.text else []
    named = args.text.name if args.text else "standard library"
    common: Row = {
        "text": f"{named}, {len(text_of(args)):,} bytes",
        "scale": args.scale,
        "cores": len(os.sched_getaffinity(0)),
        "machine": f"{platform.machine()}, {platform.system()}",
        "python": platform.python_version(),
        "versions": {
            name: version(name)
            for name in ("datasets", "numpy", "pyarrow", "sentencepiece", "pillow")
        },
    }
    kept = json.loads(args.output.read_text()) if args.output.exists() else []
    rows = [found for found in kept if found["case"] not in args.cases]
    for name in args.cases:
        for found in zip(
            *(measured(name, words, args.scale >= 1) for _ in range(args.runs)), strict=True
        ):
            values = [each["value"] for each in found]
            rows.append(
                {**found[0], "value": statistics.median(values), "values": values, **common}
            )
            print(shown(rows[-1]), flush=True)
    args.output.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
