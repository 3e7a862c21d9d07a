"""A trained model from its run folder or from an export of it, on one device: to score, to sample, to look into.

An export is the weights as safetensors, and `export.json` with what else a checkpoint knows and their SHA-256.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from rtx.compose import RUN_CONFIG, load_run_config, merge, to_dict, with_values
from rtx.config import SPREAD, Config, precision_on
from rtx.data.catalog import Store, data_root, open_data
from rtx.data.tokenizers import Tokenizer, load_tokenizer
from rtx.disk import remove_leftovers, replace_file, write_json
from rtx.errors import RunFailed, UserError
from rtx.model.transformer import Transformer
from rtx.training.checkpoint import Checkpoint, check_config, check_layout, load_for_use, load_weights
from rtx.training.hardware import prepare_torch, resolve_hardware
from rtx.training.run_folder import EXPORT_FACTS, is_export

WEIGHTS = "model.safetensors"
KEPT = ("step", "config", "data", "file")
"""Keys of a checkpoint that an export keeps, beside the model's state."""


@dataclass(frozen=True)
class LoadedRun:
    """A model in evaluation mode, and what is known of it; `checkpoint`: without tensors (KEPT)."""

    folder: Path
    model: Transformer
    config: Config
    checkpoint: Checkpoint

    @property
    def name(self) -> str:
        return self.checkpoint["file"]

    @property
    def device(self) -> torch.device:
        return self.model.output_VS.device

    @property
    def tokenizer(self) -> Tokenizer:
        """What makes units of bytes and back; `UserError` where the data have none, `RunFailed` where it is lost."""
        described = self.checkpoint["data"].get("tokenizer")
        if described is None:
            raise UserError(f"{self.folder}: a run on data={self.config.data.name} has no tokenizer")
        try:
            return load_tokenizer(described, self.folder)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise RunFailed(f"{self.folder}: its tokenizer cannot be read: {error}") from error

    @property
    def precision(self) -> str:
        """The arithmetic on this device."""
        return precision_on(self.config.hardware, self.device.type == "cuda")

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Return the context that the model computes in: bfloat16 where its precision is bf16."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.precision == "bf16")

    def facts(self) -> dict[str, Any]:
        return {"name": self.name, "step": self.checkpoint["step"]}

    def has_data(self, store: Store) -> bool:
        return self.checkpoint["data"]["fingerprint"] == store.fingerprint


def load(folder: str | Path, checkpoint: str = "best", device: str | None = None) -> LoadedRun:
    """Load a run, or an exported model, for use from Python; nothing of the process changes, random streams included.

    Args:
        folder: the run's, such as outputs/rtx/<run>.
        checkpoint: best or last.
        device: such as cpu; unset: the GPU, if there is one.

    Raises:
        UserError: there is no such run or checkpoint, or its config.yaml is not what was trained.
        RunFailed: no checkpoint of the run is whole, or its weights are not numbers.
    """
    config = on_one_device(load_run_config(folder))
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return load_run(Path(folder), config, checkpoint, where, say=lambda line: None)


def load_run(
    folder: Path,
    config: Config,
    checkpoint: str,
    device: torch.device,
    vocabulary: int | None = None,
    say: Callable[[str], object] = print,
) -> LoadedRun:
    """Load best or last of a run; `vocabulary` of the data that are read, unset: the run's. Errors as `load`."""
    found = read_export(folder) if is_export(folder) else load_for_use(folder / "checkpoints", checkpoint, say)
    check_config(found, to_dict(load_run_config(folder)), folder / RUN_CONFIG)
    where = f"{folder}: {found['file']}.ckpt"
    if not isinstance(vocabulary := vocabulary or found["data"].get("vocabulary"), int):
        raise UserError(f"{where} does not say what the units of its data are")
    if broken := [name for name, tensor in found["model"].items() if bool(tensor.isnan().any())]:
        raise RunFailed(f"{where} (step {found['step']:,}) holds NaN, first in {broken[0]}")
    with torch.random.fork_rng(devices=[]):
        model = Transformer(config, vocabulary)
    load_weights(model, found)
    model = model.to(device, torch.float64 if config.hardware.precision == "fp64" else None).eval()
    say(f"{where}, step {found['step']:,}, {model.count_parameters():,} parameters")
    return LoadedRun(folder, model, config, {key: found[key] for key in KEPT})


