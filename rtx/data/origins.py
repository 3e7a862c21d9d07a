"""Where the files of a published set come from: data.path, the hub, or the published archive."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from rtx.data.download import Remote, download
from rtx.data.files import identity_of, tables_of
from rtx.data.hub import hub_files
from rtx.data.sets import Report
from rtx.errors import UserError
from rtx.paths import expand_path
from rtx.settings.schema import DataConfig

Files = dict[str, list[Path]]
"""The files of each split."""
Forms = Sequence[Mapping[str, str]]
"""Ways to name the files of each split, by patterns; the first form has all splits."""


@dataclass(frozen=True)
class Origin:
    """Where a set comes from; nothing is fetched before `files` is called."""

    identity: list[Any]
    """What tells it from another or an older one."""
    place: dict[str, Any]
    """Where it is, for people; `files` may add what it learns (a revision)."""
    files: Callable[[], Files]


def origin_of(
    data: DataConfig,
    root: Path,
    report: Report,
    forms: Forms,
    hub: tuple[str, str, str],
    archive: Remote | None,
) -> Origin:
    """Return the origin of a published set: data.path, else the hub, else (data.fetch) `archive`.

    `hub` is a repository, a commit and a pattern of parquet files. UserError where data.path has no
    files of the set.
    """
    repository, revision, pattern = hub
    tables = str(Path(pattern).parent)
    if data.path is not None:
        files = local_files(data.path, forms, tables)
        identity = identity_of(chain(*files.values()))
        return Origin(identity, {"place": data.path}, lambda: files)
    if data.fetch == "archive" and archive is not None:
        return archive_origin(archive, root, report, forms)
    place = {"place": f"hf://datasets/{repository}", "revision": revision}

    def from_hub() -> Files:
        folder = hub_files(repository, [pattern], revision, report)
        place["revision"] = folder.name
        return tables_of(str(folder), [folder / tables], tuple(forms[0]))

    return Origin(["hub", *hub], place, cache(from_hub))


def archive_origin(archive: Remote, root: Path, report: Report, forms: Forms) -> Origin:
    """Return the origin of a set that is read from its published archive."""

    def from_archive() -> Files:
        path = download(archive, root / "downloads", report)
        return local_files(str(path), forms)

    place = {"place": archive.url, "sha256": archive.sha256}
    return Origin(["archive", archive.sha256], place, cache(from_archive))


def local_files(path: str, forms: Forms, tables: str | None = None) -> Files:
    """Return the files of each split at `path`, a folder with them or one of them.

    They are those of the first form of which all files are there, else parquet files in the folder,
    or below it in `tables`. UserError where there are none.
    """
    place = expand_path(path, "data.path")
    folder = place.parent if place.is_file() else place
    for form in forms:
        files = {split: visible(folder, pattern) for split, pattern in form.items()}
        is_meant = place == folder or place in chain(*files.values())
        if is_meant and all(files.values()):
            return files
    expected = [" and ".join(dict.fromkeys(form.values())) for form in forms]
    if tables is not None:
        files = tables_of(path, (folder / tables, folder), tuple(forms[0]))
        if files:
            return files
        expected.append("parquet files")
    raise UserError(f"data.path={path}: expected {' or '.join(expected)}, found none of these")


def visible(folder: Path, pattern: str) -> list[Path]:
    """Return the sorted matches of a pattern, without hidden files."""
    paths = sorted(folder.glob(pattern))
    return [path for path in paths if not path.name.startswith(".")]


def row_count(paths: Sequence[Path]) -> int:
    """Return how many rows (books, images) files have: one each, except parquet files."""
    from pyarrow import parquet

    count = 0
    for path in paths:
        if path.suffix == ".parquet":
            count += parquet.read_metadata(path).num_rows
        else:
            count += 1
    return count
