"""What commands that train nothing read behind their name: a small dataclass of options each, and which keys of a run.

`read_words` takes a command line apart into run folders, options and overrides of a configuration; a word that a
command does not read is refused with a line that says where it belongs. No torch, no Hydra, no YAML.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from rtx.config import GROUPS, SPREAD, all_fields, sections
from rtx.errors import UserError, collect, nearest
from rtx.keys import Field, fields_of, one_of, ranged, suggest_key
from rtx.wording import shorten

LAUNCHED = ("slurm",)
"""Options of hardware that make jobs of the cells of a sweep."""


@dataclass
class EvalOptions:
    """Scores a run's checkpoint on a split, every unit exactly once, and keeps the score with its protocol."""

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
    """Generates from a run's checkpoint, one unit after the other, and prints as it goes."""

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
    """Changes everything behind a prefix, for many prefixes, and says which outputs of the prefix move.

    Behind runs it also prices what teacher-forced scoring gains by the future, in bits, and writes audit.json beside
    each. Without a run it audits a fresh model of the configuration that the words compose.
    """

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
    """Looking into a run."""

    split: str = one_of("valid", "test", "train")
    """Part of the data to take sequences from."""
    seed: int = ranged(0, low=0, high=2**31 - 1)
    """Seed of what is drawn."""
    checkpoint: str = one_of("best", "last")
    """Checkpoint of the run to look into."""


@dataclass
class DivergenceOptions(AnalyzeOptions):
    """The Jensen-Shannon divergence between the attention of heads of one layer, drawn at random (Table 6)."""

    sequences: int = ranged(1, low=1)
    """Sequences read; draws take them in turn."""
    draws: int = ranged(10, low=1, high=10_000)
    """Pairs of heads drawn for each layer and kind of pair."""


@dataclass
class PatternsOptions(AnalyzeOptions):
    """Which positions every head reads in one sequence, as maps in the manner of the paper's Figure 1."""

    start: int | None = ranged(None, low=0)
    """Unit of the split that the sequence begins with, or number of the image; unset: drawn by the seed."""
    layer: str | None = None
    """Layers to draw, 0 the lowest, joined by +; unset: the topmost."""
    head: str | None = None
    """Heads of these layers, counted from 0, joined by +; unset: all."""


@dataclass
class ContextOptions(AnalyzeOptions):
    """Loss by position in the window, and what the same units gain from farther context."""

    windows: int = ranged(64, low=1)
    """Windows scored."""
    bins: int = ranged(16, low=1, high=256)
    """Ranges of position that the loss is averaged over."""
    mode: str = one_of("parallel", "streaming")
    """parallel: one pass over each window (teacher-forced); streaming: every decision from the prefix alone."""


@dataclass
class ReportOptions:
    """Sets runs, or the cells of a sweep, beside the paper's tables: Markdown, CSV, JSON, LaTeX and a page.

    Without a folder it lists the paper's tables and what of them is below outputs/. It speaks to W&B only with
    logger=online or logger=offline.
    """

    output: str | None = None
    """Folder to write report.{md,csv,tex,html} to; unset: report/ in the first with a run."""


@dataclass
class ExportOptions:
    """Writes the model of a run as files that others load, and that rtx eval and rtx sample take in place of a run."""

    checkpoint: str = one_of("best", "last")
    """Weights: of the best validation, or the last."""
    output: str | None = None
    """Folder to write to; unset: export/ in the run's folder."""


@dataclass
class BenchOptions:
    """Times real training steps of several rows in turn, beside the paper's.

    Table 1 with experiment=cifar10_grid,cifar10_baselines, Table 7 with experiment=pg19_steps. Lists of values are the
    rows, as in rtx train -m. No data set is needed. The record stands in outputs/<name>/bench/ for rtx report.
    """

    turns: int = ranged(5, low=1, high=10_000)
    """Turns: in each of them every row takes its steps, one row after the other, so that drift reaches all alike."""
    per_turn: int = ranged(2, low=1, high=10_000)
    """Timed steps of a row in each turn; a time is the mean of a turn, and the median over turns counts."""
    warmup: int = ranged(2, low=0, high=10_000)
    """Steps of a row, not timed, in its first turn."""


@dataclass
class SweepOptions:
    """How the cells of a sweep run."""

    parallel: int | None = ranged(None, low=1, high=1_000)
    """Cells side by side; unset: one after the other, or with hardware=slurm all of them, as the queue takes them."""
    retry: bool = False
    """Run failed cells again, from their checkpoint if there is one; otherwise they are reported as they failed."""


