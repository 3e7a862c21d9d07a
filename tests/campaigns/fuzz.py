"""Fuzz what rtx reads from outside: with Hypothesis, and guided by coverage with atheris.

    python -m tests.campaigns.fuzz --minutes 20   # all readers, one on each core
    python -m tests.campaigns.fuzz --minutes 10 --only config.yaml export

Hypothesis draws the examples of `tests/faults/test_fuzz.py` and
`tests/commandline/test_bad_lines.py` again and again, others each time. atheris
(pip install -e '.[fuzz]'; without it Hypothesis has all of the time) changes the bytes that
`tests/campaigns/fuzz_targets.py` reads, collects those that reach new code of rtx or OmegaConf, and
continues from them. Every input must be read, or refused in one line (`UserError`, `RunFailed`),
within seconds. Anything else is a finding, which ends the campaign of that reader. The log and the
input of a finding are saved and printed, and the exit code is 1.

Pictures, tables and cards are read by other libraries, in which atheris sees no coverage, so
Hypothesis alone draws them. Published archives are not fuzzed: nothing of them is read before their
sha256 is compared.

It needs the test tools (pip install -e '.[dev]') and writes `benchmarks/results/fuzz.json`, which
has a row for each reader and tool; a later call replaces its rows.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import importlib.util
import json
import multiprocessing
import os
import platform
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis.errors import HypothesisException, StopTest

from benchmarks.ending import end_with_children

ROOT = Path(__file__).resolve().parents[2]
RECORDS = "faults/test_fuzz.py::test_records"
READERS = {
    "config.yaml": "faults/test_fuzz.py::test_a_configuration",
    "status.json": f"{RECORDS}[status.json]",
    "metrics.jsonl": f"{RECORDS}[metrics.jsonl]",
    "checkpoint": "faults/test_fuzz.py::test_a_checkpoint",
    "export": "faults/test_fuzz.py::test_an_export",
    "tokenizer": "faults/test_fuzz.py::test_a_file_of_a_tokenizer",
    "command line": "commandline/test_bad_lines.py"
    "::test_a_bad_line_is_refused_in_words_or_means_what_it_says",
    "store": "faults/test_fuzz.py::test_a_store",
    "environment.json": f"{RECORDS}[environment.json]",
    "eval": f"{RECORDS}[eval/*step*]",
    "sweeps.jsonl": f"{RECORDS}[../sweeps.jsonl]",
    "picture": "faults/test_fuzz.py::test_a_picture",
    "table": "faults/test_fuzz.py::test_a_table",
    "card": "faults/test_fuzz.py::test_a_card_of_a_data_set",
    "card of an export": "faults/test_fuzz.py::test_a_card_of_an_export",
}
"""What is read, and the test that draws it."""
UNGUIDED = ("picture", "table", "card", "card of an export")
SLOWEST = 10
"""Seconds for one input, on a machine with other work."""
SHRINKING_SECONDS = 600
"""After its time, a tool has this long to make a failing input smaller."""
EXAMPLES = "stat::number_of_executed_units:"
"""What libFuzzer writes before its number of inputs."""
FOUND = re.compile(
    r"^(?:FAILED|ERROR) .*|(?<=Uncaught Python exception: ===\n).*|^==\d+== ERROR: .*", re.MULTILINE
)


class Clock:
    """A pytest plugin: it repeats a Hypothesis test for a time and counts examples."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds
        self.examples = 0
        self.has_failed = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: Any) -> bool:
        test = pyfuncitem.obj
        names = pyfuncitem._fixtureinfo.argnames
        test.hypothesis.inner_test = self.counted(test.hypothesis.inner_test)
        with contextlib.suppress(pytest.skip.Exception):
            while True:
                test(**{name: pyfuncitem.funcargs[name] for name in names})
        return True

    def counted(self, inner: Callable[..., None]) -> Callable[..., None]:
        """Return a function that counts an example, and skips the test when the time is over."""

        @functools.wraps(inner)
        def example(*arguments: Any, **options: Any) -> None:
            self.examples += 1
            try:
                inner(*arguments, **options)
            except (HypothesisException, StopTest):
                raise
            except BaseException:
                self.has_failed = True
                raise
            # Hypothesis makes a failing example smaller without a time limit.
            is_over = time.monotonic() > self.end
            if is_over and not self.has_failed:
                pytest.skip("the time is over")

        return example


