"""A key that can be set: its type, range and docstring, what it changes, and when it is read.

A group of keys is a dataclass: the annotation of a field is the type of the key (a `Literal` is a
closed list of values), the string below it the docstring, and `key` adds all else. `fields_of`
reads that. No torch, no Hydra, no YAML.
"""

import ast
import dataclasses
import functools
import importlib
import inspect
import itertools
import math
import re
import sys
import types
import typing
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from rtx.errors import UserError, close_matches, listed, nearest, shorten, written
from rtx.settings.effects import RESULTS, Effect

KINDS = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
TRUTH = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}
LENGTH = 2**24
"""The longest sequence."""
POSITIONS = 2**30
"""The highest value of a key that counts positions, keys or clusters of a sequence."""
WINDOWS = 2**40
"""The highest number of windows of a split."""
STEPS = 10**12
"""The highest number of optimizer steps: 30 years at a thousand a second."""
LARGEST = 1e30
"""The highest value of a key that arithmetic in float32 multiplies with."""
LARGEST_EXACT = 2**53
"""The largest number up to which a float represents every integer."""


class Since(NamedTuple):
    """The version that added a key, and the value that describes runs of earlier versions.

    Their records lack the key. A key with this value is left out of a cell's hash, so that cells
    recorded by earlier versions are found.
    """

    version: str
    value: Any


def key(
    default: Any,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    above: float = -math.inf,
    names: Mapping[str, Any] | None = None,
    joined: bool = False,
    changes: Effect = RESULTS,
    read_with: Mapping[str, Collection[str]] | None = None,
    since: Since | None = None,
    one_device: bool = False,
) -> Any:
    """Return a dataclass field for a key of the configuration or an option of a command.

    Args:
        low, high: inclusive bounds of a number.
        above: exclusive lower bound of a number.
        names: a table whose names are the values; extensions may add some.
        joined: whether a value may be several names with + between.
        changes: what another value changes about a run.
        read_with: other keys, each with the values with which a run reads this key; unset: always.
        since: for a key that records of earlier versions lack.
        one_device: whether commands on a trained run, which use one device, read it, too.
    """
    facts: dict[str, Any] = {"low": low, "high": high, "above": above, "joined": joined}
    facts |= {"changes": changes, "read_with": read_with or {}, "since": since}
    facts["one_device"] = one_device
    if names is not None:
        # A view of the table, which also has the names that are registered later.
        facts |= {"values": names.keys(), "extensible": True}
    return dataclasses.field(default=default, metadata=facts)


@dataclass(frozen=True)
class Field:
    """One key that can be set, by its dotted path; see `key` for its facts."""

    key: str
    kind: type
    """Type of its values: int, float, bool or str."""
    default: Any
    doc: str
    """The docstring below the field, on one line."""
    optional: bool = False
    """Whether null is a value."""
    words: tuple[str, ...] = ()
    """Values of a number that are words, such as auto."""
    values: Collection[str] = ()
    """The closed list of values, or of their parts (`joined`); empty: any of the type."""
    joined: bool = False
    extensible: bool = False
    """Whether extensions may add values."""
    low: float = -math.inf
    high: float = math.inf
    above: float = -math.inf
    changes: Effect = RESULTS
    read_with: Mapping[str, Collection[str]] = dataclasses.field(
        default_factory=dict[str, Collection[str]]
    )
    since: Since | None = None
    one_device: bool = False

    @property
    def allowed(self) -> str:
        """The allowed values, as the end of a sentence with "must be"."""
        return self.allowed_in(sys.maxsize)

    def allowed_in(self, width: int) -> str:
        """Return `allowed`, with as many whole names of a list as `width` characters hold."""
        if self.values:
            names = listed(self.values, width)
            return f"one or more of {names}, joined by +" if self.joined else f"one of {names}"
        parts = [" or ".join((*self.words, KINDS[self.kind]))]
        bounds = {"at least": self.low, "greater than": self.above, "at most": self.high}
        for words, bound in bounds.items():
            if math.isfinite(bound):
                parts.append(f"{words} {written_bound(bound)}")
        if self.optional:
            parts.append("or null")
        return ", ".join(parts)

    def read(self, value: Any) -> Any:
        """Return a value, or the text of one, as the field's type; None stands for null.

        Raises UserError for a value of another type or out of range.
        """
        if value is None and self.optional:
            return None
        if value in self.words:
            return value
        converted = convert(self.kind, value)
        if converted is not None and self.fits(converted):
            return converted
        problem = f"{self.key}={shorten(written(value))}{nearest(str(value), self.values)}"
        doc = self.doc.rstrip(".")
        raise UserError(f"{problem}: must be {self.allowed_in(240)} ({doc})")

    def fits(self, value: Any) -> bool:
        """Whether a value of the right type is in the list or range."""
        if self.values:
            parts = value.split("+") if self.joined else [value]
            return all(part in self.values for part in parts)
        if self.kind is str:
            return True
        return self.low <= value <= self.high and value > self.above

    def read_word(self, text: str) -> Any:
        """As `read`, of a value on the command line, where `null` stands for None.

        A pair of quotes around it is removed: it protects commas and blanks, and makes a text of
        `null`.
        """
        bare = text.strip()
        if bare.lower() == "null":
            return self.read(None)
        takes_any_text = self.kind is str and not self.values
        if takes_any_text and bare == unquoted(bare):
            return self.read(text)
        return self.read(unquoted(bare))


