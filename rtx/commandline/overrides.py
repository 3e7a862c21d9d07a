"""Checks what a user writes behind a command (`key=value`, `group=option`) against the schema and the files in `conf/`.

A value is taken as it is written, `~/a=b (1).txt` and all. In a sweep commas outside quotes part several values,
`range(1,4)` counts, and `model=glob(rt*)` lists options.
"""

from __future__ import annotations

import fnmatch
import functools
import importlib.util
import re
from collections.abc import Iterable
from dataclasses import dataclass

from rtx.config import GROUPS, all_fields
from rtx.errors import UserError, collect, nearest
from rtx.keys import options, unquoted
from rtx.options import LAUNCHED, refuse_foreign, split_word
from rtx.wording import shorten

COMMA = re.compile(r""",(?=(?:[^"']|"[^"]*"|'[^']*')*$)""")
"""A comma outside quotes."""

MOST_CELLS = 1_000
"""Cells of a sweep, and values of a range."""


@dataclass(frozen=True)
class Override:
    """A key, and the texts of its values as they were written: more than one where it sweeps."""

    key: str
    values: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.key}={','.join(self.values)}"


def check_overrides(arguments: Iterable[str], *, sweep: bool = False) -> list[Override]:
    """Return overrides that have been checked, one by one.

    Args:
        arguments: what the user wrote, such as `routing.heads=4` or `model=rt24`.
        sweep: whether several values and `hydra.launcher.*`, which says how jobs are made, are allowed.

    Raises:
        UserError: with a line for each override that cannot be.
    """
    return collect(functools.partial(check_override, sweep=sweep), arguments)


def check_override(argument: str, sweep: bool) -> Override:
    """Check one override; see `check_overrides`."""
    key, text = split_word(argument)
    shown = shorten(argument)
    if key.startswith(("hydra.", "hydra/")):
        if sweep and re.fullmatch(r"hydra\.launcher\.[\w.]+", key):
            return Override(key, (text,))
        raise UserError(f"{shown}: has no effect; of hydra a sweep (-m) takes hydra.launcher.*, beside hardware=slurm")
    refuse_foreign("train", key, argument, composing=True)
    values = listed(key, text)
    if len(values) > 1 and not sweep:
        quotes = f"quote it where it is one: '{key}=\"...\"'"
        raise UserError(f"{shown}: takes one value; several make a sweep (rtx train -m); {quotes}")
    for value in values:
        if key in GROUPS:
            check_option(key, value)
        elif "${" not in value:  # what refers to another key is known when all is composed
            all_fields()[key].read_word(value)
    return Override(key, tuple(values))


def check_option(group: str, name: str) -> None:
    """Refuse an option that `conf/<group>/` does not have, and jobs where nothing makes them."""
    known, shown = options(group), f"{group}={shorten(name)}"
    if name not in known and (group, name) != ("experiment", "null"):
        also = " or null" if group == "experiment" else ""
        hint = f"{nearest(name, known)}; {group} takes {shorten(', '.join(known), 240)}{also}"
        raise UserError(f"{shown}: no such option{hint}")
    jobs = group == "hardware" and name in LAUNCHED
    if jobs and importlib.util.find_spec("hydra_plugins.hydra_submitit_launcher") is None:
        raise UserError(f"{shown}: needs hydra-submitit-launcher and submitit; pip install 'rtx[slurm]' brings them")


def listed(key: str, text: str) -> list[str]:
    """Return the texts of the values that stand behind a key."""
    function, _, inner = text.strip().removesuffix(")").partition("(")
    if function == "glob" and key in GROUPS:
        found = fnmatch.filter(options(key), inner)
    elif function == "range" and key not in GROUPS and all_fields()[key].kind is int:
        try:
            found = [str(number) for number in range(*map(int, inner.split(",")))[: MOST_CELLS + 1]]
        except (ValueError, TypeError, OverflowError):
            raise UserError(f"{key}={shorten(text)}: say range(start,stop) or range(start,stop,step)") from None
    else:
        return COMMA.split(text) if key not in GROUPS else [unquoted(part.strip()) for part in text.split(",")]
    if not 0 < len(found) <= MOST_CELLS:
        raise UserError(f"{key}={shorten(text)}: stands for {'too many values' if found else 'no value'}")
    return found
