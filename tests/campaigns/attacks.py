"""Put links, pipes, devices and odd contents in place of files, and run commands on them.

    python -m tests.campaigns.attacks --cases 1000 --seed 1

The campaign makes a run with all that commands add to it, its store, its exports, a report and a
sweep. A case copies them, puts one thing in place of one file or folder, or at a name that rtx will
use (`ATTACKS`, `FUTURE`), and runs one command (`COMMANDS`) in a forked process. All three are
drawn. A case fails if

- a file outside the copies is changed, made or deleted,
- the command does not end within `--limit` seconds, or takes `MOST_MEMORY` more than it began with,
- it prints a traceback, or ends with another exit code than 0, 1 or 2.

Devices and other owners need root, and are left out without it. It needs the test tools
(pip install -e '.[dev]') and writes `benchmarks/results/attacks.json`. A line names each failure,
and the exit code is 1 if there are any.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import importlib
import json
import os
import random
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.ending import end_with_children
from benchmarks.machine import code, machine
from tests.campaigns.fuzz_targets import JSON, YAML, mutated_json
from tests.helpers.forking import forking_server
from tests.helpers.small_runs import SMALL_RUN, Workshop, import_runs

ROOT = Path(__file__).resolve().parents[2]
SPARSE_BYTES = 50 * 10**9
MOST_MEMORY = 1 << 30
NOBODY = 65534
EXIT_CODES = (0, 1, 2)
IMPORTED = ("analyze", "audit", "data", "eval", "export", "report", "runs", "sample", "sweep")
"""What the forking process imports besides `rtx train`, so that no case waits for it."""
INSIDE = """
import os, resource, signal
signal.alarm({limit})
os.chdir({folder!r})
used = int(open("/proc/self/statm").read().split()[5]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_DATA, (used + {memory},) * 2)
"""
"""What a process executes before a command: SIGALRM ends one that hangs."""


@dataclass(frozen=True)
class Command:
    """A command on one of the copies, and how often it is drawn. TEXT and names are replaced."""

    words: tuple[str, ...]
    weight: int
    run: str = ""
    """RTX_RUN."""


RUN = "out/one/run"
COMMANDS: Mapping[str, Sequence[Command]] = {
    RUN: (
        Command(("runs",), 5),
        Command(("report", "RUN"), 2),
        Command(("report", "out"), 1),
        Command(("eval", "RUN", "limit=1"), 2),
        Command(("sample", "RUN", "length=4"), 2),
        Command(("audit", "RUN", "sequences=1", "prefixes=1"), 1),
        Command(("analyze", "patterns", "RUN"), 1),
        Command(("export", "RUN"), 2),
        Command(("export", "RUN", "format=hf"), 1),
        Command(("resume", "RUN", "trainer.steps=13"), 2),
        Command(("resume", "RUN", "trainer.steps=13", "logger.csv=true"), 1),
        Command(("resume", "RUN", "trainer.steps=13", "logger.tensorboard=true"), 1),
        Command(("train", "TEXT", *SMALL_RUN, "trainer.steps=13"), 2, run="RUN"),
    ),
    "data": (
        Command(("data", "list"), 3),
        Command(("data", "verify", "data=text", "TEXT"), 3),
        Command(("data", "prepare", "data=text", "TEXT"), 3),
        Command(("data", "remove", "data=text", "TEXT"), 2),
        Command(("eval", "RUN", "limit=1"), 1),
        Command(("train", "TEXT", *SMALL_RUN, "trainer.steps=2"), 1, run="new"),
    ),
    "export": (
        Command(("eval", "export", "limit=1"), 2),
        Command(("sample", "export", "length=4"), 2),
        Command(("export", "RUN", "output=export"), 2),
    ),
    "hf": (Command(("export", "RUN", "output=hf", "format=hf"), 1),),
    "report": (Command(("report", "RUN", "output=report"), 1),),
    "out/swept": (
        Command(("sweep", "out/swept"), 4),
        Command(("report", "out/swept"), 2),
        Command(("runs", "out/swept"), 3),
    ),
}
"""The commands on each copy."""
FUTURE = {
    RUN: (
        *("wandb", "tensorboard", "tensorboard/hparams.yaml", "csv", "csv/version_0"),
        *("csv/version_1/metrics.csv", "samples/.x.1.writing", "hf", "resumes.jsonl"),
        *("report/plots", "output.log", "checkpoints/previous.ckpt", "wandb.json"),
        *("checkpoints/.last.ckpt.1.writing", "checkpoints/last.ckpt.damaged", "export.json"),
    ),
    "data": ("STORE/.verified", ".STORE.work", ".STORE.lock", "downloads", ".x.1.writing"),
    "export": ("config.json", "tokenizer.json", ".export.json.1.writing"),
    "hf": ("model.safetensors.index.json",),
    "report": ("curves.png", ".report.md.1.writing"),
    "out/swept": (".submitit", "CELL/output.log", "CELL/lock", "optuna.db"),
}
"""Names at which a copy has nothing, or may have nothing, by the time an attacker writes."""


@dataclass(frozen=True)
class World:
    """The files of a campaign: what is copied, and what may never change."""

    folder: Path

    @property
    def copied(self) -> Path:
        return self.folder / "copied"

    @property
    def outside(self) -> Path:
        """Files of somebody else, and another copy of all."""
        return self.folder / "outside"

    @property
    def case(self) -> Path:
        return self.folder / "case"


@dataclass(frozen=True)
class Case:
    """What is put in place of which file, and the command on it."""

    attack: str
    path: str
    command: Command

    def line(self) -> str:
        """Return the case in words."""
        words = " ".join(word for word in self.command.words if word not in SMALL_RUN)
        return f"{self.attack} in place of {self.path}: rtx {words}"


Attack = Callable[[World, Path, random.Random], None]


def link_to(name: str) -> Attack:
    """Return what puts a link to a file or folder outside."""

    def put(world: World, path: Path, draw: random.Random) -> None:
        path.symlink_to(world.outside / name)

    return put


def link_to_twin(world: World, path: Path, draw: random.Random) -> None:
    """Put a link to the same file or folder of another run: with it, all would work."""
    path.symlink_to(world.outside / "twin" / path.relative_to(world.case))


def link_to_itself(world: World, path: Path, draw: random.Random) -> None:
    path.symlink_to(path.name)


def make_pipe(world: World, path: Path, draw: random.Random) -> None:
    os.mkfifo(path)


def make_folder(world: World, path: Path, draw: random.Random) -> None:
    path.mkdir()
    (path / "inner").write_text("x")


def device(number: int) -> Attack:
    """Return what makes a device of the memory class: 3 is /dev/null, 5 /dev/zero."""

    def put(world: World, path: Path, draw: random.Random) -> None:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, number))

    return put


def make_empty(world: World, path: Path, draw: random.Random) -> None:
    path.touch()


def make_sparse(world: World, path: Path, draw: random.Random) -> None:
    with open(path, "wb") as file:
        file.truncate(SPARSE_BYTES)


def cut_off(world: World, path: Path, draw: random.Random) -> None:
    content = former(world, path)
    path.write_bytes(content[: draw.randrange(len(content) + 1)])


def give_away(world: World, path: Path, draw: random.Random) -> None:
    """Put a copy that belongs to another user and that everybody may write."""
    source = world.copied / path.relative_to(world.case)
    if source.is_dir():
        shutil.copytree(source, path)
    else:
        path.write_bytes(former(world, path))
    os.chown(path, NOBODY, NOBODY)
    path.chmod(0o777)


def odd_bytes(world: World, path: Path, draw: random.Random) -> None:
    path.write_bytes(draw.randbytes(draw.choice((1, 100, 10_000))))


def odd_text(world: World, path: Path, draw: random.Random) -> None:
    path.write_text(draw.choice((*JSON, "[" * 10**5, "9" * 10**5, '{"a":' * 10**4, *YAML)))


def odd_value(world: World, path: Path, draw: random.Random) -> None:
    """Put a record with one value of another type, or gone; in YAML, one line with such a value."""
    text = former(world, path).decode(errors="replace")
    lines = text.splitlines() or [""]
    if path.suffix == ".json":
        path.write_text(json.dumps(mutated_json(json.loads(text), draw)))
        return
    number = draw.randrange(len(lines))
    if path.suffix == ".jsonl":
        lines[number] = json.dumps(mutated_json(json.loads(lines[number]), draw))
    else:
        lines[number] = lines[number].partition(":")[0] + ": " + draw.choice((*JSON, *YAML))
    path.write_text("\n".join(lines) + "\n")


def former(world: World, path: Path) -> bytes:
    """Return what a file had before the attack; nothing where there was none."""
    source = world.copied / path.relative_to(world.case)
    return source.read_bytes() if source.is_file() else b""


LINKS: dict[str, Attack] = {
    "a link to a file": link_to("file"),
    "a link to a folder": link_to("folder"),
    "a dangling link": link_to("new"),
    "a link to itself": link_to_itself,
    "a link to its like": link_to_twin,
}
OTHERS: dict[str, Attack] = {
    "a pipe": make_pipe,
    "a folder": make_folder,
    "an empty file": make_empty,
    "a sparse file": make_sparse,
    "odd bytes": odd_bytes,
    "odd text": odd_text,
}
BY_ROOT: dict[str, Attack] = {"/dev/null": device(3), "/dev/zero": device(5)}
OF_FILES: dict[str, Attack] = {"a part of it": cut_off}
OF_TEXT: dict[str, Attack] = {"an odd value": odd_value}
OF_OTHERS: dict[str, Attack] = {"a copy of another user": give_away}
TEXTS = (".json", ".jsonl", ".yaml")


def attacks_on(path: Path) -> dict[str, Attack]:
    """Return the attacks that can be made at a path."""
    attacks = LINKS | OTHERS
    is_root = os.geteuid() == 0
    if is_root:
        attacks |= BY_ROOT
    if path.exists() and is_root:
        attacks |= OF_OTHERS
    if path.is_file():
        attacks |= OF_FILES
        if path.suffix in TEXTS:
            attacks |= OF_TEXT
    return attacks


def state_of(folder: Path) -> dict[str, tuple[Any, ...]]:
    """Return kind, size, owner, time and content of all that is in a folder."""
    states: dict[str, tuple[Any, ...]] = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        facts = (status.st_mode, status.st_uid, status.st_nlink, status.st_mtime_ns)
        content = b""
        if path.is_file() and not path.is_symlink():
            content = hashlib.sha256(path.read_bytes()).digest()
        states[str(path.relative_to(folder))] = (*facts, content)
    return states


ADDED = (
    ("eval", "RUN", "limit=1"),
    ("sample", "RUN", "length=4"),
    ("audit", "RUN", "sequences=1", "prefixes=1"),
    ("analyze", "patterns", "RUN"),
    ("report", "RUN"),
    ("report", "RUN", "output=report"),
    ("export", "RUN"),
    ("export", "RUN", "output=export"),
    ("export", "RUN", "output=hf", "format=hf"),
    ("resume", "RUN", "trainer.steps=12", "logger.csv=true", "logger.tensorboard=true"),
)
"""Commands that add to the run, its exports and its report."""


def make_world(workshop: Workshop, folder: Path, added: Sequence[tuple[str, ...]] = ADDED) -> World:
    """Make what is copied, in a few seconds of training, and what is outside."""
    world = World(folder)
    copied = world.copied
    copied.mkdir(parents=True)
    shutil.copy(workshop.folder / "book.txt", copied / "book.txt")
    trained = ("train", "TEXT", *SMALL_RUN)
    for words in (trained, *added):
        variables = {**variables_of(copied), "RTX_RUN": ""}
        if words is trained:
            variables["RTX_RUN"] = str(copied / RUN)
        process = workshop.fork(copied / "made", *located(words, copied), **variables)
        assert process.wait() == 0, process.log.read_text()
    make_sweep(copied)
    world.outside.mkdir()
    (world.outside / "folder" / "inner").mkdir(parents=True)
    for name in ("file", "folder/file", "folder/last.ckpt", "folder/inner/file"):
        (world.outside / name).write_text('{"mine": 1}\n')
    shutil.copytree(copied, world.outside / "twin", symlinks=True)
    return world


def make_sweep(copied: Path) -> None:
    """Make the records of a sweep of two cells, which are copies of one run."""
    swept = copied / "out" / "swept"
    cells = {}
    for seed in (0, 1):
        name = f"{seed:012x}"
        ignored = shutil.ignore_patterns("checkpoints", "report", "export", "tensorboard", "csv")
        shutil.copytree(copied / RUN, swept / name, ignore=ignored)
        cells[name] = f"seed={seed}"
    row = {"time": "2026-01-01T00:00:00Z", "command": "rtx train -m seed=0,1", "cells": cells}
    (swept / "sweeps.jsonl").write_text(json.dumps(row) + "\n")


def variables_of(folder: Path) -> dict[str, str]:
    """Return the variables of commands in a copy."""
    return {
        "RTX_OUTPUTS": str(folder / "out"),
        "RTX_DATA": str(folder / "data"),
        "XDG_CACHE_HOME": str(folder / "cache"),
    }


def located(words: Sequence[str], folder: Path) -> list[str]:
    """Return the words of a command with the paths of a copy."""
    places = {name: str(folder / name) for name in (*COMMANDS, "out", "new")}
    places |= {f"output={name}": f"output={folder / name}" for name in COMMANDS}
    places |= {"RUN": str(folder / RUN), "TEXT": f"data.path={folder / 'book.txt'}"}
    # The first word is the name of a command, such as export.
    return [*words[:1], *(places.get(word, word) for word in words[1:])]


@dataclass
class Campaign:
    """Cases in a world, and what came of them."""

    workshop: Workshop
    world: World
    seed: int
    limit: int
    drawn: Mapping[str, Sequence[Command]] = field(default_factory=lambda: COMMANDS)
    """The commands on each copy."""
    codes: collections.Counter[int] = field(default_factory=collections.Counter)
    attacks: collections.Counter[str] = field(default_factory=collections.Counter)
    commands: collections.Counter[str] = field(default_factory=collections.Counter)
    failures: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)
        self.outside = state_of(self.world.outside)

    def cases(self) -> Iterator[Case]:
        """Yield drawn cases for ever."""
        commands = []
        for root, of_root in self.drawn.items():
            for command in of_root:
                commands += [(root, command)] * command.weight
        paths = {root: self.paths_in(root) for root in self.drawn}
        while True:
            root, command = self.draw.choice(commands)
            path = self.draw.choice(paths[root])
            attacks = list(attacks_on(self.world.copied / path))
            # Most of what can be wrong with a record is in its values.
            if "an odd value" in attacks:
                attacks += ["an odd value"] * len(attacks)
            attack = self.draw.choice(attacks)
            yield Case(attack, path, command)

    def paths_in(self, root: str) -> list[str]:
        """Return the paths that are attacked in a copy: all that is there, and what may come."""
        folder = self.world.copied / root
        names = {str(path.relative_to(folder)) for path in folder.rglob("*")}
        store = next(path.name for path in (self.world.copied / "data").glob("text-*"))
        for name in FUTURE[root]:
            names.add(name.replace("STORE", store).replace("CELL", "000000000001"))
        return [f"{root}/{name}" for name in sorted(names)]

    def happen(self, case: Case) -> str:
        """Let a case happen; return what is wrong, or ""."""
        world = self.world
        shutil.rmtree(world.case, ignore_errors=True)
        shutil.copytree(world.copied, world.case, symlinks=True)
        path = world.case / case.path
        remove(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        attacks_on(world.copied / case.path)[case.attack](world, path, self.draw)
        (world.folder / "log").unlink(missing_ok=True)
        code, said = self.run(case.command)
        self.codes[code] += 1
        self.attacks[case.attack] += 1
        self.commands[" ".join(case.command.words[:2])] += 1
        problem = self.problem(code, said)
        if problem:
            self.failures.append(f"{case.line()}: {problem}")
            print(self.failures[-1], said[-3000:], sep="\n", flush=True)
        return problem

    def run(self, command: Command) -> tuple[int, str]:
        """Run a command in the copies; return its exit code and its output."""
        folder = self.world.case
        words = located(command.words, folder)
        variables = {**variables_of(folder), "RTX_RUN": ""}
        if command.run:
            variables["RTX_RUN"] = located(("train", command.run), folder)[1]
        inside = INSIDE.format(limit=self.limit, folder=str(folder), memory=MOST_MEMORY)
        log = self.workshop.folder / "attack.log"
        log.unlink(missing_ok=True)
        process = self.workshop.fork(Path("attack"), *words, inside=inside, **variables)
        code = process.wait()
        return code, log.read_text(errors="replace") if log.exists() else ""

    def problem(self, code: int, said: str) -> str:
        """Return what is wrong with the end of a command, or ""."""
        now = state_of(self.world.outside)
        if now != self.outside:
            differing = {name for name, _ in now.items() ^ self.outside.items()}
            self.outside = now
            return f"changed outside: {', '.join(sorted(differing))}"
        if code == -14:
            return f"no end after {self.limit} s"
        if "MemoryError" in said:
            return "took all memory"
        if code not in EXIT_CODES:
            return f"ended with {code}"
        return "a traceback" if "Traceback" in said else ""

    def result(self, seconds: float) -> dict[str, Any]:
        """Return the row of results."""
        return {
            "what": "links, pipes, devices and odd contents in place of files",
            "command": " ".join(["python -m tests.campaigns.attacks", *sys.argv[1:]]),
            "cases": sum(self.codes.values()),
            "failures": self.failures,
            "exit_codes": dict(sorted(self.codes.items())),
            "attacks": dict(self.attacks.most_common()),
            "commands": dict(self.commands.most_common()),
            "minutes": round(seconds / 60, 1),
            "machine": machine("cpu", 1),
            "versions": code(),
        }


def remove(path: Path) -> None:
    """Remove a file or a folder, or nothing."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def import_commands() -> None:
    """Import all commands that cases run."""
    import_runs()
    for name in IMPORTED:
        importlib.import_module(f"rtx.commands.{name}")


