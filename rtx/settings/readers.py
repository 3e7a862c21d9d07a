"""Which keys a run reads, by the values of other keys: a key without effect is refused."""

import functools
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from rtx.errors import shorten, written
from rtx.settings.fields import Field
from rtx.settings.names import BUILT_IN
from rtx.settings.schema import Config, all_fields, flat, to_dict

COUNTS = ("routing.heads", "routing.layers")
"""Where one of them is 0, no head routes: then a run reads no other key of routing."""


def unread(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the keys that a run does not read, each with the reason, such as `routing.layers=0`.

    `values` are those of a configuration by dotted keys. Those of an older run may lack some.
    """
    choices = [(key, written(values[key])) for key in deciding_keys() if key in values]
    return dict(reasons_unread(tuple(values), tuple(choices)))


@functools.cache
def deciding_keys() -> tuple[str, ...]:
    """Return the keys whose values decide which other keys a run reads."""
    keys = dict.fromkeys(COUNTS)
    for field in all_fields().values():
        keys |= dict.fromkeys(field.read_with)
    return tuple(keys)


@functools.lru_cache(maxsize=1024)
def reasons_unread(
    names: tuple[str, ...], choices: tuple[tuple[str, str], ...]
) -> Mapping[str, str]:
    """Return those of the keys `names` that a run does not read, each with the reason.

    `choices`: the values of `deciding_keys`, as texts. Most runs of a report have the same ones.
    """
    texts = dict(choices)
    fields = all_fields()
    zero_counts = [count for count in COUNTS if texts.get(count) == "0"]
    reasons: dict[str, str] = {}
    for name in fields:
        if name not in names:
            continue
        reason = reason_unread(fields[name], texts)
        if name.startswith("routing.") and name not in zero_counts:
            for count in zero_counts:
                reason = f"{count}=0"
        if reason:
            reasons[name] = reason
    return reasons


def reason_unread(field: Field, texts: Mapping[str, str]) -> str:
    """Return which value of another key leaves a key unread, or ""."""
    for other, readers in field.read_with.items():
        if other in texts and not has_reader(all_fields()[other], texts[other], readers):
            return f"{other}={texts[other]}; it is for {', '.join(readers)}"
    return ""


def has_reader(field: Field, text: str, readers: Collection[str]) -> bool:
    """Whether the text of a value, or one of its parts joined by +, is among the readers.

    It is unknown which keys a pattern or data set of an extension reads: it counts as a reader.
    """
    for part in text.split("+"):
        is_of_extension = field.extensible and part not in BUILT_IN
        if part in readers or is_of_extension:
            return True
    return False


def default_where_unread(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of values by dotted keys, with the default of each key that the run ignores.

    Where no head routes, both counts become 0. Two results that are equal describe the same run.
    """
    fields = all_fields()
    copy = dict(values)
    for name in unread(values):
        copy[name] = fields[name].default
    if any(copy.get(count) == 0 for count in COUNTS):
        for count in COUNTS:
            if count in copy:
                copy[count] = 0
    return copy


def without_effect(config: Config, keys: Iterable[str]) -> dict[str, str]:
    """Return an error line for each of `keys` that is not null and that the run does not read.

    Where no head routes, the other keys of routing get no line.
    """
    values = flat(to_dict(config))
    requested = {*keys}
    switched_off = [f"{count}=0" for count in COUNTS]
    lines: dict[str, str] = {}
    for name, reason in unread(values).items():
        if name not in requested or values[name] is None or reason in switched_off:
            continue
        lines[name] = f"{name}={shorten(written(values[name]))} has no effect with {reason}"
    return lines
