"""Which runs are the same: cells of a sweep, rows of a report, a run and its resumption, processes.

All of it follows from what each key `changes`, which keys a run reads, and since when keys exist
(`rtx/settings/schema.py`).
"""

import functools
import hashlib
import json
import os
from collections.abc import Collection, Mapping
from typing import Any

from rtx.settings.effects import COST, NOTHING, RESULTS, Effect
from rtx.settings.readers import default_where_unread
from rtx.settings.schema import Config, all_fields, flat, to_dict, with_values

REMOVED = {"trainer.checkpoint_minutes": COST, "trainer.keep_checkpoints": COST}
"""Keys that only records of old runs have."""
FORMERLY_IGNORED = ("hardware.products", "hardware.graphs", "hardware.loss")
"""Keys that hashes up to version 0.4 left out, whatever their value."""
FORMER_DEFAULTS = {"hardware.compile": ("auto", False)}
"""Keys whose default has changed to `auto`: the default, and the value that is hashed for it.

So a cell with the default has the hash that earlier versions gave it.
"""


def effect_of(key: str) -> Effect:
    """Return what another value of a key changes; unknown keys are those of old runs."""
    field = all_fields().get(key)
    if field is not None:
        return field.changes
    return NOTHING if key.startswith("logger.") else REMOVED.get(key, RESULTS)


@functools.cache
def tells_rows_apart(key: str) -> bool:
    """Whether runs with different values of a key are different rows of a report.

    A report of a thousand runs looks this up for every key of every run.
    """
    return effect_of(key).new_row


def may_change(key: str) -> bool:
    """Whether a run may be resumed with another value of a key."""
    return effect_of(key).resumable


def ranks_must_agree(key: str) -> bool:
    """Whether all processes of a run must have the same value of a key."""
    return effect_of(key).shared


def digest(values: Mapping[str, Any]) -> str:
    """Return the hash of a cell, 12 hexadecimal digits, from its values by dotted keys.

    Two cells have the same hash if they differ only by keys that tell no cells apart, or that their
    run does not read.
    """
    return digests(values)[0]


def digests(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the hash of a cell, then the other hashes that earlier versions gave it."""
    read = default_where_unread(values)
    up_to_version_4 = without(read, FORMERLY_IGNORED)
    # It covered keys that the run does not read, too.
    up_to_version_3 = without(values, FORMERLY_IGNORED)
    hashes = [hash_of(hashed) for hashed in (read, up_to_version_4, up_to_version_3)]
    return tuple(dict.fromkeys(hashes))


def hash_of(values: Mapping[str, Any]) -> str:
    """Return the hash of the values that tell cells apart.

    A key with its `since` value is left out, as in hashes from before the key existed.
    """
    hashed: dict[str, Any] = {}
    for key, value in values.items():
        if effect_of(key).new_cell and not is_as_before(key, value):
            hashed[key] = value
    for key, (default, former) in FORMER_DEFAULTS.items():
        if hashed.get(key) == default:
            hashed[key] = former
    return short_hash(hashed, 12)


def is_as_before(key: str, value: Any) -> bool:
    """Whether a value is the `since` value of its key."""
    field = all_fields().get(key)
    if field is None or field.since is None:
        return False
    return value == field.since.value


def without(values: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    """Return the values of all other keys."""
    return {key: value for key, value in values.items() if key not in keys}


def short_hash(values: Mapping[str, Any], digits: int = 8) -> str:
    """Return hexadecimal digits of a hash of values; the order of keys does not matter."""
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:digits]


def config_hash(config: Config) -> str:
    """Return the hash of a configuration as a cell of a sweep; see `digest`."""
    return cell_hashes(config)[0]


def cell_hashes(config: Config) -> tuple[str, ...]:
    """Return the names that the folder of a cell may have, that of this version first."""
    return digests(flat(to_dict(with_absolute_path(config))))


def with_absolute_path(config: Config) -> Config:
    """Return a configuration whose paths of data and models mean the same from any folder."""
    paths = {
        "data.path": config.data.path,
        "data.tokenizer_path": config.data.tokenizer_path,
        "model.start": config.model.start,
    }
    path = config.data.path
    if path is not None and config.data.name == "hub" and not os.path.exists(path):
        # The name of a data set on the hub.
        del paths["data.path"]
    absolute: dict[str, str] = {}
    for key, path in paths.items():
        if path is not None:
            absolute[key] = os.path.abspath(os.path.expanduser(path))
    return with_values(config, absolute)