def main() -> None:
    """Let cases happen, print and write what came of them."""
    options = read_options()
    end_with_children()
    folder = Path(tempfile.mkdtemp(prefix="rtx-attacks-"))
    began = time.monotonic()
    with forking_server("tests.campaigns.attacks:import_commands") as forker:
        workshop = Workshop(folder, forker)
        campaign = Campaign(
            workshop, make_world(workshop, folder / "world"), options.seed, options.limit
        )
        cases = campaign.cases()
        for number in range(1, options.cases + 1):
            campaign.happen(next(cases))
            if number % 50 == 0 or number == options.cases:
                row = campaign.result(time.monotonic() - began)
                options.output.write_text(json.dumps([row], indent=1) + "\n")
                minutes = row["minutes"]
                failures = len(campaign.failures)
                print(f"{minutes} minutes: {number} cases, {failures} failures", flush=True)
    if campaign.failures:
        sys.exit(f"files are in {folder}")
    shutil.rmtree(folder)


def read_options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=1000, help="number of cases")
    parser.add_argument("--seed", type=int, default=0, help="seed of what is drawn")
    parser.add_argument("--limit", type=int, default=300, help="seconds of a command")
    output = ROOT / "benchmarks" / "results" / "attacks.json"
    parser.add_argument("--output", type=Path, default=output, help="file for the result")
    return parser.parse_args(words)


if __name__ == "__main__":
    main()
