"""What can be set: keys with type, range and docstring, and the options of the groups in `conf/`.

Help, errors, the schema for editors and the shell's completion read this. No torch, no Hydra, no YAML.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import functools
import inspect
import itertools
import math
import re
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rtx.errors import UserError, nearest
from rtx.wording import shorten, written

KINDS = {int: "an integer", float: "a number", bool: "true or false", str: "text"}

MOST_WHOLE = 2**53
"""The largest whole number that a key without a range of its own takes; a float beyond it stands for several."""

WORDS = {**dict.fromkeys(("true", "yes", "on", "1"), True), **dict.fromkeys(("false", "no", "off", "0"), False)}


def one_of(default: str, *choices: str) -> Any:
    """A text field with a closed list of values."""
    return dataclasses.field(default=default, metadata={"choices": (default, *choices)})


def parts_of(default: str, *choices: str) -> Any:
    """A text field with one or more of a closed list of values, joined by +; one may stand there twice."""
    return dataclasses.field(default=default, metadata={"parts": (default, *choices)})


def ranged(default: Any, low: float | None = None, high: float | None = None, *, above: float | None = None) -> Any:
    """A number with `low <= value <= high` and `value > above`, each where given; None passes where allowed."""
    return dataclasses.field(default=default, metadata={"low": low, "high": high, "above": above})


def auto_or(allowed: str, low: float | None = None) -> Any:
    """A field of type `int | str` or `bool | str` that `auto`, the default, leaves to rtx; `allowed`: all it takes."""
    return dataclasses.field(default="auto", metadata={"auto": allowed, "low": low})


@dataclass(frozen=True)
class Field:
    """One key that can be set: `key` is its dotted path, `kind` its Python type, `doc` the docstring below it."""

    key: str
    kind: type
    optional: bool
    default: Any
    metadata: Mapping[str, Any]
    doc: str

    @property
    def values(self) -> tuple[str, ...]:
        """The closed list of values, or of their parts; empty where any value of the type will do."""
        return self.metadata.get("choices", ()) or self.metadata.get("parts", ())

    @property
    def allowed(self) -> str:
        """What the field takes, to stand behind "must be"."""
        if "auto" in self.metadata:
            return self.metadata["auto"]
        if self.values:
            listed = ", ".join(self.values)
            return f"one or more of {listed}, joined by +" if "parts" in self.metadata else f"one of {listed}"
        limits = [KINDS[self.kind]]
        for words, bound in (("at least", "low"), ("greater than", "above"), ("at most", "high")):
            if (limit := self.metadata.get(bound)) is not None:
                limits.append(f"{words} {limit:.12g}")
        return ", ".join(limits) + (", or null" if self.optional else "")

    def fits(self, value: Any) -> bool:
        """Tell whether a value of the field's type is in its range or its list."""
        if self.kind is str:
            parts = value.split("+") if "parts" in self.metadata else [value]
            return set(parts) <= set(self.values or parts)
        low, high, above = (self.metadata.get(bound) for bound in ("low", "high", "above"))
        most = high if high is not None else MOST_WHOLE if self.kind is int else math.inf
        return (low is None or value >= low) and (above is None or value > above) and value <= most

    def read(self, value: Any, key: str = "") -> Any:
        """Return a value, or the text of one, in the field's type; None stands for null.

        Args:
            value: what was found.
            key: the key as the user wrote it, for the error.

        Raises:
            UserError: it is of another type or out of range.
        """
        if (value is None and self.optional) or (value == "auto" and "auto" in self.metadata):
            return value
        found = convert(self.kind, value)
        if found is not None and self.fits(found):
            return found
        near = nearest(str(value), self.values, cutoff=0.8)
        large = f", at most {MOST_WHOLE}" if self.kind is int and found and found > MOST_WHOLE else ""
        said = f"{key or self.key}={shorten(written(value))}: must be {self.allowed}{large}{near}"
        raise UserError(f"{said} ({self.doc.rstrip('.')})")

    def read_word(self, text: str, key: str = "") -> Any:
        """As `read`, of what a user wrote: with quotes where it holds a comma or blanks, or is no null but a text."""
        bare = text.strip()
        if bare.lower() == "null":
            return self.read(None, key)
        free = self.kind is str and not self.values and bare == unquoted(bare)
        return self.read(text if free else unquoted(bare), key)