def draw(reader: str, folder: Path, seconds: float) -> None:
    """Draw inputs of a reader with Hypothesis, and end this process."""
    os.environ |= {
        "RTX_FUZZ": "1000",
        "RTX_BAD_LINES": "1000",
        "HYPOTHESIS_STORAGE_DIRECTORY": str(folder),
    }
    os.chdir(ROOT)
    clock = Clock(seconds)
    options = [
        "-n0",
        "-q",
        "-pno:cacheprovider",
        f"--basetemp={folder / 'tests'}",
        "-Wignore:Module already imported",
    ]
    code = pytest.main([*options, f"tests/{READERS[reader]}"], plugins=[clock])
    print(EXAMPLES, clock.examples)
    sys.exit(code)


def guide(reader: str, folder: Path, seconds: float) -> None:
    """Mutate inputs of a reader with atheris, which ends this process."""
    began = time.monotonic()
    home = folder / "home"
    shutil.copytree(folder.parent / "samples", home)
    os.environ |= {
        "RTX_DATA": str(home / "data"),
        "RTX_OUTPUTS": str(home / "outputs"),
        "XDG_CACHE_HOME": str(home),
    }
    os.chdir(home)
    atheris = importlib.import_module("atheris")
    with atheris.instrument_imports(include=["rtx", "omegaconf"]):
        targets = importlib.import_module("tests.campaigns.fuzz_targets")
    atheris.instrument_func(importlib.import_module("torch._weights_only_unpickler").Unpickler.load)
    seeds, read = targets.TARGETS[reader]()
    corpus = folder / "corpus"
    corpus.mkdir()
    for number, content in enumerate(seeds):
        (corpus / str(number)).write_bytes(content)
    dictionary = folder / "words"
    dictionary.write_text("".join([dictionary_line(word) for word in targets.WORDS]))

    def mutate(content: bytes, longest: int, seed: int) -> bytes:
        return targets.mutated(content, longest, seed, by_bytes=atheris.Mutate)

    seconds_left = max(1, round(seconds - (time.monotonic() - began)))
    arguments = [
        "fuzz",
        str(corpus),
        f"-artifact_prefix={folder}/",
        f"-max_total_time={seconds_left}",
        f"-timeout={SLOWEST}",
        "-len_control=0",
        "-print_final_stats=1",
        f"-dict={dictionary}",
    ]
    atheris.Setup(arguments, targets.refusing(read), custom_mutator=mutate)
    atheris.Fuzz()


def dictionary_line(word: bytes) -> str:
    """Return a line of libFuzzer's dictionary."""
    escaped = "".join([f"\\x{byte:02x}" for byte in word])
    return f'"{escaped}"\n'


def logged(work: Callable[..., None], log: Path, *arguments: Any) -> None:
    """Call `work` with all its output in a file."""
    with open(log, "wb") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    work(*arguments)


def fuzz_reader(reader: str, folder: Path, minutes: float, is_guided: bool) -> list[dict[str, Any]]:
    """Fuzz a reader with each tool, one process after the other; return a row for each."""
    tools: dict[str, Callable[..., None]] = {"Hypothesis": draw}
    if is_guided and reader not in UNGUIDED:
        tools["atheris"] = guide
    rows = []
    for tool, work in tools.items():
        seconds = 60 * minutes / len(tools)
        place = folder / f"{re.sub('[^a-z]+', '-', reader)}-{tool}"
        place.mkdir()
        row = run_tool(work, reader, place, seconds)
        rows.append({"reader": reader, "tool": tool, **row})
        summary = f"{row['examples']:,} examples in {row['minutes']} minutes"
        print(f"{reader}, {tool}: {summary}; found: {row['found'] or 'nothing'}", flush=True)
        if row["found"]:
            print(f"its log and input are in {place}", flush=True)
    return rows


