"""What the words of a command line say, read without Hydra and without rtx's parser: the other side of
`test_bad_lines.py`. What this reader does not understand it refuses (an error), so that nothing is waved through.
"""

import itertools
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rtx.config import GROUPS, all_fields
from rtx.errors import written
from rtx.keys import Field

TRUTH = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
NUMBER = re.compile(r"[+-]?(\d[\d_]*(\.[\d_]*)?|\.\d[\d_]*)(e[+-]?\d[\d_]*)?", re.IGNORECASE | re.ASCII)
QUOTED = r"""'[^']*'|"[^"]*\""""
REFERENCE = re.compile(r"\$\{((?:oc\.env:)?[\w.]+)\}")
SELF_MADE = ("data.length", "routing.clusters", "model.hash_buckets")
"""Keys that are worked out from others where nobody names them."""


def cell(words: Sequence[str]) -> dict[str, str]:
    """Return key and text of what a line of one cell sets, the last of each; not what is its command's own seed."""
    split = [word.partition("=")[::2] for word in words[1:] if "=" in word and not word.startswith("-")]
    found = {key.lstrip("+").strip(): text for key, text in split}
    own = words[0] in ("sample", "analyze", "audit")
    return {key: text for key, text in found.items() if not (own and key == "seed")}


def cells(words: Sequence[str]) -> list[dict[str, str]]:
    """Return what each cell of a sweep sets: lists make several cells."""
    given = cell(["", *words])
    listed = [[text] if re.fullmatch(QUOTED, text.strip()) else text.split(",") for text in given.values()]
    return [dict(zip(given, each, strict=True)) for each in itertools.product(*listed)]


def disagree(values: Mapping[str, Any], said: Mapping[str, str]) -> list[str]:
    """Return the keys of a configuration that are not what a cell's words say."""
    fields = all_fields()
    read = {key: followed(values, fields[key], text) for key, text in said.items() if key in fields}
    wrong = [key for key, value in read.items() if values[key] != value and not (value is None and key in SELF_MADE)]
    names = {group: f"{group}.name" for group in GROUPS if group in said and f"{group}.name" in values}
    return wrong + [
        group for group, own in names.items() if own not in said and said[group].strip().strip("'\"") != values[own]
    ]


def followed(values: Mapping[str, Any], field: Field, text: str) -> Any:
    """Return the value of a text, whatever it refers to."""
    word = text.strip()
    if "${" not in word:
        return value_of(field, text)
    bare = word[1:-1] if re.fullmatch(QUOTED, word) else word
    bare, found = re.sub(r"\$\{oc\.decode:'(\w+)'\}", r"\1", bare), {}
    for name in REFERENCE.findall(bare):
        leaf = name.lstrip(".")
        above = field.key.split(".")[: len(leaf) - len(name)] if leaf != name else []  # a dot: beside the key itself
        found[name] = os.environ[name[7:]] if name.startswith("oc.env:") else values[".".join([*above, leaf])]
    if bare[2:-1] in found and found[bare[2:-1]] is None:
        return None
    filled = REFERENCE.sub(lambda each: written(found[each[1]]), bare)
    assert "${" not in filled, text
    return filled if field.kind is str and not field.values else value_of(field, filled)


def value_of(field: Field, text: str) -> Any:
    """Return the value that a text is of a field."""
    word = text.strip()
    if word.lower() == "null" and field.optional:
        return None
    quotes = re.fullmatch(QUOTED, word)
    bare = word[1:-1] if quotes else word
    if field.auto and bare == "auto":
        return bare
    if field.kind is str:
        return bare if quotes or field.values else text
    if field.kind is bool:
        return TRUTH[bare.strip().lower()]
    assert NUMBER.fullmatch(bare.strip()), (field.key, text)
    number = float(bare.replace("_", ""))
    assert field.kind is float or number.is_integer()
    return number if field.kind is float else int(number)