@dataclass
class WatchOptions:
    """Shows which cells of a sweep are done, run, failed and why, or wait, until it is over or Ctrl-C."""

    once: bool = False
    """Print how the sweep stands and leave, instead of watching it until it ends."""


@dataclass
class ResumeOptions:
    """Continues a run from its last checkpoint, bit for bit as if it had never stopped.

    trainer.steps=N or trainer.max_minutes=M lengthens a run that is done. Intervals, micro-batches, hardware and logger
    may change, too; whatever else would make another run is refused.
    """


DEVICE = ("hardware.name", "hardware.precision", "hardware.deterministic", "hardware.threads")
"""What a command on a run reads of its hardware: it works on one device."""

RUN_KEYS = ("data.*", "hardware", *DEVICE)
RESUMED = ("hardware", "logger", "seed", *(f"{section}.*" for section in (*GROUPS, "trainer")))
MANY = 10_000


@dataclass(frozen=True)
class Command:
    """What stands behind the name of a command."""

    options: type | None = None
    section: str = ""
    """What may stand before an option and a dot; behind its command an option needs none."""
    runs: tuple[int, int] = (0, 0)
    """Fewest and most run folders in front."""
    keys: tuple[str, ...] = ()
    """Groups and keys of a run's configuration that may be changed for the command."""
    composes: bool = False
    """Whether the words make a configuration, where there is no run: then every group and key is read."""
    words: str = ""
    """What stands behind its name, where that is neither a run nor a setting."""

    @property
    def own(self) -> dict[str, Field]:
        """The options by their plain names."""
        return fields_of(self.options) if self.options else {}

    def option(self, key: str, composing: bool) -> str:
        """Return the plain name of the option that `key` means, or an empty string."""
        section, _, name = key.rpartition(".")
        plain = not section and not (composing and name in all_fields())  # seed and name are the run's there
        return name if name in self.own and (plain or section == self.section) else ""

    def known(self, composing: bool) -> list[str]:
        """Return the options, groups and keys that the command reads."""
        keys = [*GROUPS, *all_fields()]
        if composing:
            return [*(f"{self.section}.{name}" for name in self.own), *keys]
        return [*self.own, *(key for key in keys if any(fnmatchcase(key, pattern) for pattern in self.keys))]


READS = {
    "train": Command(composes=True),
    "train -m": Command(SweepOptions, "sweep", composes=True),
    "plan": Command(composes=True),
    "resume": Command(ResumeOptions, "resume", (1, 1), RESUMED),
    "eval": Command(EvalOptions, "eval", (1, 1), (*RUN_KEYS, "seed")),
    "audit": Command(AuditOptions, "audit", (0, MANY), RUN_KEYS, True),
    "analyze divergence": Command(DivergenceOptions, "analyze", (1, 1), RUN_KEYS),
    "analyze patterns": Command(PatternsOptions, "analyze", (1, 1), RUN_KEYS),
    "analyze context": Command(ContextOptions, "analyze", (1, 1), RUN_KEYS),
    "sample": Command(SampleOptions, "sample", (1, 1), ("hardware", *DEVICE)),
    "export": Command(ExportOptions, "export", (1, 1)),
    "report": Command(ReportOptions, "report", (0, MANY), ("logger", "logger.*")),
    "sweep": Command(WatchOptions, "sweep", (1, 1)),
    "bench steps": Command(BenchOptions, "bench", composes=True),
    "data": Command(keys=("data", "data.*"), words="prepare|verify|info|list|remove [<store>] [key=value ...]"),
    "schema": Command(words="<group>"),
    "completion": Command(words="bash"),
}


def actions(word: str) -> list[str]:
    """Return what `rtx <word>` can be asked to do, where that is said behind it."""
    return [name.partition(" ")[2] for name in READS if name.startswith(f"{word} ") and word not in READS]


def what_to_do(word: str, words: Sequence[str]) -> tuple[str, list[str]]:
    """Return what `rtx analyze` or `rtx bench` is asked to do, and the words behind that."""
    known, what = actions(word), words[0] if words else ""
    if what in known:
        return what, list(words[1:])
    said = f"rtx {word} {shorten(what)}".rstrip()
    raise UserError(f"{said}: say {', '.join(known)}{nearest(what, known)}; usage: {usage(word)}")


def offered(name: str, composing: bool) -> list[str]:
    """Return what help names of a command: all that it reads, but for what `rtx resume` reads only to refuse it."""
    from rtx.training.resumption import may_change

    known = READS[name].known(composing)
    return [key for key in known if key in GROUPS or may_change(key)] if name == "resume" else known