def run_tool(work: Callable[..., None], reader: str, place: Path, seconds: float) -> dict[str, Any]:
    """Run one tool in a process; return minutes, number of inputs and what was found."""
    log = place / "log"
    began = time.monotonic()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=logged, args=(work, log, reader, place, seconds))
    process.start()
    process.join(seconds + SHRINKING_SECONDS)
    process.kill()
    process.join()
    output = log.read_text(errors="replace")
    found: list[str] = []
    if process.exitcode:
        found = [*FOUND.findall(output), f"it ended with {process.exitcode}"][:1]
    counts = re.findall(rf"^(?:#|{EXAMPLES} +)(\d+)", output, re.MULTILINE)
    return {
        "minutes": round((time.monotonic() - began) / 60, 1),
        "examples": max(map(int, counts), default=0),
        "found": found,
    }


def main() -> None:
    """Fuzz, print and write."""
    options = read_options()
    end_with_children(at_once=True)
    # Each process has one thread; the variable must be set before torch is imported.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    is_guided = importlib.util.find_spec("atheris") is not None
    if not is_guided:
        print("without atheris (pip install -e '.[fuzz]'): Hypothesis alone")
    folder = Path(tempfile.mkdtemp(prefix="rtx-fuzz-"))
    facts = facts_of_call(options.jobs)
    make_samples(folder / "samples")

    def work(reader: str) -> list[dict[str, Any]]:
        return fuzz_reader(reader, folder, options.minutes, is_guided)

    new: list[dict[str, Any]] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for rows in pool.map(work, options.only):
            new += [row | facts for row in rows]
    write_rows(options.output, new)
    if any(row["found"] for row in new):
        sys.exit(1)
    shutil.rmtree(folder)


def facts_of_call(jobs: int) -> dict[str, Any]:
    """Return what is recorded about this call in each of its rows."""
    # This imports rtx, which the tools' processes must import later than their instrumentation.
    from benchmarks.machine import code, machine

    return {
        "command": " ".join(["python -m tests.campaigns.fuzz", *sys.argv[1:]]),
        "python": platform.python_version(),
        "machine": machine("cpu", 1),
        "side_by_side": jobs,
        "versions": code(),
    }


def write_rows(path: Path, new: list[dict[str, Any]]) -> None:
    """Write rows in the order of READERS; those of other readers and tools in the file stay."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    if path.exists():
        for row in json.loads(path.read_text()):
            rows[row["reader"], row["tool"]] = row
    for row in new:
        rows[row["reader"], row["tool"]] = row
    order = list(READERS)
    ordered = sorted(rows.values(), key=lambda row: order.index(row["reader"]))
    path.write_text(json.dumps(ordered, indent=1) + "\n")


def read_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes", type=float, default=20, help="for each reader, shared by its tools"
    )
    parser.add_argument(
        "--only", nargs="+", choices=READERS, default=[*READERS], help="readers", metavar="READER"
    )
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="readers side by side"
    )
    output = ROOT / "benchmarks" / "results" / "fuzz.json"
    parser.add_argument("--output", type=Path, default=output, help="file for the rows")
    return parser.parse_args()


def make_samples(folder: Path) -> None:
    """Make the files whose bytes are mutated: a run, its score, its export, a sweep's record."""
    from tests.helpers.small_runs import Workshop

    folder.mkdir()
    workshop = Workshop(folder)
    run = workshop.train("outputs/rtx/run")
    workshop.command("eval", str(run), "limit=1")
    score = next(run.glob("eval/*.json"))
    score.rename(run / "eval" / "a.json")
    workshop.command("export", str(run), f"output={folder / 'export'}")
    sweep = {"command": "rtx train -m seed=1", "cells": {"run": "seed=1"}}
    (run.parent / "sweeps.jsonl").write_text(json.dumps(sweep) + "\n")


if __name__ == "__main__":
    main()
