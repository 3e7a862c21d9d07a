"""Data sets of the Hugging Face hub: files by pattern, and data=hub, which `datasets` loads."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rtx.data.download import INSTEAD, unreachable
from rtx.data.files import SPLIT_NAMES, file_sha256, identity_of, load_errors, reason_of, walk
from rtx.data.hub_files import (
    SETTINGS,
    refuse_foreign_files,
    refuse_foreign_format,
    refuse_foreign_names,
)
from rtx.data.sets import Report, Source, column_text
from rtx.disk import is_file_inside, read_inside, write_inside
from rtx.errors import RunFailed, UserError
from rtx.paths import expand_path
from rtx.settings.schema import DataConfig

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

TEXTS = ("string", "large_string", "binary", "large_binary")
CUT_PERCENT = 5
"""Percent of the rows of train that a missing split gets."""
LONGEST_REASON = 300


def hub_files(
    repository: str,
    patterns: Sequence[str],
    revision: str | None,
    report: Report,
) -> Path:
    """Return the folder of a data set's files that match `patterns`; its name is a commit.

    Files come from the hub's cache where they are there, which needs no network. RunFailed where
    there are none, or one has another sha256 than its name says.
    """
    from huggingface_hub import constants

    address = f"hf://datasets/{repository}"
    if revision:
        address += f"@{revision}"
    problem = "HF_HUB_OFFLINE is set"
    if not constants.HF_HUB_OFFLINE:
        problem = unreachable(constants.ENDPOINT)
    cached = f"what is in {constants.HF_HUB_CACHE} is taken from there"
    report(f"{address}: {problem or 'fetching'}; {cached}")
    try:
        is_offline = problem is not None
        folder, files = snapshot(repository, patterns, revision, is_offline)
    # The hub's client raises errors of its HTTP library, which need not be OSError.
    except Exception as error:
        reason = problem or reason_of(error)[:LONGEST_REASON]
        raise RunFailed(f"{address}: cannot be fetched: {reason}; {INSTEAD}") from error
    for path in files:
        check_blob(path)
    return folder


def snapshot(
    repository: str,
    patterns: Sequence[str],
    revision: str | None,
    is_offline: bool,
) -> tuple[Path, list[Path]]:
    """Return the folder of a snapshot and its files; FileNotFoundError where it has none."""
    from huggingface_hub import snapshot_download

    folder = Path(
        snapshot_download(
            repository,
            repo_type="dataset",
            revision=revision,
            allow_patterns=list(patterns),
            local_files_only=is_offline,
        )
    )
    files: list[Path] = []
    for pattern in patterns:
        files += folder.glob(pattern)
    if not files:
        raise FileNotFoundError(f"it has no {' or '.join(patterns)}")
    return folder, files


def check_blob(path: Path) -> None:
    """Raise RunFailed where a large file of the hub's cache differs from its sha256.

    The cache names large files by their sha256.
    """
    blob = path.resolve()
    if not re.fullmatch("[0-9a-f]{64}", blob.name):
        return
    actual = file_sha256(path)
    if actual != blob.name:
        raise RunFailed(
            f"{path}: expected sha256 {blob.name}, found {actual}; delete {blob}, then again"
        )


def source(data: DataConfig, root: Path, report: Report) -> Source:
    """Return the rows of column data.column, each a document, of data.path.

    That is owner/name on the hub, or a folder. Without data.revision it is the newest commit, which
    is recorded. Splits that are missing are cut from the end of train, CUT_PERCENT of its rows
    each.
    """
    path = data.path or ""
    folder = expand_path(path, "data.path")
    is_local = folder.is_dir()
    files: list[Path] = []
    identity: list[Any] = [path, data.subset, data.column, data.revision]
    if is_local:
        files = walk(folder, leave_out=root)
        identity += identity_of(files + [path for path in [folder / SETTINGS] if path.is_file()])
    elif path.count("/") != 1 or folder.exists():
        expected = "a folder, or owner/name of a data set of the hub"
        actual = "a file" if folder.exists() else "neither"
        raise UserError(f"data.path={path}: expected {expected}, found {actual}")
    origin = path if is_local else f"hf://datasets/{path}"
    place: dict[str, Any] = {"place": origin, "column": data.column}

    def load(split: str, work: Path) -> datasets.Dataset:
        cache = work / "cache"
        if not is_local:
            place["revision"] = commit_of(path, data.revision, work)
        revision = place.get("revision")
        return hub_rows(load_splits(data, revision, files, cache / "hub"), split, data)

    return Source("hub", identity, place, load, read=with_newline)


def load_splits(
    data: DataConfig, revision: str | None, files: Iterable[Path], cache: Path
) -> datasets.DatasetDict:
    """Return the splits of data.path: of the hub at a commit `revision`, else of a folder.

    UserError where they cannot be loaded, or a folder would read other files than `files`.
    """
    import datasets

    place = f"data.path={data.path}"
    folder = expand_path(data.path or "", "data.path")
    path = str(folder) if revision is None else str(data.path)
    with load_errors(place):
        if revision is None:
            refuse_foreign_names(place, folder)
        builder = datasets.load_dataset_builder(
            path, name=data.subset, revision=revision, cache_dir=str(cache)
        )
        refuse_foreign_format(place, builder)
        if revision is None:
            refuse_foreign_files(place, builder, files)
        builder.download_and_prepare()
        splits = builder.as_dataset()
        assert isinstance(splits, datasets.DatasetDict)
        return splits


def commit_of(repository: str, revision: str | None, work: Path) -> str:
    """Return the commit of a preparation, which its work folder has from its beginning on.

    It is that of `revision`, or the newest. RunFailed without a network.
    """
    from huggingface_hub import constants, dataset_info

    root = work.parent
    record = f"{work.name}/cache/revision"
    try:
        if not is_file_inside(root, record):
            problem = unreachable(constants.ENDPOINT)
            if problem:
                raise ConnectionError(problem)
            commit = str(dataset_info(repository, revision=revision).sha)
            write_inside(root, record, commit.encode())
        return read_inside(root, record, LONGEST_REASON).decode()
    # The hub's client raises errors of its HTTP library, which need not be OSError.
    except Exception as error:
        reason = f"cannot be fetched: {reason_of(error)[:LONGEST_REASON]}; {INSTEAD}"
        raise RunFailed(f"hf://datasets/{repository}: {reason}") from error


def hub_rows(splits: datasets.DatasetDict, split: str, data: DataConfig) -> datasets.Dataset:
    """Return the text column of a split, which is cut from train where it is missing.

    UserError without a split train, or without the column.
    """
    names = {ours: hub_name(splits, ours) for ours in SPLIT_NAMES}
    train = names["train"]
    if train is None:
        actual = ", ".join(map(str, splits))
        raise UserError(f"data.path={data.path}: expected a split train, found {actual}")
    missing = [ours for ours, name in names.items() if name is None]
    rows = splits[names[split] or train]
    check_column(rows, data)
    if split == "train" or split in missing:
        start, stop = cut_percents(split, missing)
        first = len(rows) * start // 100
        rows = rows.select(range(first, len(rows) * stop // 100))
    rows = rows.select_columns([data.column])
    if data.column == "text":
        return rows
    return rows.rename_column(data.column, "text")


def hub_name(splits: datasets.DatasetDict, split: str) -> str | None:
    """Return what a data set of the hub calls a split; None where it has none."""
    for name in SPLIT_NAMES[split]:
        if name in splits:
            return name
    return None


def check_column(rows: datasets.Dataset, data: DataConfig) -> None:
    """Raise UserError where data.column is no column of text."""
    kinds = {name: str(rows.features[name].dtype) for name in rows.column_names}
    if kinds.get(data.column) not in TEXTS:
        columns = ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
        raise UserError(f"data.column={data.column}: expected a column of text, found {columns}")


def cut_percents(split: str, missing: Sequence[str]) -> tuple[int, int]:
    """Return from and to which percent of train a split has its rows."""
    train_stop = 100 - CUT_PERCENT * len(missing)
    if split == "train":
        return 0, train_stop
    start = train_stop + CUT_PERCENT * missing.index(split)
    return start, start + CUT_PERCENT


def with_newline(table: pa.Table) -> list[bytes]:
    """Return the text of each row, ended by a newline unless it is empty."""
    texts = []
    for text in column_text(table):
        needs_newline = text and not text.endswith(b"\n")
        texts.append(text + b"\n" if needs_newline else text)
    return texts
