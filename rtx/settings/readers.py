"""Which keys a run reads, by the values of other keys: a key without effect is refused."""

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
    zero_counts = [count for count in COUNTS if values.get(count) == 0]
    reasons = {}
    for name, field in all_fields().items():
        if name not in values:
            continue
        reason = reason_unread(field, values)
        if name.startswith("routing.") and name not in zero_counts:
            for count in zero_counts:
                reason = f"{count}=0"
        if reason:
            reasons[name] = reason
    return reasons


def reason_unread(field: Field, values: Mapping[str, Any]) -> str:
    """Return which value of another key leaves a key unread, or ""."""
    for other, readers in field.read_with.items():
        if other in values and not has_reader(all_fields()[other], values[other], readers):
            return f"{other}={written(values[other])}; it is for {', '.join(readers)}"
    return ""


def has_reader(field: Field, value: Any, readers: Collection[str]) -> bool:
    """Whether a value, or one of its parts joined by +, is among the readers.

    It is unknown which keys a pattern or data set of an extension reads: it counts as a reader.
    """
    for part in written(value).split("+"):
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
    lines = {}
    for name, reason in unread(values).items():
        if name not in requested or values[name] is None or reason in switched_off:
            continue
        lines[name] = f"{name}={shorten(written(values[name]))} has no effect with {reason}"
    return lines
