"""The table of commands: what follows each name, its options, which keys it reads.

No torch, no Hydra.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase

from rtx.cli.options import (
    AuditOptions,
    ContextOptions,
    CoverageOptions,
    DivergenceOptions,
    EvalOptions,
    ExportOptions,
    PatternsOptions,
    PlanOptions,
    PretrainedOptions,
    ReportOptions,
    SampleOptions,
    SweepOptions,
)
from rtx.errors import UserError, nearest
from rtx.settings.fields import Field, fields_of
from rtx.settings.identity import may_change
from rtx.settings.schema import Config, all_fields, settings

HELP_FLAGS = ("--help", "-h")
OF_GROUPS = ("--cfg", "--resolve", "--config-dir")
"""Flags of commands that compose a configuration; what --cfg prints is resolved anyhow."""


class Positional(Enum):
    """The words between a command and its `key=value` words, as usage lines write them."""

    NONE = ""
    ACTION = "<action>"
    RUN = "<run>"
    RUNS = "<run> ..."
    MAYBE_RUNS = "[<run> ...]"
    FOLDER = "<folder>"
    MAYBE_FOLDER = "[<folder>]"

    @property
    def needs_run(self) -> bool:
        """Whether a run must be named."""
        return self in (Positional.RUN, Positional.RUNS)

    @property
    def takes_runs(self) -> bool:
        """Whether the words name runs."""
        return self.needs_run or self is Positional.MAYBE_RUNS

    @property
    def takes_several(self) -> bool:
        """Whether more than one word is allowed."""
        return self in (Positional.RUNS, Positional.MAYBE_RUNS, Positional.ACTION)


@dataclass(frozen=True)
class Command:
    """A command: what may follow its name, and what it needs."""

    name: str
    """The words that choose it: `eval`, `analyze context`, `train -m`."""
    about: str
    options: type | None = None
    positional: Positional = Positional.NONE
    keys: tuple[str, ...] = ()
    """Groups and keys of a run's configuration that may be changed for the command."""
    composes: bool = False
    """Whether the words compose a configuration, of which the command reads `keys`, or without any
    every key."""
    prefix: str = ""
    """Begins the names of its options where keys of a configuration are beside them."""
    flags: tuple[str, ...] = ()
    """Its flags, --help apart."""
    loads_torch: bool = True
    only_prints: bool = False
    """Whether it may end early when its output is read no further (`rtx plan | head -1`)."""

    @property
    def own(self) -> dict[str, Field]:
        """Its options by their names on the command line."""
        return fields_of(self.options, self.prefix) if self.options else {}

    def known(self) -> list[str]:
        """Return the options, groups and keys that the command reads."""
        if self.name == "resume":
            return ["hardware", "logger", "extensions", *filter(may_change, all_fields())]
        keys = [*settings()]
        reads_all = self.composes and not self.keys
        if not reads_all:
            keys = [key for key in keys if any(fnmatchcase(key, pattern) for pattern in self.keys)]
        # A run may need the code of its extensions.
        extensions = ["extensions"] if self.positional.needs_run else []
        return [*self.own, *extensions, *keys]

    def usage(self) -> str:
        """Return the usage line."""
        parts = ["rtx", self.name]
        if self.positional is not Positional.NONE:
            parts.append(self.positional.value)
        if self.composes:
            parts.append("[group=option ...]")
        if len(parts) > 2 or self.keys:
            parts.append("[key=value ...]")
        return " ".join(parts)


