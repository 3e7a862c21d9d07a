"""Exported models: weights as safetensors, and `export.json` with what else a checkpoint knows and their SHA-256."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError

from rtx.disk import remove_leftovers, replace_file, write_json
from rtx.errors import RunFailed, UserError
from rtx.training.checkpoint import Checkpoint, check_layout
from rtx.training.run_folder import EXPORT_FACTS

WEIGHTS = "model.safetensors"
FORMAT = 1
"""Version of the layout; a folder of a later one is refused."""
KEPT = ("step", "config", "data", "file")
"""Keys of a checkpoint that an export keeps, beside the model's state."""


def write_export(folder: Path, checkpoint: Checkpoint, files: Mapping[str, bytes]) -> None:
    """Write a model and what else belongs to it (`files`, by name) into a folder; RunFailed where that cannot be.

    The facts come first: with them it is known for an unfinished export, to be made anew.
    """
    weights = safetensors.torch.save({name: tensor.contiguous() for name, tensor in checkpoint["model"].items()})
    facts = {"format": FORMAT, "sha256": hashlib.sha256(weights).hexdigest(), **{k: checkpoint[k] for k in KEPT}}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)
        write_json(folder / EXPORT_FACTS, facts)
        for name, content in {**files, WEIGHTS: weights}.items():
            replace_file(folder / name, lambda file, content=content: file.write(content))
    except OSError as error:
        raise RunFailed(f"cannot write to {folder}: {error.strerror}; output=<folder> names another") from error


def read_export(folder: Path) -> Checkpoint:
    """Return an exported model as the checkpoint it was made of, its tensors in CPU memory.

    Raises:
        RunFailed: a file is missing, cut short or altered.
        UserError: it comes from a later version.
    """
    try:
        facts: dict[str, Any] = json.loads((folder / EXPORT_FACTS).read_text())
        if (known := int(facts["format"])) > FORMAT:
            raise UserError(f"{folder} has format {known}; this rtx reads up to {FORMAT}: update rtx")
        weights = (folder / WEIGHTS).read_bytes()
        if hashlib.sha256(weights).hexdigest() != facts["sha256"]:
            raise RunFailed(f"{folder / WEIGHTS} is cut short or altered: export the run anew")
        checkpoint = {**{name: facts[name] for name in KEPT}, "model": safetensors.torch.load(weights)}
        check_layout(folder / EXPORT_FACTS, checkpoint)
    except FileNotFoundError as error:
        raise RunFailed(f"{error.filename} is missing: export the run anew") from error
    except UserError:
        raise
    except (OSError, ArithmeticError, ValueError, LookupError, TypeError, SafetensorError) as error:
        raise RunFailed(f"{folder / EXPORT_FACTS} is damaged ({error}): export the run anew") from error
    return checkpoint
