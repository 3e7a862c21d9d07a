"""Files on disk, from addresses and of the hub, compared with their sha256; and (data=hub) what `datasets` loads."""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import http.client
import os
import re
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import urlsplit

from rtx import __version__
from rtx.data.sets import SPLITS, Report, Source, column_text
from rtx.disk import is_full, open_regular, read_file, refuse_link, replace_file
from rtx.errors import RunFailed, UserError, nearest
from rtx.progress import progress_bar
from rtx.settings.schema import DataConfig

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

NAMES = {"train": ("train",), "valid": ("validation", "valid", "val", "dev"), "test": ("test",)}
TEXTS = ("string", "large_string", "binary", "large_binary")
ANSWER_WITHIN = 4.0  # seconds for a name look-up, a connection and the first line of an answer
SILENCE = 30.0  # seconds without a byte after which a connection counts as broken
ATTEMPTS, PAUSE = (
    5,
    1.0,
)  # in a row without a byte of progress; seconds before the second, then doubled
AGENT = {
    "User-Agent": f"Mozilla/5.0 (compatible; rtx/{__version__})"
}  # some mirrors refuse Python's own name
INSTEAD = "fetch it some other way and name it: data.path=<file or folder>"


@dataclass(frozen=True)
class Remote:
    """A published file that never changes."""

    url: str
    size: int
    sha256: str

    @property
    def name(self) -> str:
        """The file's name: the last part of the address."""
        return self.url.rpartition("/")[2]

    def matches(self, path: Path) -> bool:
        """Tell whether a file is this one."""
        return (
            path.is_file() and path.stat().st_size == self.size and file_sha256(path) == self.sha256
        )

    def check(self, path: Path) -> None:
        """Raise UserError for another file than this one: no other archive is ever opened."""
        if not self.matches(path):
            wanted = f"{self.name} ({self.url}) of {self.size:,} bytes with sha256 {self.sha256}"
            found = f"{path.stat().st_size:,} bytes with sha256 {file_sha256(path)}"
            raise UserError(f"{path}: expected {wanted}, found {found}; get it anew")


def download(remote: Remote, folder: Path, report: Report) -> Path:
    """Return `folder/<name>` with the content of `remote`, fetched unless it is there; `<name>.part` is gone on with.

    Raises RunFailed (no network, another file, a full disk), and UserError where `folder` cannot be
    written, or it or the partial file is a link.
    """
    target, part = folder / remote.name, folder / f"{remote.name}.part"
    with disk_errors(folder):
        if remote.matches(target):
            return target
        refuse_link(folder)
        report(f"fetching {remote.url} ({remote.size:,} bytes)")
        if problem := unreachable(remote.url):
            raise RunFailed(f"{remote.url}: cannot be fetched: {problem}; {INSTEAD}")
        folder.mkdir(parents=True, exist_ok=True)
        open_part(part).close()
        failures = 0
        while (have := part.stat().st_size) < remote.size:
            reason = receive(remote, part)
            failures = 0 if part.stat().st_size > have else failures + 1
            if failures == ATTEMPTS:
                raise RunFailed(f"{remote.url}: cannot be fetched: {reason}; {INSTEAD}")
            if reason:
                wait, here = PAUSE * 2**failures, part.stat().st_size
                report(
                    f"{remote.name}: {reason} at {here:,} of {remote.size:,} bytes; again in {wait:.0f} s"
                )
                time.sleep(wait)
        if not remote.matches(part):
            found = file_sha256(part)
            part.unlink()
            raise RunFailed(
                f"{remote.url}: expected sha256 {remote.sha256}, found {found}; {INSTEAD}"
            )
        return part.replace(target)


def open_part(part: Path) -> BinaryIO:
    """Open a partial download, which may be missing, to append to it.

    UserError for a link, a pipe or a folder.
    """
    try:
        return open_regular(part, "ab", follow=False)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO, errno.EINVAL, errno.EISDIR):
            raise
        raise UserError(f"{part}: is a link, or no regular file; remove it, then again") from error


