"""The pages of `--help`: groups with the options of `conf/`, keys and a command's own options with their docstrings."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rtx.config import GROUPS, SPREAD, all_fields, sections
from rtx.errors import UserError
from rtx.keys import Field, about, option_doc, options, suggest_key
from rtx.options import LAUNCHED, READS, offered, usage
from rtx.wording import written

COLUMN = 30
SHOWING = (
    ("--cfg job", "print the configuration and stop"),
    ("--help [word ...]", "this page, or its part on a group, a section or a key (--help routing.window)"),
)
SWEEPING = "run every combination of listed values (seed=1,2,3, range(1,4), glob(rt*)), one process each"
FLAGS = {"train": (("-m, --multirun", SWEEPING), *SHOWING), "plan": SHOWING}


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
        words: the rest of the command line: overrides, by which the values shown go, and topics, which narrow the page.
        summary: what it does, in a line.

    Raises:
        UserError: an override is wrong, or a topic matches nothing.
    """
    reads = {name: command for name, command in READS.items() if name.split()[0] == word}
    name, first = next(iter(reads.items()))
    fresh = first.composes and not first.runs[1]
    values = composed_values([text for text in words if "=" in text]) if fresh else {}
    known = offered(name, first.composes)
    groups = [group for group in GROUPS if group in known]
    order = [*GROUPS, "trainer", "sweep", ""]
    keys = [field for key, field in all_fields().items() if key in known]
    keys.sort(key=lambda field: order.index(section_of(field)))
    if word in FLAGS and (topics := [text for text in words if "=" not in text]):
        groups, keys = narrow(topics, groups, keys)
        return "\n".join([*group_lines(groups, values), *key_lines(keys, values)]).strip()
    lines = [wrapped(f"usage: {usage(word)}"), "", wrapped(f"{summary[:1].upper()}{summary[1:]}.")]
    for each, command in reads.items():
        lead = f"{command.section}." if fresh else ""
        lines += ["", wrapped(f"rtx {each}: {about(command.options)}")] if command.options else []
        lines += [entry(f"{lead}{key}={written(own.default)}", told(own)) for key, own in command.own.items()]
    lines += [""] * (word in FLAGS) + [entry(flag, says) for flag, says in FLAGS.get(word, ())]
    hidden = () if fresh else (*LAUNCHED, *(SPREAD if word != "resume" else ()))
    return "\n".join([*lines, *group_lines(groups, values, hidden), *key_lines(keys, values)])


def composed_values(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the value of every key, and the option of every group, that these overrides give."""
    from rtx.commandline.overrides import check_overrides
    from rtx.compose import chosen, compose_unresolved, composed, flat, to_dict

    checked = check_overrides(overrides)
    return flat(to_dict(compose_unresolved(checked))) | dict(composed(chosen(checked)).hydra.runtime.choices)


def narrow(topics: Sequence[str], groups: Sequence[str], keys: list[Field]) -> tuple[list[str], list[Field]]:
    """Return the groups and keys that the topics name: a group, a section, a key, or the last part of keys."""
    named = {field.key: {field.key, section_of(field), field.key.rpartition(".")[2]} for field in keys}
    for topic in topics:
        if not any(topic in names for names in ({*groups}, *named.values())):
            raise UserError(f"no help on {topic!r}{suggest_key(topic, [*groups, *sections(), *named])}")
    return [group for group in groups if group in topics], [key for key in keys if named[key.key] & set(topics)]


def group_lines(groups: Iterable[str], values: Mapping[str, Any], hidden: Sequence[str] = ()) -> list[str]:
    """Return the lines on groups and their options; a star marks the option in force."""
    lines = []
    for group in groups:
        lines += ["", f"{group}=<option>"]
        for option in (option for option in options(group) if option not in hidden):
            star = " *" if option == values.get(group) else ""
            lines.append(entry(option + star, option_doc(group, option)))
    return lines


def key_lines(keys: Sequence[Field], values: Mapping[str, Any]) -> list[str]:
    """Return a line on each key, below the title of its section: value, docstring, what is allowed."""
    lines, section = [], None
    for field in keys:
        if section_of(field) != section:
            section = section_of(field)
            lines += ["", wrapped(f"{section}.<key>: {sections()[section]}" if section else "other keys")]
        shown = f"{field.key}={written(values[field.key])}" if field.key in values else field.key
        lines.append(entry(shown, told(field)))
    return lines


def section_of(field: Field) -> str:
    """Return what stands before the dot of a key."""
    return field.key.rpartition(".")[0]


def told(field: Field) -> str:
    """Return the docstring of a key with what it takes."""
    return f"{field.doc} [{field.allowed}]"


def entry(left: str, right: str, column: int = COLUMN) -> str:
    """Return an indented line of two columns, wrapped below the second where a terminal is too narrow."""
    start = f"  {left}".ljust(column + 2) + "  "
    width = terminal_width()
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
