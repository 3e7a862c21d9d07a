"""Rows of a benchmark that may be ended at any moment: each is a line of JSON, written at once."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

Found = dict[str, Any]


class Row(NamedTuple):
    """One row: its key, what measures it, and whether that needs CUDA."""

    key: str
    measure: Callable[[], Found]
    needs_cuda: bool = False


class Journal:
    """The rows of a folder, by key; those of dry runs and of a GPU apart.

    Args:
        folder: where gpu.jsonl lies.
        dry: whose rows these are.
        retry_before: take a row that ended in an error before this time for one that is missing.
    """

    def __init__(self, folder: Path, dry: bool, retry_before: float = 0.0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "gpu.jsonl"
        self.current = folder / "current"
        self.dry = dry
        self.retry_before = retry_before

    def rows(self) -> dict[str, Found]:
        """Return the newest row of each key; half a line, of a process that was ended, is none."""
        found: dict[str, Found] = {}
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        for line in lines:
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            if row["dry"] == self.dry:
                found[row["key"]] = row
        return found

    def missing(self, rows: list[Row]) -> list[Row]:
        """Return the rows that are still to be measured."""
        known = {
            key
            for key, row in self.rows().items()
            if "error" not in row or row["at"] >= self.retry_before
        }
        return [row for row in rows if row.key not in known]

    def add(self, key: str, found: Found) -> None:
        """Append a row, and print it."""
        line = json.dumps({"key": key, "dry": self.dry, "at": round(time.time(), 1), **found})
        with self.path.open("a+", encoding="utf-8") as file:
            file.write(self.line_end() + line + "\n")
            file.flush()
            os.fsync(file.fileno())
        print(line, flush=True)

    def line_end(self) -> str:
        """Return what ends the line that a killed process has left, else nothing."""
        if not self.path.exists() or not self.path.stat().st_size:
            return ""
        with self.path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return "" if file.read() == b"\n" else "\n"

    def begin(self, key: str) -> None:
        """Say which row is being measured, for whoever finds that this process has died of it."""
        self.current.write_text(key)

    def begun(self) -> str | None:
        """Return the row that was being measured, None where that has ended."""
        return self.current.read_text() if self.current.exists() else None

    def end(self) -> None:
        """Say that the row has ended."""
        self.current.unlink(missing_ok=True)


@contextlib.contextmanager
def turn() -> Iterator[None]:
    """Hold the GPU's clock: of several processes on a machine one at a time measures, while others
    compile.
    """
    with (Path(tempfile.gettempdir()) / "rtx-gpu-turn").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def measured(row: Row, dry: bool) -> Found:
    """Return what a row's function finds, or why there is none: an error in a row ends no other."""
    if dry and row.needs_cuda:
        return {"skipped": "needs CUDA"}
    began = time.monotonic()
    try:
        found = row.measure()
    except Exception as error:
        found = {"error": said_of(error), "where": place_of(error)}
    return found | {"seconds": round(time.monotonic() - began, 2)}


def said_of(error: BaseException) -> str:
    """Return an error in at most some hundred letters."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"


def place_of(error: BaseException) -> list[str]:
    """Return the last calls on the way to an error."""
    calls = traceback.extract_tb(error.__traceback__)[-4:]
    return [f"{Path(call.filename).name}:{call.lineno} {call.name}" for call in calls]
