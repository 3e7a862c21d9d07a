"""Checks what a user writes behind a command (`key=value`, `group=option`) before Hydra sees it.

Hydra accepts unknown keys behind `+`, answers a wrong type in its own words, and reads some plain text (`~/a.txt`,
`1e3` as a name) as something else. Here every override is set against the schema and the files in `conf/`, and comes
out in a form that Hydra reads exactly as it was meant.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, FloatRange, Glob, Quote, QuotedString, RangeSweep, Sweep
from hydra.errors import HydraException

from rtx.config import GROUPS, all_fields
from rtx.errors import UserError, nearest
from rtx.keys import Field, options
from rtx.options import LAUNCHED, refuse_foreign, split_word
from rtx.wording import shorten

# What Hydra itself is told in a sweep; any other hydra key would have no effect.
SWEEP_KEYS = re.compile(r"hydra/launcher|hydra\.launcher\.[\w.]+")
GRAMMAR = re.compile(r"[=,\[\]{}()'\"\\]")  # what has a meaning to Hydra in a value
MOST_CELLS = 1_000  # each takes a fifth of a second to compose


@dataclass(frozen=True)
class Checked:
    """One override in Hydra's grammar: `key` and the texts of its values, more than one where it sweeps."""

    key: str
    values: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.key}={','.join(self.values)}"


def check_overrides(arguments: Iterable[str], *, sweep: bool = False) -> list[Checked]:
    """Return the overrides in Hydra's grammar, checked against the schema and the files in `conf/`.

    Args:
        arguments: what the user wrote, such as `routing.heads=4` or `model=rt24`.
        sweep: whether lists of values (`a,b`, `range(1,4)`, `glob(*)`) and the launcher's `hydra` keys are allowed.

    Raises:
        UserError: with a line for each override that cannot be.
    """
    checked, problems = [], []
    for argument in arguments:
        try:
            checked.append(check_override(argument, sweep))
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError("\n".join(problems))
    return checked


def check_override(argument: str, sweep: bool) -> Checked:
    """Check one override; see `check_overrides`."""
    key, text = split_word(argument)
    shown = shorten(argument)
    if key == "hydra" or key.startswith(("hydra.", "hydra/")):
        return check_hydra_key(key, text, shown, sweep)
    if key in GROUPS:
        return check_option(key, text, sweep)
    if key in all_fields():
        return check_field(all_fields()[key], text, sweep)
    refuse_foreign("train", key, argument, composing=True)
    raise AssertionError(key)


def check_hydra_key(key: str, text: str, shown: str, sweep: bool) -> Checked:
    """Let through what tells Hydra's launcher how to run the cells of a sweep."""
    if not sweep:
        raise UserError(f"{shown}: keys of hydra have an effect in a sweep (-m) only")
    if not SWEEP_KEYS.fullmatch(key):
        hint = "; sweep.parallel=N runs N cells at once" if key == "hydra.sweeper.max_batch_size" else ""
        raise UserError(f"{shown}: has no effect; a sweep takes hydra/launcher and hydra.launcher.*{hint}")
    if key == "hydra/launcher" and text.startswith("submitit"):
        refuse_missing_launcher(shown)
    return Checked(key, (text,))


def refuse_missing_launcher(shown: str) -> None:
    """Refuse what needs submitit's launcher where it is not installed.

    Raises:
        UserError: says how to install it.
    """
    if importlib.util.find_spec("hydra_plugins.hydra_submitit_launcher") is None:
        raise UserError(f"{shown}: needs hydra-submitit-launcher and submitit; pip install 'rtx[slurm]' brings them")


def check_option(group: str, text: str, sweep: bool) -> Checked:
    """Check `group=option` against the files of `conf/<group>/`."""
    known, chosen = options(group), []
    for value in values_of(group, text, sweep):
        name = "null" if value is None else str(plain(value))
        if name not in known and not (group == "experiment" and value is None):
            also = " or null" if group == "experiment" else ""
            hint = f"{nearest(name, known)}; {group} takes {shorten(', '.join(known), 240)}{also}"
            raise UserError(f"{group}={shorten(name)}: no such option{hint}")
        if group == "hardware" and name in LAUNCHED:
            refuse_missing_launcher(f"hardware={name}")
        chosen.append(name)
    return Checked(group, tuple(chosen))


