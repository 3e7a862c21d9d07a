"""`rtx report` on made-up records: the answer, seeds, protocols set apart, mistakes of users.

Verdicts by simulation: seldom false where rows are equal, and what they find where one is better.
"""

import csv
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rtx.cli import main as cli
from rtx.report.contents import Report
from rtx.report.formats import save_plots
from rtx.report.paper import numbered
from rtx.report.ranking import Values, chosen, compare, half_interval, mean
from rtx.tables import Table, text_of
from tests.helpers.records import (
    CAUSAL,
    DATA,
    FULL,
    IMAGES,
    LOCAL,
    config,
    write_divergence,
    write_eval,
    write_run,
)
from tests.helpers.reports import built, with_captions, without_plots

Captured = pytest.CaptureFixture[str]


def column(table: Table | None, key: str) -> list[Any]:
    assert table is not None
    return [row.get(key) for row in table.rows]


def rows_of(report: Report, start: str) -> Table:
    return next(table for table in report.tables if table.title.startswith(start))


def write_kinds(folder: Path, seeds: int = 5) -> Path:
    """Write runs of local, random, causal and topk heads.

    Causal ones are better than local ones, and topk ones are the best.
    """
    kinds = {"local": (3.0, LOCAL), "random": (3.01, {"routing__selection": "random"})}
    kinds |= {"causal": (2.5, CAUSAL), "topk": (1.0, {"routing__selection": "topk"})}
    for start, values in kinds.values():
        for seed in range(seeds):
            noise = 0.01 * ((seed * 7 + len(values)) % 5) + 0.1 * seed
            write_run(
                folder, config("far_text heads=causal", seed=seed, **values), bits=start + noise
            )
    return folder


