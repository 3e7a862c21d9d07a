"""A trained model from its run folder or from an export of it (safetensors), on one device."""

import contextlib
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

from rtx.data.catalog import data_root, open_data, store_folder
from rtx.data.sets import Report
from rtx.data.store import Store
from rtx.data.tokenizers import Tokenizer, encode_text, load_tokenizer
from rtx.disk import read_file, remove_leftovers, replace_file, write_json
from rtx.errors import DAMAGED, RunFailed, UserError, written
from rtx.evaluation.protocol import spans
from rtx.evaluation.protocols import local_reach, windows
from rtx.evaluation.scores import Score, sample_windows, score_windows
from rtx.model.decoding import generate
from rtx.model.transformer import Transformer
from rtx.progress import progress_bar, say
from rtx.runs.folder import EXPORT_FACTS, is_export
from rtx.settings.devices import precision_on
from rtx.settings.run_config import RUN_CONFIG, load_run_config, merge
from rtx.settings.schema import SPREAD, Config, DataConfig, flat, to_dict
from rtx.training.checkpoint import (
    Checkpoint,
    check_config,
    check_layout,
    load_for_use,
    load_weights,
)
from rtx.training.hardware import prepare_torch, resolve_hardware
from rtx.training.precision import WEIGHT_TYPES

WEIGHTS = "model.safetensors"
STREAM = 65_536  # units of text that a model with a memory is scored on at a stretch
KEPT = ("step", "config", "data", "file")  # keys of a checkpoint that export.json keeps


@dataclass(frozen=True)
class LoadedRun:
    """A model in evaluation mode, and what is known of it; `checkpoint`: without tensors (KEPT)."""

    folder: Path
    model: Transformer
    config: Config
    checkpoint: Checkpoint

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def tokenizer(self) -> Tokenizer:
        """What makes units of bytes and back; `UserError` where the data have none, `RunFailed` where it is lost."""
        if (described := self.checkpoint["data"].get("tokenizer")) is None:
            raise UserError(
                f"{self.folder}: a run on data={self.config.data.name} has no text to write or read"
            )
        return run_tokenizer(self.folder, described)

    @property
    def precision(self) -> str:
        return precision_on(self.config.hardware, self.device.type == "cuda")

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Return the context that the model computes in: bfloat16 where its precision is bf16."""
        return torch.autocast(
            self.device.type, dtype=torch.bfloat16, enabled=self.precision == "bf16"
        )

    def sample(self, length: int = 1000, prompt: str = "", seed: int = 0, **choice: Any) -> str:
        """Return a prompt and so many units behind it, as `rtx sample` writes them; `choice`: see `generate`."""
        prompt_1P, generator = (
            torch.from_numpy(encode_text(self.tokenizer, prompt))[None],
            torch.Generator(),
        )
        options = {**choice, "generator": generator.manual_seed(seed)}
        with self.autocast():
            units = [
                *prompt_1P[0].tolist(),
                *map(int, generate(self.model, prompt_1P, length, **options)),
            ]
        return self.tokenizer.decode(units).decode("utf-8", "replace")

    def score(
        self,
        split: str = "valid",
        limit: int | None = None,
        streaming: bool = False,
        report: Report = print,
    ) -> Score:
        """Score a split of the run's data, or a sample of `limit` windows, as `rtx eval` does, and `report` what."""
        store = open_data(self.config.data, stores_of(self.folder, self.config.data), report)
        if not self.has_data(store):
            raise UserError(f"{store.name}: these are not the data of the run")
        run = replace(
            self, config=with_stride(self.config) if self.config.model.memory else self.config
        )
        return score_split(
            run, store, split, store.split(split), limit, report, streaming=streaming
        )[0]

    def facts(self) -> dict[str, Any]:
        return {"name": self.checkpoint["file"], "step": self.checkpoint["step"]}

    def has_data(self, store: Store) -> bool:
        return self.checkpoint["data"]["fingerprint"] == store.fingerprint


