"""Settings of all tests: one thread, signals, and GPU kernels without a GPU.

Tiny tensors are slower with several threads. Commands that tests start import this checkout.
"""

import contextlib
import fnmatch
import gc
import os
import signal
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

# This must be set before torch is imported; the commands that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[1])
# Without bytecode on disk, every process would compile this code and its tests again, which is a
# third of the time in which a command starts.
if sys.dont_write_bytecode:
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A shell ignores Ctrl-C for what it runs in the background, nohup ignores SIGHUP, and the commands
# that tests start inherit this.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

import pytest

from tests.helpers.forking import PREPARATION, WORKER_KEY, Forker, forking_server
from tests.helpers.triton_interpreter import prepare_triton

FORKER = pytest.StashKey[Forker]()


def pytest_configure(config: pytest.Config) -> None:
    """Prepare Triton, and register the fixtures of small runs.

    Both import torch, which takes seconds. The process that hands tests to workers runs no test and
    needs neither. It starts the process that forks runs, which all workers use.
    """
    if hands_out_tests(config):
        stack = contextlib.ExitStack()
        config.stash[FORKER] = stack.enter_context(forking_server(PREPARATION))
        config.add_cleanup(stack.close)
        return
    prepare_triton()
    config.pluginmanager.import_plugin("tests.helpers.small_runs")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker of pytest-xdist the address of the process that forks runs."""
    node.workerinput[WORKER_KEY] = node.config.stash[FORKER].address


def hands_out_tests(config: pytest.Config) -> bool:
    """Return whether workers of pytest-xdist run the tests of this process."""
    is_worker = hasattr(config, "workerinput")
    has_workers = config.getoption("dist", "no") != "no" and bool(config.getoption("tx", None))
    return has_workers and not is_worker and not config.option.collectonly


LONG_FILES = (
    "test_slurm.py",
    "test_many_processes.py",
    "test_kills.py",
    "test_resume.py",
    "test_network.py",
)
"""Files with few tests that take long; started last, they would leave the other workers idle."""
RUN_FIXTURES = {"workshop", "run", "copy", "forker"}
"""Fixtures that start runs of rtx."""
EXHAUSTIVE = Path(__file__).with_name("exhaustive.txt")
"""Patterns of tests that `make test` leaves out."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Start long files first, and mark tests that start runs as slow, and exhaustive ones."""
    items.sort(key=place_in_order)
    for item in items:
        fixtures = getattr(item, "fixturenames", [])
        if RUN_FIXTURES.intersection(fixtures):
            item.add_marker(pytest.mark.slow)
    mark_exhaustive(config, items)


def pytest_collection_finish() -> None:
    """Let garbage collection skip all objects of modules and tests, and come less often.

    Each full collection would look at them, a sixth of the time of the tests. Configurations are
    many small objects, of which few are garbage.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)


def mark_exhaustive(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests that exhaustive.txt names; an error for a pattern that names none."""
    patterns = exhaustive_patterns()
    used: set[str] = set()
    for item in items:
        for pattern in patterns[file_of(item.nodeid)]:
            if fnmatch.fnmatchcase(item.nodeid, pattern):
                item.add_marker(pytest.mark.exhaustive)
                used.add(pattern)
    chosen_by_name = any("::" in word for word in config.args)
    files = {file_of(item.nodeid) for item in items}
    stale = [pattern for file in files for pattern in patterns[file] if pattern not in used]
    chosen_by_failure = config.getoption("lf", False)
    if stale and not chosen_by_name and not chosen_by_failure:
        raise pytest.UsageError(f"{EXHAUSTIVE.name} has a pattern without a test: {min(stale)}")


def exhaustive_patterns() -> defaultdict[str, list[str]]:
    """Return the patterns of exhaustive.txt by the file of their tests."""
    patterns: defaultdict[str, list[str]] = defaultdict(list)
    for line in EXHAUSTIVE.read_text().splitlines():
        if line and not line.startswith("#"):
            patterns[file_of(line)].append(line)
    return patterns


def file_of(node: str) -> str:
    """Return the file of a test, of its node id or a pattern of it."""
    return node.partition("::")[0]


def place_in_order(item: pytest.Item) -> int:
    """Return the place of a test's file among those that start first."""
    name = item.path.name
    return LONG_FILES.index(name) if name in LONG_FILES else len(LONG_FILES)
