"""The pages of `--help`: groups with the options of `conf/`, keys and a command's own options with their docstrings."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rtx.config import GROUPS, SPREAD, all_fields, sections
from rtx.keys import Field, about, option_doc, options
from rtx.options import LAUNCHED, READS, offered, usage
from rtx.wording import written

COLUMN = 30
SHOW = ("--cfg job", "print the configuration and stop")
SWEEP = "run every combination of listed values (seed=1,2,3, range(1,4), glob(rt*)), one process each"
FLAGS = {"train": (("-m, --multirun", SWEEP), SHOW), "plan": (SHOW,)}


def front_page(commands: Mapping[str, str]) -> str:
    """Return the page of `rtx --help`."""
    listed = "\n".join(entry(word, what, column=10) for word, what in commands.items())
    return f"""rtx: Routing Transformer experiments

usage: rtx <command> [group=option ...] [key=value ...]

{listed}

  rtx train                                  train on the embedded default
  rtx train data=text data.path=book.txt     on text of your own
  rtx train data=enwik8 model=rt24           the paper's enwik-8 model
  rtx train -m routing.heads=2,4 seed=1,2,3  a sweep

rtx <command> --help lists its options; rtx --version."""


def command_page(word: str, words: Sequence[str], summary: str = "") -> str:
    """Return the page of `rtx <word> --help`.

    Args:
        word: the command.
        words: the rest of the command line: overrides, by which the values shown go.
        summary: what it does, in a line.
    """
    reads = {name: command for name, command in READS.items() if name.split()[0] == word}
    name, first = next(iter(reads.items()))
    fresh = first.composes and not first.runs[1]
    values = composed_values([text for text in words if "=" in text]) if fresh else {}
    lines = [wrapped(f"usage: {usage(word)}"), "", wrapped(f"{summary[:1].upper()}{summary[1:]}.")]
    for each, command in reads.items():
        lead = f"{command.section}." if fresh else ""
        lines += ["", wrapped(f"rtx {each}: {about(command.options)}")] if command.options else []
        lines += [entry(f"{lead}{key}={written(own.default)}", told(own)) for key, own in command.own.items()]
    lines += [""] * (word in FLAGS) + [entry(flag, says) for flag, says in FLAGS.get(word, ())]
    known = offered(name, first.composes)
    hidden = () if fresh else (*LAUNCHED, *(SPREAD if word != "resume" else ()))
    lines += group_lines([group for group in GROUPS if group in known], values, hidden)
    for section in (*GROUPS, "trainer", ""):
        keys = [field for key, field in all_fields().items() if key in known and key.rpartition(".")[0] == section]
        title = f"{section}.<key>: {sections()[section]}" if section in sections() else "other keys"
        lines += ["", wrapped(title)] if keys else []
        for field in keys:
            shown = f"{field.key}={written(values[field.key])}" if field.key in values else field.key
            lines.append(entry(shown, told(field)))
    return "\n".join(lines)


def composed_values(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the value of every key, and the option of every group, that these overrides give."""
    from rtx.commandline.overrides import check_overrides
    from rtx.compose import chosen, compose_unresolved, composed, flat, to_dict

    checked = check_overrides(overrides)
    return flat(to_dict(compose_unresolved(checked))) | dict(composed(chosen(checked)).hydra.runtime.choices)


def group_lines(groups: Iterable[str], values: Mapping[str, Any], hidden: Sequence[str]) -> list[str]:
    """Return the lines on groups and their options; a star marks the option in force."""
    lines = []
    for group in groups:
        lines += ["", f"{group}=<option>"]
        for option in (option for option in options(group) if option not in hidden):
            lines.append(entry(option + " *" * (option == values.get(group)), option_doc(group, option)))
    return lines


def told(field: Field) -> str:
    """Return the docstring of a key with what it takes."""
    return f"{field.doc} [{field.allowed}]"


def entry(left: str, right: str, column: int = COLUMN) -> str:
    """Return an indented line of two columns, wrapped below the second where a terminal is too narrow."""
    start, width = f"  {left}".ljust(column + 2) + "  ", terminal_width()
    if len(start) + len(right) <= width:
        return start + right
    indent = " " * (column + 4 if width >= 2 * column + 20 else 8)
    head = start if len(start) <= len(indent) else start.rstrip() + "  "
    return textwrap.fill(right, width, initial_indent=head, subsequent_indent=indent, break_on_hyphens=False)


def wrapped(text: str) -> str:
    """Return a paragraph, wrapped for the terminal."""
    return textwrap.fill(text, min(terminal_width(), 100))


def terminal_width() -> int:
    """Return COLUMNS where it is set, else the columns of the terminal, else 100."""
    return shutil.get_terminal_size(fallback=(100, 24)).columns
