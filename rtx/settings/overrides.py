"""Overrides of a configuration: `key=value` words, whose values are checked for type and range.

A value needs no escapes: `~/a=b (1).txt` is one. In a sweep lists and Hydra's functions are several
values. No torch and no YAML; Hydra only where a word has a function of its grammar.
"""

import importlib.util
import itertools
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rtx.errors import UserError, shorten
from rtx.paths import refuse_non_utf8
from rtx.settings.extensions import load_extensions
from rtx.settings.fields import Field, unknown, unquoted
from rtx.settings.hydra_words import (
    check_hydra_key,
    function_values,
    hydra_text,
    integers_hint,
    is_function,
    is_hydra_key,
    split_values,
)
from rtx.settings.presets import replacement
from rtx.settings.schema import GROUPS, all_fields, settings

LAUNCHED = ("slurm",)
"""Options of hardware with which the cells of a sweep are jobs."""


@dataclass(frozen=True)
class Override:
    """A key, and the texts of its values as written; an axis of a sweep has several."""

    key: str
    values: tuple[str, ...]
    """Empty where a sweeper draws them from an interval."""
    function: str = ""
    """The values as a function of Hydra's grammar, such as range(1,5), if written so."""

    def __str__(self) -> str:
        return f"{self.key}={self.function or ','.join(self.values)}"

    @property
    def sweeps(self) -> bool:
        """Whether it is an axis of a sweep."""
        return len(self.values) != 1

    def in_hydra_words(self) -> str:
        """Return the override in Hydra's grammar."""
        if self.function and not self.function.startswith("glob"):
            return f"{self.key}={self.function}"
        return f"{self.key}={','.join(map(hydra_text, self.values))}"


def split_words(
    words: Iterable[str], own: Mapping[str, Field] | None = None
) -> list[tuple[str, str, str]]:
    """Return each `key=value` as word, key and value; `~key` has the value null.

    Args:
        own: options of a command, beside the keys of a configuration.

    Raises:
        UserError: a word has another form; the words beside it show the probable cause.
    """
    words = list(words)
    triples: list[tuple[str, str, str]] = []
    for index, word in enumerate(words):
        key, equals, text = word.partition("=")
        key = key.lstrip("+").strip()
        if is_unset(word):
            triples.append((word, word[1:], unset_value(word, own or {})))
            continue
        if not equals or not key or word.startswith(("-", "~")):
            hint = cause(words, index, {**all_fields(), **(own or {})})
            raise UserError(f"{shorten(word)!r} is not of the form key=value{hint}")
        triples.append((word, key, text))
    return triples


def is_unset(word: str) -> bool:
    """Whether a word is Hydra's ~key; ~/book.txt is a path."""
    return word.startswith("~") and not word.startswith("~/")


def unset_value(word: str, own: Mapping[str, Field]) -> str:
    """Return the value that a key has after Hydra's ~key: null; `UserError` where it cannot be
    unset.
    """
    key, equals, _ = word[1:].partition("=")
    fields = {**settings(), **own}
    if equals:
        raise UserError(f"{shorten(word)}: write ~{shorten(key)}, or {shorten(key)}=null")
    if key not in fields:
        raise UserError(unknown(key, fields))
    if fields[key].optional:
        return "null"
    instead = f"choose an option: {key}=<option>"
    if key not in GROUPS:
        instead = f"give it a value: {key}=<value>"
    raise UserError(f"{word}: a run cannot be without {key}; {instead}")


def cause(words: Sequence[str], index: int, fields: Mapping[str, Field]) -> str:
    """Return "; " and why a word is probably not of the form key=value, else ""."""
    word = words[index]
    before = words[index - 1] if index else ""
    after = words[index + 1] if index + 1 < len(words) else ""
    if word.startswith("=") or after.startswith("=") or before.endswith("="):
        return "; no blanks around =: key=value is one word"
    key, equals, text = before.partition("=")
    field = fields.get(key.lstrip("+"))
    if equals and text and field is not None and is_free(field):
        rest = itertools.takewhile(lambda other: "=" not in other, words[index:])
        whole = shlex.quote(" ".join([before, *rest]))
        return f"; quote a value with blanks: {shorten(whole, 200)}"
    return ""


def is_free(field: Field) -> bool:
    """Whether a key takes any text."""
    return field.kind is str and not field.values


