"""What a run draws: units one after the other, pictures, and samples/, of which no file is ever replaced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from rtx.data.images import png_grid
from rtx.data.sets import image_shape
from rtx.disk import replace_file
from rtx.errors import RunFailed
from rtx.model.decoding import generate
from rtx.options import SampleOptions
from rtx.training.inference import LoadedRun


def draw(run: LoadedRun, options: SampleOptions, prompt_BP: torch.Tensor, length: int) -> Iterator[torch.Tensor]:
    """Yield units `[B]` behind a prompt, which may be empty (`[B, 0]`)."""
    generator = torch.Generator().manual_seed(options.seed)
    choice = {"temperature": options.temperature, "top_k": options.top_k, "top_p": options.top_p}
    with run.autocast():
        yield from generate(run.model, prompt_BP, length, **choice, generator=generator)


def save_images(run: LoadedRun, seed: int, columns: Sequence[torch.Tensor], count: int) -> Path:
    """Keep `count` images, drawn as units `[B]` one after the other, as one PNG; what was not drawn is black."""
    images_BN = np.zeros((count, run.config.data.length), dtype=np.uint8)
    for n, unit_B in enumerate(columns):
        images_BN[:, n] = unit_B.numpy()
    picture = png_grid(list(images_BN), image_shape(run.config.data, run.checkpoint["data"]))
    return save_sample(run, seed, picture, "png")


def save_sample(run: LoadedRun, seed: int, content: bytes, kind: str = "txt") -> Path:
    """Keep a text (with its prompt) or a PNG under a name that no earlier sample has, and return its path."""
    samples, name = run.folder / "samples", f"step{run.checkpoint['step']}-seed{seed}"
    taken = {path.stem for path in samples.glob("*.*")}
    number = next(n for n in range(1, len(taken) + 2) if f"{name}-{n}" not in taken)
    path = samples / f"{name}-{number}.{kind}"
    try:
        samples.mkdir(parents=True, exist_ok=True)
        replace_file(path, lambda file: file.write(content))
    except OSError as error:
        raise RunFailed(f"cannot write {path}: {error.strerror}") from error
    return path
