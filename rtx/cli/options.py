"""What stands behind the name of a command: run folders, its options, overrides of a configuration (`key=value`).

A value is taken as it is written, `~/a=b (1).txt` and all. No torch, no Hydra, no YAML.
"""

import importlib.util
import itertools
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from rtx.errors import UserError, listed, nearest, shorten
from rtx.settings.extensions import run_files
from rtx.settings.fields import Field, fields_of, one_of, ranged, unknown, unquoted
from rtx.settings.hydra_words import COMMA, hydra_values
from rtx.settings.schema import GROUPS, SPREAD, all_fields, settings

EXTENSIBLE = ("data", "data.name", "model.base", "routing.selection")
"""Keys whose values an extension adds to."""
LAUNCHED = ("slurm",)
"""Options of hardware that make jobs of the cells of a sweep."""


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

    def known(self) -> list[str]:
        """Return the options, groups and keys that the command reads."""
        if self.name == "resume":
            from rtx.runs.resumption import may_change  # which reads configurations by this module

            return ["hardware", "logger", *filter(may_change, all_fields())]
        patterns = ("*",) if self.composes else self.keys
        return [
            *self.own,
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
        if key in reads.own:
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


def split_words(
    words: Iterable[str], own: Mapping[str, Field] | None = None
) -> list[tuple[str, str, str]]:
    """Return each `key=value` with its key and value; `own`: options of a command beside the keys of a configuration.

    `UserError` for a word of another form, with what the words beside it say of the cause.
    """
    words = list(words)
    found = []
    for at, word in enumerate(words):
        key, equals, text = word.partition("=")
        key = key.lstrip("+").strip()
        if not equals or not key or word.startswith(("-", "~")):
            hint = cause(words, at, {**all_fields(), **(own or {})})
            raise UserError(f"{shorten(word)!r} is not of the form key=value{hint}")
        found.append((word, key, text))
    return found


def cause(words: Sequence[str], at: int, known: Mapping[str, Field]) -> str:
    """Return why a word is probably not of the form key=value, and the way out, to stand behind that; or ""."""
    word = words[at]
    before = words[at - 1] if at else ""
    after = words[at + 1] if at + 1 < len(words) else ""
    if word.startswith("~") and not word.startswith("~/"):
        return "; ~ is Hydra's: rtx keeps every key, and key=null unsets those that allow it"
    if word.startswith("=") or after.startswith("=") or before.endswith("="):
        return "; no blanks around =: key=value is one word"
    key, equals, text = before.partition("=")
    field = known.get(key.lstrip("+"))
    if equals and text and field is not None and field.kind is str and not field.values:
        rest = itertools.takewhile(lambda each: "=" not in each, words[at:])
        whole = shlex.quote(" ".join([before, *rest]))
        return f"; quote a value with blanks: {shorten(whole, 200)}"
    return ""


def refuse_foreign(reads: Command, key: str) -> None:
    """Refuse a key that the command does not read; say which command reads it, or which key is near."""
    known = reads.known()
    told_later = reads.name == "resume" and key in all_fields()  # with the value that the run has
    if (
        key in known
        or told_later
        or (reads.name == "train -m" and key.startswith("hydra.launcher."))
    ):
        return
    for other in () if any(name.endswith(f".{key}") for name in known) else COMMANDS:
        if (option := key.removeprefix(f"{other.name.split()[0]}.")) in other.own:
            raise UserError(
                f"rtx {reads.name} does not read {key}; {option} is an option of rtx {other.name}"
            )
    if key in settings():
        raise UserError(f"rtx {reads.name} does not read {key}; it reads {listed(known, 300)}")
    raise UserError(unknown(key, known))


def check_overrides(words: Iterable[str], *, sweep: bool = False) -> list[Override]:
    """Return the overrides of a configuration, their values (several in a sweep) of the right type and range."""
    pairs = split_words(words)
    named = {
        value for _, key, text in pairs if key == "extensions" for value in COMMA.split(text)
    } - {"null"}
    files = {
        value: run_files(unquoted(value)) for value in sorted(named)
    }  # first: what they register is a value, too
    known, found = settings(), []
    for word, key, text in pairs:
        values = [
            files.get(value, value) if key == "extensions" else value for value in COMMA.split(text)
        ]
        if sweep and key.startswith("hydra.launcher."):
            found.append(Override(key, (text,)))
            continue
        if key not in known:
            raise UserError(unknown(key, known))
        refuse_hydra_values(known[key], text, sweep)
        if len(values) > 1 and not sweep:
            said = f"{shorten(word)}: takes one value; several make a sweep (rtx train -m)"
            raise UserError(f"{said}; quote it where it is one: '{key}=\"...\"'")
        for value in values:
            if (
                "${" not in value or key in GROUPS
            ):  # what refers to another key is known when all is composed
                read_value(known[key], value, extended=bool(named))
        if key in GROUPS:
            values = [unquoted(value.strip()) for value in values]
            if {*values} & {*LAUNCHED} and importlib.util.find_spec(
                "hydra_plugins.hydra_submitit_launcher"
            ) is None:
                raise UserError(
                    f"{word}: needs submitit and its plugin for Hydra: pip install 'rtx[slurm]'"
                )
        found.append(Override(key, tuple(values)))
    return found


def refuse_hydra_values(field: Field, text: str, sweep: bool) -> None:
    """Refuse Hydra's words for several values, such as range(1,5), with the list that says the same."""
    free = field.kind is str and not field.values
    if (said := hydra_values(text, field.values)) is None or (
        free and ("," not in text or not sweep)
    ):
        return
    word = f"{field.key}={shorten(text.strip())}"
    listing = f"{field.key}={said}" if said else f"{field.key}=<value>,<value>"
    if sweep:
        raise UserError(f"{word}: list the values: {listing}")
    raise UserError(f"{word}: takes one value; list several for a sweep: rtx train -m {listing}")


def read_value(field: Field, text: str, *, extended: bool) -> None:
    """Check the text of a value; `extended`: the line names extensions, which may add values."""
    try:
        field.read_word(text)
    except UserError as error:
        if extended or field.key not in EXTENSIBLE:
            raise
        raise UserError(f"{error}; extensions=<file>.py adds names of your own") from None
