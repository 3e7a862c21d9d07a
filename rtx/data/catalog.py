"""The data sets by name, and their stores: open (preparing on demand), verify, list, remove."""

import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import yaml

from rtx.data.files import disk_errors
from rtx.data.recall import RecallStore
from rtx.data.sets import MADE, SETS, Report, Source
from rtx.data.store import (
    FORMAT,
    DamagedStore,
    TokenStore,
    build_store,
    is_verified,
    open_store,
    read_record,
)
from rtx.disk import refuse_link
from rtx.errors import RunFailed, UserError, nearest, printable
from rtx.settings.fields import imported
from rtx.settings.presets import preset
from rtx.settings.schema import DataConfig

Store = TokenStore | RecallStore
STORE = re.compile(r"[a-z0-9_]+-[0-9a-f]{12}")  # names of stores; nothing else is ever removed


def data_root() -> Path:
    """Return the folder of all stores: RTX_DATA, or `data` below the current folder.

    UserError where it is a file, or a link that leads nowhere.
    """
    root = Path(os.environ.get("RTX_DATA") or "data").expanduser()
    if (root.exists() or root.is_symlink()) and not root.is_dir():
        raise UserError(
            f"RTX_DATA={root}: is not a folder; set RTX_DATA to a folder that you may write"
        )
    return root


def check_source(data: DataConfig, root: Path, report: Report = print) -> Source | None:
    """Return what a store is made from (None: of recall tasks); UserError where that is missing or unreadable."""
    if data.name in MADE:
        return None
    source = imported(SETS[data.name].origin)(data, root, report)
    if bool(source.image) != SETS[data.name].image:
        raise UserError(
            f"data={data.name}: side= of register_data is for images, whose Source says image="
        )
    if source.image and data.length != (dims := 3 * source.image[0] * source.image[1]):
        raise UserError(
            f"data.length={data.length}: expected {dims}, for one image is one sequence"
        )
    return source


def long_enough(store: TokenStore, data: DataConfig) -> TokenStore:
    """Return `store`; UserError where its training split is shorter than one sequence."""
    if (units := len(store.split("train"))) < data.length:
        wanted = f"expected at least one sequence of data.length={data.length} units in the training split"
        raise UserError(
            f"data={data.name}: {wanted}, found {units:,}; give more text or data.length={units}"
        )
    return store


def store_folder(data: DataConfig, root: Path, source: Source | None = None) -> Path:
    """Return where the store of `data` lies below `root`: its name tells source, tokenizer and version of the files."""
    source = source or check_source(data, root)
    if source is None:
        raise UserError(f"data={data.name}: made on the fly, nothing on disk")
    subwords = [data.vocabulary, data.tokenizer_sample] if data.tokenizer == "sentencepiece" else []
    tokenizer = ["bytes", "dim"] if source.image else [data.tokenizer, *subwords]
    key = json.dumps([FORMAT, source.name, source.identity, tokenizer, source.stamps, source.image])
    return root / f"{source.name}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"


def options_of(data: DataConfig) -> str:
    """Return the command-line options that ask for a store, for messages: what conf/data does not say."""
    path = preset("data", data.name)
    usual = DataConfig(
        **(yaml.safe_load(path.read_text()) if path else SETS[data.name].defaults or {})
    )
    left_out = [
        "name",
        "verify",
        "processes",
        *([] if data.tokenizer == "sentencepiece" else ["vocabulary"]),
    ]
    left_out += [] if SETS[data.name].image else ["length"]
    said = {
        key: value
        for key, value in vars(data).items()
        if key not in left_out and value != getattr(usual, key)
    }
    return " ".join(
        [
            f"data={data.name}",
            *(f"data.{key}={shlex.quote(str(value))}" for key, value in said.items()),
        ]
    )


def open_data(data: DataConfig, root: Path, report: Report = print) -> Store:
    """Return the store of `data` below `root`, prepared where it is missing; safe in several processes at once.

    Bytes are checked as data.verify asks: `once` in a store that was moved, copied or changed since it was last read.
    Raises UserError for a bad source, too little of it, or a damaged store; RunFailed for a download or a full disk.
    """
    source = check_source(data, root, report)
    if source is None:
        return RecallStore(data)
    folder = store_folder(data, root, source)
    if not folder.exists():
        return prepare_data(data, root, report, source)
    verify = data.verify == "always" or (data.verify == "once" and not is_verified(folder))
    return long_enough(open_store(folder, options_of(data), verify), data)


