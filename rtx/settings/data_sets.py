"""The data sets by name, and which options of the group `data` each of them has."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class DataSet:
    """What is fixed for a name."""

    origin: str | Callable[..., Any]
    """The function `source(data, root, report)`, or its dotted path.

    It returns a `rtx.data.sets.Source`.
    """
    image: bool = False
    side: int | None = None
    """Height and width of images, where they are fixed."""
    defaults: Mapping[str, Any] | None = None
    """Of a registered set: what conf/data has for others."""


RECALL = ("recall", "mqar", "copy", "induction", "masked")
"""Recall tasks."""
LONG_CONTEXT = ("needles", "tracking", "counting")
"""Tasks whose questions are all at the end of a sequence."""
MADE = {
    **dict.fromkeys(RECALL, "rtx.data.recall.RecallStore"),
    "needles": "rtx.data.long_context.NeedleStore",
    "tracking": "rtx.data.long_context.TrackingStore",
    "counting": "rtx.data.long_context.CountingStore",
}
"""Sets that are made on the fly, which have no source, and the dotted path of their stores."""
SETS: dict[str, DataSet] = {
    "stdlib": DataSet("rtx.data.text.own_files"),
    "text": DataSet("rtx.data.text.own_files"),
    "enwik8": DataSet("rtx.data.text.enwik8"),
    "kernel": DataSet("rtx.data.kernel.source"),
    "wikitext103": DataSet("rtx.data.text.wikitext"),
    "pg19": DataSet("rtx.data.text.pg19"),
    "hub": DataSet("rtx.data.hub.source"),
    "cifar10": DataSet("rtx.data.images.benchmark", image=True, side=32),
    "imagenet64": DataSet("rtx.data.images.benchmark", image=True, side=64),
    "images": DataSet("rtx.data.images.own_images", image=True),
    **dict.fromkeys(MADE, DataSet("")),
}
NAMES = tuple(SETS)
IMAGE_SETS = tuple(name for name, data_set in SETS.items() if data_set.image)
TWO_WAYS = ("wikitext103", "cifar10")
"""Sets from the hub, or (data.fetch=archive) from an archive."""
HELD_OUT = ("cifar10", "imagenet64")
"""Sets whose split valid is held out of train (data.held_out)."""
