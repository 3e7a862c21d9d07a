"""Let system calls of real commands fail, one at a time, and count tracebacks and lost bits.

    python -m tests.campaigns.injected --cases 200 --seed 1

Each case is a command in its own process. strace lets one call of one kind fail with one error
(CALLS), at a place that is drawn among the calls of that kind that the command makes when nothing
fails. The command must end with a documented exit code and without a traceback.
What it leaves must serve: a run goes on, to the bits of a run that nothing happened to, and data
are verified.

It needs Linux, strace and the test tools (pip install -e '.[dev]'). A line names each failure, and
the exit code is 1 if there are any.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.ending import end_with_children
from tests.helpers.forking import forking_server
from tests.helpers.small_runs import SMALL_RUN, Process, Workshop, difference

FILES = {
    "openat": ("EMFILE", "ENFILE", "EIO", "EACCES"),
    "read": ("EIO",),
    "write": ("ENOSPC", "EIO"),
    "newfstatat": ("EIO",),
}
"""Calls that every command makes, and their errors."""
WRITING = FILES | {
    "fsync": ("EIO",),
    "rename": ("EIO", "ENOSPC"),
    "mkdir": ("ENOSPC", "EROFS"),
    "unlink": ("EACCES",),
}
"""Those of a command that writes files."""
RUNNING = WRITING | {"socketpair": ("EMFILE",), "clone": ("EAGAIN",), "clone3": ("EAGAIN",)}
"""Those of a command that also starts threads or processes."""
CALLS: dict[str, dict[str, tuple[str, ...]]] = {
    "train": RUNNING,
    "resume RUN trainer.steps=16": RUNNING,
    "eval RUN": WRITING,
    "sample RUN length=8": WRITING,
    "export RUN": WRITING,
    "report RUN": WRITING,
    "data prepare data=text TEXT": WRITING,
    "data list": FILES,
    "runs": FILES,
    "plan": FILES,
}
"""The system calls that are let fail, with their errors, by command."""
TRACED = """
import ctypes, os, subprocess, time
ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_long(-1), 0, 0, 0)
subprocess.Popen(["strace", "-f", "-qq", "-o", {log!r}, "-p", str(os.getpid()), *{options!r}])
while "TracerPid:\\t0\\n" in open("/proc/self/status").read():
    time.sleep(0.01)
