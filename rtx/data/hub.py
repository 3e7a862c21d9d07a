"""Any text of the Hugging Face hub, or a local folder in a form that `datasets` reads: data=hub."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rtx.config import DataConfig
from rtx.data.fetch import INSTEAD, reason_of, unreachable
from rtx.data.files import NAMES, identity_of, walk
from rtx.data.sets import Report, Source, column_text
from rtx.errors import RunFailed, UserError

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

CUTS = {"train": (0, 90), "valid": (90, 95), "test": (95, 100)}
"""Percent of the rows, for a data set that has no splits."""


def source(data: DataConfig, root: Path, report: Report) -> Source:
    """Return the rows of column data.column, each a document, of data.path: owner/name, or a folder.

    Without data.revision the newest one is taken when a store is made; its commit stands in the record of the store and
    of every run on it. Splits are those of the data set; one that has only train is cut 90/5/5 by rows.
    """
    path = data.path or ""
    folder = Path(path).expanduser()
    local = folder.is_dir()
    if not local and path.count("/") != 1:
        raise UserError(f"data.path={path}: expected a folder, or owner/name of a data set of the hub, found neither")
    place: dict[str, Any] = {"place": path if local else f"hf://datasets/{path}", "column": data.column}
    identity = [
        path,
        data.subset,
        data.column,
        data.revision,
        *(identity_of(walk(folder, leave_out=root)) if local else []),
    ]

    def load(split: str, work: Path) -> datasets.Dataset:
        if not local:
            place["revision"] = commit_of(path, data.revision, work)
        return rows_of(loaded(data, str(folder) if local else path, place.get("revision"), work), split, data)

    return Source("hub", identity, place, load, read=with_newline)


def commit_of(repository: str, revision: str | None, work: Path) -> str:
    """Return the commit that a preparation began with: that of `revision`, or the newest; kept in `work`.

    Raises:
        RunFailed: the hub cannot be asked.
    """
    from huggingface_hub import constants, dataset_info

    kept = work / "cache" / "revision"
    if not kept.exists():
        problem = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else unreachable(constants.ENDPOINT)
        try:
            if problem:
                raise ConnectionError(problem)
            kept.write_text(str(dataset_info(repository, revision=revision).sha))
        except Exception as error:
            where = f"hf://datasets/{repository}"
            raise RunFailed(f"{where}: cannot be fetched: {reason_of(error)[:300]}; {INSTEAD}") from error
    return kept.read_text()


def loaded(data: DataConfig, path: str, revision: str | None, work: Path) -> datasets.DatasetDict:
    """Return all splits of the data set.

    Raises:
        UserError: it cannot be loaded, in one line.
    """
    import datasets
    from datasets.exceptions import DatasetsError

    try:
        found = datasets.load_dataset(path, data.subset, revision=revision, cache_dir=str(work / "cache" / "hub"))
    except (ValueError, RuntimeError, FileNotFoundError, DatasetsError) as error:
        raise UserError(f"data.path={data.path}: cannot be loaded: {reason_of(error)[:300]}") from error
    assert isinstance(found, datasets.DatasetDict)
    return found


def rows_of(found: datasets.DatasetDict, split: str, data: DataConfig) -> datasets.Dataset:
    """Return the column of text of a split, cut out of train where the data set has no such split.

    Raises:
        UserError: it has no training split, or no such column of text.
    """
    here = {ours: next((name for name in names if name in found), None) for ours, names in NAMES.items()}
    if here["train"] is None:
        raise UserError(f"data.path={data.path}: expected a split train, found {', '.join(map(str, found))}")
    rows = found[here[split] or here["train"]]
    if data.column not in rows.column_names or str(rows.features[data.column].dtype) not in KINDS:
        columns = ", ".join(f"{name} ({rows.features[name].dtype})" for name in rows.column_names)
        raise UserError(f"data.column={data.column}: expected a column of text, found {columns}")
    if not (here["valid"] and here["test"]) and split in shares(here):
        begin, end = (len(rows) * percent // 100 for percent in shares(here)[split])
        rows = rows.select(range(begin, end))
    rows = rows.select_columns([data.column])
    return rows if data.column == "text" else rows.rename_column(data.column, "text")


KINDS = ("string", "large_string", "binary", "large_binary")


def shares(here: dict[str, str | None]) -> dict[str, tuple[int, int]]:
    """Return which percent of train stand for train and the splits that are missing."""
    missing = [split for split in ("valid", "test") if here[split] is None]
    return CUTS if len(missing) == 2 else {"train": (0, 95), missing[0]: (95, 100)}


def with_newline(table: pa.Table) -> list[bytes]:
    """Return the text of each row, with a newline behind it where it has none."""
    return [text if text.endswith(b"\n") or not text else text + b"\n" for text in column_text(table)]