def unquoted(text: str) -> str:
    """Return a text without a pair of quotes around it."""
    return text[1:-1] if re.fullmatch(r"""'[^']*'|"[^"]*\"""", text) else text


def convert(kind: type, value: Any) -> Any:
    """Return a value as `kind`, None where it is not of that type; a whole number such as 1e3 is an integer."""
    if value is None or kind is str:
        return None if value is None else written(value)
    text = str(value).strip().lower()
    if kind is bool:
        return WORDS.get(text)
    with contextlib.suppress(ValueError):
        if kind is int and text.isascii():
            return int(text)
    with contextlib.suppress(ValueError):
        number = float(text) if text.isascii() else math.nan
        return kind(number) if math.isfinite(number) and (kind is float or number.is_integer()) else None
    return None


@functools.cache
def fields_of(cls: type, prefix: str = "") -> dict[str, Field]:
    """Return every field of a dataclass, and of the dataclasses in it, by its dotted key, in their order."""
    found: dict[str, Field] = {}
    hints, docs = typing.get_type_hints(cls), docstrings(cls)
    for spec in dataclasses.fields(cls):
        key, hint = prefix + spec.name, hints[spec.name]
        if dataclasses.is_dataclass(hint):
            found |= fields_of(typing.cast(type, hint), key + ".")
            continue
        optional = isinstance(hint, types.UnionType) and types.NoneType in typing.get_args(hint)
        kind: Any = (typing.get_args(hint) or (hint,))[0]  # of `int | str`, where the text is auto, the integer
        found[key] = Field(key, kind, optional, spec.default, spec.metadata, docs[spec.name])
    return found


def docstrings(cls: type) -> dict[str, str]:
    """Return the docstring below each field of a dataclass and of those that it extends."""
    found: dict[str, str] = {}
    for owner in (each for each in reversed(cls.__mro__) if each is not object):
        (node,) = ast.parse(inspect.getsource(owner)).body
        for pair in itertools.pairwise(typing.cast(ast.ClassDef, node).body):
            match pair:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = " ".join(text.split())
    return found


def about(cls: Any) -> str:
    """Return the docstring of a dataclass on one line."""
    return " ".join((inspect.getdoc(cls) or "").split())


@functools.cache
def conf_dir() -> Path:
    """Return the folder of the Hydra groups: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parent
    return package / "conf" if (package / "conf").is_dir() else package.parent / "conf"


@functools.cache
def options(group: str) -> tuple[str, ...]:
    """Return the options of a group in alphabetical order."""
    return tuple(sorted(path.stem for path in (conf_dir() / group).glob("*.yaml")))


def option_doc(group: str, option: str) -> str:
    """Return the first comment line of an option's file, Hydra's own directive (`# @package`) apart."""
    lines = (conf_dir() / group / f"{option}.yaml").read_text(encoding="utf-8").splitlines()
    return next(line for line in lines if not line.startswith("# @")).removeprefix("#").strip()


def suggest_key(word: str, known: Iterable[str]) -> str:
    """Return " (did you mean 'x' or 'y'?)" for the dotted keys nearest to `word`, or an empty string.

    The last part counts most: `lrr` is near to optimizer.lr, and `heads` as near to routing.heads as to model.heads.
    """
    section, _, leaf = word.lower().rpartition(".")

    def nearness(key: str) -> float:
        own, _, name = key.rpartition(".")
        by_name = difflib.SequenceMatcher(None, leaf, name).ratio()
        return 0.7 * by_name + 0.3 * difflib.SequenceMatcher(None, section, own).ratio() if section else by_name

    near = {key: nearness(key) for key in known}
    best = max(near.values(), default=0.0)
    found = [repr(key) for key, value in near.items() if value == best]
    return f" (did you mean {' or '.join(found[:3])}?)" if best >= 0.65 else ""