def run_tokenizer(folder: Path, described: dict[str, Any]) -> Tokenizer:
    """Return the tokenizer that a checkpoint describes; `RunFailed` where its file in the run's folder is another."""
    try:
        return load_tokenizer(described, folder)
    except (OSError, RuntimeError, *DAMAGED) as error:
        raise RunFailed(f"{folder}: its tokenizer cannot be read: {error}") from error


def load(folder: str | Path, checkpoint: str = "best", device: str | None = None) -> LoadedRun:
    """Load the best or last checkpoint of a run, or an export, for use from Python; nothing of the process changes.

    Raises:
        UserError: there is no such run or checkpoint, or its config.yaml is not what was trained.
        RunFailed: no checkpoint of the run is whole, or its weights are not numbers.
    """
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return load_run(Path(folder), run_config(folder), checkpoint, where, say=lambda line: None)


def load_run(
    folder: Path,
    config: Config,
    checkpoint: str,
    device: torch.device,
    vocabulary: int | None = None,
    say: Callable[[str], object] = say,
) -> LoadedRun:
    """As `load`; `vocabulary`: of the data that are read, unset: the run's."""
    found = (
        read_export(folder)
        if is_export(folder)
        else load_for_use(folder / "checkpoints", checkpoint, say)
    )
    check_config(found, to_dict(load_run_config(folder)), folder / RUN_CONFIG)
    where = f"{folder}: {found['file']}.ckpt"
    vocabulary = vocabulary or found["data"].get("vocabulary")
    if not isinstance(vocabulary, int) or all(
        each.shape[:1] != (vocabulary,) for each in found["model"].values()
    ):
        raise UserError(f"{where} does not fit data of {vocabulary} different units")
    with torch.random.fork_rng(devices=[]):
        model = Transformer(config, vocabulary)
    if config.hardware.precision in WEIGHT_TYPES:
        model = model.to(
            WEIGHT_TYPES[config.hardware.precision]
        )  # before weights are copied into it
    load_weights(model, found)
    if broken := not_numbers(model):
        holds = f"holds NaN or infinities, first in {broken[0]}"
        raise RunFailed(f"{where} (step {found['step']:,}) {holds}")
    model = model.to(device).eval()
    say(f"{where}, step {found['step']:,}, {model.count_parameters():,} parameters")
    return LoadedRun(folder, model, config, {key: found[key] for key in KEPT})


def not_numbers(model: torch.nn.Module) -> list[str]:
    """Return the names of weights that are not finite, and of buffers that hold NaN.

    Thresholds, which are buffers, may be infinite.
    """
    weights = dict(model.named_parameters())
    buffers = dict(model.named_buffers())
    broken = [name for name, weight in weights.items() if not bool(weight.isfinite().all())]
    return broken + [name for name, buffer in buffers.items() if bool(buffer.isnan().any())]


def stores_of(folder: Path | None, data: DataConfig) -> Path:
    """Return where the store of a run's data lies: in `data_root()`, or else where the run has recorded it."""
    root = data_root()
    if folder is None:
        return root
    with contextlib.suppress(OSError, *DAMAGED):
        facts = json.loads(
            read_file(folder / (EXPORT_FACTS if is_export(folder) else "environment.json"))
        )
        kept = Path(facts["data"]["folder"])
        if (
            kept.exists()
            and not store_folder(data, root).exists()
            and store_folder(data, kept.parent) == kept
        ):
            return kept.parent
    return root


def open_run(folder: Path, config: Config, checkpoint: str) -> tuple[LoadedRun, Store]:
    """Load a run for a command, with the data that its configuration names; `UserError` for another tokenizer's."""
    store = open_data(config.data, stores_of(folder, config.data))
    run = load_run(folder, config, checkpoint, prepare_device(config), store.vocabulary)
    theirs, ours = (
        data.get("tokenizer") or {} for data in (run.checkpoint["data"], store.describe())
    )
    if any(theirs.get(key) != ours.get(key) for key in ("name", "sha256")):
        raise UserError(
            f"{store.name}: the tokenizer of these data is not that of the run; name the data as it does"
        )
    if not run.has_data(store):
        say(
            f"note: these are not the data of the run ({store.name}); parts of this split may have been trained on"
        )
    return run, store


