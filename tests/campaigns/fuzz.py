"""Fuzz what rtx reads from outside: by Hypothesis, and guided by coverage (atheris) where Python reads the bytes.

    python -m tests.campaigns.fuzz --minutes 20   # all readers, as many at once as there are cores
    python -m tests.campaigns.fuzz --minutes 10 --only config.yaml export

Hypothesis draws the examples of `tests/faults/test_fuzz.py` and
`tests/commandline/test_bad_lines.py` again and again, others each time. atheris
(pip install -e '.[fuzz]'; without it Hypothesis has all of the time) changes the bytes that
`tests/campaigns/fuzz_targets.py` reads, collects those that reach new code of rtx or OmegaConf, and
continues from them. Every input must be read, or refused in one line (`UserError`, `RunFailed`),
within seconds. Anything else is a finding, which ends the campaign of that reader. The log and the
input of a finding are saved and printed, and the exit code is 1.

Pictures and tables are read by C libraries, in which atheris sees no coverage: these have Hypothesis alone. Nothing of
published archives is read before their sha256 is compared, so nothing in them is left to change.

It needs the tools of the tests (pip install -e '.[dev]') and writes `benchmarks/results/fuzz.json`: a row for each
reader and tool, in place of that of an earlier call.
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
    "command line": "commandline/test_bad_lines.py::test_a_bad_line_is_refused_in_words_or_means_what_it_says",
    "store": "faults/test_fuzz.py::test_a_store",
    "environment.json": f"{RECORDS}[environment.json]",
    "eval": f"{RECORDS}[eval/*step*]",
    "sweeps.jsonl": f"{RECORDS}[../sweeps.jsonl]",
    "picture": "faults/test_fuzz.py::test_a_picture",
    "table": "faults/test_fuzz.py::test_a_table",
}
"""What is read, and the test that draws it."""
UNGUIDED = ("picture", "table")
SLOWEST = 10  # seconds for one input, on a machine with other work
EXAMPLES = "stat::number_of_executed_units:"  # as libFuzzer has it
FOUND = re.compile(
    r"^(?:FAILED|ERROR) .*|(?<=Uncaught Python exception: ===\n).*|^==\d+== ERROR: .*", re.MULTILINE
)


class Clock:
    """A plugin of pytest: a test of Hypothesis runs again and again until its time is over, and its examples count."""

    def __init__(self, seconds: float) -> None:
        self.end, self.examples, self.has_failed = time.monotonic() + seconds, 0, False

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: Any) -> bool:
        test, names = pyfuncitem.obj, pyfuncitem._fixtureinfo.argnames
        test.hypothesis.inner_test = self.counted(test.hypothesis.inner_test)
        with contextlib.suppress(pytest.skip.Exception):
            while True:
                test(**{name: pyfuncitem.funcargs[name] for name in names})
        return True

    def counted(self, inner: Callable[..., None]) -> Callable[..., None]:
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
            if (
                time.monotonic() > self.end and not self.has_failed
            ):  # what has failed is made smaller without haste
                pytest.skip("the time is over")

        return example


def draw(reader: str, folder: Path, seconds: float) -> None:
    """Draw examples of a reader by Hypothesis, and end this process."""
    os.environ |= {
        "RTX_FUZZ": "1000",
        "RTX_BAD_LINES": "1000",
        "HYPOTHESIS_STORAGE_DIRECTORY": str(folder),
    }
    os.chdir(ROOT)
    clock = Clock(seconds)
    options = (
        "-n0",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--basetemp={folder / 'tests'}",
        "-Wignore:Module already imported",
    )
    code = pytest.main([*options, f"tests/{READERS[reader]}"], plugins=[clock])
    print(EXAMPLES, clock.examples)
    sys.exit(code)


def guide(reader: str, folder: Path, seconds: float) -> None:
    """Change the bytes that a reader is given by atheris, which ends this process."""
    began = time.monotonic()
    shutil.copytree(folder.parent / "samples", home := folder / "home")
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
    (corpus := folder / "corpus").mkdir()
    for number, content in enumerate(seeds):
        (corpus / str(number)).write_bytes(content)
    words = folder / "words"
    words.write_text(
        "".join('"' + "".join(f"\\x{byte:02x}" for byte in word) + '"\n' for word in targets.WORDS)
    )
    left = max(1, round(seconds - (time.monotonic() - began)))
    options = (
        f"max_total_time={left}",
        f"timeout={SLOWEST}",
        "len_control=0",
        "print_final_stats=1",
        f"dict={words}",
    )
    places = (str(corpus), f"-artifact_prefix={folder}/")
    mutate = functools.partial(targets.mutated, by_bytes=lambda *given: atheris.Mutate(*given))
    given = ["fuzz", *places, *(f"-{option}" for option in options)]
    atheris.Setup(given, targets.refusing(read), custom_mutator=mutate)
    atheris.Fuzz()


def logged(work: Callable[..., None], log: Path, *given: Any) -> None:
    """Do some work, all that it prints in a file."""
    with open(log, "wb") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    work(*given)


def campaign(reader: str, folder: Path, minutes: float, is_guided: bool) -> list[dict[str, Any]]:
    """Fuzz a reader by each tool, in a process each, and return a row of each."""
    tools = {"Hypothesis": draw} | (
        {"atheris": guide} if is_guided and reader not in UNGUIDED else {}
    )
    rows = []
    for tool, work in tools.items():
        place, began = folder / f"{reader.replace(' ', '-')}-{tool}", time.monotonic()
        place.mkdir()
        given = (work, log := place / "log", reader, place, seconds := 60 * minutes / len(tools))
        process = multiprocessing.get_context("spawn").Process(target=logged, args=given)
        process.start()
        process.join(seconds + 600)  # it makes smaller what it found
        process.kill()
        process.join()
        said = log.read_text(errors="replace")
        found = (
            [*FOUND.findall(said), f"it ended with {process.exitcode}"][:1]
            if process.exitcode
            else []
        )
        examples = max(
            map(int, re.findall(rf"^(?:#|{EXAMPLES} +)(\d+)", said, re.MULTILINE)), default=0
        )
        taken = (time.monotonic() - began) / 60
        rows.append(
            {
                "reader": reader,
                "tool": tool,
                "minutes": round(taken, 1),
                "examples": examples,
                "found": found,
            }
        )
        print(
            f"{reader}, {tool}: {examples:,} examples in {taken:.1f} minutes; found: {found or 'nothing'}",
            flush=True,
        )
        if found:
            print(f"kept in {place}", flush=True)
    return rows


def main() -> None:
    """Fuzz, print and write."""
    options = read_options()
    end_with_children(at_once=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of each process; before torch is imported
    if not (is_guided := importlib.util.find_spec("atheris") is not None):
        print("without atheris (pip install -e '.[fuzz]'): Hypothesis alone")
    from benchmarks.machine import (
        code,
        machine,
    )  # imports rtx, which the processes that are started are to instrument first

    folder = Path(tempfile.mkdtemp(prefix="rtx-fuzz-"))
    made = {
        "command": " ".join(["python -m tests.campaigns.fuzz", *sys.argv[1:]]),
        "python": platform.python_version(),
    }
    made |= {"machine": machine("cpu", 1), "side_by_side": options.jobs, "versions": code()}
    make_samples(folder / "samples")
    with ThreadPoolExecutor(options.jobs) as pool:
        ended = pool.map(
            lambda reader: campaign(reader, folder, options.minutes, is_guided), options.only
        )
        new = [row | made for rows in ended for row in rows]
    old = json.loads(options.output.read_text()) if options.output.exists() else []
    kept = [
        row
        for row in old
        if not any((row["reader"], row["tool"]) == (o["reader"], o["tool"]) for o in new)
    ]
    rows = sorted(kept + new, key=lambda row: [*READERS].index(row["reader"]))
    options.output.write_text(json.dumps(rows, indent=1) + "\n")
    if any(row["found"] for row in new):
        sys.exit(1)
    shutil.rmtree(folder)


def read_options() -> argparse.Namespace:
    """Return what the command line asks for."""
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
    parser.add_argument("--output", type=Path, default=output, help="where the rows go")
    return parser.parse_args()


def make_samples(folder: Path) -> None:
    """Make a run, its score, its export and the record of a sweep, whose bytes are changed."""
    from tests.helpers.small_runs import Workshop

    folder.mkdir()
    workshop = Workshop(folder)
    run = workshop.train("outputs/rtx/run")
    workshop.command("eval", str(run), "limit=1")
    next(run.glob("eval/*.json")).rename(run / "eval" / "a.json")
    workshop.command("export", str(run), f"output={folder / 'export'}")
    sweep = {"command": "rtx train -m seed=1", "cells": {"run": "seed=1"}}
    (run.parent / "sweeps.jsonl").write_text(json.dumps(sweep) + "\n")


if __name__ == "__main__":
    main()
