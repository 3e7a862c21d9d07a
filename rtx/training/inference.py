"""A trained model from its run folder or from an export of it (safetensors), on one device."""

import contextlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rtx.data.catalog import data_root, open_data, store_folder
from rtx.data.sets import Report
from rtx.data.store import Store
from rtx.data.synthetic import is_same_task
from rtx.data.tokenizers import Tokenizer, encode_text, load_tokenizer
from rtx.data.windows import sample_windows, windows
from rtx.disk import LinkRefused, read_inside
from rtx.errors import DAMAGED, RunFailed, UserError, written
from rtx.evaluation.protocol import spans
from rtx.evaluation.scores import Score, score_windows
from rtx.model.decoding import generate
from rtx.model.transformer import Transformer
from rtx.progress import progress_bar, say, warn
from rtx.runs.folder import EXPORT_FACTS, is_export, refuse_links
from rtx.settings.derived import local_reach
from rtx.settings.overrides import check_overrides
from rtx.settings.requirements import precision_on
from rtx.settings.run_config import load_run_config, merge, on_one_device
from rtx.settings.run_values import RUN_CONFIG
from rtx.settings.schema import Config, DataConfig, flat, to_dict
from rtx.training.checkpoint import (
    Checkpoint,
    check_config,
    load_for_use,
    load_weights,
)
from rtx.training.export import KEPT, LARGEST_FACTS, read_export
from rtx.training.hardware import prepare_torch, resolve_hardware
from rtx.training.precision import WEIGHT_TYPES

STREAM = 65_536
"""Tokens of a window where the model has a memory."""


@dataclass(frozen=True)
class LoadedRun:
    """A model in evaluation mode; `checkpoint` has the keys KEPT of its checkpoint, no tensors."""

    folder: Path
    model: Transformer
    config: Config
    checkpoint: Checkpoint

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the data.

        Raises `UserError` where the data have none, `RunFailed` where it is lost.
        """
        described = self.checkpoint["data"].get("tokenizer")
        if described is None:
            data = f"data={self.config.data.name}"
            raise UserError(f"{self.folder}: a run on {data} has no text to write or read")
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
        """Return a prompt and `length` tokens after it, as `rtx sample` writes them.

        Args:
            choice: options of `generate`.
        """
        prompt_1P = torch.from_numpy(encode_text(self.tokenizer, prompt))[None]
        generator = torch.Generator().manual_seed(seed)
        tokens = prompt_1P[0].tolist()
        with self.autocast():
            for token in generate(self.model, prompt_1P, length, **choice, generator=generator):
                tokens.append(int(token))
        return self.tokenizer.decode(tokens).decode("utf-8", "replace")

    def score(
        self,
        split: str = "valid",
        limit: int | None = None,
        streaming: bool = False,
        report: Report = print,
    ) -> Score:
        """Score a split of the run's data as `rtx eval` does.

        Args:
            limit: how many windows are scored; None: all.
            report: gets lines on what is scored.
        """
        store = open_data(self.config.data, stores_of(self.folder, self.config.data), report)
        if not self.has_data(store):
            raise UserError(f"{store.name}: these are not the data of the run")
        run = self
        if self.config.model.memory:
            run = replace(self, config=with_stride(self.config))
        tokens = store.split(split)
        score, _ = score_split(run, store, split, tokens, limit, report, streaming=streaming)
        return score

    def facts(self) -> dict[str, Any]:
        return {"name": self.checkpoint["file"], "step": self.checkpoint["step"]}

    def has_data(self, store: Store) -> bool:
        """Whether it was trained on these data, or on the same task with another length."""
        trained = self.checkpoint["data"]
        if trained["fingerprint"] == store.fingerprint:
            return True
        return is_same_task(trained, store.describe())


def run_tokenizer(folder: Path, described: dict[str, Any]) -> Tokenizer:
    """Return the tokenizer that a checkpoint describes; `RunFailed` where its file is another."""
    try:
        return load_tokenizer(described, folder)
    except LinkRefused:
        raise
    except (OSError, RuntimeError, *DAMAGED) as error:
        raise RunFailed(f"{folder}: its tokenizer cannot be read: {error}") from error


def load(folder: str | Path, checkpoint: str = "best", device: str | None = None) -> LoadedRun:
    """Load the best or last checkpoint of a run, or an export, for use from Python.

    Raises:
        UserError: there is no such run or checkpoint, or its config.yaml is not what was trained.
        RunFailed: no checkpoint of the run is whole, or its weights are not numbers.
    """
    default = "cuda" if torch.cuda.is_available() else "cpu"
    used = torch.device(device or default)
    return load_run(Path(folder), run_config(folder), checkpoint, used, say=lambda line: None)


def load_run(
    folder: Path,
    config: Config,
    checkpoint: str,
    device: torch.device,
    vocabulary: int | None = None,
    say: Callable[[str], object] = say,
) -> LoadedRun:
    """As `load`; `vocabulary` is the size of the vocabulary of the data, None: the run's."""
    refuse_links(folder)
    if is_export(folder):
        content = read_export(folder)
    else:
        content = load_for_use(folder / "checkpoints", checkpoint, say)
    check_config(content, to_dict(load_run_config(folder)), folder / RUN_CONFIG)
    file = f"{folder}: {content['file']}.ckpt"
    vocabulary = vocabulary or content["data"].get("vocabulary")
    if not fits_vocabulary(content, vocabulary):
        raise UserError(f"{file} does not fit data of {vocabulary} different units")
    assert isinstance(vocabulary, int)
    with torch.random.fork_rng(devices=[]):
        model = Transformer(config, vocabulary)
    # The type is set before weights are copied into the model.
    if config.hardware.precision in WEIGHT_TYPES:
        model = model.to(WEIGHT_TYPES[config.hardware.precision])
    load_weights(model, content)
    broken = not_numbers(model)
    if broken:
        holds = f"holds NaN or infinities, first in {broken[0]}"
        raise RunFailed(f"{file} (step {content['step']:,}) {holds}")
    model = model.to(device).eval()
    say(f"{file}, step {content['step']:,}, {model.count_parameters():,} parameters")
    return LoadedRun(folder, model, config, {key: content[key] for key in KEPT})


