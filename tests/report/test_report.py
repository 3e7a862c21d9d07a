"""`rtx report` on made-up records: the paper's layout, seeds, protocols set apart, and records that are not whole."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from records import config, write_eval, write_run, write_table_1

from rtx import cli
from rtx.report.cells import collect
from rtx.report.names import label_of
from rtx.report.report import Report, build
from rtx.report.views import DASH, View

IMAGES = {"name": "cifar10", "unit": "byte", "fingerprint": "abcd" * 4}


def built(*folders: Path) -> Report:
    """The report of some folders."""
    return build(collect(folders), "a report")


def column(view: View, key: str) -> list[str]:
    """The texts of a column."""
    at = [one.key for one in view.columns].index(key)
    return [row[at].text for row in view.rows]


def test_table_1_in_the_papers_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = write_table_1(tmp_path / "runs", {**IMAGES, "stamps": {"lossy": True, "scaled": "16x16"}})
    assert cli.main(["report", str(runs)]) == 0
    said = capsys.readouterr().out
    assert "Table 1. CIFAR-10" in said
    rows = list(csv.DictReader((runs / "report" / "report.csv").read_text().splitlines()))
    assert len(rows) == 27
    assert {round(float(row["difference"]), 9) for row in rows} == {0.1}
    assert {row["ours"] for row in rows} >= {"3.083", "3.109", "3.176"}
    for row in rows:
        assert float(row["speed_ratio"]) == pytest.approx(float(row["paper_speed_ratio"]))
        assert "lossy JPEG, not comparable" in row["notes"]
    page = (runs / "report" / "report.html").read_text()
    assert len(page) < 2 * 2**20
    assert "2,000 of 200,000 (1%)" in page
    assert "http" not in page.replace("http://www.w3.org", "")
    assert "&lt;b&gt;def&lt;/b&gt;" in page
    assert "\x1b" not in page
    tex = (runs / "report" / "report.tex").read_text()
    assert tex.count(r"\begin{tabular}") == tex.count(r"\end{tabular}") == 1
    assert tex.count("Routing Transformer &") == 24
    assert "| Random Transformer | 4 | 8 | 512 | 3.176 |" in (runs / "report" / "report.md").read_text()


def test_rows_that_have_not_been_run_and_tables_that_have_not(tmp_path: Path) -> None:
    write_run(tmp_path, config(), data=IMAGES)
    report = built(tmp_path)
    (view,) = report.views
    assert column(view, "ours").count("not run") == 26
    assert column(view, "paper")[10] == "2.971" and column(view, "ours")[10] == "3.000"
    assert report.tables is not None
    assert column(report.tables, "run") == ["1 of 27 rows", *["not run"] * 6]
    assert "split valid (paper: test)" in " ".join(view.lines)


def test_seeds_are_one_row_and_ties_are_marked(tmp_path: Path) -> None:
    close = {4: (3.00, 3.02, 3.04), 2: (3.01, 3.03, 3.05), 8: (3.30, 3.31, 3.32)}
    for heads, scores in close.items():
        for seed, bits in enumerate(scores):
            write_run(tmp_path, config(routing__heads=heads, seed=seed), bits=bits, data=IMAGES)
    write_run(tmp_path, config(routing__heads=8, seed=9), bits=None, state="failed", reason="NaN", data=IMAGES)
    write_run(tmp_path, config(routing__layers=2), bits=2.0, data=IMAGES)
    (view,) = built(tmp_path).views
    kinds = [column(view, key) for key in ("ours", "seeds", "error", "standing", "notes")]
    rows = {ours: rest for ours, *rest in zip(*kinds, strict=True)}
    assert rows["3.020"][:3] == ["3", "0.0115", "tied for best"]
    assert rows["3.030"][:3] == ["3", "0.0115", "tied for best"]
    assert rows["3.310"][:3] == ["3", "0.0058", "behind"]
    assert "seed 9 failed at step 2,000: NaN" in rows["3.310"][3]
    assert rows["2.000"][:3] == ["1", DASH, "not ranked"]
    assert "within 2 standard errors no ordering is claimed" in " ".join(view.lines)


def test_runs_of_one_seed_count_once(tmp_path: Path) -> None:
    for heads, bits in ((4, 2.0), (2, 1.999)):
        for threads in (1, 2, 3):
            write_run(tmp_path / "one", config(routing__heads=heads, hardware__threads=threads), bits=bits, data=IMAGES)
    (view,) = built(tmp_path / "one").views
    kinds = [column(view, key) for key in ("ours", "seeds", "notes")]
    rows = {ours: rest for ours, *rest in zip(*kinds, strict=True) if ours != "not run"}
    assert rows.keys() == {"2.000", "1.999"} and {seeds for seeds, _ in rows.values()} == {"1"}
    assert all("seed 0: mean of 3 runs" in notes for _, notes in rows.values())
    assert not {"error", "standing"} & {one.key for one in view.columns}
    assert "it takes 3 seeds a row, and the rows have 1 seed at the most" in " ".join(view.lines)
    for seed, threads, bits in ((0, 1, 2.0), (0, 2, 2.2), (1, 1, 2.3)):
        made = config("smoke", seed=seed, hardware__threads=threads, name="two")
        write_run(tmp_path / "two", made, bits=bits)
    (view,) = built(tmp_path / "two").views
    assert [column(view, key) for key in ("ours", "error", "seeds")] == [["2.2000"], ["0.1000"], ["2"]]


def test_protocols_and_data_are_set_apart(tmp_path: Path) -> None:
    first = write_run(tmp_path, config(), data=IMAGES)
    write_eval(first, 3.1)
    write_eval(first, 3.2, mode="streaming", selection_sees_future=False)
    second = write_run(tmp_path, config(routing__heads=2), data={**IMAGES, "fingerprint": "beef" * 4})
    write_eval(second, 2.9)
    report = built(tmp_path)
    assert len(report.views) == 3
    assert sum("streaming" in view.title for view in report.views) == 1
    assert "scores of 3 protocols are set apart, a table each: they differ by mode, data fingerprint" in report.problems
    sights = {row for view in report.views for row in column(view, "sees_future") if row in ("yes", "no")}
    assert sights == {"yes", "no"}


@pytest.mark.parametrize("manner", [{"mode": "streaming"}, {"ablate": "routing"}, {"partial": True}, {}])
def test_a_run_that_was_evaluated_in_another_way_stays_where_the_others_stand(tmp_path: Path, manner: dict) -> None:
    first = write_run(tmp_path, config(), bits=3.4, data=IMAGES)
    write_eval(first, 3.1, split="valid" if manner else "test", **manner)
    second = write_run(tmp_path, config(routing__heads=2), bits=3.5, data=IMAGES)
    both, other = built(tmp_path).views
    assert {"3.400", "3.500"} <= set(column(both, "ours"))
    assert "3.100" in column(other, "ours") and "3.400" not in column(other, "ours")
    write_eval(second, 3.2, split="valid" if manner else "test", **manner)
    views = built(tmp_path).views
    assert len(views) == (2 if manner else 1), "evaluations of the same manner take the place of closing validations"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"stride": 512}, {"stride": 1024}),
        ({}, {"split": "valid", "stride": 512}),
        *[({"own_data": False, "data": {**IMAGES, "fingerprint": "beef"}},) * 2],
    ],
    ids=["strides", "splits", "other data"],
)
def test_runs_without_one_evaluation_in_common_stand_together_by_their_closing_ones(
    tmp_path: Path, first: dict, second: dict
) -> None:
    runs = [write_run(tmp_path, config(routing__heads=heads), bits=3.0 + heads, data=IMAGES) for heads in (2, 4)]
    for run, values in zip(runs, (first, second), strict=True):
        write_eval(run, 3.1, **values)
    assert any({"5.000", "7.000"} <= set(column(view, "ours")) for view in built(tmp_path).views)


def test_scores_of_weights_before_the_last_step_are_told(tmp_path: Path) -> None:
    first = write_run(tmp_path, config(), data=IMAGES)
    write_eval(first, 3.1)
    assert not any("before the run's last step" in line for line in built(tmp_path).views[0].lines)
    second = write_run(tmp_path, config(routing__heads=2), data=IMAGES)
    write_eval(second, 3.2, checkpoint={"name": "best", "step": 1950})
    (view,) = built(tmp_path).views
    assert "1 of 2 scores are of a checkpoint before the run's last step (step 1,950)." in view.lines


def test_the_best_checkpoints_score_counts(tmp_path: Path) -> None:
    run = write_run(tmp_path, config(), data=IMAGES)
    write_eval(run, 3.5, checkpoint={"name": "last", "step": 9000})
    write_eval(run, 3.1)
    write_eval(run, 3.6, checkpoint={"name": "best", "step": 10})
    (view,) = built(tmp_path).views
    assert "3.100" in column(view, "ours")


def test_rows_that_the_paper_does_not_have_stand_below_its_own(tmp_path: Path) -> None:
    write_run(tmp_path, config(routing__heads=3), bits=2.5, data=IMAGES)
    write_run(tmp_path, config(routing__selection="causal"), bits=2.6, data=IMAGES)
    write_run(tmp_path, config(trainer__batch_size=16), bits=2.7, data=IMAGES)
    (view,) = built(tmp_path).views
    assert column(view, "ours")[-1] == "2.500" and column(view, "paper")[-1] not in ("2.971", "2.975")
    notes = dict(zip(column(view, "ours"), column(view, "notes"), strict=True))
    assert "routing.selection=causal" in notes["2.600"]
    assert "trainer.batch_size=16 (paper: 32)" in notes["2.700"]
    assert len(view.rows) == 27 + 2


def test_a_name_tells_of_routing_heads_only_where_there_are_any() -> None:
    keys = ("routing.heads", "routing.selection", "data.length")
    local = {
        "model.base": "local",
        "routing.heads": 0,
        "routing.layers": 2,
        "routing.selection": "topk",
        "data.length": 64,
    }
    assert label_of(local, keys) == "Local length=64"
    routing = {**local, "routing.heads": 4, "routing.window": 16}
    assert label_of(routing, keys) == "Routing 4x2 W=16 topk length=64"
    assert label_of({**routing, "routing.selection": "random"}, keys) == "Random 4x2 W=16 length=64"


def test_a_miniature_has_the_papers_rows(tmp_path: Path) -> None:
    small = config(data__length=768, routing__window=128, model__window=128)
    write_run(tmp_path, small, bits=2.5, data=IMAGES)
    (view,) = built(tmp_path).views
    at = column(view, "ours").index("2.500")
    assert column(view, "paper")[at] == "2.971"
    assert column(view, "difference")[at].startswith("(")
    assert "data.length=768 (paper: 3072)" in " ".join(view.lines)


def test_any_other_sweep_has_its_keys_as_columns(tmp_path: Path) -> None:
    for rate in (1e-3, 2e-3):
        write_run(tmp_path, config("smoke", optimizer__lr=rate), bits=2.0)
    (view,) = built(tmp_path).views
    assert column(view, "optimizer.lr") == ["0.001", "0.002"]
    assert "paper" not in [one.key for one in view.columns]


@pytest.mark.parametrize("experiment", ["smoke", "cifar10_grid"])
def test_a_pace_is_set_against_the_local_row_of_its_batch_and_machine(tmp_path: Path, experiment: str) -> None:
    speeds = {(4, 0): 8.0, (4, 2): 6.0, (16, 0): 2.0, (16, 2): 1.0, (32, 2): 0.5}
    for (batch, heads), speed in speeds.items():
        made = config(experiment, trainer__batch_size=batch, routing__heads=heads)
        write_run(tmp_path, made, bits=2.0, speed=speed, data=IMAGES)
    exact = config(experiment, trainer__batch_size=16, routing__heads=2, hardware__precision="fp64")
    write_run(tmp_path, exact, bits=2.0, speed=0.25, data=IMAGES)
    (view,) = built(tmp_path).views
    ratios = dict(zip(column(view, "steps_per_second"), column(view, "speed_ratio"), strict=True))
    ratios.pop(DASH, None)
    expected = {"8.000": "1.00", "6.000": "0.75", "2.000": "1.00", "1.000": "0.50", "0.500": DASH, "0.250": DASH}
    assert ratios == expected


def test_a_rows_pace_is_that_of_one_machine(tmp_path: Path) -> None:
    for heads, paces in ((0, {2: 8.0, 64: 99.0}), (2, {64: 1.0, 2: 4.0})):
        for seed, (threads, pace) in enumerate(paces.items()):
            run = write_run(tmp_path, config("smoke", routing__heads=heads, seed=seed), bits=2.0, speed=pace)
            facts = json.loads((run / "environment.json").read_text())
            (run / "environment.json").write_text(json.dumps({**facts, "threads": threads}))
    (view,) = built(tmp_path).views
    assert column(view, "steps_per_second") == ["8.000", "4.000"]
    assert column(view, "speed_ratio") == ["1.00", "0.50"] and column(view, "seeds") == ["2", "2"]


def test_the_glance_sets_paces_against_the_same_local_rows(tmp_path: Path) -> None:
    for batch, local in ((4, 8.0), (16, 2.0)):
        for heads in (0, 2, 4):
            made = config(trainer__batch_size=batch, routing__heads=heads)
            bits = 3.0 - heads / 10 + (batch if heads == 0 else -batch) / 100
            write_run(tmp_path, made, bits=bits, speed=local / (1 + heads), data=IMAGES)
    view = built(tmp_path).glance
    assert view is not None
    ratios = dict(zip(column(view, "ours"), column(view, "speed_ratio"), strict=True))
    assert ratios == {"3.040": "1.00", "2.440": "0.20"}


def test_a_single_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path, config("smoke"), bits=2.0)
    assert cli.main(["report", str(run), f"output={tmp_path / 'elsewhere'}"]) == 0
    assert sorted(path.name for path in (tmp_path / "elsewhere").iterdir()) == [
        *("report.csv", "report.html", "report.json", "report.md", "report.tex"),
    ]
    assert "rtx train data=text data.path=book.txt" in (tmp_path / "elsewhere" / "report.md").read_text()


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert cli.main(["report", str(tmp_path / "empty"), str(tmp_path / "none")]) == 2
    error = capsys.readouterr().err
    assert "empty: holds no run" in error and "none: no such folder" in error
    good = write_run(tmp_path / "good", config("smoke"), bits=2.0)
    assert cli.main(["report", str(tmp_path / "empty"), str(good)]) == 2
    assert (good / "report" / "report.html").is_file() and not list((tmp_path / "empty").iterdir())
    run = write_run(tmp_path, config("smoke"), bits=2.0)
    assert cli.main(["report", str(run), "outptu=x"]) == 2
    assert "did you mean 'output'" in capsys.readouterr().err
    assert cli.main(["report", str(run), "seed=1"]) == 2
    assert "rtx report does not read seed" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert cli.main(["report", str(run), f"output={tmp_path / 'file' / 'x'}"]) == 1
    assert "cannot write to" in capsys.readouterr().err
    assert cli.main(["report", "output=x"]) == 2


def test_without_a_folder_the_papers_tables_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RTX_OUTPUTS", str(tmp_path))
    assert cli.main(["report"]) == 0
    said = capsys.readouterr().out
    assert said.count("not run") == 7
    assert "rtx train -m experiment=enwik8,enwik8_baselines" in said
    assert max(map(len, said.splitlines())) <= 80


def test_the_table_goes_to_wandb_where_that_is_asked_for(tmp_path: Path) -> None:
    for seed, bits in enumerate((2.0, 2.5)):
        write_run(tmp_path / "runs", config("smoke", seed=seed, name="one"), bits=bits)
    write_run(tmp_path / "runs", config("smoke", model__layers=1), bits=None, state="failed", reason="NaN")
    own = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    command = [sys.executable, "-m", "rtx", "report", str(tmp_path / "runs"), "logger=offline"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=300, env=own)
    assert answer.returncode == 0, answer.stderr
    folder = tmp_path / "runs" / "report"
    assert f"W&B: tables in {folder / 'wandb'}" in answer.stdout
    (path,) = folder.glob("wandb/offline-run-*/files/media/table/*.table.json")
    table = json.loads(path.read_text())
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    with open(folder / "report.csv", newline="") as file:
        written = list(csv.DictReader(file))
    assert [row["ours"] for row in rows] == [None, 2.25]
    assert [(row["ours"], row["state"]) for row in written] == [("", "failed"), ("2.25", "")]
    assert [row["notes"] for row in rows] == ["failed at step 2,000: NaN; selection=causal", "selection=causal"]


def test_without_a_logger_nothing_goes_to_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rtx.training import loggers

    def asked(*arguments: object, **named: object) -> None:
        raise AssertionError("W&B was asked for")

    monkeypatch.setattr(loggers, "begin", asked)
    assert cli.main(["report", str(write_run(tmp_path, config("smoke"), bits=2.0))]) == 0


def test_no_torch_is_imported(tmp_path: Path) -> None:
    run = write_run(tmp_path, config("smoke"), bits=2.0)
    code = "import sys; from rtx import cli; cli.main(['report', sys.argv[1]]); print('torch' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code, str(run)], capture_output=True, text=True, timeout=300)
    assert answer.stdout.splitlines()[-1] == "False", answer.stderr
