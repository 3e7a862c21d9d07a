"""What can be set: every field of the schema with its docstring and range, and every option of the groups in `conf/`.

Help pages and error messages both read this. Nothing here imports Hydra, YAML or torch.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import sys
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rtx import config

KINDS = {int: "an integer", float: "a number", bool: "true or false", str: "text"}


@dataclass(frozen=True)
class Field:
    """One key that can be set: `key` is its dotted path, `kind` its Python type, `doc` the docstring below it."""

    key: str
    kind: type
    optional: bool
    default: Any
    metadata: typing.Mapping[str, Any]
    doc: str

    @property
    def choices(self) -> tuple[str, ...]:
        """The closed list of values, empty where any value of the type will do."""
        return self.metadata.get("choices", ())

    @property
    def allowed(self) -> str:
        """What the field takes, to stand behind "must be"."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if "parts" in self.metadata:
            return "one or more of " + ", ".join(self.metadata["parts"]) + ", joined by +"
        limits = [KINDS[self.kind]]
        low, high, above = (self.metadata.get(name) for name in ("low", "high", "above"))
        if low is not None:
            limits.append(f"at least {low:.12g}")
        if above is not None:
            limits.append(f"greater than {above:.12g}")
        if high is not None:
            limits.append(f"at most {high:.12g}")
        return ", ".join(limits) + (", or null" if self.optional else "")


@functools.cache
def all_fields() -> dict[str, Field]:
    """Return every field of the schema by its dotted key, in the order of the schema."""
    docs = docstrings()
    found: dict[str, Field] = {}

    def walk(cls: type, prefix: str) -> None:
        hints = typing.get_type_hints(cls)
        for spec in dataclasses.fields(cls):
            key, hint = prefix + spec.name, hints[spec.name]
            if dataclasses.is_dataclass(hint):
                walk(typing.cast(type, hint), key + ".")
            else:
                kind, optional = plain_type(hint)
                doc = docs[cls.__name__, spec.name]
                found[key] = Field(key, kind, optional, spec.default, spec.metadata, doc)

    walk(config.Config, "")
    return found


def plain_type(hint: Any) -> tuple[type, bool]:
    """Return the type of `int` or `int | None`, and whether None is allowed."""
    if isinstance(hint, types.UnionType):
        (kind,) = (member for member in typing.get_args(hint) if member is not types.NoneType)
        return kind, True
    return hint, False


@functools.cache
def docstrings() -> dict[tuple[str, str], str]:
    """Return the docstring of each class (field name "") and below each field of the schema's sources."""
    parts = [part for part in typing.get_type_hints(config.Config).values() if dataclasses.is_dataclass(part)]
    sources = dict.fromkeys(str(sys.modules[part.__module__].__file__) for part in (config.Config, *parts))
    trees = [ast.parse(Path(source).read_text(encoding="utf-8")) for source in sources]
    found = {}
    for node in (node for tree in trees for node in tree.body):
        if isinstance(node, ast.ClassDef):
            found[node.name, ""] = ast.get_docstring(node) or ""
            for statement, below in zip(node.body, node.body[1:], strict=False):
                match statement, below:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                        found[node.name, name] = " ".join(text.split())
    return found


@functools.cache
def sections() -> dict[str, str]:
    """Return the sections of the schema (data, model, trainer, ...) with the docstring of each."""
    hints = typing.get_type_hints(config.Config)
    docs = docstrings()
    return {
        name: docs[hint.__name__, ""]
        for name, hint in hints.items()
        if dataclasses.is_dataclass(hint) and isinstance(hint, type)
    }


@functools.cache
def conf_dir() -> Path:
    """Return the folder of the Hydra groups: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
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

    A key is near when it ends in that very word (`heads`), when it is written alike (`routing.windw`, and before keys a
    group: `modle`), or when its last part is (`lrr`); behind a section its own keys come first, and others must be
    nearer than for a word alone.
    """
    word, keys = word.lower(), list(known)
    section, _, leaf = word.rpartition(".")
    matches = [key for key in keys if leaf and key.rpartition(".")[2] == leaf]
    if matches and "." in word:
        matches = difflib.get_close_matches(word, matches, n=1, cutoff=0.0)
    if not matches and section:
        own = [key for key in keys if key.startswith(f"{section}.")]
        near_word = difflib.get_close_matches(word, keys, n=1, cutoff=0.85)
        matches = by_last_part(leaf, own, 0.6) or near_word or by_last_part(leaf, keys, 0.8)
    elif not matches:
        whole = [key for key in keys if "." not in key]
        near_group = difflib.get_close_matches(word, whole, n=1, cutoff=0.75)
        matches = near_group or by_last_part(leaf, keys, 0.6) or difflib.get_close_matches(word, keys, n=1, cutoff=0.7)
    return f" (did you mean {' or '.join(repr(key) for key in matches[:3])}?)" if matches else ""


def by_last_part(leaf: str, keys: list[str], cutoff: float) -> list[str]:
    """Return the keys whose last part is the nearest to `leaf`, none where it is farther than `cutoff`."""
    parts = sorted({key.rpartition(".")[2] for key in keys})
    nearest = difflib.get_close_matches(leaf, parts, n=1, cutoff=cutoff)
    return [key for key in keys if key.rpartition(".")[2] in nearest]
