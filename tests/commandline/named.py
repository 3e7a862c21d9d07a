"""What a command line names, read without Hydra and without rtx's parser: the other side of `test_bad_lines.py`.

Values are read word by word; options are read from the YAML files of `conf/` and joined as docs/design.md says. What
this reader does not understand it refuses (`Unreadable`), so that a line that rtx accepts is never waved through.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import yaml

from rtx.commandline.fields import Field, all_fields, conf_dir, options

GROUPS = ("data", "routing", "optimizer", "hardware", "logger", "model", "experiment")
USUAL = {"data": "stdlib", "routing": "causal", "optimizer": "adam", "hardware": "auto", "logger": "auto"}
TRUTH = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
SIDES = {"cifar10": 32, "imagenet64": 64, "images": 32}
NUMBER = re.compile(r"[+-]?(\d[\d_]*(\.[\d_]*)?|\.\d[\d_]*)(e[+-]?\d[\d_]*)?", re.IGNORECASE | re.ASCII)
SPECIAL = re.compile(r"[=,\[\]{}()'\"\\]")

Words = Sequence[tuple[str, str]]
"""Keys, and the text of their values."""


class Unreadable(Exception):
    """A word that this reader does not understand."""


def overrides(words: Sequence[str], short: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return key and text of the words that set something; short forms are written out."""
    split = [word.partition("=")[::2] for word in words if "=" in word and not word.startswith("-")]
    plain = [(key.lstrip("+").strip(), text) for key, text in split]
    return [(short.get(key, key), text) for key, text in plain]


def cells(words: Words) -> list[Words]:
    """Return the words of each cell of a sweep."""
    last = dict(words)
    listed = [[(key, value) for value in several(key, text)] for key, text in last.items()]
    return [list(cell) for cell in itertools.product(*listed)]


def several(key: str, text: str) -> list[str]:
    """Return the texts of the values that stand behind a key."""
    text = text.strip()
    if key == "sample.prompt":
        return [text]
    if called := re.fullmatch(r"(choice|sort|shuffle|range|glob)\((.*)\)", text, re.DOTALL):
        inner = [part.strip() for part in called[2].split(",")]
        if called[1] == "glob":
            return [option for option in options(key) if fnmatchcase(option, inner[0])]
        if called[1] == "range":
            return [str(number) for number in range(*(int(part) for part in inner))]
        return inner
    quoted = re.fullmatch(r"""'[^']*'|"[^"]*\"""", text)
    return [text] if quoted or "," not in text else [part.strip() for part in text.split(",")]


def fresh(words: Words) -> dict[str, Any]:
    """Return the configuration, by dotted keys, that the words name on top of the options and defaults."""
    chosen = {key: bare(text) for key, text in words if key in GROUPS}
    values = joined(chosen)
    if "data.length" not in dict(words):
        values["data.length"] = ("images", values["data.length"])
    return finished(values, words)


def changed(run: Mapping[str, Any], words: Words) -> dict[str, Any]:
    """Return the configuration of a run, by dotted keys, with what the words change."""
    values = dict(run)
    for group, text in words:
        if group in GROUPS:
            options_own = fresh([(group, text)])
            values |= {key: value for key, value in options_own.items() if key.startswith(group + ".")}
    return finished(values, words)


def finished(values: dict[str, Any], words: Words) -> dict[str, Any]:
    """Put the named values in, follow references, and work out what is left unset."""
    fields = all_fields()
    for key, text in words:
        if key not in GROUPS:
            values[key] = read(fields[key], text)
    size = values["data.size"]
    for key, value in values.items():
        if isinstance(value, tuple):
            images = SIDES.get(values["data.name"])
            values[key] = 3 * (size or images) ** 2 if images else value[1]
    for key in values:
        values[key] = followed(values, key)
    if values["routing.clusters"] is None:
        values["routing.clusters"] = math.ceil(values["data.length"] / values["routing.window"])
    if values["model.hash_buckets"] is None and "lsh" in values["model.base"].split("+"):
        values["model.hash_buckets"] = max(2, 2 * round(values["data.length"] / values["model.window"]))
    return values


def followed(values: Mapping[str, Any], key: str, depth: int = 0) -> Any:
    """Return the value at a key, whatever it refers to."""
    value, field = values[key], all_fields()[key]
    if not (isinstance(value, str) and value.startswith("${") and value.endswith("}")):
        return value
    inner = value[2:-1].strip()
    if inner.startswith("oc.env:"):
        return read(field, os.environ[inner.removeprefix("oc.env:")])
    if inner not in values or depth > 9:
        raise Unreadable(value)
    found = followed(values, inner, depth + 1)
    return found if found is None else read(field, text_of(found))


