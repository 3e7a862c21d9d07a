"""What can be set: keys with type, range and docstring, and the options of the groups in `conf/`.

Help, errors, the schema for editors and the shell's completion read this. No torch, no Hydra, no YAML.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import math
import sys
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rtx.errors import UserError, nearest
from rtx.wording import shorten

KINDS = {int: "an integer", float: "a number", bool: "true or false", str: "text"}

MOST_WHOLE = 2**53
"""The largest whole number that a key without a range of its own takes; a float beyond it stands for several."""

TRUE, FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


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
    def section(self) -> str:
        """What stands before the last dot."""
        return self.key.rpartition(".")[0]

    @property
    def name(self) -> str:
        """What stands behind the last dot."""
        return self.key.rpartition(".")[2]

    @property
    def choices(self) -> tuple[str, ...]:
        """The closed list of values, empty where any value of the type will do."""
        return self.metadata.get("choices", ())

    @property
    def is_free_text(self) -> bool:
        """Whether any text at all is a value."""
        return self.kind is str and not {"choices", "parts"} & set(self.metadata)

    @property
    def allowed(self) -> str:
        """What the field takes, to stand behind "must be"."""
        if "auto" in self.metadata:
            return self.metadata["auto"]
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if "parts" in self.metadata:
            return "one or more of " + ", ".join(self.metadata["parts"]) + ", joined by +"
        limits = [KINDS[self.kind]]
        for words, bound in (("at least", "low"), ("greater than", "above"), ("at most", "high")):
            if (limit := self.metadata.get(bound)) is not None:
                limits.append(f"{words} {limit:.12g}")
        return ", ".join(limits) + (", or null" if self.optional else "")

    def fits(self, value: Any) -> bool:
        """Tell whether a value of the field's type is in its range or its list."""
        if self.kind is str:
            parts = self.metadata.get("parts")
            return all(part in parts for part in value.split("+")) if parts else value in (self.choices or [value])
        low, high, above = (self.metadata.get(bound) for bound in ("low", "high", "above"))
        if high is None and self.kind is int:
            high = MOST_WHOLE
        below = (low is not None and value < low) or (above is not None and value <= above)
        finite = not isinstance(value, float) or math.isfinite(value)
        return finite and not below and (high is None or value <= high)

    def read(self, value: Any, shown: str | None = None) -> Any:
        """Return a value (a text as a user writes it, or what a parser made of one) in the field's type.

        Args:
            value: None only where it is meant as null.
            shown: how the user wrote it, for the error.

        Raises:
            UserError: it is of another type or out of range.
        """
        if (value is None and self.optional) or (value == "auto" and "auto" in self.metadata):
            return value
        found = convert(self.kind, value)
        if found is not None and self.fits(found):
            return found
        near = nearest(str(value), self.choices, cutoff=0.8) if self.choices else ""
        large = isinstance(found, int) and found > MOST_WHOLE and self.metadata.get("high") is None
        most = f", at most {MOST_WHOLE}" if large else ""
        text = shorten(shown if shown is not None else "null" if value is None else str(value))
        raise UserError(f"{self.key}={text}: must be {self.allowed}{most}{near} ({self.doc.rstrip('.')})")


def convert(kind: type, value: Any) -> Any:
    """Return a value as `kind`, None where it is not of that type; a whole number such as 1e3 is an integer."""
    if kind is str:
        if isinstance(value, bool):
            return str(value).lower()
        return str(value) if isinstance(value, str | int | float) else None
    if kind is bool:
        word = str(value).strip().lower()
        return True if word in TRUE else False if word in FALSE else None
    if isinstance(value, str):
        value = number(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if kind is int and isinstance(value, float):
        return int(value) if math.isfinite(value) and value.is_integer() else None
    try:
        return kind(value)
    except OverflowError:  # digits without end
        return None


def number(text: str) -> int | float | None:
    """Return the number that a text is, or None."""
    for kind in (int, float) if text.isascii() else ():
        try:
            return kind(text)
        except ValueError:
            continue
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
        else:
            kind, optional = plain_type(hint)
            found[key] = Field(key, kind, optional, spec.default, spec.metadata, docs[spec.name])
    return found


def plain_type(hint: Any) -> tuple[type, bool]:
    """Return the type of `int`, `int | None` or `int | str` (which may be auto), and whether None is allowed."""
    if isinstance(hint, types.UnionType):
        kind, other = typing.get_args(hint)
        return kind, other is types.NoneType
    return hint, False


def docstrings(cls: type) -> dict[str, str]:
    """Return the docstring below each field of a dataclass and of those that it extends."""
    found: dict[str, str] = {}
    for owner in reversed([each for each in cls.__mro__ if dataclasses.is_dataclass(each)]):
        for node in parsed(str(sys.modules[owner.__module__].__file__)).body:
            if isinstance(node, ast.ClassDef) and node.name == owner.__name__:
                for statement, below in zip(node.body, node.body[1:], strict=False):
                    match statement, below:
                        case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                            found[name] = " ".join(text.split())
    return found


@functools.cache
def parsed(path: str) -> ast.Module:
    """Return the syntax tree of a source file."""
    return ast.parse(Path(path).read_text(encoding="utf-8"))


def about(cls: object) -> str:
    """Return the docstring of a dataclass on one line."""
    return " ".join((inspect.getdoc(cls) or "").split())


@functools.cache
def conf_dir() -> Path:
    """Return the folder of the Hydra groups: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parent
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


@functools.cache
def options(group: str) -> tuple[str, ...]:
    """Return the options of a group in alphabetical order."""
    return tuple(sorted(path.stem for path in (conf_dir() / group).glob("*.yaml")))


def option_doc(group: str, option: str) -> str:
    """Return the first comment line of an option's file, Hydra's own directive (`# @package`) apart."""
    lines = (conf_dir() / group / f"{option}.yaml").read_text(encoding="utf-8").splitlines()
    first = next(line for line in lines if not line.startswith("# @"))
    return first.removeprefix("#").strip()


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
