"""What stands behind the name of a command: run folders, its options, overrides of a configuration (`key=value`).

A value is taken as it is written, `~/a=b (1).txt` and all. No torch, no Hydra, no YAML.
"""

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from rtx.errors import UserError, listed, nearest, shorten
from rtx.settings.extensions import load_extensions
from rtx.settings.fields import Field, fields_of, one_of, ranged, unknown, unquoted
from rtx.settings.hydra_words import is_hydra_key
from rtx.settings.identity import may_change
from rtx.settings.overrides import LAUNCHED, split_words
from rtx.settings.schema import SPREAD, all_fields, settings


@dataclass(kw_only=True)
class RunOptions:
    checkpoint: str = one_of("best", "last")
    """Checkpoint of the run: of the best validation, or the last."""


@dataclass
class EvalOptions(RunOptions):
    split: str = one_of("valid", "test", "train")
    """Part of the data to score."""
    mode: str = one_of("parallel", "streaming")
    """parallel: one pass over each window (teacher-forced); streaming: every decision from the prefix alone."""
    stride: int | None = ranged(None, low=1)
    """Units by which windows advance; unset: N (65,536 with a memory). Smaller gives more context, at more cost."""
    limit: int | None = ranged(None, low=1)
    """Score a seeded sample of this many windows only; the result is marked partial."""
    batch_size: int | None = ranged(None, low=1)
    """Windows scored at once; unset: as many as make 16,384 units."""
    memory: int | None = ranged(None, low=0)
    """Units of memory (model.base=recurrent; data.length=N says how many make a segment); unset: the run's."""
    clamp: int | None = ranged(None, low=1)
    """Largest distance told apart (model.positions=xl); unset: the run's."""
    same_length: bool = False
    """Let every position read as many keys, the memory's number (model.base=recurrent)."""
    protocol: str = one_of("whole", "released")
    """whole: every unit of the split once; released: the text as the paper's released code reads it, parts left out."""
    ablate: str = one_of("none", "routing", "local", "random")
    """Score without routing: its heads' outputs zero (routing), their keys the last W (local), or random members."""


@dataclass
class SampleOptions(RunOptions):
    length: int | None = ranged(None, low=1)
    """Units to generate; unset: 1,000 of text, a whole image of N."""
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


@dataclass
class AnalyzeOptions(RunOptions):
    split: str = one_of("valid", "test", "train")
    """Part of the data to take sequences from."""
    seed: int = ranged(0, low=0, high=2**31 - 1)
    """Seed of what is drawn: the same for every run."""


@dataclass
class AuditOptions(AnalyzeOptions):
    sequences: int = ranged(2, low=1)
    """Sequences whose future is changed."""
    prefixes: int = ranged(24, low=1)
    """Prefix lengths behind which everything is changed, one after the other."""
    tolerance: float = ranged(1e-9, low=0.0)
    """Relative change from which on an output counts as moved."""
    windows: int = ranged(32, low=1)
    """Windows of a run's data that are priced."""
    positions: int = ranged(32, low=1)
    """Positions scored in each window: each is a run of the model on its prefix alone."""


@dataclass
class DivergenceOptions(AnalyzeOptions):
    sequences: int = ranged(1, low=1)
    """Sequences read; draws take them in turn."""
    draws: int = ranged(10, low=1, high=10_000)
    """Pairs of heads drawn for each layer and kind of pair."""


@dataclass
class PatternsOptions(AnalyzeOptions):
    layer: int | None = ranged(None, low=0)
    """Layer to draw, 0 the lowest; unset: the topmost."""


@dataclass
class ContextOptions(AnalyzeOptions):
    windows: int = ranged(64, low=1)
    """Windows scored."""
    mode: str = one_of("parallel", "streaming")
    """parallel: one pass over each window (teacher-forced); streaming: every decision from the prefix alone."""


@dataclass
class CoverageOptions(AnalyzeOptions):
    windows: int = ranged(8, low=1)
    """Windows scored."""
    window: int | None = ranged(None, low=0)
    """Keys, the own included, that local heads read anyhow; unset: the run's model.window; 0: none, all keys count."""
    keys: int | None = ranged(None, low=1)
    """Keys at which selections are compared (not indexer, which must train); unset: the run's routing.window."""
    block: int | None = ranged(None, low=1)
    """Positions of a block (blocks, blocks_random), at most its keys; unset: the run's routing.block."""
    steps: int = ranged(50, low=1)
    """Training batches that centroids and thresholds are fitted to, the model frozen."""


