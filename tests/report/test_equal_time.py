"""Scores at equal time: what each row had reached when the first one ended, on a line between its validations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from records import config, write_run

from rtx.report.cells import Collection, collect
from rtx.report.equal_time import equal_time_views
from rtx.report.steps import DRAWN, WHAT, read_records
from rtx.report.views import View

LOCAL = {"routing__heads": 0}
FULL = {"routing__heads": 0, "model__base": "full"}


def texts(view: View, key: str) -> list[str]:
    """The texts of a column."""
    at = [column.key for column in view.columns].index(key)
    return [entries[at].text for entries in view.rows]


def row(view: View, name: str) -> dict[str, str]:
    """The texts of a row."""
    at = texts(view, "run").index(name)
    return {column.key: view.rows[at][place].text for place, column in enumerate(view.columns)}


def made(seed: int = 0, **values: Any) -> dict[str, Any]:
    """A configuration with a constant learning rate."""
    return config("comparison", **{"optimizer__schedule": "constant", "data__length": 1024, "seed": seed, **values})


def write_three(folder: Path, speed: float, bits: float, **values: Any) -> None:
    """Write runs of three seeds; the validation of step n has bits + 500 / n + 0.02."""
    for seed in range(3):
        write_run(folder, made(seed, **values), speed=speed, bits=bits + 0.001 * seed)


def views(folder: Path) -> list[View]:
    """The tables of the runs and records below a folder."""
    problems = Collection()
    found = equal_time_views(collect([folder]).cells, read_records([folder], problems))
    assert not problems.problems
    return found


def write_paces(
    folder: Path, name: str, device: str, time: str, local: float, full: float, causal: float | None = None
) -> None:
    """Write a record of step times: milliseconds of the local, the full and perhaps a causal row."""
    timed = [{"config": made(**LOCAL), "ms_turns": [local]}, {"config": made(**FULL), "ms_turns": [full]}]
    timed += [{"config": made(routing__selection="causal"), "ms_turns": [causal]}] if causal else []
    (folder / "bench").mkdir(exist_ok=True)
    content = {"what": WHAT, "device": device, "time": time, "rows": timed}
    (folder / "bench" / f"steps-{name}.json").write_text(json.dumps(content))


@pytest.mark.parametrize("pace", [8.0, 5.55, 11.1, 12.21, 14.43])
def test_slow_rows_are_taken_where_the_first_one_ended(tmp_path: Path, pace: float) -> None:
    write_three(tmp_path, pace, 3.0, **LOCAL)
    write_three(tmp_path, pace * 0.5125, 2.9, **FULL)
    (view,) = views(tmp_path)
    local, full = row(view, "Local"), row(view, "Transformer")
    assert local["trained"] == "2,000 of 2,000" and full["trained"] == "1,025 of 2,000"
    assert float(local["ours"]) == pytest.approx(3.001 + 500 / 2000 + 0.02, abs=1e-4)
    between = 0.75 * 500 / 1000 + 0.25 * 500 / 1100
    assert float(full["ours"]) == pytest.approx(2.901 + between + 0.02, abs=1e-4)
    assert (local["standing"], full["standing"]) == ("best", "behind")
    said = " ".join(view.lines)
    assert "Local ends first" in said and "whatever else ran there" in said and "500 bytes of split valid" in said


def test_paces_taken_in_turn_count_more_and_the_newest_most(tmp_path: Path) -> None:
    write_three(tmp_path, 8.0, 3.0, **LOCAL)
    write_three(tmp_path, 8.0, 2.9, **FULL)
    write_paces(tmp_path, "0", "H200", "2026-01-01", 10.0, 20.0)
    write_paces(tmp_path, "1", "CPU, 2 threads", "2026-01-02", 10.0, 40.0)
    (view,) = views(tmp_path)
    assert "measured them in turn (CPU, 2 threads)" in view.lines[0]
    assert row(view, "Transformer")["trained"] == "500 of 2,000"


def test_rows_that_data_may_slow_down_are_not_ranked_by_paces_of_drawn_ids(tmp_path: Path) -> None:
    write_three(tmp_path, 8.0, 3.0, **LOCAL)
    write_three(tmp_path, 8.0, 3.2, **FULL)
    write_three(tmp_path, 4.0, 2.9, routing__selection="causal")
    write_paces(tmp_path, "0", "CPU, 2 threads", "2026-01-02", 10.0, 40.0, 5.0)
    (view,) = views(tmp_path)
    assert "Routing 2x2 W=256 ends first" in view.lines[0]
    path = tmp_path / "bench" / "steps-0.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "ids": DRAWN}))
    (view,) = views(tmp_path)
    assert "Local ends first" in view.lines[0] and "at the most" in view.lines[-1]
    standing = {name.split()[0]: row(view, name)["standing"] for name in texts(view, "run")}
    assert standing == {"Local": "best", "Routing": "not ranked", "Transformer": "behind"}
    assert row(view, "Routing 2x2 W=256")["trained"] == "2,000 of 2,000"


def test_without_a_record_each_run_has_come_as_far_as_its_own_steps_took_it(tmp_path: Path) -> None:
    write_three(tmp_path, 8.0, 3.0, **LOCAL)
    run = write_run(tmp_path, made(0, **FULL), speed=8.0)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for each in rows:
        if each["kind"] == "train" and each["step"] <= 1000:
            each["tokens_per_second"] /= 3
    (run / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    assert row(views(tmp_path)[0], "Transformer")["trained"] == "667 of 2,000"


def test_who_sees_the_future_is_marked(tmp_path: Path) -> None:
    write_three(tmp_path, 8.0, 3.0, routing__selection="topk")
    write_three(tmp_path, 8.0, 3.1, routing__selection="causal")
    (view,) = views(tmp_path)
    names = [name for name in texts(view, "run") if "topk" in name]
    assert len(names) == 1 and row(view, names[0])["sees_future"] == "yes"
    assert sorted(texts(view, "sees_future")) == ["no", "yes"]


def test_a_row_without_a_validation_by_then_is_left_out_and_named(tmp_path: Path) -> None:
    write_three(tmp_path, 8.0, 3.0, **LOCAL)
    write_three(tmp_path, 8.0, 2.9, **FULL)
    write_three(tmp_path, 0.1, 2.9, routing__selection="causal")
    (view,) = views(tmp_path)
    assert len(view.rows) == 2
    assert "Left out, for want of a validation by then: Routing" in view.lines[-1]


@pytest.mark.parametrize(
    "other",
    [{"optimizer__schedule": "rsqrt"}, {"data__length": 2048}, {"trainer__val_windows": 7}],
    ids=["schedule", "length", "windows"],
)
def test_rows_of_other_terms_are_not_compared(tmp_path: Path, other: dict[str, Any]) -> None:
    write_three(tmp_path, 8.0, 3.0, **LOCAL)
    write_three(tmp_path, 8.0, 2.9, **FULL, **other)
    assert views(tmp_path) == []


def test_paces_of_two_machines_are_not_compared(tmp_path: Path) -> None:
    write_three(tmp_path, 8.0, 3.0, **LOCAL)
    for seed in range(3):
        run = write_run(tmp_path, made(seed, **FULL), speed=8.0)
        environment = json.loads((run / "environment.json").read_text())
        (run / "environment.json").write_text(json.dumps({**environment, "gpu": "H200"}))
    assert views(tmp_path) == []
    write_paces(tmp_path, "0", "CPU, 2 threads", "2026-01-02", 10.0, 40.0)
    assert len(views(tmp_path)) == 1


@pytest.mark.parametrize("damage", ["step", "batch", "paces"])
def test_damaged_records_give_no_table(tmp_path: Path, damage: str) -> None:
    write_three(tmp_path, 8.0, 3.0, **LOCAL)
    values = {"trainer__batch_size": 0} if damage == "batch" else {}
    run = write_run(tmp_path, made(0, **FULL, **values), speed=8.0, step=0 if damage == "step" else 2000)
    if damage == "paces":
        (run / "metrics.jsonl").write_text("")
    assert views(tmp_path) == []