def usage(name: str) -> str:
    """Return the usage line of a command, or of one of the things that it does."""
    several = actions(name)
    reads = READS[f"{name} {several[0]}" if several else name]
    runs = {0: "", 1: "<run> "}.get(reads.runs[1], "[<run> ...] ")
    settings = "[group=option ...] [key=value ...]" if reads.composes else "[key=value ...]"
    return " ".join(["rtx", name, *["|".join(several)] * bool(several), reads.words or runs + settings])


@dataclass(frozen=True)
class Words:
    """A command line taken apart."""

    runs: list[Path]
    options: Any
    """The command's dataclass."""
    overrides: list[str]
    """Of the configuration, as the user wrote them."""
    given: frozenset[str]
    """The plain names of the options that the user wrote."""


def read_words(command: str, words: Sequence[str]) -> Words:
    """Take apart what stands behind a command.

    Args:
        command: its name, with what it is to do behind `analyze` and `bench`, and -m behind `train` for a sweep.
        words: what stands behind that.

    Raises:
        UserError: with a line for each word that the command does not read, or a run that is missing.
    """
    reads = READS[command]
    runs = leading_runs(command, words) if reads.runs[1] else []
    composing = reads.composes and not runs

    def read(word: str) -> tuple[str, Any]:
        key, text = split_word(word)
        if name := reads.option(key, composing):
            return name, reads.own[name].read_word(text, key)
        refuse_foreign(command, key, word, composing)
        if runs:
            refuse_devices(command, key, text)
        return "", word

    found = collect(read, words[len(runs) :])
    values = {name: value for name, value in found if name}
    overrides = [word for name, word in found if not name]
    return Words(runs, reads.options(**values) if reads.options else None, overrides, frozenset(values))


def leading_runs(command: str, words: Sequence[str]) -> list[Path]:
    """Return the run folders that words begin with; one that exists may have any name (a=b, -o)."""
    least, most = READS[command].runs
    setting = (not word or "=" in word or word.startswith("-") for word in words)
    ends = (k for k, is_set in enumerate(setting) if is_set and not os.path.isdir(words[k]))
    runs = [Path(word) for word in words[: next(ends, len(words))]]
    if len(runs) < least:
        found = f", not {shorten(words[len(runs)])!r}" if len(words) > len(runs) else ""
        raise UserError(f"rtx {command} needs the run's folder first{found}; usage: {usage(command)}")
    if len(runs) > most:
        raise UserError(f"rtx {command} takes {most} run{'s' * (most > 1)}, not also {shorten(str(runs[most]))!r}")
    return runs


def split_word(word: str) -> tuple[str, str]:
    """Return key and value of `key=value`."""
    key, equals, text = word.partition("=")
    key = key.lstrip("+").strip()
    if word.startswith(("-", "~")):
        raise UserError(f"{shorten(word)}: {'unknown flag' if word[0] == '-' else 'a key can be set, not removed'}")
    if not equals or not key:
        known = [*GROUPS, *all_fields()]
        near = f"; say {key}=..." if key in known else suggest_key(key, known) if key else ""
        raise UserError(f"{shorten(word)!r} is not of the form key=value{near}")
    return key, text


def refuse_foreign(command: str, key: str, word: str, composing: bool) -> None:
    """Refuse a key that the command does not read; say which command reads it, or which key is near."""
    reads = READS[command]
    known = reads.known(composing)
    if key in known or (composing and key.startswith(("hydra.", "hydra/"))):
        return
    refused = f"{shorten(word)}: rtx {command} does not read {key}; it"
    owners = [name for name, other in READS.items() if "." in key and other.option(key, False)]
    if owners:
        moved = "; for validations in training: trainer.val_stride" if key == "eval.stride" else ""
        raise UserError(f"{refused} is an option of rtx {owners[0]}{moved}")
    reading = ", ".join([*reads.own, *reads.keys])
    if key in GROUPS or key in all_fields():
        raise UserError(f"{refused} reads {reading}")
    if key in sections():
        raise UserError(f"{shorten(word)}: {key} is a section; set its keys one by one, such as {key}.<key>=...")
    listed = "rtx train --help lists them" if composing else f"rtx {command} reads {reading}"
    raise UserError(f"unknown key {shorten(key)!r}{suggest_key(key, known) or f'; {listed}'}")


def refuse_devices(command: str, key: str, text: str) -> None:
    """Refuse hardware of several devices, and what makes jobs, behind a command on a run."""
    if key == "hardware" and text in LAUNCHED:
        raise UserError(f"{key}={text}: makes jobs of the cells of a sweep (rtx train -m), not of rtx {command}")
    if command != "resume" and key in ("hardware", "hardware.name") and text in SPREAD:
        raise UserError(f"{key}={text}: rtx {command} works on one device; hardware takes auto, cpu or gpu")
