"""What may stand behind each command: a run's folder, short forms, groups and keys, of which it reads every one.

Nothing here imports Hydra, YAML or torch.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from rtx.commandline.fields import all_fields, suggest_key
from rtx.config import GROUPS
from rtx.errors import UserError, nearest

USAGE = {
    "resume": "rtx resume <run> [key=value ...]",
    "eval": "rtx eval <run> [split=test] [mode=streaming] [stride=...] [limit=...] [ablate=routing] [key=value ...]",
    "audit": "rtx audit <run ...> [windows=32] [positions=32] [key=value ...] | [group=option ...] [key=value ...]",
    "report": "rtx report [<run or sweep folder> ...] [output=...] [logger=offline] [key=value ...]",
    "sweep": "rtx sweep <folder> [once=true]",
    "analyze": "rtx analyze divergence|patterns|context <run> [split=test] [key=value ...] | "
    "samples <run> [<other run>] [length=1000] [key=value ...]",
    "export": "rtx export <run> [checkpoint=last] [output=...]",
    "sample": "rtx sample <run> [length=2000] [temperature=0.9] [top_k=...] [top_p=...] [prompt=...] [key=value ...]",
}
"""The commands on a run."""

ANALYSES = {
    "divergence": ("analyze.*",),
    "patterns": (
        *("analyze.split", "analyze.seed", "analyze.checkpoint"),
        *(f"pictures.{key}" for key in ("text", "start", "layer", "head", "at", "asked")),
    ),
    "context": (
        *("analyze.split", "analyze.seed", "analyze.checkpoint"),
        *("pictures.windows", "pictures.bins", "eval.mode"),
    ),
    "samples": (
        *(f"sample.{key}" for key in ("length", "temperature", "top_k", "top_p", "prompt", "seed", "checkpoint")),
        *("analyze.split", "pictures.windows", "pictures.samples", "pictures.given"),
    ),
}
"""What `rtx analyze` can do, and the keys that each reads beside those of data and device; all may be written short."""

BENCHMARKS = ("steps",)
"""What `rtx bench` can time."""

LAUNCHED = ("slurm", "submitit_local")
"""Options of hardware that make jobs of the cells of a sweep."""

ONE_DEVICE = ("hardware.name", "hardware.precision", "hardware.deterministic", "hardware.threads")
READS = {
    "resume": (*(f"{section}.*" for section in ("trainer", *GROUPS) if section != "experiment"), "seed"),
    "eval": ("eval.*", "data.*", *ONE_DEVICE, "seed"),
    "audit": ("audit.*", "data.*", *ONE_DEVICE),
    "analyze": (*dict.fromkeys(key for keys in ANALYSES.values() for key in keys), "data.*", *ONE_DEVICE),
    "sample": ("sample.*", *ONE_DEVICE),
    "export": ("export.*",),
    "report": ("report.*", "logger.*"),
    "sweep": ("sweep.once",),
    "data": ("data.*",),
    **{f"analyze {what}": (*keys, "data.*", *ONE_DEVICE) for what, keys in ANALYSES.items()},
}
"""The keys that a command reads that does not read them all: any other would have no effect."""

CHOSEN_ANEW = {
    "resume": ("hardware", "logger"),
    "eval": ("hardware",),
    "audit": ("hardware",),
    "analyze": ("hardware",),
    "sample": ("hardware",),
    "export": (),
    "report": ("logger",),
    "sweep": (),
    "data": ("data",),
}
"""The groups whose option can be chosen behind such a command; behind one on a run, anew."""


@dataclass(frozen=True)
class Vocabulary:
    """What a command understands in front of "="."""

    short: Mapping[str, str]
    """Short forms and the keys they stand for."""
    groups: tuple[str, ...]
    keys: tuple[str, ...]
    command: str = ""
    """The command, if it does not read every key; `analyze` with what is to be analyzed."""

    @property
    def word(self) -> str:
        """The command without what it is to analyze."""
        return self.command.partition(" ")[0]

    @property
    def one_device(self) -> bool:
        """Whether the command never takes more than one device."""
        return self.word in ("eval", "audit", "analyze", "sample")

    def near(self, key: str) -> str:
        """Return " (did you mean 'x'?)" for what is understood and nearest to `key`, or an empty string."""
        return suggest_key(key, [*self.short, *self.groups, *self.keys])

    def unknown(self, key: str) -> str:
        """Return what follows "unknown key 'x'": the nearest that there is, or where all are listed."""
        near = self.near(key)
        if self.command:
            return f"{near}; rtx {self.command} reads {', '.join(READS[self.command])}"
        return near or "; rtx train --help lists them"

    def refusal(self, key: str) -> str:
        """Return why a group or key of the schema cannot stand behind this command, or an empty string."""
        if key in self.groups or key in self.keys:
            return ""
        if key in GROUPS and self.word in USAGE and self.groups:
            return f"a run keeps its {key}; {' and '.join(f'{group}=' for group in self.groups)} can be chosen anew"
        return f"rtx {self.command} does not read {key}; it reads {', '.join(READS[self.command])}"


@functools.cache
def vocabulary(command: str = "") -> Vocabulary:
    """Return what may stand behind a command on a run, or behind `data`; behind any other: every group and key.

    Keys of `eval`, `audit`, `analyze` and `sample` may be written short behind the command of that name (`split=test`),
    and behind `analyze` with what is to be analyzed all that `ANALYSES` lists.
    """
    if command not in READS:
        return Vocabulary({}, GROUPS, tuple(all_fields()))
    keys = tuple(key for key in all_fields() if any(fnmatchcase(key, pattern) for pattern in READS[command]))
    word, _, what = command.partition(" ")
    mine = ANALYSES[what] if what else (f"{word}.*",) if word in USAGE else ()
    own = [key for key in keys if any(fnmatchcase(key, pattern) for pattern in mine)]
    short = {key.partition(".")[2]: key for key in own}
    return Vocabulary(short, CHOSEN_ANEW[word], keys, command)


def run_folder(arguments: list[str], command: str) -> tuple[Path, list[str]]:
    """Return the run folder that the arguments of a command begin with, and the overrides behind it.

    Args:
        command: with what is to be analyzed behind `analyze`.

    Raises:
        UserError: there is no folder in front.
    """
    if not arguments or "=" in arguments[0]:
        found = f", not {arguments[0]!r}" if arguments else ""
        usage = USAGE.get(command, f"rtx {command} <run> [key=value ...]")
        raise UserError(f"rtx {command} needs the run's folder first{found}; usage: {usage}")
    return Path(arguments[0]), arguments[1:]


def run_folders(arguments: list[str]) -> tuple[list[Path], list[str]]:
    """Return the run folders, none or more, that the arguments of a command begin with, and the overrides behind."""
    count = next((at for at, argument in enumerate(arguments) if "=" in argument), len(arguments))
    return [Path(argument) for argument in arguments[:count]], arguments[count:]


def analysis(arguments: list[str]) -> tuple[str, list[str]]:
    """Return which analysis `rtx analyze` is asked for, and the arguments behind the word.

    Raises:
        UserError: none, or one that there is not.
    """
    word = arguments[0] if arguments else ""
    if word not in ANALYSES:
        said = f"rtx analyze {word}".rstrip() + f": say {', '.join(ANALYSES)}"
        raise UserError(said + (nearest(word, ANALYSES) if word else "") + f"; usage: {USAGE['analyze']}")
    return word, arguments[1:]


def benchmark(arguments: list[str]) -> list[str]:
    """Return the arguments behind the word that says what `rtx bench` is to time.

    Raises:
        UserError: none, or one that there is not.
    """
    word = arguments[0] if arguments else ""
    if word not in BENCHMARKS:
        said, known = f"rtx bench {word}".rstrip(), " or ".join(BENCHMARKS)
        raise UserError(f"{said}: say {known}{nearest(word, BENCHMARKS)}, as in: rtx bench steps experiment=pg19_steps")
    return arguments[1:]
