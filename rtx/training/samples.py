"""samples/: the texts and pictures that a run has made, none of them ever replaced."""

from __future__ import annotations

from pathlib import Path

from rtx.disk import replace_file
from rtx.errors import RunFailed


def save_sample(folder: Path, step: int, seed: int, content: bytes, kind: str = "txt") -> Path:
    """Keep a text (with its prompt) or a PNG byte for byte under a name that no earlier sample has; returns its path.

    Raises:
        RunFailed: it cannot be written.
    """
    samples, name = folder / "samples", f"step{step}-seed{seed}"
    taken = {path.stem for path in samples.glob("*.*")}
    number = next(n for n in range(1, len(taken) + 2) if f"{name}-{n}" not in taken)
    path = samples / f"{name}-{number}.{kind}"
    try:
        samples.mkdir(parents=True, exist_ok=True)
        replace_file(path, lambda file: file.write(content))
    except OSError as error:
        raise RunFailed(f"cannot write {path}: {error.strerror}") from error
    return path