def receive(remote: Remote, part: Path) -> str:
    """Append to `part` what one connection delivers; return what ended it early, or ""; raises as `download`."""
    have, opener = part.stat().st_size, urllib.request.build_opener(SameScheme)
    headers = {**AGENT, "Accept-Encoding": "identity"} | (
        {"Range": f"bytes={have}-"} if have else {}
    )
    try:
        request = urllib.request.Request(remote.url, headers=headers)
        with opener.open(request, timeout=SILENCE) as response, open_part(part) as file:
            if response.status != 206:  # all anew
                file.truncate(have := 0)
            if response.length is not None and have + response.length != remote.size:
                found = f"{have + response.length:,} ({response.headers.get('Content-Type', 'of no stated type')})"
                raise RunFailed(
                    f"{remote.url}: expected {remote.size:,} bytes, found {found}; {INSTEAD}"
                )
            with progress_bar("bytes") as show:
                while have < remote.size and (
                    chunk := response.read1(1 << 18)
                ):  # a break later costs none of it
                    have += file.write(chunk[: remote.size - have])
                    show(have, remote.size)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code < 500 and error.code not in (408, 425, 429):
            raise RunFailed(f"{remote.url}: {reason_of(error)}; {INSTEAD}") from error
        return reason_of(error)
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, OSError) and (is_full(error) or error.filename):
            raise
        return reason_of(error)
    return "the connection ended early" if have < remote.size else ""


class SameScheme(urllib.request.HTTPRedirectHandler):
    """Follows no redirect from https to http or to a file."""

    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> Any:
        if urlsplit(newurl).scheme != req.type:
            refused = f"refused, only {req.type} is fetched; {INSTEAD}"
            raise RunFailed(f"{req.full_url}: the server redirects to {newurl}: {refused}")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def hub_files(
    repository: str, patterns: Sequence[str], revision: str | None, report: Report
) -> Path:
    """Return the folder, named after its commit, of a hub data set's files, from the hub's cache without a network."""
    from huggingface_hub import constants, snapshot_download

    where = f"hf://datasets/{repository}{f'@{revision}' if revision else ''}"
    problem = (
        "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else unreachable(constants.ENDPOINT)
    )
    report(
        f"{where}: {problem or 'fetching'}; what is in {constants.HF_HUB_CACHE} is taken from there"
    )
    options = {"allow_patterns": list(patterns), "local_files_only": problem is not None}
    try:
        folder = Path(
            snapshot_download(repository, repo_type="dataset", revision=revision, **options)
        )
        files = [path for pattern in patterns for path in folder.glob(pattern)]
        if not files:
            raise FileNotFoundError(f"it has no {' or '.join(patterns)}")
    except (
        Exception
    ) as error:  # those of whichever HTTP library it uses among them, which are no OSError
        raise RunFailed(
            f"{where}: cannot be fetched: {problem or reason_of(error)[:300]}; {INSTEAD}"
        ) from error
    for path in files:
        blob = path.resolve()  # large files are named by their sha256
        if re.fullmatch("[0-9a-f]{64}", blob.name) and (found := file_sha256(path)) != blob.name:
            raise RunFailed(
                f"{path}: expected sha256 {blob.name}, found {found}; delete {blob}, then again"
            )
    return folder


def unreachable(address: str) -> str | None:
    """Return why nothing answers at `address`, or None; said in time, for which a look-up of names needs a thread."""
    reasons: list[str | None] = [f"no answer within {ANSWER_WITHIN:.0f} s"]

    def ask() -> None:
        try:  # with the proxies of now: urlopen remembers those of its first call
            request = urllib.request.Request(address, headers=AGENT, method="HEAD")
            with contextlib.suppress(urllib.error.HTTPError):
                urllib.request.build_opener().open(request, timeout=ANSWER_WITHIN).close()
            reasons.append(None)
        except Exception as error:
            reasons.append(
                f"{urlsplit(address).hostname}: {reason_of(getattr(error, 'reason', error))}"
            )

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(ANSWER_WITHIN)
    return reasons[-1]


def reason_of(error: object) -> str:
    """Return what an error says, in one line."""
    said = (
        (error.strerror if isinstance(error, OSError) else None)
        or str(error)
        or type(error).__name__
    )
    return " ".join(said.split())


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file's bytes, in hexadecimal; OSError for what is no regular file."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


@contextlib.contextmanager
def disk_errors(root: Path) -> Iterator[None]:
    """Turn what a full or closed disk raises below `root` into a RunFailed or UserError of one line."""
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:  # `datasets` puts errors of its own around what went wrong
            if isinstance(cause, UserError | RunFailed):
                raise cause from cause.__cause__
            if isinstance(cause, OSError) and is_full(cause):
                advice = "free some, or set RTX_DATA to a folder on a larger disk"
                raise RunFailed(f"{root}: no space left to write; {advice}") from error
            if isinstance(cause, OSError) and cause.errno in (
                errno.EACCES,
                errno.EPERM,
                errno.EROFS,
            ):
                advice = "set RTX_DATA to a folder that you may write"
                raise UserError(
                    f"{cause.filename or root}: {reason_of(cause)}; {advice}"
                ) from error
            cause = cause.__cause__ or cause.__context__
        raise


