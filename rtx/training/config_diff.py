"""In what two configurations differ, and which differences a run that goes on may have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ALLOWED = {
    *("trainer.steps", "trainer.max_minutes", "trainer.micro_batch_size", "trainer.log_every"),
    *("trainer.val_every", "trainer.val_windows", "trainer.val_stride"),
    *("trainer.checkpoint_every", "trainer.checkpoint_minutes", "trainer.keep_checkpoints"),
    *("optimizer.steps", "model.recompute", "model.ffn_parts"),
    *("name", "model.name", "data.path", "data.verify", "data.processes"),
}
"""What `rtx resume` may change: how long, where, how often; the rest would make another run of it."""
LEARNING = {"dropout", "attention_dropout", "ffn_dropout", "decay", "threshold_rate", "commitment"}
"""Fields of the model and the routing that only say how it learns."""


def may_change(key: str) -> bool:
    """Tell whether a run may go on with another value of a field."""
    return key in ALLOWED or key.startswith(("hardware.", "logger."))


def makes_another(key: str) -> bool:
    """Tell whether a change of a field makes another model, or other data."""
    shaping = key.startswith(("model.", "routing.", "data.")) and not may_change(key)
    return shaping and key.rpartition(".")[2] not in LEARNING


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
