"""The one place that maps keys of records of earlier versions to the keys of today."""

from collections.abc import Mapping
from typing import Any, cast

from rtx.data.sets import stamp_phrases

FOREIGN = " (not the run's own data)"
"""Follows the name of data in a protocol where they are not those of the run."""
PREFIXES = {"train": "train/", "valid": "valid/", "final": "valid/final_"}
"""The prefix of a metric's name, by the `kind` that rows of earlier versions have."""
MARK_OF_EARLIER_ROW = b'"kind"'
"""Is in lines of metrics.jsonl by earlier versions alone."""
FORMER_PREFIX = "val_"
"""The prefix that earlier versions gave the metrics of a validation."""
FORMER_NAMES = {"se": "standard_error"}


def metrics_row(row: Any) -> Any:
    """Return a row of metrics.jsonl with today's names: `valid/bits`, where it had `val_bits`."""
    values = json_object(row)
    kind = values.get("kind")
    if not isinstance(kind, str):
        return row
    prefix = PREFIXES.get(kind, f"{kind}/")
    mapped: dict[str, Any] = {}
    for key, value in values.items():
        if key in ("step", "time"):
            mapped[key] = value
        elif key != "kind":
            name = key.removeprefix(FORMER_PREFIX)
            mapped[f"{prefix}{FORMER_NAMES.get(name, name)}"] = value
    return mapped


def json_object(value: Any) -> dict[str, Any]:
    """Return a value of JSON if it is an object, else an empty one."""
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}


def json_array(value: Any) -> list[Any]:
    """Return a value of JSON if it is an array, else an empty one."""
    return cast(list[Any], value) if isinstance(value, list) else []


def kind_of(metrics: Mapping[str, Any]) -> str:
    """Return the kind of a row by the names of its metrics: `train`, `valid` or `final`."""
    names = "\n".join(metrics)
    # Reports read millions of rows, and one search is faster than a loop over the names.
    if names.startswith("valid/final_") or "\nvalid/final_" in names:
        return "final"
    first = next(iter(metrics), "")
    return first.partition("/")[0]


def evaluation(record: Any) -> Any:
    """Return a record of eval/ with its protocol apart, and its bits by this name."""
    values = json_object(record)
    if not values or isinstance(values.get("protocol"), dict):
        return record
    unit = json_object(values.get("data")).get("unit")
    return {
        **values,
        "protocol": protocol(values),
        "bits": values.get(f"bits_per_{unit}"),
        "sees_future": values.get("selection_sees_future"),
        "selection": selection_of(values.get("protocol")),
    }


def protocol(record: dict[str, Any]) -> dict[str, Any]:
    """Return the protocol of a record of eval/ that has its parts among other keys."""
    data = json_object(record.get("data"))
    name = data.get("name")
    if not record.get("own_data"):
        name = f"{name}{FOREIGN}"
    split = record.get("split")
    stamps = stamp_phrases(json_object(data.get("stamps")), str(split))
    stamps += json_array(record.get("memory"))
    if record.get("read_as") == "released":
        stamps.append("protocol=released")
    return {
        "split": split,
        "mode": record.get("mode"),
        "unit": data.get("unit"),
        "data": name,
        "fingerprint": data.get("fingerprint"),
        "length": record.get("length"),
        "stride": record.get("stride"),
        "windows": record.get("windows") if record.get("partial") else None,
        "ablate": record.get("ablate"),
        "stamps": stamps,
    }


def selection_of(line: Any) -> str:
    """Return the part on the selection of an earlier version's line on a protocol."""
    _, _, end = str(line or "").rpartition("; ")
    return end.rpartition(": ")[0]


def analysis(record: Any) -> Any:
    """Return a record of analysis/ with today's keys.

    The positions of patterns are now `units`. A protocol was once a text, and is left out.
    """
    values = json_object(record)
    if not values:
        return record
    mapped = dict(values)
    if values.get("what") == "patterns" and "positions" in values:
        mapped["units"] = mapped.pop("positions")
    if isinstance(values.get("protocol"), str):
        del mapped["protocol"]
    return mapped


def price(record: Any) -> Any:
    """Return the price of an audit with the positions of each window, which once were the same."""
    values = json_object(record)
    positions = json_array(values.get("positions"))
    if not positions or isinstance(positions[0], list):
        return record
    return {**values, "positions": [positions] * int(values.get("windows") or 1)}
