"""`rtx analyze WHAT RUN`: what a run reads (divergence, patterns), and what far context is worth to it (context).

`divergence`, how far apart the heads of a layer read (the paper's Table 6), stands here, with what all of them share.
"""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rtx.analysis.divergence import divergences
from rtx.data.windows import windows
from rtx.disk import replace_file
from rtx.errors import RunFailed, UserError
from rtx.evaluation.scores import sample_windows
from rtx.identity import short_hash
from rtx.options import read_words, what_to_do
from rtx.progress_bar import progress_bar
from rtx.report.divergence import divergence_table
from rtx.training.inference import open_run, run_config
from rtx.training.run_folder import utc_now


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
    folder, options = words.runs[0], words.options
    config = run_config(folder, words.overrides)
    if config.model.heads < 2:
        raise UserError(f"model.heads={config.model.heads}: a divergence is between two heads of a layer")
    run, store = open_run(folder, config, options.checkpoint)
    tokens = store.split(options.split)
    chosen = sample_windows(windows(len(tokens), config.data.length), options.sequences, options.seed)
    rows = np.stack([tokens[window.start : window.stop] for window in chosen]).astype(np.int64)
    ids_BN = torch.from_numpy(rows).to(run.device)
    began = time.monotonic()
    with run.autocast(), progress_bar("layers") as show:
        found = divergences(run.model, ids_BN, draws=options.draws, seed=options.seed, on_progress=show)
    result = {
        "what": "divergence",
        "layers": [{**asdict(one), "mean": one.mean, "deviation": one.deviation} for one in found],
        "bound": float(np.log(2)),
        "checkpoint": run.facts(),
        "analyze": asdict(options),
        "length": config.data.length,
        "data": store.describe(),
        "seconds": time.monotonic() - began,
        "time": utc_now(),
    }
    print("\n".join(divergence_table(result)))
    asked = {"analyze": result["analyze"], "length": config.data.length, "data": store.fingerprint}
    keep(folder / "analysis" / f"divergence-{run.name}-step{run.checkpoint['step']}-{short_hash(asked)}.json", result)
    return 0


def keep(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result and say where; raises as `save`."""
    save(path, (json.dumps(result, indent=2, ensure_ascii=False) + "\n").encode())
    print(path)


def save(path: Path, content: bytes) -> None:
    """Write a file whole, and the folders above it; `RunFailed` where it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, lambda file: file.write(content))
    except OSError as error:
        raise RunFailed(f"cannot write {path}: {error.strerror}") from error
