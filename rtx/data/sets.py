"""What was published about the data sets, and what the module of a set returns.

Nothing heavy is imported.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

Report = Callable[[str], object]
"""Called with a line for the user."""
SPLITS = ("train", "valid", "test")


# What was published about the sets: addresses, sizes, checksums, counts. The words of Wikitext-103
# are those between blanks, and one <eos> for every line, blank ones too (Merity et al. 2016). Those
# of PG-19 are in the table of Rae et al. 2020; no rule reproduces them (blanks alone give about 1%
# more).
# by path: installed with rtx
FACTS: dict[str, Any] = json.loads((Path(__file__).parent / "published.json").read_text())
WORDS: dict[str, dict[str, int]] = {
    name: facts["counts"]["words"] for name, facts in FACTS.items() if "counts" in facts
}
"""Published words of each split, by which word perplexity divides the total nats."""
KINDS: dict[str, int] = {"wikitext103": FACTS["wikitext103"]["counts"]["kinds"]}
"""Number of different words of the training split, with `<unk>` and `<eos>`."""


def column_text(table: pa.Table) -> Iterable[bytes]:
    """Yield the bytes of column `text`, str or bytes, of some rows; nothing is decoded."""
    import pyarrow as pa

    for chunk in table.column("text").chunks:
        for value in chunk.cast(pa.large_binary()).to_pylist():
            yield value or b""


@dataclass(frozen=True)
class Source:
    """What a store is made from; nothing is fetched or read before `load` is called.

    All values of `identity`, `place` and `stamps` are JSON values.
    """

    name: str
    identity: Sequence[Any]
    """What tells it from another or an older one: a sha256, or sizes and times of files."""
    place: dict[str, Any]
    """Where the data come from, for people; `load` may add what it learns (a revision)."""
    load: Callable[[str, Path], datasets.Dataset] = field(repr=False)
    """`load(split, work)` returns the rows of train, valid or test in order.

    It caches files in `work/cache/<split>`. A row is a document or, where a column `first` says so,
    a piece of one, cut at a blank or newline.
    """
    read: Callable[[pa.Table], Iterable[bytes]] = field(default=column_text, repr=False)
    """Returns the bytes of each of some rows: text, or the sub-pixels of an image."""
    stamps: dict[str, Any] = field(default_factory=dict)
    """Deviations from the published set, for every result: {"newlines": "drop"}."""
    image: tuple[int, int] | None = None
    """Height and width of every image; None for text."""


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