def check_field(field: Field, text: str, sweep: bool) -> Checked:
    """Check `key=value` against the field's type and range."""
    values = values_of(field.key, text, sweep)
    several = len(values) > 1
    return Checked(field.key, tuple(canonical(field, value, "" if several else text) for value in values))


def is_text(key: str) -> bool:
    """Whether a key takes any text at all."""
    field = all_fields().get(key)
    return field is not None and field.is_free_text


def values_of(key: str, text: str, sweep: bool) -> list[Any]:
    """Return the values of an override in Hydra's grammar: one, or in a sweep all that are listed."""
    shown = f"{key}={shorten(text)}"
    if key in all_fields() and not GRAMMAR.search(text):  # `~/book.txt` and `1e3` as they stand
        return [None if text.strip().lower() == "null" else text]
    try:
        value = OverridesParser.create().parse_override(f"{key}={text}").value()
    except (HydraException, ValueError, RecursionError):  # digits without end, brackets without end
        if not is_text(key):
            return [text]  # which is no option and no number, as the caller will say
        raise UserError(
            f"{shown}: a value with any of = , ( [ {{ or quotes in it needs quotes of its own: '{key}=\"...\"'"
        ) from None
    if not isinstance(value, Sweep | Glob):
        return [value]
    if not sweep:
        quotes = f"; if it is one value, quote it: '{key}=\"...\"'" if is_text(key) else ""
        raise UserError(f"{shown}: takes one value; several make a sweep (rtx train -m){quotes}")
    listed = list_values(value, key, shown)
    if not 0 < len(listed) <= MOST_CELLS:
        raise UserError(f"{shown}: stands for {'no value' if not listed else 'too many values'}")
    return listed


def list_values(value: Sweep | Glob, key: str, shown: str) -> list[Any]:
    """Return the values that a sweep stands for, one more than `MOST_CELLS` at the most."""
    if isinstance(value, Glob):
        return value.filter(list(options(key))) if key in GROUPS else []
    if isinstance(value, ChoiceSweep):
        listed = list(value.list)
    elif isinstance(value, RangeSweep):
        if value.step == 0 or not all(math.isfinite(each or 0) for each in (value.start, value.stop, value.step)):
            raise UserError(f"{shown}: the ends and the step of a range must be finite, and the step not 0")
        listed = list(itertools.islice(numbers(value), MOST_CELLS + 1))
    else:
        raise UserError(f"{shown}: an interval has no end of values; list them, or use range(start,stop,step)")
    if value.shuffle:
        random.shuffle(listed)
    return listed


def numbers(sweep: RangeSweep) -> Iterator[int | float]:
    """Return the numbers of a range without its end, counted in decimals (Hydra lets range(0.1,0.4,0.1) reach 0.4)."""
    start, stop, step = sweep.start, sweep.stop, sweep.step
    if isinstance(start, int) and isinstance(stop, int) and isinstance(step, int):
        return iter(range(start, stop, step))
    return iter(FloatRange(*(Decimal(str(bound)) for bound in (start, stop, step))))


def plain(value: Any) -> Any:
    """Return a parsed value without the quotes it stood in."""
    return value.text if isinstance(value, QuotedString) else value


def canonical(field: Field, value: Any, shown: str) -> str:
    """Return a value of `field` in Hydra's grammar; `shown` is how the user wrote it, if known.

    Raises:
        UserError: the value is of another type or out of range.
    """
    if isinstance(value, str) and value.startswith("${"):
        return value  # an interpolation: known only when all is composed, and checked then
    found = field.read(plain(value), shown or None)
    if found is None:
        return "null"
    if isinstance(found, str):
        return QuotedString(found, Quote.single).with_quotes()
    return str(found).lower() if isinstance(found, bool) else repr(found)
