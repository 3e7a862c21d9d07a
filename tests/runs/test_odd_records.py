"""Records by strangers: odd types, huge numbers, deep nesting, endless files and lines."""

import copy
import json
import math
import tracemalloc
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import DataObject

from rtx.report.run_records import Cell
from rtx.runs import study
from rtx.runs.folder import METRICS, last_active
from rtx.runs.records import (
    CurveRow,
    EnvironmentRecord,
    MetricsRow,
    StatusRecord,
    each_row,
    last_rows,
    read_record,
    read_rows,
)
from rtx.runs.status import read_status, state_of
from rtx.runs.study import read_sweeps
from tests.runs.test_records import DATA, RECORDS

DEEP: list[Any] = []
for _ in range(150):
    DEEP = [DEEP]
ODD = st.one_of(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    st.sampled_from(
        [10**400, -(10**30), 2**63, -1, 1e308, math.inf, math.nan, "\ud800", "9" * 999]
    ),
    st.sampled_from([[], {}, [[]], {"a": None}, [{}], {"": {}}, DEEP]),
)


def places(content: Any) -> list[tuple[Any, Any]]:
    """Return every container in nested values with each of its keys."""
    found = []
    keys = range(len(content)) if isinstance(content, list) else list(content)
    for key in keys:
        found.append((content, key))
        if isinstance(content[key], dict | list):
            found += places(content[key])
    return found


@pytest.mark.parametrize("kind, content", RECORDS, ids=lambda part: getattr(part, "__name__", ""))
@given(data=st.data())
@settings(
    max_examples=30,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
def test_a_record_with_odd_values_is_named_or_can_be_written_and_read_again(
    tmp_path: Path, kind: type[Any], content: dict[str, Any], data: DataObject
) -> None:
    changed = copy.deepcopy(content)
    for _ in range(data.draw(st.integers(1, 2))):
        container, key = data.draw(st.sampled_from(places(changed)))
        container[key] = copy.deepcopy(data.draw(ODD))
    path = tmp_path / "record.json"
    path.write_text(json.dumps(changed))
    problems: list[str] = []
    record = read_record(kind, tmp_path, path.name, problems)
    if record is None:
        (line,) = problems
        assert line.startswith(f"{path}: ") and "\n" not in line and "pydantic" not in line
        return
    assert problems == []
    written = record.model_dump_json(exclude_unset=True)
    assert kind.model_validate_json(written).model_dump_json(exclude_unset=True) == written


@pytest.mark.parametrize("heartbeat", [5, None, ["2026"], "soon", "2026-01-31T12:00:00", True])
def test_a_heartbeat_that_is_no_time_counts_as_no_status(tmp_path: Path, heartbeat: Any) -> None:
    (tmp_path / "status.json").write_text(json.dumps({"state": "done", "heartbeat": heartbeat}))
    problems: list[str] = []
    status = read_status(tmp_path, problems)
    assert status is None and len(problems) == 1
    assert state_of(status) == "unknown" and last_active(tmp_path) == ""


def test_a_file_without_end_is_refused_by_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "status.json"
    with open(path, "wb") as file:
        file.truncate(3 * 10**9)
    problems: list[str] = []
    tracemalloc.start()
    assert read_record(StatusRecord, tmp_path, path.name, problems) is None
    assert tracemalloc.get_traced_memory()[1] < StatusRecord.most_bytes
    tracemalloc.stop()
    fault = "3,000,000,000 bytes, more than the 1,048,576 that it may have"
    assert problems == [f"{path}: cannot be read ({fault})"]
    monkeypatch.setattr(MetricsRow, "most_bytes", 1000)
    rows = tmp_path / "metrics.jsonl"
    rows.write_text(f'{{"step": 1}}\n{{"step": 2, "x": {"1" * 2000}}}\n{{"step": 3}}\n')
    assert [row.step for row in read_rows(MetricsRow, tmp_path, rows.name, problems)] == [1]
    assert problems[1:] == [f"{rows}: line 2 is longer than 1,000 bytes"]


def test_rows_are_read_one_by_one_and_thinned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = []
    for step in range(1, 8_001):
        kind = "valid" if step % 10 == 0 else "train"
        lines.append(json.dumps({"step": step, f"{kind}/bits": 3.0}))
    path.write_text("\n".join(lines))
    assert len(study.thinned(each_row(MetricsRow, tmp_path, path.name, []))) == 8_000
    monkeypatch.setattr(study, "MOST_ROWS", 500)
    tracemalloc.start()
    rows = study.thinned(each_row(MetricsRow, tmp_path, path.name, []))
    assert tracemalloc.get_traced_memory()[1] < 5e6, "the file is 0.3 MB, its rows 12 MB"
    tracemalloc.stop()
    counts = {kind: sum(row.kind == kind for row in rows) for kind in ("train", "valid")}
    assert all(250 <= count <= 501 for count in counts.values())
    assert {7_999, 8_000} <= {row.step for row in rows}
    assert [row.step for row in last_rows(MetricsRow, tmp_path, path.name)][-2:] == [7_999, 8_000]
    assert last_rows(MetricsRow, tmp_path, "none.jsonl") == []


GOOD_ROW = b'{"step": 1, "valid/bits": 2.5}\n'
ROWS = (
    b"",
    GOOD_ROW,
    GOOD_ROW.strip(),
    GOOD_ROW + b'{"step": 2, "valid/bi',
    GOOD_ROW + b"\n" + GOOD_ROW,
    b'{"step": 1}, {"step": 2}\n' + GOOD_ROW,
    b'{"step": 1, "x": [{}\n{}]}\n' + GOOD_ROW,
    b'{"step": 1}\r{"step": 2}\n',
    b'{"step": 1}\r\n' + GOOD_ROW,
    b'{"step": -1}\n' + GOOD_ROW,
    b'{"step": 1, "train/mfu": "\xff"}\n' + GOOD_ROW,
    b'{"step": 1, "train/mfu": NaN}\n{"step": "2"}\n',
    b"null\n[]\n5\n" + GOOD_ROW,
    b'{"step": 3, "kind": "val", "val_bits": 2.0}\n' + GOOD_ROW,
    b'{"step": 4, "x": "' + b"x" * (1 << 20) + b'"}\n' + GOOD_ROW,
)


@pytest.mark.parametrize("content", ROWS, ids=lambda content: repr(content[:40]))
def test_rows_that_are_checked_in_one_call_are_those_of_a_call_for_each(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / METRICS).write_bytes(content)
    one_by_one: list[str] = []
    expected = list(each_row(CurveRow, tmp_path, METRICS, one_by_one))
    problems: list[str] = []
    assert repr(study.read_curve(tmp_path, problems)) == repr(expected)
    assert problems == one_by_one


def test_a_command_with_a_quote_that_does_not_end_is_shown() -> None:
    record = EnvironmentRecord.model_validate({"versions": {}, "data": DATA, "command": "rtx t 'x"})
    assert Cell(Path("run"), environment=record).command == "rtx t ''\"'\"'x'"


@pytest.mark.parametrize("name", ["..", ".", "../x", "/tmp", "a/b", "", "a\0b"])
def test_a_cell_in_another_folder_is_left_out(tmp_path: Path, name: str) -> None:
    row = {"command": "rtx train -m", "cells": {name: "seed=1"}}
    (tmp_path / "sweeps.jsonl").write_text(json.dumps(row) + "\n")
    problems: list[str] = []
    assert read_sweeps(tmp_path, problems) == []
    assert "is not the name of a folder inside another one" in problems[0]
