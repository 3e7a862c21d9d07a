"""The pages of `--help`: groups with the options of `conf/`, keys and a command's own options with their docstrings."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from rtx.config import GROUPS, SPREAD, composed_fields, sections
from rtx.errors import UserError
from rtx.keys import Field, about, option_doc, options, suggest_key
from rtx.options import LAUNCHED, READS, Command
from rtx.wording import written

COLUMN = 30
ABOUT = {
    "train": """Trains a model and writes outputs/<name>/<run>/: configuration, metrics, checkpoints, a sample. Every
        option has a default. The configuration is composed from one option of each group, in the order below (a later
        group wins), then the single keys. Ctrl-C saves and stops; rtx resume goes on.""",
    "resume": """Continues a run from its last checkpoint, bit for bit as if it had never stopped, with the run's own
        configuration. trainer.steps=N or trainer.max_minutes=M lengthens a run that is done. A key that would change
        shapes, data or seed is refused; force=true goes on all the same and says that the run is no longer exact.""",
    "eval": """Scores a run's checkpoint on a split, every unit exactly once, and writes the score with its protocol
        beside the run. stride= defaults to the run's trainer.val_stride.""",
    "audit": """Changes everything behind a prefix, for many prefixes, and says which outputs of the prefix move: the
        logits, and the heads of each layer by themselves. Behind runs it also prices what teacher-forced scoring gains
        by the future, in bits, with standard errors over positions and over the runs, and writes audit.json beside
        each. Without a run it audits a fresh model of the configuration that the words compose, or with
        audit.module=package.module:callable the model that the callable returns, priced where data are named: its
        logits at a position are for the unit behind it.""",
    "analyze": """Looks into a run. divergence: the Jensen-Shannon divergence between the attention of heads of one
        layer, local and routing, drawn at random (the paper's Table 6). patterns: which positions every head reads in
        one sequence, as a page that answers for any position of a text, as pictures of images, and as maps in the
        manner of the paper's Figure 1. context: the loss by position in the window, and what the same units gain from
        farther context. samples: texts of one run or of two side by side, with the share of words that the training
        text does not have, or images completed from their upper half. Results are kept in analysis/ of the run.""",
    "sample": """Generates from a run's checkpoint, one unit after the other, and prints as it goes.""",
    "export": """Writes the model of a run into a folder of its own: model.safetensors, config.yaml, export.json with
        the checksum, a card (README.md) with its scores, and a trained tokenizer's file. rtx eval, rtx sample and
        rtx.training.trained.load_model take such a folder in place of a run.""",
    "report": """Sets runs, or the cells of a sweep, beside the paper's tables from their records: report.md, .csv,
        .json, .tex and a page, report.html, in report/ of the first with a run. Runs of other data or protocol stand in
        tables of their own. Without a folder it lists the paper's tables and what of them is below outputs/. It speaks
        to W&B only with logger=online or logger=offline.""",
    "bench": """steps: times real training steps (forward, backward, clipping, optimizer, centroids) of several rows in
        turn, each in a process of its own, and sets their ratios to the local row beside the paper's: Table 1 with
        experiment=cifar10_grid,cifar10_baselines, Table 7 with experiment=pg19_steps. Lists of values and the cells of
        an experiment are the rows, as in rtx train -m, and any other key reaches them all. Ids are drawn at random, so
        no data set is needed. The record stands in outputs/<name>/bench/, where rtx report finds it.""",
    "sweep": """Shows how a sweep (rtx train -m) stands, refreshed in place until it is over: cells that are done, that
        run (step, bits, time left), that failed and why, that wait. It reads records alone; it may be left (Ctrl-C) and
        called again at any time. Where the output is no terminal, or with once=true, it prints once.""",
    "plan": """Counts parameters, FLOPs and memory of what rtx train would run with the same words; runs nothing.""",
    "data": """Token stores below data/ (or RTX_DATA): prepare makes one, or goes on where a killed preparation ended;
        verify compares every byte with its checksums; info says what is in it and shows examples; list says what is
        on disk, downloads too; remove deletes a store, chosen by the words that prepared it or by its name in the list.
        The store of a data set that a run needs is prepared by itself.""",
}
SHOWING = (
    ("--cfg job", "print the configuration and stop; --package trainer prints a part of it"),
    ("--help [word ...]", "this page, or its part on a group, a section or a key (--help routing.window)"),
)
SWEEPING = (
    "-m, --multirun",
    "run every combination of listed values (seed=1,2,3, range(1,4), glob(rt*)), one process each",
)
FLAGS = {"train": (SWEEPING, *SHOWING), "plan": SHOWING}


def front_page(commands: Mapping[str, str]) -> str:
    """Return the page of `rtx --help`."""
    lines = [
        "rtx: Routing Transformer experiments",
        "",
        "usage: rtx <command> [group=option ...] [key=value ...]",
        "",
        *(entry(word, what, column=10) for word, what in commands.items()),
        "",
        "  rtx train                                  train on the embedded default",
        "  rtx train data=text data.path=book.txt     on text of your own",
        "  rtx train data=enwik8 model=rt24           the paper's enwik-8 model",
        "  rtx train -m routing.heads=2,4 seed=1,2,3  a sweep",
        "",
        "rtx <command> --help lists its options; rtx --version.",
    ]
    return "\n".join(lines)


