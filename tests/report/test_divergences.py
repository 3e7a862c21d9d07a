"""The paper's Table 6 beside ours: in the report, on the terminal, and records that are not whole."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path

import pytest
from records import config, write_divergence, write_run

from rtx.report.cells import collect
from rtx.report.divergence import divergence_table, newest_divergence, paper_spreads
from rtx.report.formats import comma_separated, markdown
from rtx.report.page import html
from rtx.report.report import Report, build
from rtx.report.views import View

WORDS = {"name": "wikitext103", "unit": "word", "fingerprint": "cafe" * 4}


def built(folder: Path) -> Report:
    """The report of a folder."""
    return build(collect([folder]), "a report")


def table_6(report: Report) -> list[View]:
    """Its tables of divergences."""
    return [view for view in report.views if view.title.startswith("Table 6")]


def test_the_papers_values_stand_beside_ours_layer_by_layer(tmp_path: Path) -> None:
    write_divergence(write_run(tmp_path, config("wikitext103"), data=WORDS))
    report = built(tmp_path)
    (view,) = table_6(report)
    assert [column.title for column in view.columns][:3] == ["layer", "local local", "paper local local"]
    texts = [[value.text for value in row] for row in view.rows]
    assert len(texts) == 10
    assert texts[1][:3] == ["1", "0.0100 ± 0.0020", "0.3071 ± 0.1217"]
    assert texts[9][-2:] == ["0.2900 ± 0.0020", "0.3581 ± 0.0019"]
    assert not any("Not the paper's setting" in line for line in view.lines)
    rows = list(csv.DictReader(io.StringIO(comma_separated(report))))
    mine = [row for row in rows if row["table"].startswith("Table 6")]
    assert float(mine[0]["paper_local_routed"]) == 0.4706
    assert float(mine[0]["paper_local_routed_deviation"]) == 0.0319
    assert [row["layer"] for row in mine] == [str(layer) for layer in range(10)]
    assert "0.3071 ± 0.1217" in markdown(report)
    assert 'class="bound"' in html(report)
    ((caption, lines),) = report.divergences
    assert "Divergence of heads" in caption and [len(line.points) for line in lines] == [10] * 6
    assert lines[3].label == "paper local local" and lines[3].errors[1] == 0.1217
    assert report.tables is not None
    assert [row[3].text for row in report.tables.rows] == [
        "not run",
        "1 of 7 rows",
        *["not run"] * 3,
        "1 run",
        "not run",
    ]


def test_a_model_of_other_depth_has_the_papers_range_instead(tmp_path: Path) -> None:
    write_divergence(write_run(tmp_path, config(), data=WORDS), layers=2)
    (view,) = table_6(built(tmp_path))
    assert "paper" not in " ".join(column.title for column in view.columns)
    said = " ".join(view.lines)
    assert "local routing 0.4706 to 0.6674" in said
    assert "model.layers=12 (paper: 10)" in said and "data.name=cifar10 (paper: wikitext103)" in said


def test_records_of_other_protocols_are_set_apart_and_the_best_checkpoint_counts(tmp_path: Path) -> None:
    first = write_run(tmp_path, config("wikitext103"), data=WORDS)
    write_divergence(first)
    write_divergence(first, checkpoint="last", layers=3)
    second = write_run(tmp_path, config("wikitext103", seed=1), data=WORDS)
    write_divergence(second, length=64)
    assert [len(view.rows) for view in table_6(built(tmp_path))] == [10, 10]
    write_divergence(second)
    (view,) = table_6(built(tmp_path))
    assert len(view.rows) == 20 and view.columns[0].key == "run"


def test_a_record_that_is_not_whole_is_told_or_left_out(tmp_path: Path) -> None:
    run = write_run(tmp_path, config("wikitext103"), data=WORDS)
    write_divergence(run)
    (run / "analysis" / "torn.json").write_text('{"what": "diverg')
    (run / "analysis" / "other.json").write_text('{"what": "patterns"}')
    (run / "analysis" / "odd.json").write_text(json.dumps({"what": "divergence", "layers": [{"layer": "x"}, 3, None]}))
    report = built(tmp_path)
    assert any("torn.json: cannot be read" in problem for problem in report.problems)
    assert len(table_6(report)) == 1
    record = newest_divergence(collect([run]).cells[0])
    assert record is not None and len(record["layers"]) == 30


@pytest.mark.parametrize("layers", [2, 10])
def test_the_lines_of_the_command_fit_a_narrow_terminal(layers: int, tmp_path: Path) -> None:
    run = write_run(tmp_path, config("wikitext103"), data=WORDS)
    write_divergence(run, layers=layers, share=0.52)
    lines = divergence_table(json.loads((run / "analysis" / "divergence-best.json").read_text()))
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("1 ") and "0.0100 ± 0.0020" in line for line in lines)
    beside = [line for line in lines if line.startswith("  paper")]
    assert len(beside) == (10 if layers == 10 else 0)
    assert any("0.3071 ± 0.1217" in line for line in beside) == (layers == 10)
    assert any("local routing 0.4706 to 0.6674" in line for line in lines) == (layers != 10)


def test_no_value_of_the_paper_is_beyond_its_bound() -> None:
    assert len(paper_spreads()) == 30
    assert all(0 <= spread.mean <= math.log(2) for spread in paper_spreads().values())