def fits_vocabulary(checkpoint: Checkpoint, vocabulary: Any) -> bool:
    """Return whether a checkpoint has a tensor with a row for each token of a vocabulary."""
    if not isinstance(vocabulary, int):
        return False
    return any(tensor.shape[:1] == (vocabulary,) for tensor in checkpoint["model"].values())


def not_numbers(model: torch.nn.Module) -> list[str]:
    """Return the names of weights with NaN or infinities, and of buffers with NaN.

    Thresholds, which are buffers, may be infinite.
    """
    weights = dict(model.named_parameters())
    buffers = dict(model.named_buffers())
    broken = [name for name, weight in weights.items() if not bool(weight.isfinite().all())]
    return broken + [name for name, buffer in buffers.items() if bool(buffer.isnan().any())]


def stores_of(folder: Path | None, data: DataConfig) -> Path:
    """Return the folder of prepared data: `data_root()`, else the one in the records of the run.

    The second is taken where the first lacks the data.
    """
    root = data_root()
    if folder is None:
        return root
    record = EXPORT_FACTS if is_export(folder) else "environment.json"
    with contextlib.suppress(OSError, *DAMAGED):
        recorded = Path(json.loads(read_inside(folder, record, LARGEST_FACTS))["data"]["folder"])
        is_missing = recorded.exists() and not store_folder(data, root).exists()
        if is_missing and store_folder(data, recorded.parent) == recorded:
            return recorded.parent
    return root


def open_run(folder: Path, config: Config, checkpoint: str) -> tuple[LoadedRun, Store]:
    """Load a run for a command, with the data that its configuration names.

    Raises `UserError` for data of another tokenizer.
    """
    store = open_data(config.data, stores_of(folder, config.data))
    run = load_run(folder, config, checkpoint, prepare_device(config), store.vocabulary)
    trained = run.checkpoint["data"].get("tokenizer") or {}
    here = store.describe().get("tokenizer") or {}
    if any(trained.get(key) != here.get(key) for key in ("name", "sha256")):
        differs = "the tokenizer of these data is not that of the run"
        raise UserError(f"{store.name}: {differs}; name the data as it does")
    if not run.has_data(store):
        risk = "parts of this split may have been trained on"
        warn(f"note: these are not the data of the run ({store.name}); {risk}")
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
    """Score the tokens of a split, and return the score and the number of all windows.

    Raises `UserError` for a memory longer than the split, `RunFailed` for nats that are no number.

    Args:
        limit: how many windows are scored; None: all.
        how: options of `score_windows`.
    """
    memory = run.config.model.memory
    if memory > len(tokens):
        most = f"{len(tokens):,}, the units of split {split}"
        raise UserError(f"memory={memory} must be at most {most}")
    all_windows = windows(len(tokens), *spans(flat(to_dict(run.config))))
    chosen = sample_windows(all_windows, limit, run.config.seed)
    report(f"{len(chosen):,} of {len(all_windows):,} windows of split {split}")
    starts = store.document_starts(split, run.config.data)
    reach = local_reach(run.config)
    options = {"answers": store.answers, "reach": reach, "starts": starts, **how}
    with run.autocast(), progress_bar("windows") as show:
        score = score_windows(run.model, tokens, chosen, **options, on_progress=show)
    if not math.isfinite(score.nats):
        narrow = f"hardware.precision={run.precision} is too narrow for it"
        reason = f"the run has diverged, or {narrow}; nothing is written"
        file = f"{run.checkpoint['file']}.ckpt of {run.folder}"
        raise RunFailed(f"{file} scores {score.nats} nats: {reason}")
    return score, len(all_windows)


def prepare_device(config: Config) -> torch.device:
    """Set up torch for a command, before any tensor is made, and return the device."""
    hardware = resolve_hardware(config)
    prepare_torch(config, hardware)
    return torch.device(hardware.torch_device)


def run_config(folder: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Return a run's configuration with overrides, for work on one device, not compiled."""
    return on_one_device(load_run_config(folder), check_overrides(overrides))


def with_stride(config: Config, stride: int | None = None) -> Config:
    """Return the configuration of an evaluation by windows that advance by `stride` tokens.

    None: by their length, or by `STREAM` where the model has a memory.
    """
    default = STREAM if config.model.memory else None
    return merge(config, [f"trainer.val_stride={written(stride or default)}"])