def text_of(value: Any) -> str:
    """Return a value as one writes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def joined(chosen: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of the options that are chosen, or that those bring along, and defaults for the rest."""
    options_chosen: dict[str, str] = dict(chosen)
    bodies: dict[str, dict[str, Any]] = {}
    for group in reversed(GROUPS):  # what a later group brings along wins over what an earlier one does
        option = options_chosen.get(group, {"model": "tiny", "experiment": "null", **USUAL}[group])
        options_chosen[group] = option
        if group == "experiment" and option == "null":
            continue
        bodies[group], brought = file_of(group, option)
        for other, its in brought.items():
            options_chosen.setdefault(other, its)
    values = {key: field.default for key, field in all_fields().items()}
    values["trainer.steps"] = "${optimizer.steps}"
    for group in GROUPS:
        values |= bodies.get(group, {})
    fields = all_fields()
    return {key: float(value) if fields[key].kind is float and value is not None else value
            for key, value in values.items()}  # fmt: skip


def file_of(group: str, option: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values of an option by dotted keys, and the options of other groups that it brings along."""
    text = (conf_dir() / group / f"{option}.yaml").read_text(encoding="utf-8")
    content = yaml.safe_load(text)
    brought = {}
    for entry in content.pop("defaults", []):
        if not isinstance(entry, dict):
            raise Unreadable(f"{group}={option} includes {entry}")
        brought |= {key.removeprefix("override /"): its for key, its in entry.items()}
    content.pop("hydra", None)
    whole = text.startswith("# @package _global_")
    return flat(content if whole else {group: content}), {
        key: its for key, its in brought.items() if not key.startswith("hydra")
    }


def flat(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values by dotted keys."""
    values: dict[str, Any] = {}
    for name, value in content.items():
        values |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return values


def bare(text: str) -> str:
    """Return a word without blanks and quotes around it."""
    text = text.strip()
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def read(field: Field, text: str) -> Any:
    """Return the value that a text is of a field.

    Raises:
        Unreadable: it is none.
    """
    word = text.strip()
    if word.startswith("${"):
        return word
    if field.kind is str:
        return read_text(field, text)
    if word.lower() == "null" and field.optional:
        return None
    if field.kind is bool:
        if bare(word).lower() in TRUTH:
            return TRUTH[bare(word).lower()]
    elif NUMBER.fullmatch(word):
        number = float(word.replace("_", ""))
        if field.kind is float:
            return number
        if re.fullmatch(r"[+-]?[\d_]+", word):
            return int(word.replace("_", ""))
        if number.is_integer():
            return int(number)
    raise Unreadable(f"{field.key}={text}")


def read_text(field: Field, text: str) -> str | None:
    """Return the text that stands behind a key: as it is, or inside of the quotes where it stands in quotes."""
    word, quotes = text.strip(), re.fullmatch(r"""'[^'\\]*'|"[^"\\]*\"""", text.strip())
    closed = bool({"choices", "parts"} & set(field.metadata))
    if field.key == "sample.prompt":
        return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text
    if word.lower() == "null" and field.optional:
        return None
    if quotes:
        return word[1:-1]
    if SPECIAL.search(text):
        raise Unreadable(f"{field.key}={text}")
    return word if closed else text


def from_yaml(text: str) -> dict[str, Any]:
    """Return the configuration that the text of a run's config.yaml names; defaults where it is silent."""
    values = {key: field.default for key, field in all_fields().items()}
    document = yaml.compose(text, Loader=yaml.BaseLoader)
    scalars = scalars_of(document, "")
    for key, (word, is_plain) in scalars.items():
        field = all_fields()[key]
        if is_plain and word in ("", "~", "null", "Null", "NULL"):
            values[key] = None
        elif word.startswith("${") or field.kind is str:
            values[key] = word
        else:
            values[key] = read_number(field, word)
    return finished(values, [])


def scalars_of(node: yaml.Node | None, prefix: str) -> dict[str, tuple[str, bool]]:
    """Return the scalars of a YAML document by dotted keys, and whether each stands there without quotes."""
    if isinstance(node, yaml.ScalarNode):
        return {prefix: (node.value, node.style is None)}
    if not isinstance(node, yaml.MappingNode):
        raise Unreadable(prefix)
    found: dict[str, tuple[str, bool]] = {}
    for key, value in node.value:
        found |= scalars_of(value, f"{prefix}.{key.value}".lstrip("."))
    return found


def read_number(field: Field, word: str) -> Any:
    """Return the number, or the truth, that a YAML scalar is."""
    try:
        return read(field, word)
    except Unreadable:
        value = yaml.safe_load(word)  # YAML has forms of its own, such as 0x10
        if type(value) is not field.kind:
            raise
        return value