def identity_of(paths: Iterable[Path]) -> list[Any]:
    """Return how many files there are, and a digest of paths, sizes and times; UserError for one that is no file."""
    lines = []
    for path in paths:
        if not path.is_file():
            raise UserError(f"{path}: expected a regular file or a folder, found neither")
        lines.append(f"{path.resolve()}\0{path.stat().st_size}\0{path.stat().st_mtime_ns}\n")
    return [
        len(lines),
        hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest(),
    ]


def walk(root: Path, skipped: Sequence[str] = (), leave_out: Path | None = None) -> list[Path]:
    """Return the files below `root`, ordered by path components, without hidden ones; UserError if it is unreadable."""

    def stop(error: OSError) -> None:
        raise UserError(f"{error.filename}: cannot be read: {error.strerror}") from error

    found: list[Path] = []
    for folder, folders, names in os.walk(root, onerror=stop):
        kept = [name for name in folders if not name.startswith(".") and name not in skipped]
        folders[:] = [
            name
            for name in kept
            if not leave_out or Path(folder, name).resolve() != leave_out.resolve()
        ]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted((path for path in found if path.is_file()), key=lambda path: path.parts)


def files_of(path: str, leave_out: Path) -> list[Path]:
    """Return the files that `path` means: a file, all below a folder, or the matches of a glob; UserError for none."""
    place = Path(path).expanduser()
    files = [place] if place.exists() else sorted(map(Path, glob.glob(str(place), recursive=True)))
    files = (
        walk(place, leave_out=leave_out)
        if place.is_dir()
        else [file for file in files if not file.is_dir()]
    )
    if not files:
        near = nearest(
            place.name, [] if place.exists() else [other.name for other in place.parent.glob("*")]
        )
        raise UserError(
            f"data.path={path}: expected a file, a folder or a glob that matches files, found none{near}"
        )
    return files


def tables_of(
    path: str, folders: Iterable[Path], splits: Sequence[str] = SPLITS
) -> dict[str, list[Path]]:
    """Return the parquet files of each split in the first of `folders` that has some; UserError if one is not whole."""
    import pyarrow as pa
    from pyarrow import parquet

    names = {split: re.compile(rf"({'|'.join(NAMES[split])})\b") for split in splits}
    for folder in folders:
        tables = sorted(folder.rglob("[!.]*.parquet"))
        found = {
            split: [table for table in tables if name.match(table.name)]
            for split, name in names.items()
        }
        if lacking := [split for split, files in found.items() if not files]:
            if len(lacking) == len(splits):
                continue
            missing = " and ".join(lacking)
            raise UserError(
                f"data.path={path}: missing split: {missing}; found only {tables[0].name}, ..."
            )
        for table in tables:
            try:
                parquet.read_schema(table)
            except (pa.ArrowException, OSError) as error:
                raise UserError(
                    f"{table}: expected a whole parquet file, found {reason_of(error)}"
                ) from error
        return found
    return {}


def column_of(paths: Sequence[Path], wanted: Sequence[str]) -> str:
    """Return the first of the columns `wanted` that parquet files have; raises UserError where they have none."""
    from pyarrow import parquet

    names = parquet.read_schema(paths[0]).names
    if not (found := [name for name in wanted if name in names]):
        raise UserError(
            f"{paths[0]}: expected a column {' or '.join(wanted)}; found {', '.join(names[:8])}"
        )
    return found[0]


def table_rows(paths: Sequence[Path], wanted: Sequence[str], cache: Path) -> datasets.Dataset:
    """Return `column_of` parquet files, copied some rows at a time: `load_dataset` would hold row groups thrice."""
    import datasets
    import pyarrow as pa
    from pyarrow import parquet

    cache.mkdir(parents=True, exist_ok=True)
    place, column = str(paths[0].parent), column_of(paths, wanted)
    with (
        told(place, OSError),
        tempfile.NamedTemporaryFile(dir=cache, suffix=".arrow", delete=False) as rows,
    ):
        schema = pa.schema([parquet.read_schema(paths[0]).field(column)])
        with pa.ipc.new_stream(rows, schema) as copy:
            for path in paths:
                table = parquet.ParquetFile(path, memory_map=True)
                for some in table.iter_batches(16, columns=[column], use_threads=False):
                    copy.write_batch(some)
    return datasets.Dataset.from_file(rows.name)


@contextlib.contextmanager
def told(place: str, *kinds: type[Exception]) -> Iterator[None]:
    """Raise UserError, in one line, where `place` cannot be loaded by what is done inside, which may raise `kinds`."""
    from datasets.exceptions import DatasetsError

    try:
        yield
    except (ValueError, RuntimeError, FileNotFoundError, DatasetsError, *kinds) as error:
        cause = error.__cause__ or error
        if getattr(cause, "errno", None):  # of the disk that is written
            raise
        raise UserError(f"{place}: cannot be loaded: {reason_of(cause)[:300]}") from error


