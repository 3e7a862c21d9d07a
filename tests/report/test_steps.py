"""Step times beside the paper's, and what rows score after equal time."""

import json
from pathlib import Path
from typing import Any

import pytest
from records import CAUSAL, FULL, LOCAL, config, write_run

from rtx import cli
from rtx.report.run_records import Collection, collect
from rtx.report.steps import WHAT, equal_time_tables, read_record, read_records, views
from rtx.report.tables import Table


def timed(milliseconds: float, experiment: str = "cifar10", reason: str | None = None, **values: Any) -> dict[str, Any]:
    turns = [milliseconds, milliseconds * 1.01, milliseconds * 0.99]
    return {"config": config(experiment, **values), "ms_turns": turns, "parameters": 1000, "reason": reason}


def record(*rows: dict[str, Any], **facts: Any) -> dict[str, Any]:
    how = {"bench": {"turns": 3, "per_turn": 2, "warmup": 2}, "ids": "training batches", "device": "CPU, 1 thread"}
    return {"what": WHAT, **how, "time": "2026", "rows": rows, **facts}


def write_record(folder: Path, content: Any, name: str = "a") -> Path:
    (folder / "bench").mkdir(exist_ok=True, parents=True)
    path = folder / "bench" / f"steps-{name}.json"
    path.write_text(json.dumps(content))
    return path


def test_ratios_stand_beside_the_papers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [timed(100.0, routing__heads=0), timed(200.0), timed(50.0, **FULL)]
    write_record(tmp_path, record(*rows, command="python benchmarks/steps.py experiment=cifar10_grid"))
    assert cli.main(["report", str(tmp_path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Table 1. CIFAR-10: routing heads, routing layers and window: measured" in said
    assert "python benchmarks/steps.py experiment=cifar10_grid" in (tmp_path / "report" / "report.md").read_text()
    (table,) = views(read_record(record(*rows)))
    ratios = {row["row"]: (row["speed_ratio"], row["paper_speed_ratio"]) for row in table.rows}
    assert ratios["routing (topk)"] == (pytest.approx(0.5), pytest.approx(5.14 / 9.023))
    assert ratios["full"] == (pytest.approx(2.0), pytest.approx(5.608 / 9.023))
    assert all(0 < row["pace_half"] < 0.1 * row["steps_per_second"] for row in table.rows)
    assert {row["ratio_half"] and round(row["ratio_half"], 9) for row in table.rows} == {None, 0.0}, "drift cancels"


def test_paces_of_a_record_count_before_those_of_runs(tmp_path: Path) -> None:
    for values in (LOCAL, FULL, CAUSAL):
        write_run(tmp_path, config("far_text_causal", **values), speed=7.0)
    rows = [timed(100.0, "far_text_causal", **LOCAL), timed(400.0, "far_text_causal", "ids drawn at random", **FULL)]
    write_record(tmp_path, record(*rows))
    assert cli.main(["report", str(tmp_path)]) == 0
    answer = json.loads((tmp_path / "report" / "report.json").read_text())["tables"][0]
    paces = {row["heads"]: round(row["steps_per_second"], 2) for row in answer["rows"]}
    assert paces == {"local": 10.0, "full": 2.5, "routing (causal)": 7.0}
    assert "Steps/s of routing (causal) are as the runs went, not timed in turn." in answer["lines"][0]
    assert "Steps/s of full may not be those of training (ids drawn at random)." in answer["lines"][0]


def test_failed_rows_rows_without_a_local_one_and_other_rows_stand_with_a_reason() -> None:
    failed = {**timed(1.0, reason="out of memory"), "ms_turns": []}
    local = timed(10.0, routing__heads=0, hardware__threads=7)
    tables = views(read_record(record(failed, timed(20.0), local, timed(9.0, "smoke"))))
    assert [table.title for table in tables][1] == "Measured training steps"
    assert [row["milliseconds"] for row in tables[0].rows if row["note"]] == ["out of memory"]
    assert [row["speed_ratio"] for row in tables[0].rows] == [pytest.approx(1.0), None, None]


def test_what_is_no_record_is_told(tmp_path: Path) -> None:
    other = '{"what": "x", "rows": [{"config": {}}]}'
    for content, said in (("{", "cannot be read"), (other, "is not a record"), ("[3]", "damaged")):
        write_record(tmp_path, None).write_text(content)
        found = Collection()
        assert read_records([tmp_path], found) == [] and said in found.problems[0]


def write_five(folder: Path, bits: float, **values: Any) -> None:
    """Write runs of five seeds; the validation of step n has bits + 500 / n + 0.02."""
    for seed in range(5):
        made = config("far_text_causal", seed=seed, **values)
        write_run(folder, made, bits=bits + 0.001 * (seed * 3 % 5), bits_far_repeated=1.0)


def equal_time(folder: Path) -> list[tuple[Table, str]]:
    found = collect([folder])
    return equal_time_tables(found.cells, read_records([folder], found))


def test_slow_rows_are_taken_where_the_first_one_ended_and_those_not_timed_in_training_left_out(tmp_path: Path) -> None:
    for values in (LOCAL, FULL, CAUSAL):
        write_five(tmp_path, 2.0, **values)
    assert equal_time(tmp_path) == []
    drawn = timed(100.0, "far_text_causal", "ids drawn at random", **CAUSAL)
    paces = [timed(100.0, "far_text_causal", **LOCAL), timed(250.0, "far_text_causal", **FULL)]
    write_record(tmp_path, record(*paces, drawn))
    ((table, said),) = equal_time(tmp_path)
    assert table.title == "Equal time: 3.3 minutes of training steps"
    assert len(table.rows) == 2 and table.lines[-1] == "Left out: routing (causal) (ids drawn at random)."
    assert "bits far repeated" not in {column.title for column in table.columns}, "the closing score's alone"
    ours = {row["heads"]: row["ours"] for row in table.rows}
    assert ours["full"] == pytest.approx(2.0 + 500 / 800 + 0.022) and ours["local"] == pytest.approx(2.0 + 0.25 + 0.022)
    assert said == "Behind local: full." and "(a sample of 16 windows)" in table.lines[0]
    uncertain = {**timed(250.0, "far_text_causal", **FULL), "ms_turns": [80.0, 250.0, 800.0]}
    write_record(tmp_path, record(paces[0], uncertain, drawn, time="2027"), "b")
    ((_, said),) = equal_time(tmp_path)
    assert said == "No difference from local shown: full.", "the error of the pace is in the verdict"


@pytest.mark.parametrize("one", [("optimizer__schedule", "rsqrt"), ("data__length", 1024), ("trainer__val_windows", 8)])
def test_rows_of_other_terms_are_not_compared(tmp_path: Path, one: tuple[str, Any]) -> None:
    other = dict([one])
    write_five(tmp_path, 2.0, **LOCAL)
    write_five(tmp_path, 2.0, **FULL, **other)
    paces = [timed(100.0, "far_text_causal", **LOCAL), timed(100.0, "far_text_causal", **FULL, **other)]
    write_record(tmp_path, record(*paces))
    assert equal_time(tmp_path) == []