"""
"""What a process executes to be traced; prctl allows its child to trace it."""


@dataclass(frozen=True)
class Case:
    """A command, and which of its calls fails."""

    command: str
    call: str
    error: str
    number: int
    """The how-maniest call of the first thread fails."""

    def line(self) -> str:
        """Return the case in words."""
        return f"rtx {self.command}: {self.call} number {self.number} fails with {self.error}"


class Campaign:
    """A workshop with a whole run, and copies of it in which cases happen."""

    def __init__(self, workshop: Workshop, seed: int) -> None:
        self.workshop = workshop
        self.draw = random.Random(seed)
        self.run = workshop.train("run")
        self.longer = self.resumed()
        self.counts = {command: self.count(command) for command in CALLS}
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.failures: list[str] = []

    def resumed(self) -> Path:
        """Return a copy of the run that was resumed to 16 steps while nothing failed."""
        copy = Path(shutil.copytree(self.run, self.workshop.folder / "longer"))
        process = self.workshop.fork(copy, "resume", str(copy), "trainer.steps=16", RTX_RUN="")
        assert process.wait() == 0, process.log.read_text()
        return copy

    def start(self, command: str, options: list[str], log: Path) -> Process:
        """Start a command under strace, on a new copy of the run."""
        folder = self.workshop.folder / "case"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        copy = folder / "run"
        words = [word.replace("RUN", str(copy)) for word in command.split()]
        words = [self.workshop.text if word == "TEXT" else word for word in words]
        variables = {"RTX_OUTPUTS": str(folder), "RTX_RUN": ""}
        if command == "train":
            variables["RTX_RUN"] = str(copy)
            words += [self.workshop.text, *SMALL_RUN]
        else:
            shutil.copytree(self.run, copy)
        if command.startswith("data prepare"):
            variables["RTX_DATA"] = str(folder / "data")
        inside = TRACED.format(log=str(log), options=options)
        (self.workshop.folder / f"{copy.name}.log").unlink(missing_ok=True)
        return self.workshop.fork(copy, *words, inside=inside, **variables)

    def count(self, command: str) -> dict[str, int]:
        """Return how many calls of each kind the first thread of a command makes."""
        log = self.workshop.folder / "strace"
        calls = ",".join(f"?{call}" for call in CALLS[command])
        process = self.start(command, ["-e", f"trace={calls}"], log)
        assert process.wait() == 0, process.log.read_text()
        counts: collections.Counter[str] = collections.Counter()
        for line in log.read_text(errors="replace").splitlines():
            match = re.match(rf"{process.number} +(\w+)\(", line)
            if match:
                counts[match[1]] += 1
        return dict(counts)

    def cases(self) -> Iterator[Case]:
        """Yield cases for ever: all commands, calls and errors in random order, then again."""
        kinds = []
        for command, calls in CALLS.items():
            for call, errors in calls.items():
                if self.counts[command].get(call, 0):
                    kinds += [(command, call, error) for error in errors]
        while True:
            self.draw.shuffle(kinds)
            for command, call, error in kinds:
                number = self.draw.randint(1, self.counts[command][call])
                yield Case(command, call, error, number)

    def happen(self, case: Case) -> None:
        """Let a case happen, and note what came of it."""
        log = self.workshop.folder / "strace"
        inject = f"inject={case.call}:error={case.error}:when={case.number}"
        options = ["-e", f"trace={case.call}", "-e", inject]
        process = self.start(case.command, options, log)
        code = process.wait()
        said = process.log.read_text(errors="replace")
        problem = ""
        if code not in (0, 1, 2):
            problem = f"ended with {code}"
        outcome = f"exit code {code}"
        if is_import_error(said):
            outcome = "a module that cannot be loaded"
        elif "Traceback" in said:
            problem = "a traceback"
        problem = problem or self.problem_after(case, process.run)
        self.outcomes[outcome] += 1
        if problem:
            self.failures.append(f"{case.line()}: {problem}")
            print(self.failures[-1], said, sep="\n", flush=True)

    def problem_after(self, case: Case, run: Path) -> str:
        """Return what is wrong with the files that a command has left, or ""."""
        if case.command not in ("train", "resume RUN trainer.steps=16"):
            return difference(run, self.run)
        expected = self.run if case.command == "train" else self.longer
        steps = "trainer.steps=12" if case.command == "train" else "trainer.steps=16"
        words = ("resume", str(run), steps)
        variables = {"RTX_RUN": ""}
        if not (run / "config.yaml").exists():
            words = ("train", self.workshop.text, *SMALL_RUN)
            variables["RTX_RUN"] = str(run)
        process = self.workshop.fork(run, *words, **variables)
        if process.wait():
            return f"then rtx {words[0]}: {process.log.read_text(errors='replace')[-500:]}"
        return difference(run, expected)


def is_import_error(said: str) -> bool:
    """Return whether Python could not load a module, for which no line is promised."""
    last = said.rstrip().rpartition("\n")[2]
    return last.startswith(("ImportError: ", "ModuleNotFoundError: "))


def main() -> None:
    """Let cases happen, and print what came of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=100, help="number of failing calls")
    parser.add_argument("--seed", type=int, default=0, help="seed of the places")
    options = parser.parse_args()
    if shutil.which("strace") is None:
        sys.exit("strace is not installed (Debian: apt-get install strace)")
    end_with_children()
    folder = Path(tempfile.mkdtemp(prefix="rtx-injected-"))
    with forking_server("tests.helpers.small_runs:import_runs") as forker:
        campaign = Campaign(Workshop(folder, forker), options.seed)
        for case in itertools.islice(campaign.cases(), options.cases):
            campaign.happen(case)
    outcomes = ", ".join(f"{name}: {count}" for name, count in campaign.outcomes.items())
    print(f"{options.cases} failing calls; {outcomes}; {len(campaign.failures)} failures")
    if campaign.failures:
        sys.exit(f"files are in {folder}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
