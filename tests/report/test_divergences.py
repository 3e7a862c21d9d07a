"""Table 6: the paper's divergences beside ours."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from records import config, write_divergence, write_run

from rtx.report.contents import build
from rtx.report.divergences import newest_divergence
from rtx.report.run_records import collect
from rtx.report.tables import Table

WORDS = {"name": "wikitext103", "unit": "word", "fingerprint": "f00d" * 4}


def table_of(folder: Path) -> Table:
    """The table of divergences of a folder's report."""
    return next(table for table in build(collect([folder]), "").tables if "divergence" in table.title.lower())


def test_the_papers_values_stand_beside_ours_layer_by_layer_and_in_the_mean(tmp_path: Path) -> None:
    write_divergence(write_run(tmp_path, config("wikitext103"), data=WORDS))
    table = table_of(tmp_path)
    assert table.title.startswith("Table 6. Wikitext-103")
    assert [row["layer"] for row in table.rows] == [*map(str, range(10)), "mean"]
    assert table.rows[1]["local_routed"] == pytest.approx(0.11) and table.rows[1]["paper_local_routed"] == 0.6674
    assert table.rows[-1]["local_local"] == pytest.approx(0.045)
    assert table.rows[-1]["paper_local_local"] == pytest.approx(0.17760)
    plots = [plot.name for plot in build(collect([tmp_path]), "").plots]
    assert "divergence-0" in plots


def test_a_run_on_other_data_is_not_titled_by_the_papers(tmp_path: Path) -> None:
    write_divergence(write_run(tmp_path, config("smoke")), layers=4)
    table = table_of(tmp_path)
    assert "Wikitext" not in table.title and "text" in table.title
    assert "paper_local_local" not in table.rows[0] and "paper_local_local" in table.rows[-1]


def test_the_best_checkpoint_counts_and_a_damaged_record_does_not(tmp_path: Path) -> None:
    run = write_run(tmp_path, config("wikitext103"), data=WORDS)
    write_divergence(run, checkpoint="last")
    write_divergence(run, checkpoint="best", length=1024)
    (cell,) = collect([tmp_path]).cells
    assert (newest_divergence(cell) or {})["length"] == 1024
    for layers in ({}, [{"layer": "x"}], [3], None):
        write_divergence(run, checkpoint="best")
        path = run / "analysis" / "divergence-best.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "layers": layers}))
        (cell,) = collect([tmp_path]).cells
        assert (newest_divergence(cell) or {})["length"] == 4096
