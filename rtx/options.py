"""What stands behind the name of a command: its options, run folders, and overrides of a configuration (`key=value`).

A value is taken as it is written, `~/a=b (1).txt` and all. In a sweep commas outside quotes part several values,
`range(1,4)` counts, and `model=glob(rt*)` lists options. No torch, no Hydra, no YAML.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import filter as matching
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from rtx.config import GROUPS, SPREAD, all_fields
from rtx.errors import UserError, collect, nearest
from rtx.keys import Field, fields_of, one_of, options, ranged, suggest_key, unquoted
from rtx.wording import shorten

COMMA = re.compile(r""",(?=(?:[^"']|"[^"]*"|'[^']*')*$)""")
"""A comma outside quotes."""

MOST_CELLS = 1_000
"""Cells of a sweep, and values of a range."""

LAUNCHED = ("slurm",)
"""Options of hardware that make jobs of the cells of a sweep."""


@dataclass
class EvalOptions:
    split: str = one_of("valid", "test", "train")
    """Part of the data to score."""
    mode: str = one_of("parallel", "streaming")
    """parallel: one pass over each window (teacher-forced); streaming: every decision from the prefix alone."""
    stride: int | None = ranged(None, low=1)
    """Units by which windows advance; unset: N. Smaller gives every unit more context, at more cost."""
    limit: int | None = ranged(None, low=1)
    """Score a seeded sample of this many windows only; the result is marked partial."""
    batch_size: int | None = ranged(None, low=1)
    """Windows scored at once; unset: as many as make 16,384 units."""
    protocol: str = one_of("whole", "released")
    """whole: every unit of the split once; released: the text as the paper's released code reads it, parts left out."""
    checkpoint: str = one_of("best", "last")
    """Checkpoint of the run to score."""
    ablate: str = one_of("none", "routing", "local", "random")
    """Score without routing: its heads' outputs zero (routing), their keys the last W (local), or random members."""


@dataclass
class SampleOptions:
    length: int | None = ranged(None, low=1)
    """Units to generate; unset: 1,000 of text, a whole image of N."""
    count: int = ranged(1, low=1, high=1024)
    """Images to generate, side by side in one picture (image sets)."""
    temperature: float = ranged(1.0, low=0.0)
    """Divides the logits; 0: always the most likely unit."""
    top_k: int | None = ranged(None, low=1)
    """Draw from this many most likely units only."""
    top_p: float | None = ranged(None, above=0.0, high=1.0)
    """Draw from the most likely units that hold this share of the probability (nucleus)."""
    prompt: str = ""
    """Text to continue."""
    seed: int = ranged(0, low=0)
    """Seed of the draw."""
    checkpoint: str = one_of("best", "last")
    """Checkpoint of the run to sample from."""


@dataclass
class AuditOptions:
    length: int | None = ranged(None, low=2)
    """Positions of the sequences that are changed; unset: N."""
    double: bool = True
    """Compute the changes in float64; false: in the parameters' own type (audit.tolerance must allow its rounding)."""
    streaming: bool = True
    """Change the future of decisions made from the prefix alone, too."""
    sequences: int = ranged(2, low=1)
    """Sequences whose future is changed."""
    prefixes: int = ranged(24, low=1)
    """Prefix lengths behind which everything is changed, one after the other."""
    tolerance: float = ranged(1e-9, low=0.0)
    """Relative change from which on an output counts as moved."""
    split: str = one_of("valid", "test", "train")
    """Part of a run's data to take sequences from."""
    windows: int = ranged(32, low=0)
    """Windows of a run's data that are priced; 0: no price, and the data are not read."""
    positions: int = ranged(32, low=1)
    """Positions scored in each window: each is a run of the model on its prefix alone."""
    checkpoint: str = one_of("best", "last")
    """Checkpoint of the run to audit."""
    seed: int = ranged(0, low=0, high=2**31 - 1)
    """Seed of the windows, positions and changed ids: the same ones for every run."""
    output: str | None = None
    """File for the result as JSON, of a configuration; a run gets audit.json in its folder."""


@dataclass
class AnalyzeOptions:
    split: str = one_of("valid", "test", "train")
    """Part of the data to take sequences from."""
    seed: int = ranged(0, low=0, high=2**31 - 1)
    """Seed of what is drawn."""
    checkpoint: str = one_of("best", "last")
    """Checkpoint of the run to look into."""


@dataclass
class DivergenceOptions(AnalyzeOptions):
    sequences: int = ranged(1, low=1)
    """Sequences read; draws take them in turn."""
    draws: int = ranged(10, low=1, high=10_000)
    """Pairs of heads drawn for each layer and kind of pair."""


@dataclass
class PatternsOptions(AnalyzeOptions):
    start: int | None = ranged(None, low=0)
    """Unit of the split that the sequence begins with, or number of the image; unset: drawn by the seed."""
    layer: str | None = None
    """Layers to draw, 0 the lowest, joined by +; unset: the topmost."""
    head: str | None = None
    """Heads of these layers, counted from 0, joined by +; unset: all."""


@dataclass
class ContextOptions(AnalyzeOptions):
    windows: int = ranged(64, low=1)
    """Windows scored."""
    bins: int = ranged(16, low=1, high=256)
    """Ranges of position that the loss is averaged over."""
    mode: str = one_of("parallel", "streaming")
    """parallel: one pass over each window (teacher-forced); streaming: every decision from the prefix alone."""


@dataclass
class ReportOptions:
    output: str | None = None
    """Folder to write report.{md,csv,tex,html} to; unset: report/ in the first with a run."""


@dataclass
class ExportOptions:
    checkpoint: str = one_of("best", "last")
    """Weights: of the best validation, or the last."""
    output: str | None = None
    """Folder to write to; unset: export/ in the run's folder."""


@dataclass
class SweepOptions:
    parallel: int | None = ranged(None, low=1, high=1_000)
    """Cells side by side; unset: one after the other, or with hardware=slurm all of them, as the queue takes them."""
    retry: bool = False
    """Run failed cells again, from their checkpoint if there is one; otherwise they are reported as they failed."""


@dataclass
class WatchOptions:
    once: bool = False
    """Print how the sweep stands and leave, instead of watching it until it ends."""


@dataclass(frozen=True)
class Command:
    """What stands behind the name of a command."""

    name: str
    """Its word; with what it is to do behind analyze, and -m behind train for a sweep."""
    about: str
    options: type | None = None
    runs: int = 0
    """Run folders in front: one, or up to many."""
    keys: tuple[str, ...] = ()
    """Groups and keys of a run's configuration that may be changed for the command."""
    composes: bool = False
    """Whether the words make a configuration, where there is no run: then every group and key is read."""

    @property
    def own(self) -> dict[str, Field]:
        """The options by their names."""
        return fields_of(self.options) if self.options else {}

    @property
    def section(self) -> str:
        """What may stand before an option and a dot, and must where it is a key of the configuration as well."""
        return "sweep" if self.name == "train -m" else self.name.split()[0]

    def option(self, key: str, composing: bool) -> str:
        """Return the name of the option that `key` means, or an empty string."""
        name = key.removeprefix(f"{self.section}.")
        return name if name in self.own and not (composing and key in all_fields()) else ""

    def known(self, composing: bool) -> list[str]:
        """Return the options, groups and keys that the command reads."""
        if self.name == "resume":
            from rtx.training.resumption import may_change  # which reads configurations by this module

            names = ("name", "model.name")
            return ["hardware", "logger", *(key for key in all_fields() if may_change(key) and key not in names)]
        own = [f"{self.section}.{name}" if composing else name for name in self.own]
        patterns = ("*",) if composing else self.keys
        return own + [key for key in (*GROUPS, *all_fields()) if any(fnmatchcase(key, each) for each in patterns)]

    def usage(self) -> str:
        """Return the line that says how it is called."""
        runs = {0: "", 1: " <run>"}.get(self.runs, " [<run> ...]")
        settings = " [key=value ...]" if self.runs or self.keys or self.composes else ""
        return f"rtx {self.name}{runs}{' [group=option ...]' * self.composes}{settings}"


DEVICE = ("hardware", "hardware.name", "hardware.precision", "hardware.deterministic", "hardware.threads")
"""What a command on a run reads of its hardware: it works on one device."""
RUN = ("data.*", *DEVICE)
MANY = 10_000
COMMANDS = (
    Command("train", "train a model; every option has a default", composes=True),
    Command("train -m", "train every combination of listed values, a process each", SweepOptions, composes=True),
    Command("resume", "go on exactly where a run stopped, or lengthen it by trainer.steps=N", runs=1),
    Command("eval", "score a run on a split, every unit exactly once", EvalOptions, 1, (*RUN, "seed")),
    Command("audit", "change the future, see what of the past moves and its price", AuditOptions, MANY, RUN, True),
    Command("analyze divergence", "do heads read elsewhere (Table 6)", DivergenceOptions, 1, RUN),
    Command("analyze patterns", "draw what every head reads, as in Figure 1", PatternsOptions, 1, RUN),
    Command("analyze context", "loss by position, and what far context is worth", ContextOptions, 1, RUN),
    Command("sample", "generate from a run", SampleOptions, 1, DEVICE),
    Command("export", "write a run's model as safetensors with a card, for others to load", ExportOptions, 1),
    Command("sweep", "watch a sweep: what is done, runs, failed, waits", WatchOptions, 1),
    Command("report", "set runs and sweeps beside the paper's tables", ReportOptions, MANY, ("logger", "logger.*")),
    Command("plan", "count parameters, FLOPs and memory of a run, and run nothing", composes=True),
    Command("data", "prepare, verify, info or remove data=<set>; list what lies here", keys=("data", "data.*")),
    Command("schema", "print what a file of conf/<group>/ may hold, for editors: rtx schema <group>"),
    Command("completion", "print a script by which bash completes lines: source <(rtx completion bash)"),
)
READS = {command.name: command for command in COMMANDS}


@dataclass(frozen=True)
class Override:
    """A key, and the texts of its values as they were written: more than one where it sweeps."""

    key: str
    values: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.key}={','.join(self.values)}"


@dataclass(frozen=True)
class Words:
    """A command line taken apart: `options` is the command's dataclass, `given` names those that the user wrote."""

    runs: list[Path]
    options: Any
    overrides: list[str]
    given: frozenset[str]


def what_to_do(word: str, words: Sequence[str]) -> tuple[str, list[str]]:
    """Return which of several things a command (`rtx analyze`) is asked to do, and the words behind that."""
    known = [name.partition(" ")[2] for name in READS if name.startswith(f"{word} ") and word not in READS]
    what = words[0] if words and known else ""
    if what in known or not known:
        return what, list(words[bool(known) :])
    said = f"rtx {word} {shorten(what)}".rstrip()
    raise UserError(f"{said}: say {', '.join(known)}{nearest(what, known)}; rtx {word} --help says more")


def read_words(command: str, words: Sequence[str]) -> Words:
    """Take apart what stands behind a command (its name as in `READS`).

    Raises:
        UserError: with a line for each word that the command does not read, or a run that is missing.
    """
    reads = READS[command]
    runs = leading_runs(reads, words) if reads.runs else []
    composing = reads.composes and not runs

    def read(word: str) -> tuple[str, Any]:
        key, text = split_word(word)
        if name := reads.option(key, composing):
            return name, replace(reads.own[name], key=key).read_word(text)
        check_override(word, command, composing)
        return "", word

    found = collect(read, words[len(runs) :])
    values = {name: value for name, value in found if name}
    overrides = [word for name, word in found if not name]
    return Words(runs, reads.options(**values) if reads.options else None, overrides, frozenset(values))


def leading_runs(reads: Command, words: Sequence[str]) -> list[Path]:
    """Return the run folders that words begin with; one that exists may have "=" in its name."""
    runs = [Path(word) for word in itertools.takewhile(lambda word: "=" not in word or os.path.isdir(word), words)]
    if not runs and reads.runs < MANY:
        found = f", not {shorten(words[0])!r}" if words else ""
        raise UserError(f"rtx {reads.name} needs the run's folder first{found}; usage: {reads.usage()}")
    if len(runs) > reads.runs:
        raise UserError(f"rtx {reads.name} takes 1 run, not also {shorten(str(runs[1]))!r}")
    return runs


def check_overrides(words: Iterable[str], *, sweep: bool = False) -> list[Override]:
    """Return the overrides of a configuration, checked one by one; `sweep`: they may list values.

    Raises:
        UserError: with a line for each that cannot be.
    """
    return collect(lambda word: check_override(word, "train -m" if sweep else "train", True), words)


def check_override(word: str, command: str, composing: bool) -> Override:
    """Return one override, checked: the command reads its key, and each value is an option, or in type and range."""
    (key, text), sweep = split_word(word), command == "train -m"
    if sweep and key.startswith("hydra.launcher."):
        return Override(key, (text,))
    refuse_foreign(READS[command], key, word, composing)
    values = listed(key, text)
    if len(values) > 1 and not sweep:
        said = f"{shorten(word)}: takes one value; several make a sweep (rtx train -m)"
        raise UserError(f"{said}; quote it where it is one: '{key}=\"...\"'")
    for value in values:
        if key in GROUPS:
            check_option(key, value)
        elif "${" not in value:  # what refers to another key is known when all is composed
            all_fields()[key].read_word(value)
    apart = (*LAUNCHED, *(SPREAD if command != "resume" else ()))
    if not composing and key in ("hardware", "hardware.name") and {*values} & {*apart}:
        takes = ", ".join(option for option in options("hardware") if option not in apart)
        raise UserError(f"{word}: not for rtx {command}; hardware takes {takes}")
    return Override(key, tuple(values))


def split_word(word: str) -> tuple[str, str]:
    """Return key and value of `key=value`."""
    key, equals, text = word.partition("=")
    key = key.lstrip("+").strip()
    if not equals or not key or word.startswith(("-", "~")):
        near = suggest_key(key.lstrip("~-"), [*GROUPS, *all_fields()])
        raise UserError(f"{shorten(word)!r} is not of the form key=value{near}")
    return key, text


def refuse_foreign(reads: Command, key: str, word: str, composing: bool) -> None:
    """Refuse a key that the command does not read; say which command reads it, or which key is near."""
    known, ours = reads.known(composing), {*GROUPS, *all_fields()}
    if key in known or (reads.name == "resume" and key in all_fields() and key != "name"):  # which tells what changes
        return
    owners = [name for name, other in READS.items() if "." in key and other.option(key, False)]
    if owners or key in ours:
        where = (
            f"is an option of rtx {owners[0]}"
            if owners
            else f"reads {shorten(', '.join([*reads.own, *(reads.keys or known)]), 300)}"
        )
        raise UserError(f"{shorten(word)}: rtx {reads.name} does not read {key}; it {where}")
    near = suggest_key(key, known) or f"; rtx {reads.name} --help lists them"
    raise UserError(f"unknown key {shorten(key)!r}{near}")


def check_option(group: str, name: str) -> None:
    """Refuse an option that `conf/<group>/` does not have, and jobs where nothing makes them."""
    known, shown = options(group), f"{group}={shorten(name)}"
    if name not in known and (group, name) != ("experiment", "null"):
        takes = f"{group} takes {shorten(', '.join(known), 240)}"
        raise UserError(f"{shown}: no such option{nearest(name, known)}; {takes}")
    if name in LAUNCHED and importlib.util.find_spec("hydra_plugins.hydra_submitit_launcher") is None:
        raise UserError(f"{shown}: needs hydra-submitit-launcher and submitit; pip install 'rtx[slurm]' brings them")


def listed(key: str, text: str) -> list[str]:
    """Return the texts of the values that stand behind a key."""
    function, _, inner = text.strip().removesuffix(")").partition("(")
    if function == "glob" and key in GROUPS:
        found = matching(options(key), inner)
    elif function == "range" and key not in GROUPS and all_fields()[key].kind is int:
        try:
            found = [str(number) for number in range(*map(int, inner.split(",")))[: MOST_CELLS + 1]]
        except (ValueError, TypeError, OverflowError):
            raise UserError(f"{key}={shorten(text)}: say range(start,stop) or range(start,stop,step)") from None
    else:
        return COMMA.split(text) if key not in GROUPS else [unquoted(part.strip()) for part in text.split(",")]
    if not 0 < len(found) <= MOST_CELLS:
        raise UserError(f"{key}={shorten(text)}: stands for {'too many values' if found else 'no value'}")
    return found
