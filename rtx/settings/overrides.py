"""Words of the form `key=value` as overrides of a configuration, each value checked.

A value is taken as it is written, `~/a=b (1).txt` and all. No torch, no Hydra, no YAML.
"""

import importlib.util
import itertools
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rtx.errors import UserError, shorten
from rtx.settings.extensions import load_extensions
from rtx.settings.fields import Field, unknown, unquoted
from rtx.settings.hydra_words import COMMA, hydra_values
from rtx.settings.schema import GROUPS, all_fields, settings

EXTENSIBLE = ("data", "data.name", "model.base", "routing.selection")
"""Keys whose values an extension adds to."""
LAUNCHED = ("slurm",)
"""Options of hardware that make jobs of the cells of a sweep."""


@dataclass(frozen=True)
class Override:
    """A key, and the texts of its values as they were written: more than one where it sweeps."""

    key: str
    values: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.key}={','.join(self.values)}"


def split_words(
    words: Iterable[str], own: Mapping[str, Field] | None = None
) -> list[tuple[str, str, str]]:
    """Return each `key=value` with its key and value; `own`: options of a command beside the keys of a configuration.

    `UserError` for a word of another form, with what the words beside it say of the cause.
    """
    words = list(words)
    found = []
    for at, word in enumerate(words):
        key, equals, text = word.partition("=")
        key = key.lstrip("+").strip()
        if not equals or not key or word.startswith(("-", "~")):
            hint = cause(words, at, {**all_fields(), **(own or {})})
            raise UserError(f"{shorten(word)!r} is not of the form key=value{hint}")
        found.append((word, key, text))
    return found


def cause(words: Sequence[str], at: int, known: Mapping[str, Field]) -> str:
    """Return why a word is probably not of the form key=value, and the way out, to stand behind that; or ""."""
    word = words[at]
    before = words[at - 1] if at else ""
    after = words[at + 1] if at + 1 < len(words) else ""
    if word.startswith("~") and not word.startswith("~/"):
        return "; ~ is Hydra's: rtx keeps every key, and key=null unsets those that allow it"
    if word.startswith("=") or after.startswith("=") or before.endswith("="):
        return "; no blanks around =: key=value is one word"
    key, equals, text = before.partition("=")
    field = known.get(key.lstrip("+"))
    if equals and text and field is not None and field.kind is str and not field.values:
        rest = itertools.takewhile(lambda each: "=" not in each, words[at:])
        whole = shlex.quote(" ".join([before, *rest]))
        return f"; quote a value with blanks: {shorten(whole, 200)}"
    return ""


def check_overrides(words: Iterable[str], *, sweep: bool = False) -> list[Override]:
    """Return the overrides of a configuration, their values (several in a sweep) of the right type and range."""
    pairs = split_words(words)
    named = {
        value for _, key, text in pairs if key == "extensions" for value in COMMA.split(text)
    } - {"null"}
    files = {
        value: load_extensions(unquoted(value)) for value in sorted(named)
    }  # first: what they register is a value, too
    known, found = settings(), []
    for word, key, text in pairs:
        values = [
            files.get(value, value) if key == "extensions" else value for value in COMMA.split(text)
        ]
        if sweep and key.startswith("hydra.launcher."):
            found.append(Override(key, (text,)))
            continue
        if key not in known:
            raise UserError(unknown(key, known))
        refuse_hydra_values(known[key], text, sweep)
        if len(values) > 1 and not sweep:
            said = f"{shorten(word)}: takes one value; several make a sweep (rtx train -m)"
            raise UserError(f"{said}; quote it where it is one: '{key}=\"...\"'")
        for value in values:
            if (
                "${" not in value or key in GROUPS
            ):  # what refers to another key is known when all is composed
                read_value(known[key], value, extended=bool(named))
        if key in GROUPS:
            values = [unquoted(value.strip()) for value in values]
            if {*values} & {*LAUNCHED} and importlib.util.find_spec(
                "hydra_plugins.hydra_submitit_launcher"
            ) is None:
                raise UserError(
                    f"{word}: needs submitit and its plugin for Hydra: pip install 'rtx[slurm]'"
                )
        found.append(Override(key, tuple(values)))
    return found


def refuse_hydra_values(field: Field, text: str, sweep: bool) -> None:
    """Refuse Hydra's words for several values, such as range(1,5), with the list that says the same."""
    free = field.kind is str and not field.values
    if (said := hydra_values(text, field.values)) is None or (
        free and ("," not in text or not sweep)
    ):
        return
    word = f"{field.key}={shorten(text.strip())}"
    listing = f"{field.key}={said}" if said else f"{field.key}=<value>,<value>"
    if sweep:
        raise UserError(f"{word}: list the values: {listing}")
    raise UserError(f"{word}: takes one value; list several for a sweep: rtx train -m {listing}")


def read_value(field: Field, text: str, *, extended: bool) -> None:
    """Check the text of a value; `extended`: the line names extensions, which may add values."""
    try:
        field.read_word(text)
    except UserError as error:
        if extended or field.key not in EXTENSIBLE:
            raise
        raise UserError(f"{error}; extensions=<file>.py adds names of your own") from None