def score_split(
    run: LoadedRun,
    store: Store,
    split: str,
    tokens: np.ndarray,
    limit: int | None,
    report: Report = print,
    **how: Any,
) -> tuple[Score, int]:
    """Score `tokens`, as a split is read, or a sample of `limit` windows; return the number of all windows, too.

    `how`: see `score_windows`. `UserError` for a memory longer than the split, `RunFailed` for nats that are no number.
    """
    if (memory := run.config.model.memory) > len(tokens):
        raise UserError(
            f"memory={memory} must be at most {len(tokens):,}, the units of split {split}"
        )
    every = windows(len(tokens), *spans(flat(to_dict(run.config))))
    chosen, reach = sample_windows(every, limit, run.config.seed), local_reach(run.config)
    report(f"{len(chosen):,} of {len(every):,} windows of split {split}")
    with run.autocast(), progress_bar("windows") as show:
        score = score_windows(
            run.model, tokens, chosen, answers=store.answers, reach=reach, **how, on_progress=show
        )
    if not math.isfinite(score.nats):
        why = f"the run has diverged, or hardware.precision={run.precision} is too narrow for it; nothing is written"
        raise RunFailed(
            f"{run.checkpoint['file']}.ckpt of {run.folder} scores {score.nats} nats: {why}"
        )
    return score, len(every)


def prepare_device(config: Config) -> torch.device:
    """Set up torch for a command as `hardware` says, before any tensor is made, and return where to compute."""
    hardware = resolve_hardware(config)
    prepare_torch(config, hardware)
    return torch.device("cuda" if hardware.accelerator == "gpu" else "cpu")


def run_config(folder: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Return a run's configuration with overrides, for work on one device, not compiled."""
    config = load_run_config(folder)
    name = "auto" if config.hardware.name in SPREAD else config.hardware.name
    alone = replace(config.hardware, name=name, devices=None, nodes=1, compile=False)
    return merge(
        replace(config, hardware=alone), overrides
    )  # what does not go with other devices, or compiled, may


def with_stride(config: Config, stride: int | None = None) -> Config:
    """Return the configuration of an evaluation by windows that advance by `stride` units; unset: N, or `STREAM`."""
    return merge(
        config,
        [f"trainer.val_stride={written(stride or (STREAM if config.model.memory else None))}"],
    )


def write_export(folder: Path, checkpoint: Checkpoint, files: Mapping[str, bytes]) -> None:
    """Write a model and what else belongs to it (`files`, by name) into a folder; RunFailed where that cannot be."""
    weights = safetensors.torch.save(
        {name: tensor.clone() for name, tensor in checkpoint["model"].items()}
    )
    facts = {
        "sha256": hashlib.sha256(weights).hexdigest(),
        **{key: checkpoint[key] for key in KEPT},
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)
        write_json(
            folder / EXPORT_FACTS, facts
        )  # first: by it an unfinished export is known, to be made anew
        for name, content in {**files, WEIGHTS: weights}.items():
            replace_file(folder / name, lambda file, content=content: file.write(content))
    except OSError as error:
        raise RunFailed(
            f"cannot write to {folder}: {error.strerror}; output=<folder> names another"
        ) from error


def read_export(folder: Path) -> Checkpoint:
    """Return an exported model as the checkpoint it was made of; RunFailed where a file is missing, cut or altered."""
    try:
        facts, weights = json.loads(read_file(folder / EXPORT_FACTS)), read_file(folder / WEIGHTS)
        if hashlib.sha256(weights).hexdigest() != facts["sha256"] or facts["file"] not in (
            "best",
            "last",
            "previous",
        ):
            raise ValueError(f"{WEIGHTS} is cut short or altered")
        checkpoint = {
            **{name: facts[name] for name in KEPT},
            "model": safetensors.torch.load(weights),
        }
    except (OSError, safetensors.SafetensorError, *DAMAGED) as error:
        raise RunFailed(f"{folder} is a damaged export ({error}): export the run anew") from error
    check_layout(folder / EXPORT_FACTS, checkpoint)
    return checkpoint
