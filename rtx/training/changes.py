"""In what two configurations differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FREE = {
    *("trainer.steps", "trainer.max_minutes", "optimizer.steps"),
    *("trainer.val_every", "trainer.val_windows", "trainer.val_stride"),
    *("trainer.checkpoint_every", "trainer.checkpoint_minutes", "trainer.keep_checkpoints", "trainer.log_every"),
    *("hardware.name", "hardware.workers"),
    *("name", "model.name", "data.path", "data.verify", "data.processes"),
}
"""Fields that may change without a change of one bit of the weights up to a given step."""

LEARNING = (
    "dropout",
    "attention_dropout",
    "ffn_dropout",
    "recompute",
    "ffn_parts",
    "decay",
    "threshold_rate",
    "commitment",
)
"""Fields of the model and the routing that only say how it learns."""


def makes_another(key: str, of: str | tuple[str, ...] = ("model.", "routing.", "data.")) -> bool:
    """Tell whether a change of a field makes another model, or other data; `of`: what its name begins with."""
    return key.startswith(of) and key not in FREE and key.rpartition(".")[2] not in LEARNING


def differences(
    old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "", *, shared: bool = False
) -> dict[str, tuple[Any, Any]]:
    """Return the fields (dotted names) whose values differ between two configurations, with both values.

    `shared`: leave out fields that only one of them has, which is of another version of rtx.
    """
    found: dict[str, tuple[Any, Any]] = {}
    for key in sorted(old.keys() & new.keys() if shared else old.keys() | new.keys()):
        before, after = old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            found |= differences(before, after, f"{prefix}{key}.", shared=shared)
        elif before != after:
            found[prefix + key] = (before, after)
    return found
