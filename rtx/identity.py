"""What tells two configurations apart: hashes that cells of a sweep and results are named by. No torch, no Hydra."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from rtx.commandline.fields import all_fields

NAMELIKE = (
    *("name", "model.name", "hardware.workers"),
    *("trainer.checkpoint_minutes", "trainer.keep_checkpoints"),
)
OUTSIDE = ("logger.", "sweep.", "report.", "export.", "pictures.", "bench.")
"""Keys, and what keys begin with, that cannot change a bit of the result: they tell no cells of a sweep apart."""

FIRST = {
    "data": "name path length fetch tokenizer vocabulary tokenizer_sample newlines size held_out verify processes "
    "pairs keys values fillers sequences",
    "routing": "selection keys heads layers window clusters logit_scale attend_self update decay init commitment",
    "optimizer": "name lr beta1 beta2 weight_decay schedule warmup steps",
    "hardware": "name devices nodes precision compile deterministic threads",
    "model": "layers heads hidden base window stride summary positions axes max_distance norm ffn ffn_hidden dropout "
    "attention_dropout ffn_dropout embedding tie_embeddings lsh hash_rounds hash_buckets span_ramp span_cost init "
    "recompute",
    "trainer": "steps max_minutes batch_size micro_batch_size clip val_every val_windows checkpoint_every log_every",
    "eval": "split mode stride limit batch_size protocol checkpoint ablate",
    "sample": "length count temperature top_k top_p prompt seed checkpoint",
    "audit": "module length vocabulary double streaming sequences prefixes tolerance split windows positions "
    "checkpoint seed output",
    "analyze": "split sequences draws seed checkpoint",
}
"""The keys that have always counted, and `seed`. One that came later counts where it is not at its default: so a cell
keeps its hash, and its folder, in versions that have more to set."""


def digest(values: Mapping[str, Any]) -> str:
    """Return 12 hexadecimal digits of a configuration's values by their dotted keys, those without effect left out."""
    kept = {key: value for key, value in values.items() if counts(key, value)}
    return short_hash(kept, 12)


def short_hash(values: Mapping[str, Any], digits: int = 8) -> str:
    """Return hexadecimal digits that tell values apart, in whatever order their keys stand; what JSON lacks as text."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:digits]


def counts(key: str, value: Any) -> bool:
    """Tell whether a key with this value tells cells apart."""
    if key in NAMELIKE or key.startswith(OUTSIDE):
        return False
    section, _, name = key.rpartition(".")
    if key == "seed" or name in FIRST.get(section, "").split():
        return True
    field = all_fields().get(key)
    return field is None or value != field.default
