"""What is known of each data set by its name, and what a module says that makes one; nothing heavy is imported here."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

    from rtx.settings.schema import DataConfig

Report = Callable[[str], object]  # takes a line for the user
SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class DataSet:
    """What stands fixed for a name; `origin` is `source(data, root, report) -> Source`, or the dotted path of that."""

    origin: str | Callable[..., Source]
    image: bool = False
    side: int | None = None  # height and width of its images where they are fixed
    words: Mapping[str, int] = field(default_factory=dict)
    """Published words of each split, by which word perplexity divides the total nats, whatever the model's units."""
    kinds: int | None = (
        None  # different words of the training split, `<unk>` and `<eos>` among them
    )
    defaults: Mapping[str, Any] | None = (
        None  # of a set that was registered: what for others stands in conf/data
    )


# What was published of the sets: addresses, sizes, sums, counts. Words of Wikitext-103 are those between blanks and one
# <eos> for every line, blank ones too (Merity et al. 2016); of PG-19 the table of Rae et al. 2020, which cannot be
# recounted (blanks alone give about 1% more).
FACTS: dict[str, Any] = json.loads((Path(__file__).parent / "published.json").read_text())
SETS: dict[str, DataSet] = {
    "stdlib": DataSet("rtx.data.text.own_files"),
    "text": DataSet("rtx.data.text.own_files"),
    "enwik8": DataSet("rtx.data.text.enwik8"),
    "kernel": DataSet("rtx.data.kernel.source"),
    "wikitext103": DataSet("rtx.data.text.wikitext", **FACTS["wikitext103"]["counts"]),
    "pg19": DataSet("rtx.data.text.pg19", **FACTS["pg19"]["counts"]),
    "hub": DataSet("rtx.data.files.source"),
    "cifar10": DataSet("rtx.data.images.benchmark", image=True, side=32),
    "imagenet64": DataSet("rtx.data.images.benchmark", image=True, side=64),
    "images": DataSet("rtx.data.images.own_images", image=True),
}
MADE = (
    "recall",
    "mqar",
    "copy",
    "induction",
)  # as they are asked for (rtx/data/recall.py), from no source
SETS |= {name: DataSet("") for name in MADE}
NAMES = tuple(SETS)
IMAGE_SETS = tuple(name for name, known in SETS.items() if known.image)
TWO_WAYS = ("wikitext103", "cifar10")  # from the hub or (data.fetch=archive) from an archive
HELD_OUT = ("cifar10", "imagenet64")  # valid is held out of train (data.held_out)


def image_side(data: DataConfig) -> int | None:
    """Height and width that the images of a set are known to have: data.size, or the set's own; None: not known."""
    return data.size or SETS[data.name].side


def column_text(table: pa.Table) -> Iterable[bytes]:
    """Yield the bytes of column `text`, str or bytes, of some rows as they are (never decoded)."""
    import pyarrow as pa

    for chunk in table.column("text").chunks:
        yield from (value or b"" for value in chunk.cast(pa.large_binary()).to_pylist())


@dataclass(frozen=True)
class Source:
    """What a store is made from; nothing is fetched or read before `load` is called.

    `load(split, work)` returns the rows of train, valid or test, in order; caches go to `work/cache/<split>`. A row is
    a document, or (where a column `first` says so) a piece of one, cut beside a blank or newline. `read` returns the
    bytes of each of some rows: text, or the sub-pixels of an image. All that is told is of JSON's kinds.
    """

    name: str
    identity: Sequence[
        Any
    ]  # what tells it from another or an older one: a sha256, or sizes and times of files
    place: dict[
        str, Any
    ]  # where the data come from, for people to read; `load` may add what it learns (a revision)
    load: Callable[[str, Path], datasets.Dataset] = field(repr=False)
    read: Callable[[pa.Table], Iterable[bytes]] = field(default=column_text, repr=False)
    stamps: dict[str, Any] = field(
        default_factory=dict
    )  # of protocol, on every result: {"newlines": "drop"}
    image: tuple[int, int] | None = None  # height and width of every image; None: text


def stamp_phrases(stamps: Mapping[str, Any], split: str) -> list[str]:
    """Return in words what the stamps of a store mean for a score on a split."""
    phrases = []
    if stamps.get("newlines") == "drop":
        phrases.append("newlines dropped")
    if stamps.get("lossy"):
        phrases.append("lossy JPEG, not comparable")
    if "scaled" in stamps:
        phrases.append(f"scaled to {stamps['scaled']}, not comparable")
    if stamps.get("variant") == "other":
        phrases.append("not the PixelRNN images, not comparable")
    if stamps.get("complete") is False:
        phrases.append("not the whole published set, not comparable")
    if stamps.get("valid") == "test" and split == "valid":
        phrases.append("valid is the published test split")
    return phrases
