"""What is known of the data sets by their names; what is read of them is in `rtx/data`."""

from __future__ import annotations

from rtx.config import DataConfig

IMAGE_SETS = {"cifar10": 32, "imagenet64": 64, "images": None}
"""Data sets of images, and the side of their images where it is fixed."""

# As in conf/data: units of a set where they are not bytes, and subwords.
USUAL_TOKENIZER = {"wikitext103": "words", "pg19": "sentencepiece"}
USUAL_VOCABULARY = {"pg19": 98_000}

TWO_WAYS = ("wikitext103", "cifar10")
"""Sets that come from the hub or from an archive."""

HELD_OUT = ("cifar10", "imagenet64")
"""Sets whose valid is held out of train."""


def image_side(data: DataConfig) -> int | None:
    """Height and width that the images of a set are known to have: data.size, or the set's own; None: not known."""
    return data.size or IMAGE_SETS[data.name]
