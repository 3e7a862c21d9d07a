"""samples/: the texts and pictures that a run has made, none of them ever replaced."""

from __future__ import annotations

import os
from pathlib import Path

from rtx.disk import replace_file
from rtx.errors import RunFailed


def save_sample(folder: Path, step: int, seed: int, content: bytes, kind: str = "txt") -> Path:
    """Keep a text or a picture byte for byte under a name that no earlier sample has, and return its path.

    Args:
        folder: the run folder.
        step: of the weights that wrote it.
        seed: of the draws.
        content: what was written, a prompt included, or the PNG of what was drawn.
        kind: ending of the name: txt or png.

    Raises:
        RunFailed: it cannot be written.
    """
    samples, name = folder / "samples", f"step{step}-seed{seed}"
    taken = {path.stem for path in samples.glob("*.*")}
    number = next(n for n in range(1, len(taken) + 2) if f"{name}-{n}" not in taken)
    path = samples / f"{name}-{number}.{kind}"
    try:
        os.makedirs(samples, exist_ok=True)
        replace_file(path, lambda file: file.write(content))
    except OSError as error:
        raise RunFailed(f"cannot write {path}: {error.strerror}") from error
    return path
