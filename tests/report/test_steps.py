"""Records of `rtx bench steps` in a report: ratios beside the paper's, and records that are none."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from records import config, write_run

from rtx import cli
from rtx.report.steps import DRAWN, WHAT, read_record, record_path, recorded, views
from rtx.report.views import DASH, View


def row(made: dict[str, Any], *times: float, reason: str | None = None) -> dict[str, Any]:
    """A row of a record."""
    return {"config": made, "ms_turns": list(times), "peak_bytes": 2**31, "parameters": 7, "reason": reason}


def record(*rows: dict[str, Any]) -> dict[str, Any]:
    """A record of these rows."""
    bench = {"turns": 3, "per_turn": 2, "warmup": 1, "together": True}
    facts = {"what": WHAT, "bench": bench, "ids": DRAWN, "device": "CPU, 2 threads", "versions": {"torch": "2.11.0"}}
    return {**facts, "time": "2026-11-21T00:00:00Z", "rows": list(rows)}


def write(folder: Path, content: Any, key: str = "0") -> Path:
    """Write a record below a folder."""
    (folder / "bench").mkdir(parents=True, exist_ok=True)
    path = folder / "bench" / f"steps-{key}.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def texts(view: View, key: str) -> list[str]:
    """The texts of a column."""
    at = [column.key for column in view.columns].index(key)
    return [entries[at].text for entries in view.rows]


LOCAL = config(routing__heads=0)
ROUTING = config(routing__heads=4, routing__layers=8, routing__window=512)


def test_ratios_stand_beside_the_papers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "cifar10"
    write(folder, record(row(ROUTING, 200.0, 210.0, 400.0), row(LOCAL, 100.0, 105.0, 100.0)))
    write_run(folder, ROUTING)
    assert cli.main(["report", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "the median of 3 turns of 2 steps, after 1 step of warm-up; ids drawn at random" in " ".join(said.split())
    rows = [r for r in csv.DictReader((folder / "report" / "report.csv").read_text().splitlines()) if r["milliseconds"]]
    assert [r["row"] for r in rows] == ["Local", "Routing 4x8 W=512"]
    local, routing = rows
    assert (float(local["milliseconds"]), float(routing["milliseconds"])) == (100.0, 210.0)
    assert float(routing["speed_ratio"]) == pytest.approx(100 / 210)
    assert float(routing["paper_speed_ratio"]) == pytest.approx(5.14 / 9.023)
    assert routing["spread"] == "0.25 to 0.50"


def test_a_folder_with_nothing_but_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "pg19", record(row(config("pg19"), 20.0), row(config("pg19", routing__heads=0), 10.0)))
    assert cli.main(["report", str(tmp_path / "pg19")]) == 0
    said = capsys.readouterr().out
    assert "Table 7. PG-19: steps per second" in said and "0.59" in said and "the median of 1 turn of 3" in said
    assert "Not the paper's row: Local: model.layers=22 (paper: 24)." in said
    assert "The local model has 24 layers" in (tmp_path / "pg19" / "report" / "report.md").read_text()


def test_the_list_of_the_papers_tables_counts_what_was_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RTX_OUTPUTS", str(tmp_path))
    write(tmp_path / "pg19", record(row(config("pg19"), 20.0)))
    write(tmp_path / "cifar10", record(row(LOCAL, 10.0), row(ROUTING, reason="out of memory")))
    assert cli.main(["report"]) == 0
    lines = {
        line[:7]: line
        for line in capsys.readouterr().out.replace("\n    ", " ").splitlines()
        if line.startswith("Table ")
    }
    assert "1 of 2 rows timed" in lines["Table 7"] and "1 of 27 rows timed" in lines["Table 1"]
    assert "rtx bench steps experiment=pg19_steps" in lines["Table 7"] and "not run" in lines["Table 2"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"what": "training st', "half written, or damaged"),
        ("[]", "is not a record"),
        ({"what": "something else", "rows": []}, "is not a record of rtx bench steps"),
        ({"what": WHAT}, "is not a record of rtx bench steps"),
        (record(row(LOCAL, -1.0)), "is not a record of rtx bench steps"),
        (record({"config": "x", "ms_turns": [1.0]}), "is not a record of rtx bench steps"),
    ],
)
def test_what_is_no_record_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: Any, said: str) -> None:
    path = write(tmp_path / "cifar10", content)
    assert cli.main(["report", str(path.parents[1])]) == 2
    assert said in capsys.readouterr().err
    write_run(tmp_path / "cifar10", LOCAL)
    assert cli.main(["report", str(path.parents[1])]) == 0
    assert f"{path}: " in capsys.readouterr().out


def test_failed_rows_and_rows_without_a_local_one() -> None:
    (view,) = views(read_record(record(row(ROUTING, 10.0), row(config(model__base="full"), reason="out of memory"))))
    assert any(line.startswith("No ratios: ") for line in view.lines)
    (view,) = views(read_record(record(row(LOCAL, 10.0), row(ROUTING, reason="NaN"), row(LOCAL, 20.0, reason="NaN"))))
    assert view.lines[-1] == "Failed: Local (3), Routing 4x8 W=512: NaN."
    assert texts(view, "row") == ["Local (1)", "Local (3)", "Routing 4x8 W=512"]
    assert texts(view, "milliseconds") == ["10.0", "20.0", "failed"]


def test_what_random_ids_cannot_tell_is_said() -> None:
    causal = config(routing__selection="causal", routing__heads=4, routing__layers=8, routing__window=512)
    for made, said in ((ROUTING, False), (causal, True)):
        (view,) = views(read_record(record(row(LOCAL, 10.0), row(made, 10.0))))
        assert any("real data may take longer" in line for line in view.lines) == said


def test_the_local_row_with_the_fewest_other_differences_counts() -> None:
    sizes = [(hidden, heads) for hidden in (64, 128) for heads in (0, 4)]
    rows = [config(model__hidden=hidden, routing__heads=heads, routing__window=512) for hidden, heads in sizes]
    times = (10.0, 20.0, 40.0, 160.0)
    made = read_record(record(*(row(each, time) for each, time in zip(rows, times, strict=True))))
    by_name = {
        name: ratio
        for view in views(made)
        for name, ratio in zip(texts(view, "row"), texts(view, "speed_ratio"), strict=True)
    }
    assert by_name["Routing 4x8 W=512 hidden=64"] == "0.50" and by_name["Routing 4x8 W=512 hidden=128"] == "0.25"
    other = read_record(
        record(row(LOCAL, 10.0), row(config(data__length=1536, routing__heads=0, model__base="full"), 10.0))
    )
    assert DASH in [text for view in views(other) for text in texts(view, "speed_ratio")]


def test_rows_of_another_batch_or_arithmetic_give_no_ratio() -> None:
    made = [config(routing__heads=3, trainer__batch_size=7), config(routing__heads=3, hardware__threads=1)]
    both = config(routing__heads=3)
    _, view = views(read_record(record(row(LOCAL, 10.0), *(row(each, 20.0) for each in (*made, both)))))
    assert texts(view, "speed_ratio") == [DASH, DASH, "0.50"]
    (view,) = views(read_record(record(row(LOCAL, reason="out of memory"), row(ROUTING, 10.0))))
    assert "No ratios: they are to a row of local heads alone (routing.heads=0) of the same N, batch" in view.lines[1]


def test_rows_that_are_none_of_the_papers_stand_apart() -> None:
    odd = config(routing__heads=3)
    first, second = views(read_record(record(row(odd, 10.0), row(LOCAL, 5.0))))
    assert first.title.startswith("Table 1. ") and second.title == "Measured training steps"
    assert texts(second, "speed_ratio") == ["0.50"]
    assert "paper_steps_per_second" not in [column.key for column in second.columns]


def test_the_same_rows_on_the_same_device_share_a_record(tmp_path: Path) -> None:
    folder = tmp_path / "name"
    first = record_path(folder, ["a", "b"], "CPU, 2 threads")
    assert first == record_path(folder, ["b", "a"], "CPU, 2 threads")
    assert len({first, record_path(folder, ["a"], "CPU, 2 threads"), record_path(folder, ["a", "b"], "H200")}) == 3
    first.parent.mkdir(parents=True)
    first.touch()
    assert recorded(folder) == [first] == recorded(tmp_path)
