"""Which files a data set of the hub names: those of its folder or repository, and no others.

`datasets` reads whatever the data set's README.md names, also absolute paths and addresses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import yaml

from rtx.disk import read_named
from rtx.errors import UserError, shorten

if TYPE_CHECKING:
    import datasets

CARD = "README.md"
SETTINGS = ".huggingface.yaml"
"""`datasets` reads it beside the card; its keys win."""
LARGEST_CARD = 1 << 22
"""The most bytes of one of them."""
NAMING_KEYS = ("data_files", "data_dir")
"""Keys of a configuration in the card that name files."""
FORMATS = (
    "arrow",
    "conll",
    "csv",
    "fasta",
    "fastq",
    "genbank",
    "json",
    "parquet",
    "text",
    "webdataset",
    "xml",
)
"""Formats of `datasets` whose files name no other files; `datasets` needs no package for them."""


def refuse_foreign_names(place: str, folder: Path) -> None:
    """Raise `UserError` where a local folder names files that are not below it.

    Nothing is looked up, so that no server gets a request.
    """
    from huggingface_hub import DatasetCard

    configurations: list[Any] = []
    if (folder / CARD).is_file():
        card = read_named(folder / CARD, LARGEST_CARD).decode()
        configurations.append(DatasetCard(card).data.get("configs"))
    if (folder / SETTINGS).is_file():
        settings = yaml.safe_load(read_named(folder / SETTINGS, LARGEST_CARD))
        if isinstance(settings, dict):
            configurations.append(settings.get("configs"))
    for name in file_names(configurations):
        if not is_below(name):
            rule = "a folder may name only files below it, by relative paths"
            raise UserError(f"{place}: its {CARD} names {shorten(name)!r}: {rule}")


def file_names(configurations: Any) -> Iterator[str]:
    """Yield every text in the values of NAMING_KEYS.

    Aliases of YAML share objects, so each object is visited once.
    """
    visited: set[int] = set()
    waiting: list[tuple[Any, bool]] = [(configurations, False)]
    while waiting:
        value, names_files = waiting.pop()
        if isinstance(value, str) and names_files:
            yield value
        if not isinstance(value, dict | list) or id(value) in visited:
            continue
        visited.add(id(value))
        if isinstance(value, list):
            waiting += [(inner, names_files) for inner in value]
        else:
            waiting += [(inner, names_files or key in NAMING_KEYS) for key, inner in value.items()]


def is_below(name: str) -> bool:
    """Whether a name or a pattern is a path that stays below the folder that it is relative to.

    A colon may begin an address (`http:`), or join two (`zip://a.txt::http:`).
    """
    path = PurePosixPath(name)
    return not (path.is_absolute() or ".." in path.parts or ":" in name or "\\" in name)


def refuse_foreign_format(place: str, builder: datasets.DatasetBuilder) -> None:
    """Raise `UserError` where the files of a data set may name further files."""
    if builder.name not in FORMATS:
        formats = ", ".join(FORMATS)
        raise UserError(f"{place}: expected files of {formats}, found {builder.name}")


def refuse_foreign_files(
    place: str, builder: datasets.DatasetBuilder, hashed: Iterable[Path]
) -> None:
    """Raise `UserError` where a local folder would read other files than `hashed`.

    `hashed` are those that the identity of the data covers.
    """
    own_names = {path.resolve() for path in hashed}
    for names in (builder.config.data_files or {}).values():
        for name in names:
            if Path(name).resolve() not in own_names:
                rule = "is hidden, or not below that folder"
                raise UserError(f"{place}: names {shorten(str(name))}, which {rule}")
