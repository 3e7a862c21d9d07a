"""Table 6: the paper's divergences beside ours."""

from __future__ import annotations

from pathlib import Path

import pytest
from records import config, write_divergence, write_run

from rtx.report.contents import build
from rtx.report.run_records import collect
from rtx.report.tables import Table

WORDS = {"name": "wikitext103", "unit": "word", "fingerprint": "f00d" * 4}


def table_of(folder: Path) -> Table:
    """The table of divergences of a folder's report."""
    return next(table for table in build(collect([folder]), "").tables if "divergence" in table.title.lower())


def test_the_papers_values_stand_beside_ours_layer_by_layer_and_in_the_mean(tmp_path: Path) -> None:
    run = write_run(tmp_path, config("wikitext103"), data=WORDS)
    write_divergence(run, checkpoint="last", length=1024)
    write_divergence(run)
    table = table_of(tmp_path)
    assert table.title.startswith("Table 6. Wikitext-103")
    assert "sequences of 4096;" in table.lines[0], "the best checkpoint counts"
    assert [row["layer"] for row in table.rows] == [*map(str, range(10)), "mean"]
    assert table.rows[1]["local_routing"] == pytest.approx(0.11) and table.rows[1]["paper_local_routing"] == 0.6674
    assert table.rows[-1]["local_local"] == pytest.approx(0.045)
    assert table.rows[-1]["paper_local_local"] == pytest.approx(0.17760)
    assert f"divergence-{run.name}" in [plot.name for plot in build(collect([tmp_path]), "").plots]


def test_a_run_on_other_data_is_not_titled_by_the_papers(tmp_path: Path) -> None:
    write_divergence(write_run(tmp_path, config("smoke")), layers=4)
    table = table_of(tmp_path)
    assert "Wikitext" not in table.title and "text" in table.title
    assert "paper_local_local" not in table.rows[0] and "paper_local_local" in table.rows[-1]
