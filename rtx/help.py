"""The pages of `--help`: groups with the options of `conf/`, keys and a command's own options with their docstrings."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from typing import Any

from rtx.config import GROUPS, SECTIONS, all_fields
from rtx.keys import Field, option_doc, options
from rtx.options import COMMANDS, LAUNCHED
from rtx.wording import written

FRONT = """rtx: Routing Transformer experiments

usage: rtx <command> [group=option ...] [key=value ...]
"""
EXAMPLES = """
  rtx train                                  train on the embedded default
  rtx train data=text data.path=book.txt     on text of your own
  rtx train data=enwik8 model=rt24           the paper's enwik-8 model
  rtx train -m routing.heads=2,4 seed=1,2,3  a sweep

rtx <command> --help lists its options; rtx --version."""


def front_page() -> str:
    """Return the page of `rtx --help`."""
    return "\n".join([FRONT, *(entry(command.name, command.about, column=18) for command in COMMANDS), EXAMPLES])


def command_page(word: str, words: Sequence[str]) -> str:
    """Return the page of `rtx <word> --help`; the values shown are those that overrides among the words give."""
    commands = [command for command in COMMANDS if command.name.split()[0] == word]
    first, lines = commands[0], []
    values = composed_values([text for text in words if "=" in text]) if first.composes and not first.runs else {}
    for command in commands:
        for text in ("", f"usage: {command.usage()}", command.about):
            lines.append(textwrap.fill(text, terminal_width()))
        lines += [entry(f"{key}={written(own.default)}", told(own)) for key, own in command.own.items()]
    lines += [entry("--cfg job", "print the configuration and stop")] if values else []
    known = first.known(first.composes)
    for group in (group for group in GROUPS if group in known):
        lines += ["", f"{group}=<option>"]
        for option in options(group):
            if values or option not in LAUNCHED:
                lines.append(entry(option + " *" * (option == values.get(group)), option_doc(group, option)))
    for section in (*SECTIONS, ""):
        keys = [field for key, field in all_fields().items() if key in known and key.rpartition(".")[0] == section]
        lines += ["", f"{section}.<key>" if section else "other keys"] if keys else []
        shown = [f"{field.key}={written(values[field.key])}" if values else field.key for field in keys]
        lines += [entry(left, told(field)) for left, field in zip(shown, keys, strict=True)]
    return "\n".join(lines[1:])


def composed_values(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the value of every key, and the option of every group, that these overrides give."""
    from rtx.compose import chosen, compose_unresolved, composed, flat, to_dict
    from rtx.options import check_overrides

    checked = check_overrides(overrides)
    return flat(to_dict(compose_unresolved(checked))) | dict(composed(chosen(checked)).hydra.runtime.choices)


def told(field: Field) -> str:
    """Return the docstring of a key with what it takes."""
    return f"{field.doc} [{field.allowed}]"


def entry(left: str, right: str, column: int = 30) -> str:
    """Return an indented line of two columns, wrapped below the second where the terminal is too narrow."""
    head, indent = f"  {left}".ljust(column + 2) + "  ", " " * (column + 4)
    width = terminal_width()
    return textwrap.fill(right, width, initial_indent=head, subsequent_indent=indent, break_on_hyphens=False)


def terminal_width() -> int:
    """Return COLUMNS where it is set, else the columns of the terminal, else 100."""
    return shutil.get_terminal_size(fallback=(100, 24)).columns
