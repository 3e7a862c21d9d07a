"""The part of the schema that `rtx analyze patterns`, `context` and `samples` read beside `analyze` and `sample`."""

from __future__ import annotations

from dataclasses import dataclass

from rtx.limits import ranged


@dataclass
class PicturesConfig:
    """What rtx analyze draws: attention maps, loss by position, samples side by side."""

    text: str = ""
    """Text to look at instead of one from the split (patterns)."""
    start: int | None = ranged(None, low=0)
    """Unit of the split that the text begins with, or number of the image (patterns); unset: drawn by analyze.seed."""
    layer: str | None = None
    """Layers to draw, 0 the lowest, joined by + (patterns); unset: the topmost."""
    head: str | None = None
    """Heads of these layers, counted from 0, joined by + (patterns); unset: all."""
    at: str | None = None
    """Positions to look at, joined by + (patterns); unset: the last one of a text, four of an image."""
    asked: int = ranged(512, low=1, high=2048)
    """Positions of a text that the page can be asked about, the first of `at` amid them (patterns)."""
    windows: int | None = ranged(None, low=1)
    """Windows scored (context; unset: 64), or images completed (samples; unset: 4)."""
    bins: int = ranged(16, low=1, high=256)
    """Ranges of position that the loss is averaged over (context)."""
    samples: int | None = ranged(None, low=1, high=256)
    """Texts of each run (samples; unset: 8), or completions of each image (unset: 4)."""
    given: int | None = ranged(None, low=0)
    """Units of the split that each sample goes on from (samples); unset: none of a text, the upper half of an image."""
