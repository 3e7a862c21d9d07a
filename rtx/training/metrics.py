"""metrics.jsonl: one JSON object per line, only ever appended to; after a resume the last row of a step counts."""

from __future__ import annotations

import datetime
import json
import math
from pathlib import Path
from typing import Any

TIME_FIELDS = frozenset({"time", "seconds", "tokens_per_second", "data_share", "memory_bytes"})
"""Fields of a row that are measured by clock or machine; all others repeat exactly after a resume."""


def utc_now() -> str:
    """Return the time as ISO 8601 in UTC, to the millisecond."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class MetricsFile:
    """Appends rows to a metrics.jsonl; each is on its way to the disk before `write` returns."""

    def __init__(self, path: Path) -> None:
        self.file = open(path, "a+b")  # noqa: SIM115
        self._drop_torn_row()

    def _drop_torn_row(self) -> None:
        """Cut off a last line without its end, which a killed run may leave."""
        self.file.seek(0)
        content = self.file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            self.file.truncate(whole)

    def write(self, row: dict[str, Any]) -> None:
        """Append a row; numbers that JSON does not know (NaN, infinity) become null.

        Raises:
            OSError: the disk is full.
        """
        known = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        self.file.write(json.dumps(known, allow_nan=False).encode() + b"\n")
        self.file.flush()

    def close(self) -> None:
        """Close the file."""
        self.file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows that count, in the order of their steps: of each kind and step, the last one written.

    A last line cut short by a kill is no row. Rows have a `kind` (train, valid, final) and a `step`.
    """
    rows: dict[tuple[int, str], dict[str, Any]] = {}
    for line in path.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):
            row = json.loads(line)
            rows[row["step"], row["kind"]] = row
    order = {"train": 0, "valid": 1, "final": 2}
    return sorted(rows.values(), key=lambda row: (row["step"], order[row["kind"]]))