def check_overrides(words: Iterable[str], *, sweep: bool = False) -> list[Override]:
    """Return the overrides of a configuration, their values (several in a sweep) of the right type
    and range.
    """
    triples = split_words(words)
    for _, key, text in triples:
        refuse_non_utf8(shorten(key), text)
    # Extensions first: what they register is a value of other keys.
    extensions = run_extensions(triples)
    fields = settings()
    overrides: list[Override] = []
    for word, key, text in triples:
        if is_hydra_key(key):
            check_hydra_key(key, text, sweep=sweep)
            overrides.append(Override(key, (text,)))
        elif "@" in key and key.partition("@")[0] in GROUPS:
            raise UserError(f"{shorten(word)}: rtx has no packages: {key.partition('@')[0]}={text}")
        elif key not in fields:
            raise UserError(unknown(shorten(key), fields))
        else:
            override = read_override(fields[key], word, text, extensions, sweep)
            check_launcher(override)
            overrides.append(override)
    return overrides


def run_extensions(triples: Iterable[tuple[str, str, str]]) -> dict[str, str]:
    """Run the files that words name as extensions; returns each value with its path and sha256."""
    values: set[str] = set()
    for _, key, text in triples:
        if key == "extensions":
            values.update(split_values(text))
    return {value: load_extensions(unquoted(value)) for value in sorted(values - {"null"})}


def read_override(
    field: Field, word: str, text: str, extensions: Mapping[str, str], sweep: bool
) -> Override:
    """Return one override of a configuration, its values checked."""
    if field.key == "logger" and is_list(text):
        for name in text.strip(" []").split(","):
            read_value(field, name, extended=False)
        return Override(field.key, (text.strip(),))
    if is_function(text) and (sweep or not is_free(field)):
        return read_function(field, text, bool(extensions), sweep)
    refuse_integers(field, text, sweep)
    values = split_values(text)
    if len(values) > 1 and not sweep:
        several = f"{shorten(word)}: takes one value; several make a sweep (rtx train -m)"
        raise UserError(f"{several}; quote it where it is one: '{field.key}=\"...\"'")
    if field.key == "extensions":
        values = [extensions.get(value, value) for value in values]
    for value in values:
        read_value(field, value, extended=bool(extensions))
    if field.key in GROUPS:
        values = [unquoted(value.strip()) for value in values]
    return Override(field.key, tuple(values))


def is_list(text: str) -> bool:
    """Whether a value is a list of options, such as [csv,wandb]."""
    return re.fullmatch(r"\[[\w, ]+\]", text.strip()) is not None


def read_function(field: Field, text: str, extended: bool, sweep: bool) -> Override:
    """Return the override that a function of Hydra's grammar makes; `UserError` for a sweep where
    there is none.
    """
    result = function_values(field.key, text, field.values)
    word = f"{field.key}={shorten(text.strip())}"
    if result.is_sweep and not sweep:
        raise UserError(f"{word}: takes one value; a sweep tries several: rtx train -m '{word}'")
    if result.is_interval and field.kind is int and "." in "".join(result.values):
        raise UserError(f"{word}: draws fractions; write {field.key}=int({shorten(text.strip())})")
    for value in result.values:
        read_value(field, value, extended=extended)
    if result.is_interval:
        return Override(field.key, (), text.strip())
    if result.is_sweep:
        return Override(field.key, result.values, text.strip())
    return Override(field.key, result.values)


def refuse_integers(field: Field, text: str, sweep: bool) -> None:
    """Refuse 1..5 as the value of a number; Hydra has range() for it."""
    instead = integers_hint(text)
    if instead and not is_free(field):
        command = "" if sweep else "rtx train -m "
        word = f"{field.key}={shorten(text.strip())}"
        raise UserError(f"{word}: takes one value; for a sweep: {command}'{field.key}={instead}'")


def read_value(field: Field, text: str, *, extended: bool) -> None:
    """Check the text of a value; `extended`: the line names extensions, which may add values."""
    # What refers to another key is checked when the configuration is composed.
    if "${" in text and field.key not in GROUPS:
        return
    instead = replacement(field.key, unquoted(text.strip()))
    if instead:
        raise UserError(f"{field.key}={shorten(text)}: write {instead}")
    try:
        field.read_word(text)
    except UserError as error:
        if extended or not field.extensible:
            raise
        raise UserError(f"{error}; extensions=<file>.py adds names of your own") from None


def check_launcher(override: Override) -> None:
    """Raise `UserError` for cells as jobs where the package that submits them is missing."""
    if override.key != "hardware" or not {*override.values} & {*LAUNCHED}:
        return
    if importlib.util.find_spec("submitit") is None:
        raise UserError(f"{override}: needs submitit: pip install 'rtx[slurm]'")