def rows_of(texts: Iterator[tuple[bytes, bool]], cache: Path) -> datasets.Dataset:
    """Return rows of exact bytes; each is given with whether a document starts with it."""
    import datasets

    kinds = datasets.Features(
        {"text": datasets.Value("large_binary"), "first": datasets.Value("bool")}
    )
    made, named = (
        ({"text": text, "first": first} for text, first in texts),
        datasets.NamedSplit(cache.name),
    )
    cache.mkdir(parents=True, exist_ok=True)
    own: dict[str, Any] = {
        "cache_dir": str(cache),
        "fingerprint": os.urandom(8).hex(),
        "split": named,
    }
    return datasets.Dataset.from_generator(
        lambda: made, features=kinds, writer_batch_size=16, **own
    )


def source(data: DataConfig, root: Path, report: Report) -> Source:
    """Return the rows of column data.column, each a document, of data.path: owner/name on the hub, or a folder.

    Without data.revision the newest is taken; the commit stands in the record. Splits that are missing are cut from the
    end of train, 5% of the rows each.
    """
    path, folder = data.path or "", Path(data.path or "").expanduser()
    identity: list[Any] = [path, data.subset, data.column, data.revision]
    if folder.is_dir():
        identity += identity_of(walk(folder, leave_out=root))
    elif path.count("/") != 1 or folder.exists():
        found = "a file" if folder.exists() else "neither"
        raise UserError(
            f"data.path={path}: expected a folder, or owner/name of a data set of the hub, found {found}"
        )
    place: dict[str, Any] = {
        "place": path if folder.is_dir() else f"hf://datasets/{path}",
        "column": data.column,
    }

    def load(split: str, work: Path) -> datasets.Dataset:
        import datasets

        options: dict[str, Any] = {"path": str(folder), "cache_dir": str(work / "cache" / "hub")}
        if not folder.is_dir():
            place["revision"] = commit_of(path, data.revision, work / "cache" / "revision")
            options |= {"path": path, "revision": place["revision"]}
        with told(f"data.path={path}"):
            found = datasets.load_dataset(name=data.subset, **options)
        return hub_rows(found, split, data)

    return Source("hub", identity, place, load, read=with_newline)


def commit_of(repository: str, revision: str | None, kept: Path) -> str:
    """Return the commit that a preparation began with, that of `revision` or the newest; RunFailed without a hub."""
    from huggingface_hub import constants, dataset_info

    try:
        if not kept.exists():
            if problem := unreachable(constants.ENDPOINT):
                raise ConnectionError(problem)
            commit = str(dataset_info(repository, revision=revision).sha)
            replace_file(kept, lambda file: file.write(commit.encode()))
        return read_file(kept).decode()
    except Exception as error:  # those of whichever HTTP library it uses among them
        reason = f"cannot be fetched: {reason_of(error)[:300]}; {INSTEAD}"
        raise RunFailed(f"hf://datasets/{repository}: {reason}") from error


def hub_rows(found: datasets.DatasetDict, split: str, data: DataConfig) -> datasets.Dataset:
    """Return the column of text of a split, cut out of train where there is none; UserError without train or column."""
    here = {
        ours: next((name for name in names if name in found), None) for ours, names in NAMES.items()
    }
    if here["train"] is None:
        raise UserError(
            f"data.path={data.path}: expected a split train, found {', '.join(map(str, found))}"
        )
    rows = found[here[split] or here["train"]]
    if data.column not in rows.column_names or str(rows.features[data.column].dtype) not in TEXTS:
        columns = ", ".join(f"{name} ({rows.features[name].dtype})" for name in rows.column_names)
        raise UserError(f"data.column={data.column}: expected a column of text, found {columns}")
    order = ["train", *(ours for ours, name in here.items() if name is None)]
    if split in order:
        bounds = [0, *range(105 - 5 * len(order), 101, 5)]
        rows = rows.select(
            range(*(len(rows) * percent // 100 for percent in bounds[order.index(split) :][:2]))
        )
    rows = rows.select_columns([data.column])
    return rows if data.column == "text" else rows.rename_column(data.column, "text")


def with_newline(table: pa.Table) -> list[bytes]:
    """Return the text of each row, with a newline behind it where it has none."""
    return [
        text if text.endswith(b"\n") or not text else text + b"\n" for text in column_text(table)
    ]


def disk_size(path: Path) -> str:
    """Return the size of a file, or of all files below a folder, as text: 36.4MB."""
    from tqdm import tqdm

    files = [file for file in [path, *path.rglob("*")] if file.is_file()]
    return tqdm.format_sizeof(sum(file.lstat().st_size for file in files), "B")
