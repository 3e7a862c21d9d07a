"""Step times beside the paper's."""

from pathlib import Path
from typing import Any

import pytest

from rtx.cli import main as cli
from rtx.report.run_records import collect
from rtx.report.steps import StepRecord, timed_records, views
from rtx.runs.records import StepsRecord
from tests.helpers.records import (
    CAUSAL,
    FULL,
    LOCAL,
    config,
    steps_record,
    timed_row,
    write_record,
    write_run,
)
from tests.helpers.reports import without_plots


def timed(*rows: dict[str, Any]) -> StepRecord:
    """Return a record of timed rows as it is read."""
    (record,) = timed_records([StepsRecord.model_validate(steps_record(*rows))])
    return record


def test_ratios_stand_beside_the_papers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [timed_row(100.0, routing__heads=0), timed_row(200.0), timed_row(50.0, **FULL)]
    write_record(
        tmp_path, steps_record(*rows, command="python benchmarks/steps.py experiment=cifar10_grid")
    )
    assert cli.main(["report", str(tmp_path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Table 1. CIFAR-10: routing heads, routing layers and window: measured" in said
    assert (
        "python benchmarks/steps.py experiment=cifar10_grid"
        in (tmp_path / "report" / "report.md").read_text()
    )
    (table,) = views(timed(*rows))
    ratios = {row["row"]: (row["speed_ratio"], row["paper_speed_ratio"]) for row in table.rows}
    assert ratios["routing (topk)"] == (pytest.approx(0.5), pytest.approx(5.14 / 9.023))
    assert ratios["full"] == (pytest.approx(2.0), pytest.approx(5.608 / 9.023))
    assert all(0 < row["pace_half"] < 0.1 * row["steps_per_second"] for row in table.rows)
    assert {row["ratio_half"] and round(row["ratio_half"], 9) for row in table.rows} == {
        None,
        0.0,
    }, "drift cancels"


def test_paces_of_a_record_count_before_those_of_runs(tmp_path: Path) -> None:
    for values in (LOCAL, FULL, CAUSAL):
        write_run(tmp_path, config("far_text heads=causal", **values), speed=7.0)
    rows = [
        timed_row(100.0, "far_text heads=causal", **LOCAL),
        timed_row(400.0, "far_text heads=causal", "ids drawn at random", **FULL),
    ]
    write_record(tmp_path, steps_record(*rows))
    answer = without_plots(tmp_path).answer
    assert answer is not None
    paces = {row["heads"]: round(row["steps_per_second"], 2) for row in answer.rows}
    assert paces == {"local": 10.0, "full": 2.5, "routing (causal)": 7.0}
    assert (
        "Steps/s of routing (causal) were measured in training, not timed in turn."
        in answer.lines[0]
    )
    assert "Steps/s of full may not be those of training (ids drawn at random)." in answer.lines[0]


def test_failed_rows_rows_without_a_local_one_and_other_rows_stand_with_a_reason() -> None:
    failed = {**timed_row(1.0, reason="out of memory"), "ms_turns": []}
    local = timed_row(10.0, routing__heads=0, hardware__threads=7)
    tables = views(timed(failed, timed_row(20.0), local, timed_row(9.0, "smoke")))
    assert [table.title for table in tables][1] == "Measured training steps"
    assert [row["milliseconds"] for row in tables[0].rows if row["note"]] == ["out of memory"]
    assert [row["speed_ratio"] for row in tables[0].rows] == [pytest.approx(1.0), None, None]


def test_what_is_no_record_is_told(tmp_path: Path) -> None:
    other = '{"what": "x", "rows": [{"config": {}}]}'
    for content, said in (
        ("{", "cannot be read; half written, or damaged"),
        (other, "what is damaged: Input should be 'training steps in turn'"),
        ("[3]", "is damaged: Input should be an object"),
    ):
        write_record(tmp_path, None).write_text(content)
        found = collect([tmp_path])
        assert found.steps == [] and said in found.problems[0]
