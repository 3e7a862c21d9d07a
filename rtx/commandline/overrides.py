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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, FloatRange, Glob, Quote, QuotedString, RangeSweep, Sweep
from hydra.errors import HydraException

from rtx.checks import violated
from rtx.commandline.fields import Field, all_fields, options, sections
from rtx.commandline.vocabulary import LAUNCHED, Vocabulary, vocabulary
from rtx.config import GROUPS
from rtx.errors import UserError, nearest
from rtx.limits import MOST_WHOLE

# What Hydra itself is told in a sweep; any other hydra key would have no effect.
SWEEP_KEYS = re.compile(r"hydra/launcher|hydra\.launcher\.[\w.]+")
GRAMMAR = re.compile(r"[=,\[\]{}()'\"\\]")
WORDS_OF_TRUTH = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}
MOST_CELLS = 1_000  # each takes a fifth of a second to compose


@dataclass(frozen=True)
class Checked:
    """One override in Hydra's grammar: `key` and the texts of its values, more than one where it sweeps."""

    key: str
    values: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.key}={','.join(self.values)}"


def check_overrides(
    arguments: Iterable[str], *, sweep: bool = False, understood: Vocabulary | None = None
) -> list[Checked]:
    """Return the overrides in Hydra's grammar, checked against the schema and the files in `conf/`.

    Args:
        arguments: what the user wrote, such as `routing.heads=4` or `model=rt24`.
        sweep: whether lists of values (`a,b`, `range(1,4)`, `glob(*)`) and the launcher's `hydra` keys are allowed.
        understood: what the command understands in front of "="; unset: every group and key.

    Raises:
        UserError: with a line for each override that cannot be.
    """
    checked, problems = [], []
    for argument in arguments:
        try:
            checked.append(check_override(argument, sweep, understood or vocabulary()))
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError("\n".join(problems))
    return checked


def check_override(argument: str, sweep: bool, understood: Vocabulary) -> Checked:
    """Check one override; see `check_overrides`."""
    shown = shorten(argument)
    prefix, key, equals, text = split(argument)
    if argument.startswith("-"):
        raise UserError(f"{shown}: unknown flag; see rtx --help")
    if prefix == "~":
        raise UserError(f"{shown}: a key or group can be set, not removed")
    key = understood.short.get(key, key)
    if not equals or not key:
        raise UserError(f"{shown!r} is not of the form key=value{completed(key, understood)}")
    if key == "hydra" or key.startswith(("hydra.", "hydra/")):
        return check_hydra_key(key, text, shown, sweep)
    if key in (*GROUPS, *all_fields()) and (refusal := understood.refusal(key)):
        raise UserError(f"{shown}: {refusal}")
    if key in GROUPS:
        return check_option(key, text, sweep)
    if key in all_fields():
        return check_field(all_fields()[key], text, sweep)
    if key in sections():
        example = next(field for field in all_fields() if field.startswith(key + "."))
        raise UserError(f"{shown}: {key} is a section; set its keys one by one, such as {example}=...")
    raise UserError(f"unknown key {shorten(key)!r}{understood.unknown(key)}")


def split(argument: str) -> tuple[str, str, str, str]:
    """Split `+key=value` into prefix ("", "+", "++" or "~"), key, "=" (or "" where there is none) and value."""
    key, equals, text = argument.partition("=")
    prefix = next((mark for mark in ("++", "+", "~") if key.startswith(mark)), "")
    return prefix, key.removeprefix(prefix).strip(), equals, text


def completed(key: str, understood: Vocabulary) -> str:
    """Return what to add to a word without "=": how to complete a known key, or which key is near."""
    if key in GROUPS or key in all_fields():
        return f"; say {key}=<{'option' if key in GROUPS else 'value'}>"
    return understood.near(key) if key else ""


def shorten(text: str, width: int = 100) -> str:
    """Return `text` on one line and no longer than `width`, for an error message."""
    line = "".join(letter if letter.isprintable() else "?" for letter in text)
    return line if len(line) <= width else line[: width - 3] + "..."


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
    known = list(options(group))
    values = values_of(group, text, sweep)
    for value in values:
        if group == "experiment" and value is None:
            continue
        if not isinstance(value, str | QuotedString) or plain(value) not in known:
            name = "null" if value is None else shorten(str(plain(value)))
            quoted = shorten(value.with_quotes()) if isinstance(value, QuotedString) and name == "null" else name
            raise UserError(
                f"{group}={quoted}: no such option{nearest(name, known)}; {group} takes {', '.join(known)}"
                + (" or null" if group == "experiment" else "")
            )
        if group == "hardware" and plain(value) in LAUNCHED:
            refuse_missing_launcher(f"hardware={plain(value)}")
    return Checked(group, tuple("null" if value is None else str(plain(value)) for value in values))


def check_field(field: Field, text: str, sweep: bool) -> Checked:
    """Check `key=value` against the field's type and range."""
    if is_literal(field, text):
        return Checked(field.key, (canonical(field, QuotedString(text, Quote.single), text),))
    values = values_of(field.key, text, sweep)
    several = len(values) > 1
    return Checked(
        field.key, tuple(canonical(field, value, str(plain(value)) if several else text) for value in values)
    )