def prepare_data(
    data: DataConfig, root: Path, report: Report = print, source: Source | None = None
) -> Store:
    """Return the store of `data`, written anew if it is missing or a byte of it is wrong; raises as open_data does."""
    source = source or check_source(data, root, report)
    if source is None:
        return RecallStore(data)
    folder, options = store_folder(data, root, source), options_of(data)
    with disk_errors(root):
        root.mkdir(parents=True, exist_ok=True)
        with locked(folder, options, report):
            problem = ""
            try:
                open_store(folder, options, verify=True)
            except UserError as error:
                problem = (
                    f"{error.what}; rebuilding the store:"
                    if isinstance(error, DamagedStore)
                    else "preparing"
                )
            if problem:
                report(f"{problem} {options} -> {folder}")
                build_store(folder, source, data, options, report)
            return long_enough(open_store(folder, options, verify=bool(problem)), data)


def find_data(data: DataConfig, root: Path) -> Store:
    """Return the store of `data` that is there; UserError where there is none."""
    if data.name in MADE:
        return RecallStore(data)
    return open_store(store_folder(data, root), options_of(data))


def verify_data(data: DataConfig, root: Path, report: Report = print) -> Store:
    """Compare every byte of the store of `data` with its recorded checksums; UserError where there is none."""
    store = open_store(store_folder(data, root), options_of(data), verify=True)
    report(f"{store.folder}: every byte as recorded; fingerprint {store.fingerprint}")
    return store


def vocabulary_size(data: DataConfig) -> int:
    """Return the number of different units of `data`; UserError for words of a text whose store is not prepared."""
    kinds = SETS[data.name].kinds
    if data.name in MADE or (data.tokenizer == "words" and kinds is None):
        return find_data(data, data_root()).vocabulary
    return {"words": kinds or 0, "sentencepiece": data.vocabulary, "bytes": 256}[data.tokenizer]


@contextlib.contextmanager
def locked(folder: Path, options: str, report: Report) -> Iterator[None]:
    """Let one process at a time work on the store at `folder`."""
    from filelock import FileLock, Timeout

    path = folder.with_name(f".{folder.name}.lock")
    refuse_link(path)
    lock = FileLock(path, thread_local=False)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        report(f"{options}: waiting for another process, which is preparing it")
        lock.acquire()
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # who waits for it sees that it is gone, and makes another
        lock.release()


def listing(root: Path) -> list[str]:
    """Return a line for each store, unfinished preparation and download below `root`: size, name, what it is."""
    said = dict.fromkeys(
        root.glob(".*.work"), "unfinished; the same rtx data prepare goes on with it"
    )
    said |= {
        path: "unfinished" if path.suffix == ".part" else "download"
        for path in root.glob("downloads/*")
    }
    for path in filter(lambda path: STORE.fullmatch(path.name), root.glob("*-*")):
        try:
            said[path] = read_record(path, "")["options"]
        except (DamagedStore, RunFailed) as error:
            said[path] = str(getattr(error, "what", error))
    lines = [
        printable(f"{disk_size(path):>9}  {path.relative_to(root)}  {said[path]}")
        for path in sorted(said)
    ]
    return lines or [f"{root}: no data yet"]


def disk_size(path: Path) -> str:
    """Return the bytes of a file, or of all files below a folder, for people: 36.4MB."""
    from tqdm import tqdm

    return tqdm.format_sizeof(
        sum(file.lstat().st_size for file in [path, *path.rglob("*")] if file.is_file()), "B"
    )


def remove_store(root: Path, name: str, report: Report = print) -> None:
    """Remove the store that `name`, as `rtx data list` has it, means, and an unfinished preparation of it."""
    plain = name.removeprefix(".").removesuffix(".work")
    both = (root / plain, root / f".{plain}.work")
    candidates = both if STORE.fullmatch(plain) else ()
    there = [path for path in candidates if path.is_dir() or path.is_symlink()]
    for path in there:
        refuse_link(path)
    if not there:
        known = [path.name for path in root.glob("*-*")]
        raise UserError(
            f"{name}: no store of this name in {root}{nearest(plain, known)}; rtx data list names them"
        )
    with disk_errors(root), locked(root / plain, plain, report):
        for path in there:
            report(f"{path}: removed, {disk_size(path)}")
            shutil.rmtree(path)