@dataclass
class ReportOptions:
    output: str | None = None
    """Folder to write report.{md,csv,tex,html} to; unset: report/ in the first, with the names of others."""


@dataclass
class ExportOptions(RunOptions):
    output: str | None = None
    """Folder to write to; unset: export/ in the run's folder."""


@dataclass
class PlanOptions:
    memory: float | None = ranged(None, above=0.0, high=1e6)
    """GiB of the GPU (with hardware=cpu: of the machine) to plan for; unset: usual GPUs and this machine."""


@dataclass
class SweepOptions:
    parallel: int | None = ranged(None, low=1, high=1_000)
    """Cells side by side; unset: one after the other, or with hardware=slurm all of them, as the queue takes them."""
    retry: bool = False
    """Run failed cells again, from their checkpoint if there is one; otherwise they are reported as they failed."""


@dataclass(frozen=True)
class Command:
    """What stands behind the name of a command."""

    name: str
    """Its word; with what it is to do behind analyze, and -m behind train for a sweep."""
    about: str
    options: type | None = None
    runs: str = ""
    """The runs (by folder or name, see `find_run`) or folders in front, as its usage has them."""
    keys: tuple[str, ...] = ()
    """Groups and keys of a run's configuration that may be changed for the command."""
    composes: bool = False
    """Whether the words make a configuration: then every group and key is read."""

    @property
    def own(self) -> dict[str, Field]:
        """The options by their names; those that stand among the keys of a configuration behind sweep or plan."""
        prefix = ("plan." if self.options is PlanOptions else "sweep.") * self.composes
        return fields_of(self.options, prefix) if self.options else {}

    @property
    def loads_run(self) -> bool:
        """Whether the command needs the code of a run's extensions, which `extensions=` names."""
        return self.runs.startswith("<run>")

    def known(self) -> list[str]:
        """Return the options, groups and keys that the command reads."""
        if self.name == "resume":
            return ["hardware", "logger", "extensions", *filter(may_change, all_fields())]
        patterns = ("*",) if self.composes else self.keys
        return [
            *self.own,
            *(["extensions"] if self.loads_run else []),
            *(key for key in settings() if any(fnmatchcase(key, each) for each in patterns)),
        ]

    def usage(self) -> str:
        """Return the line that says how it is called."""
        words = " [key=value ...]" if self.runs or self.keys or self.composes else ""
        return f"rtx {self.name} {self.runs}{'[group=option ...]' * self.composes}".rstrip() + words


DEVICE = (
    "hardware",
    "hardware.name",
    "hardware.precision",
    "hardware.deterministic",
    "hardware.threads",
)
"""What a command on a run reads of its hardware: it works on one device."""
RUN = ("data.*", *DEVICE)
DATA = ("data", "data.*", "extensions")
COMMANDS = (
    Command("train", "train a model; every option has a default", composes=True),
    Command(
        "train -m",
        "train every combination of listed values, a process each",
        SweepOptions,
        composes=True,
    ),
    Command(
        "resume", "continue a stopped run exactly, or extend it to trainer.steps=N", runs="<run>"
    ),
    Command(
        "eval",
        "score a run on a split, every unit exactly once",
        EvalOptions,
        "<run>",
        (*RUN, "seed"),
    ),
    Command(
        "audit",
        "test for leaks: change later units, see what earlier moves",
        AuditOptions,
        "<run> ...",
        RUN,
    ),
    Command(
        "analyze divergence", "do heads read elsewhere (Table 6)", DivergenceOptions, "<run>", RUN
    ),
    Command(
        "analyze patterns",
        "draw what every head reads, as in Figure 1",
        PatternsOptions,
        "<run>",
        RUN,
    ),
    Command(
        "analyze context",
        "loss by position, and what far context is worth",
        ContextOptions,
        "<run>",
        RUN,
    ),
    Command(
        "analyze coverage",
        "what selections keep of full heads' weight",
        CoverageOptions,
        "<run>",
        RUN,
    ),
    Command("sample", "generate from a run", SampleOptions, "<run>", DEVICE),
    Command(
        "export",
        "write a run's model as safetensors with a card, for others to load",
        ExportOptions,
        "<run>",
    ),
    Command(
        "runs",
        "list what was run, the newest first; ~ before bits: of a sample of windows",
        runs="[<folder>]",
    ),
    Command("sweep", "watch a sweep: what is done, runs, failed, waits", runs="<folder>"),
    Command(
        "report", "set runs and sweeps beside the paper's tables", ReportOptions, "[<run> ...]"
    ),
    Command(
        "plan",
        "count parameters, FLOPs and memory of a run, and run nothing",
        PlanOptions,
        composes=True,
    ),
    Command(
        "data", "prepare, verify or info data=<set>; list what lies here, remove <name>", keys=DATA
    ),
    Command("completion", "complete lines in bash or zsh: source <(rtx completion bash)"),
)
READS = {command.name: command for command in COMMANDS}