def command_page(word: str, words: Sequence[str]) -> str:
    """Return the page of `rtx <word> --help`.

    Args:
        word: the command.
        words: the rest of the command line: overrides, by which the values shown go, and topics, which narrow the page.

    Raises:
        UserError: an override is wrong, or a topic matches nothing.
    """
    reads = {name: command for name, command in READS.items() if name.split()[0] == word}
    first = next(iter(reads.values()))
    values = composed_values([text for text in words if "=" in text]) if first.composes and not first.runs[1] else {}
    groups = GROUPS if first.composes else first.groups
    keys = keys_of(first)
    topics = [text for text in words if "=" not in text] if word in FLAGS else []
    if topics:
        groups, keys = narrow(topics, groups, keys)
        return "\n".join([*group_lines(groups, values), *key_lines(keys, values)]).strip()
    left_out = () if word in ("train", "plan", "bench") else (*LAUNCHED, *(SPREAD if word != "resume" else ()))
    lines = [usage(first.usage), "", wrapped(ABOUT[word])]
    lines += [""] * (word in FLAGS) + [entry(flag, says) for flag, says in FLAGS.get(word, ())]
    for name, command in reads.items():
        lines += option_lines(name, command)
    return "\n".join([*lines, *group_lines(groups, values, left_out), *key_lines(keys, values)])


def keys_of(reads: Command) -> list[Field]:
    """Return the keys of a configuration that a command reads, in the order of the groups."""
    order = [*GROUPS, "trainer", "sweep", ""]
    found = [
        field
        for key, field in composed_fields().items()
        if reads.composes or any(fnmatchcase(key, pattern) for pattern in reads.keys)
    ]
    return sorted(found, key=lambda field: order.index(field.section))


def option_lines(name: str, command: Command) -> list[str]:
    """Return a line on each option of a command's own."""
    if command.options is None:
        return []
    lead = "sweep." if name == "train -m" else "bench." if command.composes and not command.runs[1] else ""
    return [
        *("", wrapped(f"options of rtx {name}: {about(command.options)}")),
        *(entry(f"{lead}{key}={written(field.default)}", told(field)) for key, field in command.own.items()),
    ]


def told(field: Field) -> str:
    """Return the docstring of a key with what it takes."""
    return f"{field.doc} [{field.allowed}]"


def composed_values(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the value of every key, and the option of every group, that these overrides give."""
    from rtx.commandline.overrides import check_overrides
    from rtx.compose import compose_unresolved, get
    from rtx.config import all_fields

    config, choices = compose_unresolved([str(override) for override in check_overrides(overrides)])
    return {key: get(config, key) for key in all_fields()} | choices


def narrow(topics: Sequence[str], groups: Iterable[str], keys: list[Field]) -> tuple[list[str], list[Field]]:
    """Return the groups and keys that the topics name: a group, a section, a key, or the last part of keys."""
    kept_groups, kept_keys = [], []
    for topic in topics:
        by_group = [group for group in groups if group == topic]
        by_key = [field for field in keys if topic in (field.key, field.section, field.name)]
        if not by_group and not by_key:
            known = [*groups, *sections(), *(field.key for field in keys)]
            raise UserError(f"no help on {topic!r}{suggest_key(topic, known)}")
        kept_groups += by_group
        kept_keys += by_key
    return kept_groups, kept_keys


def group_lines(groups: Iterable[str], values: Mapping[str, Any], left_out: Sequence[str] = ()) -> list[str]:
    """Return the lines on groups and their options; a star marks the option in force."""
    lines = []
    for group in groups:
        lines += ["", f"{group}=<option>"]
        for option in (option for option in options(group) if option not in left_out):
            star = " *" if option == values.get(group) else ""
            lines.append(entry(option + star, option_doc(group, option)))
    return lines


def key_lines(keys: Sequence[Field], values: Mapping[str, Any]) -> list[str]:
    """Return a line on each key, below the title of its section: value, docstring, what is allowed."""
    lines, section = [], None
    for field in keys:
        if field.section != section:
            section = field.section
            lines += ["", wrapped(f"{section}.<key>: {sections().get(section, 'cells')}" if section else "other keys")]
        shown = f"{field.key}={written(values[field.key])}" if field.key in values else field.key
        lines.append(entry(shown, told(field)))
    return lines


def entry(left: str, right: str, column: int = COLUMN) -> str:
    """Return an indented line of two columns, wrapped below the second where a terminal is too narrow."""
    start = f"  {left}".ljust(column + 2) + "  "
    width = terminal_width()
    if len(start) + len(right) <= width:
        return start + right
    indent = " " * (column + 4 if width >= 2 * column + 20 else 8)
    head = start if len(start) <= len(indent) else start.rstrip() + "  "
    return textwrap.fill(right, width, initial_indent=head, subsequent_indent=indent, break_on_hyphens=False)


def usage(text: str) -> str:
    """Return a usage line, wrapped for the terminal between its brackets."""
    whole = text.replace(" ...]", "\N{NO-BREAK SPACE}...]")
    lines = textwrap.wrap(whole, terminal_width() - 7, break_on_hyphens=False, break_long_words=False)
    return "usage: " + "\n       ".join(lines).replace("\N{NO-BREAK SPACE}", " ")


def wrapped(text: str) -> str:
    """Return a paragraph, wrapped for the terminal."""
    return textwrap.fill(" ".join(text.split()), min(terminal_width(), 100))


def terminal_width() -> int:
    """Return COLUMNS where it is set, else the columns of the terminal, else 100."""
    return shutil.get_terminal_size(fallback=(100, 24)).columns