DEVICE = ("hardware", *(name for name, field in fields_of(Config).items() if field.one_device))
"""Keys of hardware that commands on a trained run read: they use one device."""
RUN = ("data.*", *DEVICE)
DATA = ("data", "data.*", "extensions")
DATA_SOURCE = (
    "data",
    "data.path",
    "data.column",
    "data.subset",
    "data.revision",
    "data.fetch",
    "data.verify",
    "data.processes",
    "extensions",
)
"""Keys that say which text is read, whatever its tokens."""
COMMANDS = (
    Command(
        "train",
        "train a model; every option has a default",
        composes=True,
        flags=("-m", "--multirun", *OF_GROUPS),
    ),
    Command(
        "train -m",
        "train every combination of listed values, a process each",
        SweepOptions,
        composes=True,
        prefix="sweep.",
    ),
    Command(
        "resume",
        "continue a stopped run exactly, or extend it to trainer.steps=N",
        positional=Positional.RUN,
    ),
    Command(
        "eval",
        "score a run on a split, every unit exactly once",
        EvalOptions,
        Positional.RUN,
        (*RUN, "seed"),
    ),
    Command(
        "audit",
        "test for leaks: change later units, see what earlier moves",
        AuditOptions,
        Positional.RUNS,
        RUN,
    ),
    Command(
        "analyze divergence",
        "do heads read elsewhere (Table 6)",
        DivergenceOptions,
        Positional.RUN,
        RUN,
    ),
    Command(
        "analyze patterns",
        "draw what every head reads, as in Figure 1",
        PatternsOptions,
        Positional.RUN,
        RUN,
    ),
    Command(
        "analyze context",
        "loss by position, and what far context is worth",
        ContextOptions,
        Positional.RUN,
        RUN,
    ),
    Command(
        "analyze coverage",
        "what selections keep of full heads' weight",
        CoverageOptions,
        Positional.RUN,
        RUN,
    ),
    Command(
        "analyze pretrained",
        "what selections cost in a model of Hugging Face transformers",
        PretrainedOptions,
        keys=(*DATA_SOURCE, *DEVICE),
        composes=True,
    ),
    Command("sample", "generate from a run", SampleOptions, Positional.RUN, DEVICE),
    Command(
        "export",
        "write a run's model as safetensors with a card, for others to load",
        ExportOptions,
        Positional.RUN,
    ),
    Command(
        "runs",
        "list what was run, the newest first; ~ before bits: of a sample of windows",
        positional=Positional.MAYBE_FOLDER,
        loads_torch=False,
        only_prints=True,
    ),
    Command(
        "sweep",
        "watch a sweep: what is done, runs, failed, waits",
        positional=Positional.FOLDER,
        loads_torch=False,
        only_prints=True,
    ),
    Command(
        "report",
        "set runs and sweeps beside the paper's tables",
        ReportOptions,
        Positional.MAYBE_RUNS,
        loads_torch=False,
    ),
    Command(
        "plan",
        "count parameters, FLOPs and memory of a run, and run nothing",
        PlanOptions,
        composes=True,
        prefix="plan.",
        flags=OF_GROUPS,
        only_prints=True,
    ),
    Command(
        "data",
        "prepare, verify or info data=<set>; list what lies here, remove <name>",
        positional=Positional.ACTION,
        keys=DATA,
        flags=("--config-dir",),
        loads_torch=False,
    ),
    Command(
        "completion",
        "complete lines in bash or zsh: source <(rtx completion bash)",
        only_prints=True,
    ),
)
BY_NAME = {command.name: command for command in COMMANDS}
WORDS = tuple(dict.fromkeys(command.name.split()[0] for command in COMMANDS))
"""The first words of all commands."""


def find_command(word: str, words: Sequence[str], *, sweep: bool) -> tuple[Command, list[str]]:
    """Return a command by its first word, and the words that remain.

    Raises:
        UserError: the word is one of several commands, as `analyze`, and the next does not say
            which.
    """
    if sweep:
        return BY_NAME[f"{word} -m"], list(words)
    if word in BY_NAME:
        return BY_NAME[word], list(words)
    kinds = [name.partition(" ")[2] for name in BY_NAME if name.startswith(f"{word} ")]
    first = words[0] if words else ""
    if first in kinds:
        return BY_NAME[f"{word} {first}"], list(words[1:])
    raise UserError(f"rtx {word}: say {', '.join(kinds)}{nearest(first, kinds)}")
