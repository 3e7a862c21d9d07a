"""Exported models: a folder with the weights as safetensors, and export.json on the run."""

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch

from rtx.disk import (
    ITSELF,
    MARK,
    LinkRefused,
    make_folder,
    names_inside,
    read_inside,
    remove_leftovers,
    write_inside,
    write_json,
)
from rtx.errors import DAMAGED, RunFailed, UserError
from rtx.runs.folder import EXPORT_FACTS
from rtx.training.checkpoint import Checkpoint, check_layout

WEIGHTS = "model.safetensors"
LARGEST_FACTS = 1 << 24
LARGEST_WEIGHTS = 1 << 36
"""The most bytes of export.json, and of the weights."""
KEPT = ("step", "config", "data", "file")
"""Keys of a checkpoint that export.json keeps."""


def write_export(
    folder: Path,
    checkpoint: Checkpoint,
    files: Mapping[str, bytes],
    name: str = ITSELF,
    former: Sequence[str] = (),
) -> None:
    """Write a model and `files`, by their names, into a folder; `RunFailed` where that fails.

    Args:
        folder: a folder that the user has named.
        name: the export's name below it.
        former: the names of what earlier exports have written there.
    """
    tensors = {name: tensor.clone() for name, tensor in checkpoint["model"].items()}
    weights = safetensors.torch.save(tensors)
    facts: dict[str, Any] = {"sha256": hashlib.sha256(weights).hexdigest()}
    facts |= {key: checkpoint[key] for key in KEPT}
    facts["files"] = [*dict.fromkeys([*names_of(files), *former])]
    try:
        make_folder(folder, name)
        remove_leftovers(folder, name)
        # Written first: it marks the folder as an export even if writing is interrupted.
        write_json(folder, f"{name}/{EXPORT_FACTS}", facts)
        for file, content in {**files, WEIGHTS: weights}.items():
            write_inside(folder, f"{name}/{file}", content)
    except OSError as error:
        other = "output=<folder> names another"
        raise RunFailed(f"cannot write to {folder / name}: {error.strerror}; {other}") from error


def names_of(files: Mapping[str, bytes]) -> list[str]:
    """Return the names of all that is written for an export with these files."""
    return [EXPORT_FACTS, *files, WEIGHTS]


def former_files(folder: Path, name: str) -> list[str] | None:
    """Return the names of what earlier exports have written; None: an older one does not say.

    Raises `UserError` for a folder that has files, but no export.
    """
    place = f"output={folder / name}"
    instead = "name a new or an empty folder"
    try:
        entries = names_inside(folder, name)
    except OSError as error:
        raise UserError(f"{place}: {error.strerror}; {instead}") from error
    others = [entry for entry in entries if not entry.endswith(MARK)]
    if (folder / name).is_file() or (others and EXPORT_FACTS not in others):
        raise UserError(f"{place}: is a file, or holds other files; {instead}")
    if not others:
        return []
    facts: Any = None
    with contextlib.suppress(OSError, *DAMAGED):
        facts = json.loads(read_inside(folder, f"{name}/{EXPORT_FACTS}", LARGEST_FACTS))
    if not isinstance(facts, dict) or not facts.keys() >= {"sha256", *KEPT}:
        other = f"holds an {EXPORT_FACTS} that rtx export did not write"
        raise UserError(f"{place}: {other}; {instead}")
    former = facts.get("files")
    return [str(file) for file in former] if isinstance(former, list) else None


def read_export(folder: Path) -> Checkpoint:
    """Return an exported model as a checkpoint; `RunFailed` where a file is missing or altered."""
    try:
        facts = json.loads(read_inside(folder, EXPORT_FACTS, LARGEST_FACTS))
        weights = read_inside(folder, WEIGHTS, LARGEST_WEIGHTS)
        is_altered = hashlib.sha256(weights).hexdigest() != facts["sha256"]
        if is_altered or facts["file"] not in ("best", "last", "previous"):
            raise ValueError(f"{WEIGHTS} is cut short or altered")
        checkpoint = {name: facts[name] for name in KEPT}
        checkpoint["model"] = safetensors.torch.load(weights)
    except LinkRefused:
        raise
    except (OSError, safetensors.SafetensorError, *DAMAGED) as error:
        raise RunFailed(f"{folder} is a damaged export ({error}): export the run anew") from error
    check_layout(folder / EXPORT_FACTS, checkpoint)
    return checkpoint