def test_the_answer_ranks_legal_kinds_and_marks_what_sees_the_future(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    assert cli.main(["report", str(write_kinds(tmp_path))]) == 0
    lines = capsys.readouterr().out.splitlines()[:25]
    start = "At length 2,048, routing (causal) wins: 3.67 bits in 0.45"
    assert max(map(len, lines)) <= 110 and lines[0].startswith(start)
    parts = ("Scores by kind of heads:", "bits/byte", "sees", "steps/s", "against", "●", "yes")
    for part in parts:
        assert part in "\n".join(lines), part
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    causal, local, random, topk = rows = report["tables"][0]["rows"]
    assert [row["heads"] for row in rows] == [
        "routing (causal)",
        "local",
        "random",
        "routing (topk)",
    ]
    assert [(row["seeds"], row["sees_future"]) for row in rows] == [*[(5, "no")] * 3, (5, "yes")]
    assert (causal["against_local"], local["against_local"], topk["against_local"]) == (
        "better",
        "",
        "not ranked",
    )
    assert (
        random["against_local"] in ("tied", "behind")
        and local["less_local"] == topk["less_local"] == ""
    )
    assert re.fullmatch(r"\N{MINUS SIGN}0\.\d{3} ± 0\.\d{3}, p<0\.001", causal["less_local"])
    assert report["headline"].endswith("of local's time.")
    assert [line.partition(",")[0] for line in report["lines"][:-1]] == [
        "Against local",
        "Against random",
    ]
    assert report["lines"][-1] == "routing (topk) sees the future and is not ranked."


def test_four_seeds_give_no_verdict_and_a_killed_run_with_a_score_is_none(tmp_path: Path) -> None:
    for values in (LOCAL, CAUSAL):
        write_run(
            tmp_path, config("far_text heads=causal", seed=4, **values), bits=1.0, state="running"
        )
    report = without_plots(write_kinds(tmp_path, seeds=4))
    assert (
        column(report.answer, "seeds") == [4, 4, 4, 4] and min(column(report.answer, "ours")) > 1.0
    )
    assert report.answer and report.answer.lines[-1] == "Left out: 2 scored runs that did not end."
    assert set(column(report.answer, "against_local")) == {"", "too few seeds", "not ranked"}
    assert report.headline.startswith(
        "Not certain: routing (causal) heads have the lowest mean, but a verdict takes 5"
    )
    assert all(half is not None for half in column(report.answer, "half"))


def test_the_best_of_several_rows_is_reported_by_seeds_that_did_not_choose_it_if_any_are_left(
    tmp_path: Path,
) -> None:
    for heads in (1, 2):
        for seed in range(6):
            bits = 2.0 + 0.01 * seed + 0.5 * (heads == 1) + (seed < 3) * -0.3
            write_run(
                tmp_path,
                config("far_text heads=causal", seed=seed, routing__heads=heads),
                bits=bits,
            )
    for seed in range(6):
        write_run(
            tmp_path,
            config("far_text heads=causal", seed=seed, **LOCAL),
            bits=2.5 + 0.01 * (seed % 2),
        )
    answer = without_plots(tmp_path).answer
    assert (
        answer
        and answer.lines[1]
        == "routing (causal): best of 2 (heads=2), by 3 seeds that did not choose it."
    )
    row = next(row for row in answer.rows if row["heads"].startswith("routing"))
    assert row["seeds"] == 3 and row["of"] == 2 and row["ours"] == pytest.approx(2.04)
    for values, lr, seed in itertools.product((LOCAL, CAUSAL), (0.1, 0.2), (0, 1)):
        made = config(
            "far_text heads=causal", optimizer__lr=lr, seed=seed + 10 * (lr == 0.2), **values
        )
        write_run(tmp_path / "few", made, bits=2.0 + lr)
    assert without_plots(tmp_path / "few").headline.startswith(
        "Not certain: of several rows of a kind one is chosen, and no seeds are"
    ), "rows without a seed in common choose on no equal terms"


def test_a_row_chosen_by_its_only_seed_is_shown_with_that_seed_and_its_score(
    tmp_path: Path,
) -> None:
    for values, lr in itertools.product((LOCAL, CAUSAL), (0.1, 0.2)):
        write_run(
            tmp_path, config("far_text heads=causal", optimizer__lr=lr, **values), bits=2.0 + lr
        )
    report = built(tmp_path)
    assert report.headline == "Not certain: 1 seed a row; no verdict."
    answer = report.answer
    assert answer and column(answer, "ours") == [2.1, 2.1] and column(answer, "seeds") == [1, 1]
    (seeds,) = [one for one in answer.columns if one.key == "seeds"]
    assert [text_of(row, seeds) for row in answer.rows] == ["1, which chose it"] * 2
    assert (
        "local: best of 2 (lr=0.1), by the seeds that chose it, so rather too low." in answer.lines
    )
    assert "speed" not in [plot.name for plot in report.plots], (
        "no score is drawn beside others that chose it"
    )


def write_grid(folder: Path, seeds: int = 1, **values: Any) -> Path:
    """Write a grid of heads x layers x window, all rows within 0.06 bits of each other."""
    for at, (heads, layers, window) in enumerate(itertools.product((1, 2), (1, 2), (32, 64))):
        sizes = {"routing__heads": heads, "routing__layers": layers, "routing__window": window}
        for seed in range(seeds):
            made = config(
                "far_text heads=causal", seed=seed, routing__selection="exact", **sizes, **values
            )
            write_run(
                folder, made, bits=3.43 + 0.06 * at / 7 + 0.001 * ((seed * 3 + at) % 5), error=0.08
            )
    return folder


def test_a_report_of_one_seed_a_row_opens_with_how_certain_it_is(
    tmp_path: Path, capsys: Captured
) -> None:
    windows = 1  # 1,000 units scored, in windows of 2,048
    first = "Not certain: 1 seed a row; no verdict."
    noise = (
        "Differences below about 0.226 bits/byte are within the noise of a score "
        f"(its standard error 0.080 over {windows} window); the means of the 8 rows are up to "
        "0.062 bits/byte apart. Add seed=0,1,2,3,4 for a verdict."
    )
    assert cli.main(["report", str(write_grid(tmp_path))]) == 0
    assert " ".join(capsys.readouterr().out.split()).startswith(f"{first} {noise}")
    texts = {
        form: (tmp_path / "report" / f"report.{form}").read_text()
        for form in ("md", "html", "tex", "json")
    }
    assert texts["md"].splitlines()[2] == f"**{first}** {noise}"
    assert texts["md"].splitlines()[4].startswith("## Scores of all rows")
    body = texts["html"].partition("<body>")[2]
    assert f'<p class="headline">{first} <span>{noise}</span></p>' in body.partition("<table")[0]
    assert (
        f"\\textbf{{{first}}} {noise}".replace("-", "{-}")
        in texts["tex"].partition("\\begin{table}")[0]
    )
    report = json.loads(texts["json"])
    assert (report["headline"], report["noise"]) == (first, noise)
    assert [row["standard_error"] for row in report["tables"][0]["rows"]] == [0.08] * 8
    assert "clusters" not in texts["html"], "selection=exact has none"


def test_a_grid_of_five_seeds_has_a_verdict_on_its_lowest_row(tmp_path: Path) -> None:
    report = without_plots(write_grid(tmp_path, seeds=5))
    said = "Lowest mean: routing (exact): heads=1 layers=1 window=32; better than 7 of 7 other rows"
    assert report.headline == f"{said} (Holm's correction over 28 pairs)."
    assert report.noise.startswith(
        "Verdicts are for the windows scored: on other data a score may move by its"
    )
    report = without_plots(write_grid(tmp_path / "few", seeds=3))
    assert report.headline == "Not certain: a verdict takes 5 seeds a row, and here are 3."
    assert report.noise.startswith("Differences below about 0.226 bits/byte are within the noise")


def test_runs_that_differ_by_keys_that_they_do_not_read_are_one_row(tmp_path: Path) -> None:
    for seed, (layers, window) in enumerate(itertools.product((1, 2), (32, 64))):
        for kind, values in {"local": LOCAL, "full": FULL}.items():
            sizes = {"routing__layers": layers, "routing__window": window}
            made = config("far_text heads=causal", seed=seed, **values, **sizes)
            write_run(tmp_path / kind / str(seed), made, bits=3.0 + 0.01 * seed)
        for clusters in (4, 8):
            made = config(
                "far_text heads=causal",
                routing__selection="exact",
                seed=seed,
                routing__clusters=clusters,
            )
            write_run(tmp_path / "exact" / str(clusters), made, bits=2.9)
    report = without_plots(*(tmp_path / kind for kind in ("local", "full", "exact")))
    rows = rows_of(report, "Scores of all rows")
    assert column(rows, "run") == ["routing (exact)", "local", "full"] and column(
        rows, "seeds"
    ) == [4, 4, 4]
    assert not any("routing.clusters" in row for row in rows.rows)
    assert [row["routing.layers"] for row in rows.rows] == [1, None, None], (
        "no head of the others routes"
    )
    assert report.answer and not any("best of" in line for line in report.answer.lines), (
        "none is its own rival"
    )


def test_a_run_at_work_is_no_damaged_one(tmp_path: Path) -> None:
    run = write_run(tmp_path, config("smoke"), bits=None, state="running")
    status = json.loads((run / "status.json").read_text())
    del status["final"]
    (run / "status.json").write_text(json.dumps(status))
    report = built(tmp_path)
    assert report.problems == []
    assert report.headline.startswith("Not certain: no run has ended")


def test_table_1_beside_the_papers_and_without_a_folder_the_list_of_tables(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = tmp_path / "runs"
    data = {**IMAGES, "stamps": {"lossy": True, "scaled": "16x16"}}
    for row in numbered(1).rows:
        values = {"full": FULL, "local": LOCAL}.get(row.kind) or {
            "routing__heads": row.routing_heads,
            "routing__layers": row.routing_layers,
            "routing__window": row.window,
            "routing__selection": {"routing": "topk"}.get(row.kind, row.kind),
        }
        assert row.value and row.steps_per_second
        write_run(
            runs, config(**values), bits=row.value + 0.1, speed=row.steps_per_second, data=data
        )
    assert cli.main(["report", str(runs)]) == 0
    assert "Table 1 with other settings than the paper's" in capsys.readouterr().out
    rows = list(csv.DictReader((runs / "report" / "report.csv").read_text().splitlines()))
    mine = [row for row in rows if row["table"].startswith("Table 1 with other settings")]
    assert len(mine) == 27 and {row["difference"] for row in mine if "difference" in row} <= {""}
    for row in mine:
        assert float(row["ours"]) - float(row["paper"]) == pytest.approx(0.1)
    page = (runs / "report" / "report.html").read_text()
    assert len(page) < 2 * 2**20 and "http" not in page.replace("http://www.w3.org", "")
    assert "lossy JPEG, not comparable, scaled to 16x16" in page
    assert {path.name for path in (runs / "report").glob("*.png")} == {
        *("time.png", "speed.png", "heads-by-layers.png", "curves.png")
    }
    monkeypatch.setenv("RTX_OUTPUTS", str(tmp_path))
    assert cli.main(["report"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "27 of 27 rows, 0 of them with the paper's settings" in said
    assert said.index(f"rtx report {runs} 27 runs, 27 with a score") < said.index(
        "The paper's tables:"
    )
    assert "rtx train -m experiment=pg19,pg19_baselines" in said
    for row in ("Routing 4x8 W=512 2.971 5.140", "Routing 12 8 0.99", "Routing 22 8 0.7236"):
        assert row in said
    assert "0.0038 ± 0.0018 0.4706 ± 0.0319" in said


def test_runs_of_the_papers_settings_stand_in_the_papers_tables_by_the_measure_that_those_have(
    tmp_path: Path,
) -> None:
    for seed in (0, 1):
        run = write_run(tmp_path, config("cifar10", seed=seed), bits=3.0, data=IMAGES, step=200_000)
        write_eval(run, 3.0 + 0.1 * seed)
        run = write_run(
            tmp_path,
            config("pg19", seed=seed),
            bits=None,
            data={**IMAGES, "name": "pg19"},
            step=200_000,
        )
        write_eval(run, 4.1, length=8192, perplexity_per_word=35.0 + seed, baselines={"xz": 5.0})
    report = without_plots(tmp_path)
    words = rows_of(report, "Table 5. PG-19")
    table = rows_of(report, "Table 1. CIFAR-10")
    mine, simple = [row for row in words.rows if row.get("ours") != "not run"]
    assert simple == {"run": "baseline: xz", "bits": 5.0}
    assert mine["ours"] == 35.5 and mine["difference"] == pytest.approx(35.5 - 33.2)
    assert column(table, "ours").count("not run") == 26
    (mine,) = [row for row in table.rows if row["ours"] != "not run"]
    assert mine["paper_row"] == "Routing 4x8 W=512" and mine["seeds"] == 2
    assert mine["difference"] == pytest.approx(3.05 - 2.971)
    assert (
        table.notes
        and "1 of 27 rows, 1 of them" in column(rows_of(report, "The paper's tables"), "run")[0]
    )
    write_eval(
        write_run(
            tmp_path, config("cifar10", seed=2), bits=None, state="running", data=IMAGES, step=5_000
        ),
        4.0,
    )
    table = rows_of(without_plots(tmp_path), "Table 1 with other settings")
    assert "difference" not in table.rows[0] and "5,000 steps done of 200,000" in table.lines[1]


def test_a_simple_baseline_stands_beside_the_scores_of_every_table(tmp_path: Path) -> None:
    bits = {"zlib": 3.5, "order-2": 3.25}
    runs = [
        write_run(tmp_path, config("far_text heads=causal", **values), bits=2.0, baselines=bits)
        for values in (LOCAL, CAUSAL)
    ]
    for run in runs:
        write_eval(run, 2.5, baselines={"order-2": 4.0})
    report = without_plots(tmp_path)
    tables = [table for table in report.every_table() if table.title.startswith("Scores")]
    rows = [
        (table.rows[-1].get("heads", table.rows[-1].get("run")), table.rows[-1]["ours"])
        for table in tables
    ]
    assert rows == [("baseline: order-2", 4.0)] * 2, "of the split that was scored"
    assert "order-2" not in report.headline
    for run in runs:
        write_eval(run, 2.5, baselines={"xz": 1.5})
    assert without_plots(tmp_path).lines[-1] == (
        "The simple baseline xz (1.500 bits/byte) is ahead of every model."
    )


MANNERS = [
    {"mode": "streaming", "selection_sees_future": False},
    {"data": {**DATA, "fingerprint": "beef" * 4}},
]


@pytest.mark.parametrize("manner", [*MANNERS, {"ablate": "routing"}, {"partial": True}, {}])
def test_a_run_evaluated_in_another_way_stays_with_the_others(
    tmp_path: Path, manner: dict[str, Any]
) -> None:
    first = write_run(tmp_path, config("smoke"), bits=3.4)
    write_eval(first, 3.1, split="valid" if manner else "test", **manner)
    second = write_run(tmp_path, config("smoke", routing__heads=1), bits=3.5)
    both, other = [
        table
        for table in without_plots(tmp_path).tables
        if table.title.startswith("Scores of all rows")
    ]
    assert column(both, "ours") == [3.4, 3.5] and column(other, "ours") == [3.1]
    assert column(other, "sees_future") == [
        "yes" if manner.get("selection_sees_future", True) else "no"
    ]
    write_eval(second, 3.2, split="valid" if manner else "test", **manner)
    tables = [
        table
        for table in without_plots(tmp_path).tables
        if table.title.startswith("Scores of all rows")
    ]
    assert len(tables) == (2 if manner else 1), (
        "evaluations of the same manner take the place of closing validations"
    )


def test_all_rows_have_means_by_seed_the_best_checkpoints_score_and_names_of_what_differs(
    tmp_path: Path,
) -> None:
    write_run(tmp_path, config("far_text heads=local"), bits=2.0)
    for window, seed, threads, bits in (
        (64, 0, 1, 2.0),
        (64, 0, 2, 2.2),
        (64, 1, 1, 2.3),
        (128, 0, 1, 2.9),
    ):
        made = config(
            "far_text heads=causal", seed=seed, routing__window=window, hardware__threads=threads
        )
        if threads == 2:
            del made["routing"]["merge"]  # as of a version without this key
        run = write_run(tmp_path, made, bits=bits)
    table = rows_of(without_plots(tmp_path), "Scores of all rows")
    assert column(table, "run") == [
        "local",
        "routing (causal): window=64",
        "routing (causal): window=128",
    ]
    assert (column(table, "ours"), column(table, "seeds")) == (
        [2.0, pytest.approx(2.2), 2.9],
        [1, 2, 1],
    )
    assert column(table, "note")[1] == "seed 0: mean of 2 runs"
    write_eval(run, 3.2, checkpoint={"name": "last", "step": 2000})
    write_eval(run, 3.1, checkpoint={"name": "best", "step": 1500})
    scored = next(
        table for table in without_plots(tmp_path).tables if column(table, "ours") == [3.1]
    )
    assert any(
        "1 of 1 score is of a checkpoint before the run's last step" in line
        for line in scored.lines
    )


def test_measures_of_some_data_alone_have_columns_and_the_best_of_all_keys_are_full_attention(
    tmp_path: Path,
) -> None:
    for seed, share in enumerate((0.5, 0.7)):
        told = {
            "accuracy": share,
            "accuracy_by_pairs": {"4": [share + 0.1, 10]},
            "bits_far_repeated": share,
        }
        write_run(tmp_path, config("mqar heads=exact", seed=seed), bits=2.0, **told)
    write_run(tmp_path, config("mqar heads=full"), bits=1.0, accuracy=1.0)
    report = without_plots(tmp_path)
    for table in (report.answer, rows_of(report, "Scores of all rows")):
        assert column(table, "accuracy") == [1.0, pytest.approx(0.6)]
        assert column(table, "accuracy, pairs 4") == [None, pytest.approx(0.7)]
        assert column(table, "bits far repeated") == [None, pytest.approx(0.6)]
    assert column(report.answer, "heads") == ["local+full", "routing (exact)"]


def test_table_6_has_the_papers_divergences_beside_ours_layer_by_layer_and_in_the_mean(
    tmp_path: Path,
) -> None:
    words = {"name": "wikitext103", "unit": "word", "fingerprint": "f00d" * 4}
    run = write_run(tmp_path, config("wikitext103"), data=words)
    write_divergence(run, checkpoint="last", length=1024)
    write_divergence(run)
    report = with_captions(tmp_path)
    table = rows_of(report, "Table 6. Wikitext-103")
    assert "sequences of 4096;" in table.lines[0], "the best checkpoint counts"
    assert column(table, "layer") == [*map(str, range(10)), "mean"]
    assert (
        table.rows[1]["local_routing"] == pytest.approx(0.11)
        and table.rows[1]["paper_local_routing"] == 0.6674
    )
    assert table.rows[-1]["local_local"] == pytest.approx(0.045)
    assert table.rows[-1]["paper_local_local"] == pytest.approx(0.17760)
    assert not any("Not the paper's setting" in line for line in table.lines)
    assert f"divergence-{run.name}" in [plot.name for plot in report.plots]
    made = config("wikitext103", routing__layers=1)
    write_divergence(write_run(tmp_path / "less", made, data=words))
    less = rows_of(without_plots(tmp_path / "less"), "Table 6 with other settings than the paper's")
    assert "Not the paper's setting: routing.layers=1 (paper: as model.layers)." in less.lines
    write_divergence(write_run(tmp_path / "other", config("smoke")), layers=4)
    (table,) = [
        table
        for table in without_plots(tmp_path / "other").tables
        if "divergence" in table.title.lower()
    ]
    assert "Wikitext" not in table.title and "text" in table.title
    assert "paper_local_local" not in table.rows[0] and "paper_local_local" in table.rows[-1]


def test_mistakes(tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    Path("file").touch()
    write_run(tmp_path, config("smoke")).rename("../run")
    for words, said, code in (
        (["nowhere"], "nowhere: no such folder", 2),
        (["../run", "."], "holds no run", 2),
        (["."], "(rtx report alone prints the paper's tables)", 2),
        (["output=x"], "which runs?", 2),
        (["../run", "outptu=x"], "output", 2),
        (["../run", "output=file/x"], "output=<folder> names another", 1),
    ):
        assert cli.main(["report", *words]) == code
        error = capsys.readouterr().err
        assert said in error and "Traceback" not in error


def test_records_that_are_not_whole_are_told_and_the_rest_is_written(
    tmp_path: Path, capsys: Captured
) -> None:
    runs = (write_run(tmp_path, config(seed=seed), data=IMAGES) for seed in range(6))
    whole, torn, changed, resumed, bare, damaged = runs
    with open(torn / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "st')
    (torn / "status.json").write_text('{"state": "do')
    (changed / "config.yaml").write_text(
        (changed / "config.yaml").read_text().replace("lr: 0.0002", "lr: 0.5")
    )
    (resumed / "resumes.jsonl").write_text(
        json.dumps({"changed": {"trainer.steps": [1, 2]}}) + "\n"
    )
    (bare / "config.yaml").write_text("{[")
    (bare / "environment.json").unlink()
    (damaged / "status.json").write_text('{"state": "done", "step": 7, "final": {"bits": [3]}}')
    write_run(tmp_path, config(routing__heads=2, routing__layers=4), bits=None, state="running")
    row = {
        "time": "t",
        "command": "rtx train -m seed=1,2",
        "folder": "/",
        "cells": {"1" * 12: "seed=2"},
    }
    (tmp_path / "sweeps.jsonl").write_text(json.dumps(row) + "\n{half")
    assert cli.main(["report", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    for part in (
        f"{torn.name}/metrics.jsonl: 1 broken row left out",
        f"{torn.name}/status.json: cannot be read; half written, or damaged",
        f"{changed.name}: its configuration changed under the sweep",
        f"{resumed.name}: resumed with other values of trainer.steps",
        f"{bare.name}/config.yaml: cannot be read",
        f"{bare.name}/environment.json: missing",
        f"{damaged.name}/status.json: final.bits is damaged: Input should be a valid number",
        "sweeps.jsonl: 1 broken row left out",
    ):
        assert part in said, part
    assert f"{whole.name}:" not in said
    assert cli.main(["report", str(whole)]) == 0 and "not started" not in capsys.readouterr().out
    page = (tmp_path / "report" / "report.md").read_text()
    assert "not started" in page and "killed" in page and "rtx train -m seed=1,2" in page


def test_heat_maps_of_different_selections_are_panels_of_their_own(tmp_path: Path) -> None:
    for selection, heads, layers in itertools.product(("topk", "causal"), (1, 2), (1, 2)):
        sizes = {"routing__heads": heads, "routing__layers": layers}
        bits = 3.0 + 0.01 * (selection == "topk") + 0.02 * heads * layers - 0.02
        write_run(
            tmp_path,
            config("far_text heads=causal", routing__selection=selection, **sizes),
            bits=bits,
        )
    (plot,) = [plot for plot in built(tmp_path).plots if plot.name == "heads-by-layers"]
    assert all(plot.svg.count(f">{kind}<") == 1 for kind in ("routing (topk)", "routing (causal)"))
    scale = re.findall(r">(\d\.\d+)<", plot.svg)
    assert {"3.000", "3.070"} <= {*scale}, "the values of the cells"
    ends = [float(number) for number in scale if len(number) < 5]
    assert min(ends) <= 3.01 and max(ends) >= 3.06, "the colour bar has all of the range"
    assert "1 seed a cell; differences below about 0.057 bits/byte" in plot.svg


def test_the_first_plot_of_runs_is_saved_in_their_folder(tmp_path: Path) -> None:
    assert save_plots([tmp_path]) == "", "runs that have none"
    write_divergence(write_run(tmp_path, config("smoke")), layers=2)
    saved = tmp_path / "curves.png"
    assert save_plots([tmp_path]) == str(saved) and saved.read_bytes()[:4] == b"\x89PNG"
    saved.unlink()
    saved.mkdir()
    assert save_plots([tmp_path]).startswith("no plot: ")


def test_reports_of_several_runs_leave_that_of_one_alone(tmp_path: Path, capsys: Captured) -> None:
    one, two = (write_run(tmp_path, config("smoke", seed=seed)) for seed in (1, 2))
    for runs, place in (([one], "report"), ([one, two], f"report-{two.name}")):
        assert (
            cli.main(["report", *map(str, runs)]) == 0
            and f"{one}/{place}/report.md" in capsys.readouterr().out
        )


def test_reports_need_no_torch(tmp_path: Path) -> None:
    run = write_run(tmp_path, config("smoke"))
    code = (
        "import sys; from pathlib import Path; "
        "from rtx.report.contents import build; from rtx.report.run_records import collect; "
        "late = {'torch', 'matplotlib', 'scipy', 'jinja2', 'rich'}; "
        "assert not late & set(sys.modules); "
        "build(collect([Path(sys.argv[1])]), ''); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(run)], check=True)


TABLES = {2: 3000, 5: 1000, 27: 200}
"""Simulated tables by rows.

Chance alone moves a share of 5% by one standard error of 0.4 to 1.5 points.
"""


def simulated(
    rng: np.random.Generator, rows: int, seeds: int, paired: bool, better: float = 0.0
) -> dict[str, Values]:
    """Return rows of one mean; paired ones share what a seed does to all.

    `better`: by how many deviations row 1 is better.
    """
    scores = rng.normal(size=(rows, seeds)) + (rng.normal(size=seeds) if paired else 0.0)
    scores[1] -= better
    names = [
        [str(seed) if paired else f"{row}.{seed}" for seed in range(seeds)] for row in range(rows)
    ]
    return {
        str(row): dict(zip(names[row], map(float, scores[row]), strict=True)) for row in range(rows)
    }


@pytest.mark.parametrize("seeds", [5, 10])
@pytest.mark.parametrize("rows", [2, 5, 27])
@pytest.mark.parametrize("paired", [True, False], ids=["paired", "welch"])
def test_equal_rows_have_a_false_verdict_in_one_table_of_twenty_at_most(
    rows: int, seeds: int, paired: bool
) -> None:
    rng = np.random.default_rng(rows + seeds)
    tables = TABLES[rows]
    false = 0
    power = 0
    # What a table compares: all with local and with random heads.
    others = ("0", "2")[: rows - 1]
    against = [(str(row), other) for other in others for row in range(1, rows) if str(row) != other]
    for _ in range(tables):
        found = compare(simulated(rng, rows, seeds, paired), against)
        false += any(one.verdict != "tied" for one in found.values())
        found = compare(simulated(rng, rows, seeds, paired, better=2.0), against)
        power += found["1", "0"].verdict == "better"
        for one in found.values():
            assert one.difference is not None
            assert (one.verdict == "tied") == (-one.half <= one.difference <= one.half), (
                "the interval says the same"
            )
            assert (one.verdict == "tied") == (one.chance > 0.05), "and so does p"
    print(
        f"{rows} rows, {seeds} seeds: false {false / tables:.1%}; "
        f"two deviations found in {power / tables:.0%}"
    )
    assert false / tables <= 0.05 + 3 * (0.05 * 0.95 / tables) ** 0.5
    assert power / tables > (0.6 if rows == 2 or (rows == 5 and seeds == 10) else 0.01)


def test_intervals_are_those_of_students_t_and_equal_rows_tie() -> None:
    assert half_interval([1.0, 2.0, 3.0]) == pytest.approx(4.302653 / 3**0.5)
    assert half_interval([1.0]) is None
    rows = {
        "a": dict.fromkeys("12345", 1.0),
        "b": dict.fromkeys("12345", 1.0),
        "c": dict.fromkeys("12345", 2.0),
    }
    found = compare(rows, [("b", "a"), ("c", "a"), ("a", "c")])
    assert [one.verdict for one in found.values()] == ["tied", "behind", "better"]


def test_the_best_of_many_is_reported_by_other_seeds_than_those_that_chose_it() -> None:
    rng = np.random.default_rng(0)
    reported: list[float] = []
    for _ in range(400):
        _, values = chosen(simulated(rng, 24, 10, paired=False))
        assert not values  # they share no seed, so that nothing chose on equal terms
        _, values = chosen(simulated(rng, 24, 10, paired=True))
        assert len(values) == 5
        reported.append(mean(values.values()))
    assert abs(mean(reported)) < 0.1, "the least of 24 means of five would be at -0.9"
    assert chosen({"a": {"0": 1.0}, "b": {"0": 2.0, "1": 5.0}}) == ("a", {})
    assert chosen({"a": {"0": 1.0, "1": 3.0}, "b": {"0": 2.0}}) == ("a", {"1": 3.0})


@pytest.mark.parametrize("size", [1e-170, 1e100, 1e300])
def test_scores_of_any_size_are_compared(size: float) -> None:
    """A crafted record may have any: squares of such variances overflow, or are 0."""
    one = {str(seed): size * (1 + seed / 100) for seed in range(5)}
    other = {str(seed): size * (1 + seed * seed % 3 / 90) for seed in range(5)}
    compared = compare({"one": one, "other": other}, [("one", "other")])
    assert compared["one", "other"].verdict in ("tied", "better", "behind")
    if size > 1e150:
        assert compared["one", "other"].verdict == "tied"
