"""What can be set: keys with type, range and docstring, and options of the groups in `conf/`. No torch, Hydra, YAML."""

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
from typing import Any

from rtx.errors import UserError, close_matches, listed, nearest, shorten, written

KINDS = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
TRUTH = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}


def one_of(default: str, *choices: str, joined: bool = False) -> Any:
    """A text field with a closed list of values; `joined`: one or more of them with + between."""
    return dataclasses.field(
        default=default, metadata={"values": (default, *choices), "joined": joined}
    )


def key_of(table: Mapping[str, Any], joined: bool = False) -> Any:
    """As `one_of` of the keys that a table has whenever it is asked; the first is the default."""
    return dataclasses.field(
        default=next(iter(table)), metadata={"values": table.keys(), "joined": joined}
    )


def ranged(
    default: Any,
    low: float = -math.inf,
    high: float = math.inf,
    *,
    above: float = -math.inf,
    words: tuple[str, ...] = (),
) -> Any:
    """A number with `low <= value <= high` and `value > above`; None and auto pass by the type, and further `words`."""
    return dataclasses.field(
        default=default, metadata={"low": low, "high": high, "above": above, "words": words}
    )


@dataclass(frozen=True)
class Field:
    """One key that can be set: `key` is its dotted path, `kind` its Python type, `doc` the docstring below it."""

    key: str
    kind: type
    optional: bool
    auto: bool
    default: Any
    doc: str
    values: Collection[str] = ()
    """The closed list of values, or of their parts (`joined`); empty where any value of the type will do."""
    joined: bool = False
    low: float = -math.inf
    high: float = math.inf
    above: float = -math.inf
    words: tuple[str, ...] = ()
    """What stands for no number, beside auto."""

    @property
    def allowed(self) -> str:
        """What the field takes, to stand behind "must be"."""
        return self.allowed_in(sys.maxsize)

    def allowed_in(self, width: int) -> str:
        """Return `allowed`, with as many whole names of a list as `width` characters hold."""
        if self.values:
            names = listed(self.values, width)
            return f"one or more of {names}, joined by +" if self.joined else f"one of {names}"
        bounds = {"at least": self.low, "greater than": self.above, "at most": self.high}
        limits = [
            f", {words} {limit:.12g}" for words, limit in bounds.items() if math.isfinite(limit)
        ]
        return (
            "".join(f"{word} or " for word in ("auto",) * self.auto + self.words)
            + KINDS[self.kind]
            + "".join(limits)
            + ", or null" * self.optional
        )

    def read(self, value: Any) -> Any:
        """Return a value, or the text of one, in the field's type and range (`UserError`); None stands for null."""
        if (
            (value is None and self.optional)
            or (value == "auto" and self.auto)
            or value in self.words
        ):
            return value
        found = convert(self.kind, value)
        if self.values:
            fits = (
                {*str(found).split("+")} <= {*self.values} if self.joined else found in self.values
            )
        else:
            fits = found is not None and (
                self.kind is str or (self.low <= found <= self.high and found > self.above)
            )
        if fits:
            return found
        said = f"{self.key}={shorten(written(value))}{nearest(str(value), self.values)}"
        raise UserError(f"{said}: must be {self.allowed_in(240)} ({self.doc.rstrip('.')})")

    def read_word(self, text: str) -> Any:
        """As `read`, of what a user wrote: with quotes where it holds a comma or blanks, or is no null but a text."""
        bare = text.strip()
        if bare.lower() == "null":
            return self.read(None)
        free = self.kind is str and not self.values and bare == unquoted(bare)
        return self.read(text if free else unquoted(bare))


def unquoted(text: str) -> str:
    """Return a text without a pair of quotes around it."""
    return text[1:-1] if re.fullmatch(r"""'[^']*'|"[^"]*\"""", text) else text


def convert(kind: type, value: Any) -> Any:
    """Return a value as `kind`, None where it is not of that type; a whole number such as 1e3 is an integer."""
    if value is None or kind is str:
        return None if value is None else written(value)
    text = str(value).strip().lower()
    if kind is bool:
        return TRUTH.get(text)
    try:
        number = float(text) if text.isascii() else math.nan
    except ValueError:
        return None
    if kind is float:
        return number if math.isfinite(number) else None
    return (
        int(number) if number.is_integer() and abs(number) <= 2**53 else None
    )  # beyond, a float stands for several


def imported(found: Any) -> Any:
    """Return what stands in a table: an object, or what its dotted path names."""
    if not isinstance(found, str):
        return found
    module, _, name = found.rpartition(".")
    return getattr(importlib.import_module(module), name)


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
        kind: Any = (typing.get_args(hint) or (hint,))[0]
        optional, auto = (
            types.NoneType in typing.get_args(hint),
            spec.default == "auto" and kind is not str,
        )
        found[key] = Field(
            key, kind, optional, auto, spec.default, docs[spec.name], **spec.metadata
        )
    return found


def docstrings(cls: type) -> dict[str, str]:
    """Return the docstring below each field of a dataclass and of those that it extends."""
    found: dict[str, str] = {}
    for owner in cls.__mro__[-2::-1]:
        (node,) = ast.parse(inspect.getsource(owner)).body
        for pair in itertools.pairwise(typing.cast(ast.ClassDef, node).body):
            match pair:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                    value=ast.Constant(value=str(text))
                ):
                    found[name] = " ".join(text.split())
    return found


def unknown(word: str, known: Iterable[str]) -> str:
    """Return what to say of a key that does not exist: the dotted key nearest to it by its last part, if any."""
    if word.lower().startswith("hydra.launcher."):
        return f"{shorten(word)}: is read by rtx train -m alone, with hardware=slurm"
    if word.lower().startswith("hydra"):
        own = "RTX_OUTPUTS=<folder> and name= say where runs go, sweep.parallel= and hardware=slurm how cells are run"
        return f"{shorten(word)}: keys of Hydra's own are not read; {own}"
    section, _, leaf = word.lower().rpartition(".")
    others = {"max_epochs": "steps", "epochs": "steps", "max_steps": "steps", "learning_rate": "lr"}
    leaf = {**others, "pattern": "selection"}.get(leaf, leaf)
    names = {key: key.rpartition(".")[2] for key in known}
    near = close_matches(leaf, names.values(), cutoff=0.65)
    found = sorted(
        (key for key in names if names[key] in near),
        key=lambda key: key.rpartition(".")[0] != section,
    )
    hint = f" (did you mean {found[0]!r}?)" if found else "; --help lists them"
    return f"unknown key {shorten(word)!r}{hint}"
