"""Preparation: a source's documents through a tokenizer into the files of a store, in parallel, in bounded memory.

Everything is written to `<root>/.<name>-<key>.work`, which a killed preparation leaves and the next one continues, and
which gets the store's name by a rename when it is whole. The bytes are the same for any number of processes.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rtx.data.checksums import BLOCK
from rtx.data.disk import Report, disk_errors, install, is_held, need_space, remove_leftovers, write_whole
from rtx.data.parts import Place, finished_parts, join_parts, work_on_part, write_part
from rtx.data.progress import Progress
from rtx.data.recipe import FORMAT, Recipe
from rtx.data.source import Part, Tokenizer
from rtx.data.store import RECORD, DamagedStore, fingerprint, mark_verified, record_sum, verify_store
from rtx.data.tokenizers import tokenizer_for
from rtx.data.workers import Job, run_jobs
from rtx.errors import RunFailed, UserError

PAYS = {"byte": 1 << 26}
PAYS_OTHERWISE = 1 << 23
"""Bytes beside the longest part from which on several processes pay: copying text takes less time than starting one."""
MOST_MEMORY = 5 << 28
"""Bytes that the parts read at once may take, unless data.processes says how many they are."""
QUIET = 1 << 27
"""Bytes that are prepared without a word on progress."""
RESTING = 24 * 3600.0
"""Seconds after which the unfinished preparation of another store is removed."""


def build_store(root: Path, recipe: Recipe, report: Report = print) -> None:
    """Write the store of `recipe` beside its place and rename it there; the caller holds the lock.

    What is finished is left for the next preparation by a Ctrl-C, a kill, a lost process or connection; a wrong source
    and a full disk leave nothing.

    Raises:
        RunFailed: the disk is full, or a download failed.
        UserError: the source is not what the recipe says, or `root` cannot be written.
    """
    folder = recipe.folder(root)
    work = work_folder(folder)
    try:
        with disk_errors(root):
            remove_leftovers(root, folder)
            remove_resting(root, work)
            if not _is_whole(work, recipe):
                _fill(root, work, recipe, report)
            install(work, folder)
    except BaseException as error:
        if not (_may_pass(error) and _is_worth_keeping(work)):
            shutil.rmtree(work, ignore_errors=True)
        raise


def work_folder(folder: Path) -> Path:
    """Return where the store that will stand at `folder` is made."""
    return folder.with_name(f".{folder.name}.work")


def remove_resting(root: Path, ours: Path) -> None:
    """Remove the unfinished preparations of other stores that nobody has touched for a day."""
    for path in root.glob(".*.work"):
        with contextlib.suppress(FileNotFoundError):
            latest = max(entry.stat().st_mtime for entry in (path, *path.glob("*"), *path.glob("parts/*")))
            lock = root / f"{path.name.removesuffix('.work')}.lock"
            if path != ours and time.time() - latest > RESTING and not is_held(lock):  # clocks jump, locks do not
                shutil.rmtree(path, ignore_errors=True)


def _is_whole(work: Path, recipe: Recipe) -> bool:
    """Whether a preparation was killed after its last byte, and every one is still right."""
    if not (work / RECORD).exists():
        return False
    try:
        verify_store(work, recipe.options)
    except DamagedStore:
        shutil.rmtree(work)
        return False
    return True


def _may_pass(error: BaseException) -> bool:
    """Whether the same preparation may succeed another time: it was stopped, or failed, but not for want of space."""
    if isinstance(error, RunFailed):
        return not isinstance(error.__cause__, OSError)
    return not isinstance(error, Exception)


def _is_worth_keeping(work: Path) -> bool:
    """Whether a preparation that was stopped had anything finished: a part, or a tokenizer."""
    for path in work.glob("parts/*.tmp"):
        path.unlink(missing_ok=True)
    return any(path.suffix == ".json" or path.parent == work for path in work.rglob("*") if path.is_file())


def _fill(root: Path, work: Path, recipe: Recipe, report: Report) -> None:
    """Write all files of the store into `work`, its record last."""
    splits = {name: list(parts) for name, parts in recipe.source.parts().items()}
    there = sum(path.stat().st_size for path in work.rglob("*") if path.is_file())
    need_space(root, sum(_size(part) for parts in splits.values() for part in parts) - there)
    (work / "parts").mkdir(parents=True, exist_ok=True)
    train = splits.get("train") or []
    processes = affordable(recipe, [part for parts in splits.values() for part in parts])
    tokenizer = tokenizer_for(recipe.data, recipe.source, train, work, report, processes)
    dtype = smallest_type(tokenizer.vocabulary)
    records = _tokenize(work, recipe, tokenizer, dtype, splits, report, processes)
    record: dict[str, Any] = {"format": FORMAT, "name": recipe.name, "options": recipe.options}
    record |= {"source": recipe.source.place}
    record |= {"stamps": recipe.source.stamps, "image": recipe.source.image, "tokenizer": tokenizer.describe()}
    record |= {"unit": tokenizer.unit, "vocabulary": tokenizer.vocabulary, "dtype": dtype, "block": BLOCK}
    record["splits"] = _join(work, recipe, records)
    record["fingerprint"] = fingerprint(record)
    record["made"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    record["sum"] = record_sum(record)
    shutil.rmtree(work / "parts")
    write_whole(work / RECORD, json.dumps(record, indent=2).encode() + b"\n")
    mark_verified(work)


def affordable(recipe: Recipe, parts: Sequence[Part]) -> int:
    """Return how many processes may read parts at once: those that were asked for, or as many as memory is meant for.

    A part that takes much has a property `memory`, in bytes.
    """
    most = max((getattr(part, "memory", 0) for part in parts), default=0)
    if recipe.data.processes is not None or not most:
        return recipe.processes
    return min(recipe.processes, max(1, MOST_MEMORY // most))


def smallest_type(vocabulary: int) -> str:
    """Return the smallest unsigned type that holds ids below `vocabulary`."""
    return "uint8" if vocabulary <= 1 << 8 else "uint16" if vocabulary <= 1 << 16 else "uint32"


def _size(part: Part) -> int:
    return getattr(part, "size", 0)


def _tokenize(
    work: Path,
    recipe: Recipe,
    tokenizer: Tokenizer,
    dtype: str,
    splits: Mapping[str, Sequence[Part]],
    report: Report,
    processes: int,
) -> dict[Place, dict[str, Any]]:
    """Write every part that is not finished, in processes where they pay; return the records of all, in order."""
    images = recipe.source.image is not None
    records: dict[Place, dict[str, Any]] = {}
    jobs: list[tuple[Part, Place]] = []
    for name, parts in splits.items():
        places = [Place(work, name, number, len(parts)) for number in range(len(parts))]
        finished = finished_parts(parts, places, images)
        for part, place in zip(parts, places, strict=True):
            records[place] = finished.get(place.number, {})
            if place.number not in finished:
                jobs.append((part, place))
    total = sum(_size(part) for part, _ in jobs)
    beside = total - max((_size(part) for part, _ in jobs), default=0)
    several = processes > 1 and beside > PAYS.get(tokenizer.unit, PAYS_OTHERWISE)
    described = json.dumps(tokenizer.describe())
    calls: list[Job] = [
        (work_on_part, (part, described, work, dtype, images, place))
        if several
        else (write_part, (part, tokenizer, dtype, images, place))
        for part, place in jobs
    ]
    progress = Progress(recipe.name, total, len(jobs), report, quiet=total <= QUIET)
    if len(jobs) < len(records):
        report(f"going on where an earlier preparation ended: {len(records) - len(jobs)} of {len(records)} parts done")
    for index, record in run_jobs(calls, processes if several else 1, progress.advance):
        records[jobs[index][1]] = record
        progress.part_done()
    progress.end()
    return records


def _join(work: Path, recipe: Recipe, records: Mapping[Place, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Make the files of the splits; return their records, checked against what the source is known to hold."""
    splits = {}
    known = recipe.source.units or {}
    for name in dict.fromkeys(place.split for place in records):
        places = [place for place in records if place.split == name]
        found = sum(records[place]["units"] for place in places)
        if name in known and found != known[name]:
            raise UserError(
                f"{recipe.options}: the source changed while it was read: expected {known[name]:,} units of split "
                f"{name}, found {found:,}; prepare it again"
            )
        if image := recipe.source.image:
            assert found == sum(records[place]["documents"] for place in places) * image[0] * image[1] * 3, found
        if not found:
            raise UserError(f"{recipe.options}: expected at least one unit in split {name}, found none; give more")
        splits[name] = join_parts(places, [records[place] for place in places], recipe.source.image is not None)
    return splits
