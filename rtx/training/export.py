"""Exported models: a folder with the weights as safetensors, and export.json on the run."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import safetensors.torch

from rtx.disk import read_file, remove_leftovers, replace_file, write_json
from rtx.errors import DAMAGED, RunFailed
from rtx.runs.folder import EXPORT_FACTS
from rtx.training.checkpoint import Checkpoint, check_layout

WEIGHTS = "model.safetensors"
KEPT = ("step", "config", "data", "file")
"""Keys of a checkpoint that export.json keeps."""


def write_export(folder: Path, checkpoint: Checkpoint, files: Mapping[str, bytes]) -> None:
    """Write a model and `files`, by their names, into a folder; `RunFailed` where that fails."""
    tensors = {name: tensor.clone() for name, tensor in checkpoint["model"].items()}
    weights = safetensors.torch.save(tensors)
    facts = {"sha256": hashlib.sha256(weights).hexdigest()}
    facts |= {key: checkpoint[key] for key in KEPT}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)
        # Written first: it marks the folder as an export even if writing is interrupted.
        write_json(folder / EXPORT_FACTS, facts)
        for name, content in {**files, WEIGHTS: weights}.items():
            replace_file(folder / name, lambda file, content=content: file.write(content))
    except OSError as error:
        other = "output=<folder> names another"
        raise RunFailed(f"cannot write to {folder}: {error.strerror}; {other}") from error


def read_export(folder: Path) -> Checkpoint:
    """Return an exported model as a checkpoint; `RunFailed` where a file is missing or altered."""
    try:
        facts = json.loads(read_file(folder / EXPORT_FACTS))
        weights = read_file(folder / WEIGHTS)
        is_altered = hashlib.sha256(weights).hexdigest() != facts["sha256"]
        if is_altered or facts["file"] not in ("best", "last", "previous"):
            raise ValueError(f"{WEIGHTS} is cut short or altered")
        checkpoint = {name: facts[name] for name in KEPT}
        checkpoint["model"] = safetensors.torch.load(weights)
    except (OSError, safetensors.SafetensorError, *DAMAGED) as error:
        raise RunFailed(f"{folder} is a damaged export ({error}): export the run anew") from error
    check_layout(folder / EXPORT_FACTS, checkpoint)
    return checkpoint
