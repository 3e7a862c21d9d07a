"""Words of Hydra's that rtx does not take: what a user of Hydra writes instead. No torch, no Hydra, no YAML."""

import math
import re
from collections.abc import Collection
from fnmatch import fnmatchcase

from rtx.settings.fields import convert

COMMA = re.compile(r""",(?=(?:[^"']|"[^"]*"|'[^']*')*$)""")
"""A comma outside quotes: in a sweep it parts several values."""
CALL = re.compile(r"(range|choice|glob|interval|shuffle|sort|tag)\((.*)\)", re.DOTALL)
INTEGERS = re.compile(r"(-?\d{1,9})\.\.(-?\d{1,9})")
MOST = 12
"""Numbers that a message lists at the most."""
WIDTH = 240
"""Characters of a list of names in a message at the most."""


def hydra_flag(flag: str) -> str:
    """Return what to use instead of a flag of Hydra's, to stand behind its refusal, or ""."""
    name = flag.partition("=")[0]
    if name in ("-cn", "--config-name"):
        return "; model= and experiment= choose presets: model=tiny"
    if name in ("-cp", "-cd", "--config-path"):
        return "; --config-dir <folder> adds presets of your own"
    return ""


def hydra_values(text: str, values: Collection[str] = ()) -> str | None:
    """Return the list, with commas, that Hydra's range(), choice() or glob(), or a..b, stands for.

    Empty where it stands for none that can be listed; None where the text is nothing of the kind. `values` are those
    that a key takes, of which glob() chooses.
    """
    if spread := INTEGERS.fullmatch(text.strip()):
        first = int(spread[1])
        last = int(spread[2])
        return steps(first, last + 1, 1)
    call = CALL.fullmatch(text.strip())
    if call is None:
        return None
    name = call[1]
    arguments = [part.strip() for part in COMMA.split(call[2])]
    if name == "range":
        return of_range(arguments)
    if name == "choice":
        return whole_names(arguments)
    if name == "glob":
        return whole_names([value for value in values if fnmatchcase(value, arguments[0])])
    return ""


def whole_names(names: list[str]) -> str:
    """Return names with commas between, a long list cut after a complete name."""
    text = ",".join(names)
    return text if len(text) <= WIDTH else f"{text[:WIDTH].rpartition(',')[0]},..."


def of_range(arguments: list[str]) -> str:
    """Return the values of range(stop), range(start, stop) or range(start, stop, step), without the stop."""
    named = {"start": "0", "stop": "", "step": "1"}
    order = ("stop",) if len(arguments) == 1 else ("start", "stop", "step")
    if len(arguments) > 3:
        return ""
    for place, argument in zip(order, arguments, strict=False):
        name, equals, value = argument.rpartition("=")
        named[name.strip() if equals else place] = value.strip()
    start, stop, step = (number(named[name]) for name in ("start", "stop", "step"))
    if start is None or stop is None or not step:
        return ""
    return steps(start, stop, step)


def number(text: str) -> int | float | None:
    """Return the number that a text is, a whole one as int; None where it is none."""
    whole = convert(int, text)
    return convert(float, text) if whole is None else whole


def steps(start: float, stop: float, step: float) -> str:
    """Return start, start + step, ... before stop, without the middle of a long list; empty where there is none."""
    length = (stop - start) / step
    count = max(0, math.ceil(length)) if math.isfinite(length) else 0
    shown = [f"{start + step * place:.12g}" for place in range(min(count, MOST))]
    if count > MOST:
        shown[3:] = ["...", f"{start + step * (count - 1):.12g}"]
    return ",".join(shown)