def is_literal(field: Field, text: str) -> bool:
    """Whether a text field takes `text` letter by letter, rather than in Hydra's grammar.

    So it is for text in which nothing has a meaning there (`~/book.txt`, `1e3`), and for a prompt, which is prose with
    commas and brackets, unless it stands in quotes.
    """
    if not free_text(field.key):
        return False
    if field.key == "sample.prompt":
        return not (len(text) > 1 and text[0] == text[-1] and text[0] in "'\"")
    return not GRAMMAR.search(text) and text.strip().lower() != "null"


def free_text(key: str) -> bool:
    """Whether a key takes any text at all."""
    field = all_fields().get(key)
    return field is not None and field.kind is str and not {"choices", "parts"} & set(field.metadata)


def values_of(key: str, text: str, sweep: bool) -> list[Any]:
    """Return the values of an override in Hydra's grammar: one, or in a sweep all that are listed."""
    shown = f"{key}={shorten(text)}"
    try:
        value = OverridesParser.create().parse_override(f"{key}={text}")._value
    except (HydraException, ValueError, RecursionError):  # digits without end, brackets without end
        if not free_text(key):
            return [text]  # which is no option and no number, as the caller will say
        raise UserError(
            f"{shown}: a value with any of = , ( [ {{ or quotes in it needs quotes of its own: '{key}=\"...\"'"
        ) from None
    if not isinstance(value, Sweep | Glob):
        return [value]
    if not sweep:
        quotes = f"; if it is one value, quote it: '{key}=\"...\"'" if free_text(key) else ""
        raise UserError(f"{shown}: several values need -m, which runs each of them{quotes}")
    listed = list_values(value, key, shown)
    if not 0 < len(listed) <= MOST_CELLS:
        raise UserError(f"{shown}: stands for {'no value' if not listed else 'too many values'}")
    return listed


def list_values(value: Sweep | Glob, key: str, shown: str) -> list[Any]:
    """Return the values that a sweep stands for, one more than `MOST_CELLS` at the most."""
    match value:
        case Glob():
            return value.filter(list(options(key))) if key in GROUPS else []
        case ChoiceSweep():
            listed = list(value.list)
        case RangeSweep() if not all(math.isfinite(each or 0) for each in (value.start, value.stop, value.step)):
            raise UserError(f"{shown}: the ends and the step of a range must be finite")
        case RangeSweep() if value.step == 0:
            raise UserError(f"{shown}: the step of a range must not be 0")
        case RangeSweep():
            listed = list(itertools.islice(numbers(value), MOST_CELLS + 1))
        case _:
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
    """Return a value of `field` in Hydra's grammar; `shown` is how the user wrote it.

    Raises:
        UserError: the value is of another type or out of range.
    """
    if isinstance(value, str) and value.startswith("${"):
        return value  # an interpolation: known only when all is composed, and checked then
    if value is None and field.optional:
        return "null"
    converted = convert(field.kind, value)
    if converted is None or violated(field.metadata, converted):
        near = nearest(str(plain(value)), field.choices, cutoff=0.8) if field.choices else ""
        most = f", at most {MOST_WHOLE}" if isinstance(converted, int) and converted > MOST_WHOLE else ""
        allowed = field.allowed + (most if field.metadata.get("high") is None else "")
        raise UserError(f"{field.key}={shorten(shown)}: must be {allowed}{near} ({field.doc.rstrip('.')})")
    if isinstance(converted, str):
        return QuotedString(converted, Quote.single).with_quotes()
    return str(converted).lower() if isinstance(converted, bool) else repr(converted)


def convert(kind: type, value: Any) -> Any:
    """Return a parsed value as `kind`, None where it is not of that type; a whole number such as 1e3 is an integer."""
    value = plain(value)
    if kind is bool:
        return value if isinstance(value, bool) else WORDS_OF_TRUTH.get(str(value).lower())
    if kind is str:
        return (
            str(value).lower()
            if isinstance(value, bool)
            else str(value)
            if isinstance(value, str | int | float)
            else None
        )
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if kind is int and isinstance(value, float):
        return int(value) if math.isfinite(value) and value.is_integer() else None
    return kind(value)


def cells(checked: Sequence[Checked]) -> list[list[str]]:
    """Return the overrides of each cell of a sweep, the last key changing fastest (the order of Hydra's basic sweeper).

    Raises:
        UserError: there are too many.
    """
    last = {override.key: override for override in checked if not override.key.startswith(("hydra.", "hydra/"))}
    count = math.prod(len(override.values) for override in last.values())
    if count > MOST_CELLS:
        raise UserError(f"the sweep has {count:,} cells; at most {MOST_CELLS:,} are taken at once")
    texts = [[f"{key}={value}" for value in override.values] for key, override in last.items()]
    return [list(cell) for cell in itertools.product(*texts)]