def unquoted(text: str) -> str:
    """Return a text without a pair of quotes around it."""
    return text[1:-1] if re.fullmatch(r"""'[^']*'|"[^"]*\"""", text) else text


def convert(kind: type, value: Any) -> Any:
    """Return a value as `kind`, or None if it is not of that type; 1e3 is an integer, too."""
    if value is None:
        return None
    if kind is str:
        return written(value)
    text = str(value).strip().lower()
    if kind is bool:
        return TRUTH.get(text)
    number = number_of(text)
    if number is None or kind is float:
        return number
    is_exact = number.is_integer() and abs(number) <= LARGEST_EXACT
    return int(number) if is_exact else None


def number_of(text: str) -> float | None:
    """Return a text as a finite number, or None if it is not one."""
    if not text.isascii():
        return None
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def imported(entry: Any) -> Any:
    """Return an object, or what its dotted path names."""
    if not isinstance(entry, str):
        return entry
    module, _, name = entry.rpartition(".")
    return getattr(importlib.import_module(module), name)


@functools.cache
def fields_of(cls: type, prefix: str = "") -> dict[str, Field]:
    """Return every field of a dataclass, and of the dataclasses in it, by its dotted key.

    Args:
        prefix: goes before each key.
    """
    fields: dict[str, Field] = {}
    hints = typing.get_type_hints(cls)
    docs = docstrings(cls)
    for spec in dataclasses.fields(cls):
        name = prefix + spec.name
        hint = hints[spec.name]
        if dataclasses.is_dataclass(hint):
            fields |= fields_of(typing.cast(type, hint), name + ".")
            continue
        facts = {**type_facts(hint), **spec.metadata}
        fields[name] = Field(name, default=spec.default, doc=docs[spec.name], **facts)
    return fields


def type_facts(hint: Any) -> dict[str, Any]:
    """Return the facts of a `Field` that follow from the annotation of a key.

    `Literal["a", "b"]` is a closed list; in `int | Literal["auto"] | None` it is a word beside the
    numbers, and None is null.
    """
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    parts = typing.get_args(hint) if is_union else (hint,)
    kinds: list[Any] = []
    names: tuple[str, ...] = ()
    for part in parts:
        if typing.get_origin(part) is Literal:
            names = typing.get_args(part)
        elif part is not types.NoneType:
            kinds.append(part)
    optional = types.NoneType in parts
    if not kinds:
        return {"kind": str, "optional": optional, "values": names}
    return {"kind": kinds[0], "optional": optional, "words": names}


def docstrings(cls: type) -> dict[str, str]:
    """Return the docstring below each field of a dataclass and of those that it extends.

    The classes must be at the top level of their modules.
    """
    docs: dict[str, str] = {}
    bases = [base for base in cls.__mro__ if base is not object]
    # The class itself is the last one, and so replaces the docstrings of its bases.
    for owner in reversed(bases):
        body = classes_in(sys.modules[owner.__module__])[owner.__name__].body
        for statement, following in itertools.pairwise(body):
            text = text_of(following)
            if isinstance(statement, ast.AnnAssign) and text is not None:
                docs[ast.unparse(statement.target)] = " ".join(text.split())
    return docs


def text_of(statement: ast.stmt) -> str | None:
    """Return the text of a statement that is a text alone, else None."""
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Constant):
        return None
    text = statement.value.value
    return text if isinstance(text, str) else None


@functools.cache
def classes_in(module: types.ModuleType) -> dict[str, ast.ClassDef]:
    """Return the syntax trees of the classes at the top level of a module, by name."""
    tree = ast.parse(inspect.getsource(module))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


OTHER_NAMES = {
    "max_epochs": "steps",
    "epochs": "steps",
    "max_steps": "steps",
    "learning_rate": "lr",
    "pattern": "selection",
}
"""Names that other programs give to keys."""
RUN_FOLDERS = "RTX_OUTPUTS=<folder> and name= say where runs go"
CELLS = "sweep.parallel= and hardware=slurm how cells are run"


def unknown(word: str, known: Iterable[str]) -> str:
    """Return the message for a key that does not exist, with the key nearest by its last part.

    Keys of the same section come first.
    """
    if word.lower().startswith("hydra.launcher."):
        return f"{shorten(word)}: is read by rtx train -m alone, with hardware=slurm"
    if word.lower().startswith("hydra"):
        return f"{shorten(word)}: keys of Hydra's own are not read; {RUN_FOLDERS}, {CELLS}"
    section, _, leaf = word.lower().rpartition(".")
    leaf = OTHER_NAMES.get(leaf, leaf)
    leaves = {name: name.rpartition(".")[2] for name in known}
    same_section = [leaves[name] for name in leaves if name.rpartition(".")[0] == section]
    close = close_matches(leaf, same_section, cutoff=0.65)
    close = close or close_matches(leaf, leaves.values(), cutoff=0.65)
    candidates = [name for name in leaves if leaves[name] in close]
    candidates.sort(key=lambda name: name.rpartition(".")[0] != section)
    hint = f" (did you mean {candidates[0]!r}?)" if candidates else "; --help lists them"
    return f"unknown key {shorten(word)!r}{hint}"


def written_bound(bound: float) -> str:
    """Return a bound as text: 64, 0.5, 1,000,000,000,000 or 1e+30."""
    if abs(bound) >= 10_000 and abs(bound) <= LARGEST_EXACT:
        return f"{bound:,.0f}"
    return f"{bound:.12g}"
