"""What tells two configurations apart: hashes that cells of a sweep and results are named by. No torch, no Hydra."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

NAMELIKE = (
    *("name", "model.name", "optimizer.steps", "hardware.workers", "data.verify", "data.processes"),
    *("trainer.checkpoint_every", "trainer.checkpoint_minutes", "trainer.keep_checkpoints"),
    *("trainer.micro_batch_size", "model.recompute"),
)
OUTSIDE = ("logger.",)
"""Keys, and what keys begin with, that cannot change a bit of what is trained, or that a machine may choose for itself,
as they change it by rounding alone: they tell no cells of a sweep apart."""


def digest(values: Mapping[str, Any]) -> str:
    """Return 12 hexadecimal digits of a configuration's values by their dotted keys, those without effect left out."""
    kept = {key: value for key, value in values.items() if key not in NAMELIKE and not key.startswith(OUTSIDE)}
    return short_hash(kept, 12)


def short_hash(values: Mapping[str, Any], digits: int = 8) -> str:
    """Return hexadecimal digits that tell values apart, in whatever order their keys stand; what JSON lacks as text."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:digits]
