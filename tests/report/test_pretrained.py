"""`rtx report` on records of `rtx analyze pretrained`, from a folder and from a study file."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from rtx.cli import main as cli
from rtx.report.contents import Report
from rtx.report.pretrained_comparisons import comparisons
from rtx.report.pretrained_plots import lines_of
from rtx.report.run_records import collect
from rtx.runs.pretrained_record import PretrainedRecord
from rtx.runs.study import StudyLine, write_study
from rtx.tables import Table
from tests.helpers.records import CAUSAL, config, pretrained_record, write_run
from tests.helpers.reports import built, without_plots

TEXTS = {
    "book": {
        ("none", 64): [0.9, 0.8, 0.7],
        ("exact", 4): [0.10, 0.12, 0.11],
        ("probed", 4): [0.11, 0.11, 0.12],
        ("exact", 8): [0.05, 0.06, 0.04],
        ("probed", 8): [0.15, 0.17, 0.14],
    },
    "code": {
        ("none", 64): [1.9, 1.8],
        ("exact", 4): [0.20, 0.22],
        ("probed", 4): [0.21, 0.21],
        ("exact", 8): [0.15, 0.16],
        ("probed", 8): [0.26, 0.25],
    },
}


def write(folder: Path, name: str, record: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"text-N64-{name}.json"
    path.write_text(json.dumps(record))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a model with records of both texts."""
    model = tmp_path / "pretrained" / "small"
    for number, (text, above) in enumerate(TEXTS.items()):
        write(model, f"{number:08d}", pretrained_record(text, above))
    return model


def row_of(table: Table | None, **values: Any) -> dict[str, Any]:
    assert table is not None
    (row,) = [row for row in table.rows if values.items() <= row.items()]
    return row


def pooled(name: tuple[str, int]) -> np.ndarray:
    """Return the bits above dense of all windows of a choice."""
    return np.array(list(itertools.chain(*(above[name] for above in TEXTS.values()))))


def half(values: np.ndarray) -> float:
    """Return half the 95% interval of a mean."""
    low, high = stats.t.interval(0.95, len(values) - 1, 0, stats.sem(values))
    return (high - low) / 2


def test_windows_of_all_texts_are_pooled_and_compared_in_pairs(folder: Path) -> None:
    report = without_plots(folder)
    probed = row_of(report.answer, label="probed", k=8)
    assert probed["ours"] == pytest.approx(pooled(("probed", 8)).mean())
    assert probed["half"] == pytest.approx(half(pooled(("probed", 8))))
    assert probed["book"] == pytest.approx(0.46 / 3)
    assert probed["book half"] == pytest.approx(half(np.array(TEXTS["book"]["probed", 8])))
    pairs, dense = report.tables
    assert len(pairs.rows) == 2, "none is in no pair, and 4 keys are not compared with 8"
    tied = row_of(pairs, label="probed", k=4)
    behind = row_of(pairs, label="probed", other="exact", k=8)
    assert (tied["verdict"], behind["verdict"]) == ("tied", "behind")
    differences = pooled(("probed", 8)) - pooled(("exact", 8))
    assert behind["difference"] == pytest.approx(differences.mean())
    assert behind["half"] > half(differences), "Holm's level is below 5%"
    assert row_of(dense, text="code")["sinks_half"] == pytest.approx(0.1 * stats.t.ppf(0.975, 1))
    assert report.headline.endswith("; tied with it: probed.")
    assert "with 8 further keys exact loses least, 0.092 ±" in report.lines[0]
    with_other_window = json.loads(json.dumps(pretrained_record("poem", TEXTS["book"])))
    with_other_window["analyze"]["window"] = 16
    write(folder, "other000", with_other_window)
    again = without_plots(folder)
    assert row_of(again.answer, label="probed", k=8) == probed, "other settings are not pooled"
    assert len(again.tables) == 2 + 3


def test_a_line_goes_from_few_keys_to_many_in_whatever_order_they_were_measured() -> None:
    records = []
    for k in (8, 4, 16):
        records.append(pretrained_record("book", {("exact", k): [0.1, 0.2]}))
    (comparison,) = comparisons([PretrainedRecord.model_validate(record) for record in records])
    (line,) = lines_of(comparison)
    assert line.keys == sorted(line.keys) and len(set(line.keys)) == 3


