"""Images as people look at them: many of them in a grid, as one PNG."""

from __future__ import annotations

import io
import math
from pathlib import Path

import numpy as np

from rtx.data.disk import disk_errors, write_whole

GAP = 2  # pixels between images
BACKGROUND = 128


def contact_sheet(tokens: np.ndarray, image: tuple[int, int], path: Path, count: int = 64) -> Path:
    """Write a PNG with `count` images, taken evenly over all of them, and return its path.

    Args:
        tokens: sub-pixels, uint8 `[images * height * width * 3]`, memory-mapped or not.
        image: height and width.
        path: of the PNG; it is replaced at once, or stays as it was.
        count: images to show, in order; of fewer all are shown.

    Raises:
        UserError: the folder cannot be written.
        RunFailed: the disk is full.
    """
    size = image[0] * image[1] * 3
    images = len(tokens) // size
    assert images >= 1 and len(tokens) % size == 0, (len(tokens), image)
    shown = [place * images // min(count, images) for place in range(min(count, images))]
    content = png_grid([np.asarray(tokens[place * size : (place + 1) * size]) for place in shown], image)
    with disk_errors(path.parent):
        write_whole(path, content)
    return path


def png_grid(images: list[np.ndarray], image: tuple[int, int], columns: int | None = None) -> bytes:
    """Return a PNG with images, each `[height * width * 3]` sub-pixels, in a grid, row by row.

    One image alone stands without a margin, as large as it is. `columns` unset: a grid about as wide as high.
    """
    from PIL import Image

    height, width = image
    if columns is None:
        columns = math.ceil(math.sqrt(len(images) * height / width)) if len(images) > 1 else 1
        columns = min(len(images), max(1, columns))
    rows = math.ceil(len(images) / columns)
    sheet_HWC = np.full((rows * (height + GAP) - GAP, columns * (width + GAP) - GAP, 3), BACKGROUND, dtype=np.uint8)
    for place, pixels in enumerate(images):
        top, left = place // columns * (height + GAP), place % columns * (width + GAP)
        sheet_HWC[top : top + height, left : left + width] = pixels.reshape(height, width, 3)
    target = io.BytesIO()
    Image.fromarray(sheet_HWC).save(target, "PNG")
    return target.getvalue()
