"""`rtx analyze WHAT RUN`: finds what is asked for; and `divergence`, how far apart heads of a layer read (Table 6)."""

from __future__ import annotations

import importlib
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rtx.analysis.divergence import Divergence, divergences
from rtx.commands.eval import check_fingerprint
from rtx.config import Config
from rtx.data.catalog import data_root, open_data
from rtx.data.windows import windows
from rtx.errors import RunFailed, UserError
from rtx.evaluation.scores import sample_windows
from rtx.identity import short_hash
from rtx.options import DivergenceOptions, read_words, what_to_do
from rtx.report.divergence import divergence_table
from rtx.training.files import replace_file
from rtx.training.metrics import utc_now
from rtx.training.progress import Progress, clock
from rtx.training.trained import Trained, load_trained, run_config


def main(arguments: list[str]) -> int:
    """Run `rtx analyze WHAT RUN [overrides]`; all but divergence have a file of their own beside this one.

    Raises:
        UserError: no such analysis or run, a wrong option, a model in which no layer has two heads.
        RunFailed: no checkpoint is whole, or the result cannot be written.
    """
    what, rest = what_to_do("analyze", arguments)
    if what == "divergence":
        return divergence(rest)
    return importlib.import_module(f"rtx.commands.analyze_{what}").main(rest)


def divergence(arguments: list[str]) -> int:
    """Run `rtx analyze divergence RUN [overrides]`; the result stands in the run's folder, too; raises as `main`."""
    words = read_words("analyze divergence", arguments)
    folder, wish = words.runs[0], words.options
    config = run_config(folder, words.overrides)
    if config.model.heads < 2:
        raise UserError(f"model.heads={config.model.heads}: a divergence is between two heads of a layer")
    store = open_data(config.data, data_root())
    trained = load_trained(folder, config, wish.checkpoint, store.vocabulary)
    check_fingerprint(store, trained)
    tokens = store.split(wish.split)
    begin = time.monotonic()
    found = measure(trained, config, wish, tokens)
    result = {
        "what": "divergence",
        "layers": [{**asdict(one), "mean": one.mean, "deviation": one.deviation} for one in found],
        "bound": float(np.log(2)),
        "checkpoint": {"name": trained.name, "step": trained.checkpoint["step"]},
        "analyze": asdict(wish),
        "length": config.data.length,
        "data": store.describe(),
        "seconds": time.monotonic() - begin,
        "time": utc_now(),
    }
    print("\n".join(divergence_table(result)))
    key = short_hash({name: result[name] for name in ("analyze", "length")} | {"data": store.fingerprint})
    keep(folder / "analysis" / f"divergence-{trained.name}-step{trained.checkpoint['step']}-{key}.json", result)
    return 0


def measure(trained: Trained, config: Config, wish: DivergenceOptions, tokens: np.ndarray) -> list[Divergence]:
    """Return the divergences on seeded sequences of a split, behind a progress line."""
    chosen = sample_windows(windows(len(tokens), config.data.length), wish.sequences, wish.seed)
    rows = np.stack([tokens[window.start : window.stop] for window in chosen]).astype(np.int64)
    device = trained.model.output_VS.device
    line, begin = Progress(sys.stderr), time.monotonic()

    def show(done: int, total: int) -> None:
        left = (time.monotonic() - begin) / done * (total - done)
        line.show(f"{done}/{total} layers | {clock(left)} left")

    with trained.arithmetic():
        found = divergences(
            trained.model, torch.from_numpy(rows).to(device), draws=wish.draws, seed=wish.seed, on_progress=show
        )
    line.clear()
    return found


def keep(path: Path, result: dict[str, Any]) -> None:
    """Write a result and say where; raises as `save`."""
    save(path, (json.dumps(result, indent=2, ensure_ascii=False) + "\n").encode())
    print(path)


def save(path: Path, content: bytes) -> None:
    """Write a file whole, and the folders above it.

    Raises:
        RunFailed: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, lambda file: file.write(content))
    except OSError as error:
        raise RunFailed(f"cannot write {path}: {error.strerror}") from error
