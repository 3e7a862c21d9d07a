"""Scores at equal time: the last validation that each row had reached when the fastest had taken its last step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from records import config, write_run

from rtx.report.cells import Collection, collect
from rtx.report.equal_time import equal_time_views
from rtx.report.steps import WHAT, read_records
from rtx.report.views import View


def texts(view: View, key: str) -> list[str]:
    """The texts of a column."""
    at = [column.key for column in view.columns].index(key)
    return [entries[at].text for entries in view.rows]


def made(seed: int = 0, **values: Any) -> dict[str, Any]:
    """A configuration with a constant learning rate."""
    values = {"optimizer__schedule": "constant", "data__length": 1024, "seed": seed, **values}
    return config("comparison", **values)


def write_three(folder: Path, speed: float, bits: float, **values: Any) -> None:
    """Write runs of three seeds; at step n they have bits + 500 / n + 0.02."""
    for seed in range(3):
        write_run(folder, made(seed, **values), speed=speed, bits=bits + 0.001 * seed)


def test_slow_rows_are_taken_where_the_fast_one_ended(tmp_path: Path) -> None:
    write_three(tmp_path, 8.0, 3.0, routing__heads=0)
    write_three(tmp_path, 4.1, 2.9, routing__heads=0, model__base="full")
    (view,) = equal_time_views(collect([tmp_path]).cells, [])
    local, full = (texts(view, "run").index(name) for name in ("Local", "Transformer"))
    assert texts(view, "trained")[local] == "2,000 of 2,000"
    assert texts(view, "trained")[full] == "1,025 of 2,000"  # 4.1 steps a second for 250 seconds
    assert float(texts(view, "ours")[local]) == pytest.approx(3.001 + 500 / 2000 + 0.02, abs=1e-4)
    assert float(texts(view, "ours")[full]) == pytest.approx(2.901 + 500 / 1000 + 0.02, abs=1e-4)
    assert texts(view, "standing")[local] == "best" and texts(view, "standing")[full] == "behind"
    said = " ".join(view.lines)
    assert "4:10 of training" in said and "whatever else their machine did" in said and "500 bytes" in said


def test_paces_taken_in_turn_count_more(tmp_path: Path) -> None:
    write_three(tmp_path, 8.0, 3.0, routing__heads=0)
    write_three(tmp_path, 8.0, 2.9, routing__heads=0, model__base="full")
    timed = [
        {"config": made(routing__heads=0), "ms_turns": [10.0]},
        {"config": made(routing__heads=0, model__base="full"), "ms_turns": [40.0]},
    ]
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "steps-0.json").write_text(json.dumps({"what": WHAT, "rows": timed}))
    problems = Collection()
    (view,) = equal_time_views(collect([tmp_path]).cells, read_records([tmp_path], problems))
    assert not problems.problems
    assert "measured in turn by rtx bench steps" in view.lines[0]
    assert "500 of 2,000" in texts(view, "trained")


@pytest.mark.parametrize("other", [{"optimizer__schedule": "rsqrt"}, {}])
def test_nothing_is_shown_where_it_would_mean_nothing(tmp_path: Path, other: dict[str, Any]) -> None:
    """A learning rate that falls; a row that had no validation by then."""
    write_run(tmp_path, made(routing__heads=0), speed=8.0)
    write_run(tmp_path, made(routing__heads=0, model__base="full", **other), speed=8.0 if other else 0.1)
    assert equal_time_views(collect([tmp_path]).cells, []) == []