def test_the_page_has_the_plot_and_maps_of_layers_and_heads(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["report", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "further keys" in printed and "verdict" in printed
    names = {path.name for path in (folder / "report").iterdir()}
    plots = {"pretrained-small-N64.png"}
    plots |= {f"pretrained-small-N64-coverage-k{keys}.png" for keys in (4, 8)}
    assert plots <= names
    page = (folder / "report" / "report.html").read_text()
    assert page.count("<svg") == 3
    assert page.index("<svg") < page.index("<table"), "the plot is beside the first table"
    text = (folder / "report" / "report.md").read_text()
    assert "| probed | 8 |" in text and "| 8 | probed | exact |" in text
    assert "rtx analyze pretrained data=text data.path=book" in text


def test_a_study_file_and_a_folder_above_give_the_same_report(folder: Path, tmp_path: Path) -> None:
    study = tmp_path / "small.jsonl"
    lines = []
    for text, above in TEXTS.items():
        record = PretrainedRecord.model_validate(pretrained_record(text, above))
        lines.append(StudyLine(pretrained=record))
    write_study(study, lines)

    def tables(report: Report) -> list[Any]:
        return [table.rows for table in report.every_table()]

    expected = tables(without_plots(folder))
    for place in (study, folder.parent, tmp_path):
        assert tables(without_plots(place)) == expected


def test_further_choices_on_one_text_are_not_pooled_with_those_of_all_texts(folder: Path) -> None:
    further = {("none", 64): [1.9, 1.8], ("exact", 16): [0.01, 0.02]}
    write(folder, "further0", pretrained_record("code", further))
    report = built(folder)
    assert report.answer and {row["k"] for row in report.answer.rows} == {4, 8, 64}
    assert row_of(report.answer, label="exact", k=8)["seeds"] == 5
    (of_code,) = [table for table in report.tables if table.title.endswith("64, code")][:1]
    assert row_of(of_code, label="exact", k=16)["seeds"] == 2
    assert row_of(of_code, label="exact", k=8)["ours"] == pytest.approx(0.155)
    assert "pretrained-small-N64-code" in {plot.name for plot in report.plots}


def test_runs_and_pretrained_models_share_a_report(folder: Path, tmp_path: Path) -> None:
    write_run(tmp_path / "runs", config("far_text heads=causal", **CAUSAL))
    report = without_plots(tmp_path)
    titles = [table.title for table in report.every_table()]
    assert any(title.startswith("Loss with each selection: small") for title in titles)
    assert any(title.startswith("Environment") for title in titles)


def test_damaged_records_are_left_out_with_a_line(folder: Path) -> None:
    damaged = pretrained_record("poem", TEXTS["book"])
    damaged["rows"][1]["above_of_windows"] = [0.1]
    write(folder, "damaged0", damaged)
    write(folder, "halfway0", {"what": "pretrained"}).write_text('{"what": "pre')
    heads = pretrained_record("poem", TEXTS["book"])
    heads["rows"][2]["kept_of_heads"] = [[0.5]]
    write(folder, "heads000", heads)
    collection = collect([folder])
    assert len(collection.pretrained) == 2 and len(collection.problems) == 3
    problems = "\n".join(collection.problems)
    for words in ("k = 4, has not as many windows", "half written", "k = 4, has other heads"):
        assert words in problems


def test_few_windows_give_differences_without_a_verdict(tmp_path: Path) -> None:
    write(tmp_path, "00000000", pretrained_record("book", TEXTS["book"]))
    report = without_plots(tmp_path)
    row = row_of(report.tables[0], label="probed", k=8)
    differences = np.array(TEXTS["book"]["probed", 8]) - np.array(TEXTS["book"]["exact", 8])
    assert row["verdict"] == "too few windows"
    assert row["half"] == pytest.approx(half(differences))
    assert "a verdict takes 5 windows" in report.headline
