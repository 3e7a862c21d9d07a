"""Writes configuration.md beside this file: every group, its options, and every key.

All of it is read from rtx/settings/schema.py and conf/; `python docs/schema/make.py` calls this.
"""

import html
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rtx.cli.help import values_of
from rtx.errors import written
from rtx.settings import effects
from rtx.settings.effects import Effect
from rtx.settings.fields import Field, fields_of
from rtx.settings.names import BUILT_IN
from rtx.settings.presets import about, options, preset
from rtx.settings.schema import GROUPS, Config

PAGE = Path(__file__).with_suffix(".md")
EFFECTS = {
    effect: name.lower() for name, effect in vars(effects).items() if isinstance(effect, Effect)
}
"""The name of each effect in lower case."""
ABOUT_GROUPS = {
    "experiment": "A whole comparison or table: it sets keys of all groups.",
    "heads": "The rows of an experiment: other heads in its model.",
    "trainer": "The training loop, counted in optimizer steps.",
}
"""Groups of which no option is chosen by default; those of experiments and heads set any key."""

INTRODUCTION = """\
# Configuration

Every group, its options and its keys, written by `python docs/schema/make.py` from
`rtx/settings/schema.py` and `conf/`. `rtx train --help <group>` and `--help <key>` print the same.
[Runs and options](runs.md#options) explains how options are written,
[Extending](extending.md#how-to-add-a-key) how a key is added.

*Default* is the value with which `rtx train` runs when you set nothing; a model, an experiment or
another option changes it. *Effect* says what another value changes:
"""


def text() -> str:
    """Return the page."""
    values = values_of([])
    parts = [INTRODUCTION, "\n".join(effect_rows())]
    for group in GROUPS:
        parts += [f"## {group}", about_group(group), "\n".join(option_rows(group, values))]
        parts += keys_of(group, values)
    parts += ["## Keys of no group", *keys_of("", values)]
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"


def effect_rows() -> Iterator[str]:
    """Yield the table of effects."""
    yield "| effect | what another value changes | `rtx resume` may change it |"
    yield "|---|---|---|"
    for effect, name in EFFECTS.items():
        yield f"| {name} | {effect.about} | {yes_or_no(effect.resumable)} |"


def yes_or_no(value: bool) -> str:
    return "yes" if value else "no"


def about_group(group: str) -> str:
    """Return one sentence about a group."""
    if group in ABOUT_GROUPS:
        return ABOUT_GROUPS[group]
    section = typing.get_type_hints(Config)[group]
    return str(section.__doc__)


def option_rows(group: str, values: dict[str, Any]) -> Iterator[str]:
    """Yield the table of the options of a group that have a file in conf/."""
    yield f"| `{group}=` | |"
    yield "|---|---|"
    for option in options(group):
        if preset(group, option) is None:
            continue
        mark = " (default)" if option == values.get(group) else ""
        yield f"| `{option}`{mark} | {cell(about(group, option))} |"


def keys_of(section: str, values: dict[str, Any]) -> list[str]:
    """Return the table of the keys of a section, "" for those of none; no part without keys."""
    fields = [
        field for name, field in fields_of(Config).items() if name.rpartition(".")[0] == section
    ]
    if not fields:
        return []
    rows = ["| key | values | default | meaning | effect |", "|---|---|---|---|---|"]
    return ["\n".join([*rows, *(key_row(field, values) for field in fields)])]


def key_row(field: Field, values: dict[str, Any]) -> str:
    """Return the row of a key."""
    meaning = cell(field.doc) + read_only_with(field)
    default = code(written(values[field.key]))
    effect = EFFECTS[field.changes]
    return f"| `{field.key}` | {allowed(field)} | {default} | {meaning} | {effect} |"


def allowed(field: Field) -> str:
    """Return the values of a key: a list of its names, or its type and range."""
    if not field.values:
        return cell(field.allowed)
    # Installed extensions add values, which are not part of rtx.
    names = [name for name in field.values if not field.extensible or name in BUILT_IN]
    shown = ", ".join(code(name) for name in names)
    if field.optional:
        shown += " or `null`"
    return f"{shown}; several joined by +" if field.joined else shown


def read_only_with(field: Field) -> str:
    """Return for which values of other keys a run reads a key, "" if always."""
    conditions = []
    for other, wanted in field.read_with.items():
        names = ", ".join(code(name) for name in wanted)
        conditions.append(f"{code(other)}: {names}")
    return f" *Read with* {'; '.join(conditions)}." if conditions else ""


def code(word: str) -> str:
    """Return a word as code."""
    return f"`{word}`"


def cell(words: str) -> str:
    """Return a text that a cell of a table can hold."""
    plain = html.escape(words, quote=False)
    return re.sub(r"[|*_\[\]]", r"\\\g<0>", plain)


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