def open_run(folder: Path, config: Config, checkpoint: str) -> tuple[LoadedRun, Store]:
    """Load a run for a command, with the data that its configuration names; errors as `load`.

    Raises:
        UserError, RunFailed: the data are not there, or their units are of another tokenizer.
    """
    store = open_data(config.data, data_root())
    run = load_run(folder, config, checkpoint, prepare_device(config), store.vocabulary)
    theirs, ours = (data.get("tokenizer") or {} for data in (run.checkpoint["data"], store.describe()))
    if any(theirs.get(key) != ours.get(key) for key in ("name", "sha256")):
        names = [f"{one.get('name')} {one.get('sha256', '')[:12]}".strip() for one in (theirs, ours)]
        raise UserError(
            f"{store.name}: expected the run's tokenizer ({names[0]}), found a store of another one ({names[1]}); "
            "name the data and the settings of data.* that the run was trained with"
        )
    if not run.has_data(store):
        print(f"note: these are not the data of the run ({store.name}); parts of this split may have been trained on")
    return run, store


def prepare_device(config: Config) -> torch.device:
    """Set up torch for a command as `hardware` says, before any tensor is made, and return where to compute."""
    hardware = resolve_hardware(config)
    prepare_torch(config, hardware)
    return torch.device("cuda" if hardware.accelerator == "gpu" else "cpu")


def run_config(folder: Path, overrides: list[str]) -> Config:
    """Return a run's configuration with overrides, for work on one device."""
    return on_one_device(merge(load_run_config(folder), overrides))


def on_one_device(config: Config) -> Config:
    """Return a configuration for work on one device, not compiled."""
    name = "auto" if config.hardware.name in SPREAD else config.hardware.name
    one = {"hardware.name": name, "hardware.devices": None, "hardware.nodes": 1, "hardware.compile": False}
    return with_values(config, one)


def write_export(folder: Path, checkpoint: Checkpoint, files: Mapping[str, bytes]) -> None:
    """Write a model and what else belongs to it (`files`, by name) into a folder; RunFailed where that cannot be.

    The facts come first: with them it is known for an unfinished export, to be made anew.
    """
    weights = safetensors.torch.save({name: tensor.contiguous() for name, tensor in checkpoint["model"].items()})
    facts = {"sha256": hashlib.sha256(weights).hexdigest(), **{key: checkpoint[key] for key in KEPT}}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)
        write_json(folder / EXPORT_FACTS, facts)
        for name, content in {**files, WEIGHTS: weights}.items():
            replace_file(folder / name, lambda file, content=content: file.write(content))
    except OSError as error:
        raise RunFailed(f"cannot write to {folder}: {error.strerror}; output=<folder> names another") from error


def read_export(folder: Path) -> Checkpoint:
    """Return an exported model as the checkpoint it was made of; RunFailed where a file is missing, cut or altered."""
    try:
        facts, weights = json.loads((folder / EXPORT_FACTS).read_text()), (folder / WEIGHTS).read_bytes()
        if hashlib.sha256(weights).hexdigest() != facts["sha256"]:
            raise RunFailed(f"{folder / WEIGHTS} is cut short or altered: export the run anew")
        checkpoint = {**{name: facts[name] for name in KEPT}, "model": safetensors.torch.load(weights)}
    except FileNotFoundError as error:
        raise RunFailed(f"{error.filename} is missing: export the run anew") from error
    except (OSError, ValueError, LookupError, TypeError, safetensors.SafetensorError) as error:
        raise RunFailed(f"{folder / EXPORT_FACTS} is damaged ({error}): export the run anew") from error
    check_layout(folder / EXPORT_FACTS, checkpoint)
    return checkpoint
