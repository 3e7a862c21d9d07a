"""metrics.jsonl: whole rows only, and the last of a step counts."""

from __future__ import annotations

import json
import math
from pathlib import Path

from rtx.training.metrics import MetricsFile, read_metrics, utc_now


def test_rows_survive_a_kill_in_the_middle_of_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"kind": "train", "step": 1, "bits": 8.0}\n{"kind": "train", "st')
    assert read_metrics(path) == [{"kind": "train", "step": 1, "bits": 8.0}]
    file = MetricsFile(path)
    file.write({"kind": "train", "step": 2, "bits": 7.0})
    file.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


def test_the_last_row_of_a_step_and_kind_counts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    for kind, step, bits in [
        ("train", 2, 1.0),
        ("valid", 2, 2.0),
        ("train", 4, 3.0),
        ("train", 2, 4.0),
        ("train", 4, 5.0),
    ]:
        file.write({"kind": kind, "step": step, "bits": bits})
    file.close()
    assert [row["bits"] for row in read_metrics(path)] == [4.0, 2.0, 5.0]


def test_what_json_does_not_know_becomes_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.write({"kind": "train", "step": 1, "a": math.nan, "b": -math.inf, "c": 1.5})
    file.close()
    (row,) = read_metrics(path)
    assert (row["a"], row["b"], row["c"]) == (None, None, 1.5)


def test_times_are_utc() -> None:
    assert utc_now().endswith("Z")
    assert len(utc_now()) == len("2026-11-21T06:07:00.123Z")
