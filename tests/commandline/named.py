"""What the words of a command line say, read without Hydra and without rtx's parser: the other side of
`test_bad_lines.py`. What this reader does not understand it refuses (`Unreadable`), so that nothing is waved through.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import yaml

from rtx.config import GROUPS, all_fields
from rtx.keys import Field, options
from rtx.wording import written

TRUTH = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
NUMBER = re.compile(r"[+-]?(\d[\d_]*(\.[\d_]*)?|\.\d[\d_]*)(e[+-]?\d[\d_]*)?", re.IGNORECASE | re.ASCII)
QUOTED = r"""'[^']*'|"[^"]*\""""
REFERENCE = re.compile(r"\$\{((?:oc\.env:)?[\w.]+)\}")
SELF_MADE = ("data.length", "routing.clusters", "model.hash_buckets")
"""Keys that are worked out from others where nobody names them."""


class Unreadable(Exception):
    """A word that this reader does not understand."""


def cells(words: Sequence[str]) -> list[dict[str, str]]:
    """Return key and text of what each cell of a line sets; the last of a key wins, and lists make several cells."""
    split = [word.partition("=")[::2] for word in words if "=" in word and not word.startswith("-")]
    last = {key.lstrip("+").strip(): text for key, text in split}
    listed = [[(key, value) for value in several(key, text)] for key, text in last.items()]
    return [dict(cell) for cell in itertools.product(*listed)]


def several(key: str, text: str) -> list[str]:
    """Return the texts of the values that stand behind a key."""
    text = text.strip()
    if called := re.fullmatch(r"(range|glob)\((.*)\)", text, re.DOTALL):
        inner = [part.strip() for part in called[2].split(",")]
        if called[1] == "glob":
            return [option for option in options(key) if fnmatchcase(option, inner[0])] if key in GROUPS else [text]
        return [str(number) for number in range(*map(int, inner))] if all_fields()[key].kind is int else inner
    quoted = re.fullmatch(QUOTED, text)
    return [text] if quoted or "," not in text else [part.strip() for part in text.split(",")]


def disagree(values: Mapping[str, Any], cell: Mapping[str, str]) -> list[str]:
    """Return the keys of a configuration that are not what a cell's words say."""
    fields = all_fields()
    said = {key: followed(values, fields[key], text) for key, text in cell.items() if key in fields}
    wrong = [key for key, value in said.items() if values[key] != value and not (value is None and key in SELF_MADE)]
    for group in GROUPS:
        own = f"{group}.name"
        if group in cell and own in values and own not in cell and cell[group].strip("'\" ") != values[own]:
            wrong.append(group)
    return wrong


def followed(values: Mapping[str, Any], field: Field, text: str) -> Any:
    """Return the value of a text, whatever it refers to."""
    word = text.strip()
    if "${" not in word:
        return read(field, text)
    bare = word[1:-1] if re.fullmatch(QUOTED, word) else word
    found = {
        inner: os.environ[inner[7:]] if inner.startswith("oc.env:") else values[inner]
        for inner in REFERENCE.findall(bare)
    }
    if bare[2:-1] in found and found[bare[2:-1]] is None:
        return None
    filled = REFERENCE.sub(lambda each: written(found[each[1]]), bare)
    if "${" in filled:
        raise Unreadable(text)
    return filled if field.kind is str and not field.values else read(field, filled)


def read(field: Field, text: str) -> Any:
    """Return the value that a text is of a field.

    Raises:
        Unreadable: it is none.
    """
    word = text.strip()
    if word.lower() == "null" and field.optional:
        return None
    quotes = re.fullmatch(QUOTED, word)
    bare = word[1:-1] if quotes else word
    if "auto" in field.metadata and bare == "auto":
        return bare
    if field.kind is str:
        return bare if quotes or field.values else text
    if field.kind is bool and bare.strip().lower() in TRUTH:
        return TRUTH[bare.strip().lower()]
    if field.kind is not bool and NUMBER.fullmatch(bare.strip()):
        number = float(bare.replace("_", ""))
        if field.kind is float:
            return number
        if re.fullmatch(r"[+-]?[\d_]+", bare.strip()):
            return int(bare.replace("_", ""))
        if number.is_integer():
            return int(number)
    raise Unreadable(f"{field.key}={text}")


def from_yaml(text: str) -> dict[str, Any]:
    """Return what the text of a run's config.yaml names, by dotted keys."""
    document = yaml.compose(text, Loader=yaml.BaseLoader)
    assert isinstance(document, yaml.MappingNode)
    values: dict[str, Any] = {}
    for key, node in document.value:
        inner = node.value if isinstance(node, yaml.MappingNode) else [(None, node)]
        for name, scalar in inner:
            field = all_fields()[f"{key.value}.{name.value}" if name else key.value]
            is_null = scalar.style is None and scalar.value in ("", "~", "null", "Null", "NULL")
            values[field.key] = None if is_null else scalar.value if field.kind is str else read(field, scalar.value)
    return values