@dataclass(frozen=True)
class Words:
    """A command line taken apart: `options` is the command's dataclass, `given` names those that the user wrote."""

    runs: list[Path]
    options: Any
    overrides: list[str]
    given: frozenset[str]


def what_to_do(word: str, words: Sequence[str]) -> tuple[str, list[str]]:
    """Return which of several things a command (`rtx analyze`) is asked to do, and the words behind that."""
    known = [
        name.partition(" ")[2]
        for name in READS
        if name.startswith(f"{word} ") and word not in READS
    ]
    if not known or {*words[:1]} & {*known}:
        return "".join(words[: bool(known)]), list(words[bool(known) :])
    raise UserError(f"rtx {word}: say {', '.join(known)}{nearest(''.join(words[:1]), known)}")


def read_words(command: str, words: Sequence[str]) -> Words:
    """Take apart what stands behind a command (its name as in `READS`); `UserError` for what it does not read."""
    reads, runs, values, overrides = READS[command], [], {}, []
    if reads.runs:  # a folder that exists may have "=" in its name
        runs = [
            Path(word)
            for word in itertools.takewhile(
                lambda word: "=" not in word or os.path.isdir(word), words
            )
        ]
        if runs and len(words) > len(runs) and words[len(runs)].startswith("="):
            runs.pop()  # a key, with blanks around its =
        if not runs and "[" not in reads.runs:
            raise UserError(f"rtx {command} needs the run's folder first; usage: {reads.usage()}")
        if len(runs) > 1 and "..." not in reads.runs:
            raise UserError(f"rtx {command} takes 1 run, not also {shorten(str(runs[1]))!r}")
    many = (*LAUNCHED, *(SPREAD if command != "resume" else ()))
    for word, key, text in split_words(words[len(runs) :], reads.own):
        if runs and key in ("hardware", "hardware.name") and unquoted(text.strip()) in many:
            raise UserError(f"{word}: not for rtx {command}, which takes one run on this machine")
        if key == "extensions" and reads.loads_run:
            load_extensions(unquoted(text.strip()))
        elif key in reads.own:
            values[key.rpartition(".")[2]] = reads.own[key].read_word(text)
        else:
            refuse_foreign(reads, key)
            overrides.append(word)
    if "<run>" in reads.runs:
        from rtx.runs.folder import find_run

        runs = [
            run if "[" in reads.runs and run.is_dir() else find_run(run) for run in runs
        ]  # a report is of many
    return Words(
        runs, reads.options(**values) if reads.options else None, overrides, frozenset(values)
    )


def refuse_foreign(reads: Command, key: str) -> None:
    """Refuse a key that the command does not read; say which command reads it, or which key is near."""
    known = reads.known()
    told_later = reads.name == "resume" and key in all_fields()  # with the value that the run has
    if key in known or told_later or is_hydra_key(key):
        return
    for other in () if any(name.endswith(f".{key}") for name in known) else COMMANDS:
        if (option := key.removeprefix(f"{other.name.split()[0]}.")) in other.own:
            raise UserError(
                f"rtx {reads.name} does not read {key}; {option} is an option of rtx {other.name}"
            )
    if key in settings():
        raise UserError(f"rtx {reads.name} does not read {key}; it reads {listed(known, 300)}")
    raise UserError(unknown(key, known))
