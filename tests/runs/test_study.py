"""Study files: the records of many runs in one file, and docs/results/keep.py, which writes it."""

import json
import os
import runpy
import socket
from pathlib import Path

import pytest
import yaml

from rtx.report.contents import build
from rtx.report.formats import as_json
from rtx.report.run_records import collect
from rtx.runs.status import utc_now
from rtx.runs.study import StudyLine, is_study, read_run, read_study, write_study
from rtx.settings.identity import digest
from rtx.settings.schema import flat
from tests.helpers.records import (
    CAUSAL,
    config,
    pretrained_record,
    steps_record,
    timed_row,
    write_divergence,
    write_eval,
    write_record,
    write_run,
)
from tests.helpers.small_runs import draw_nothing

KEEP = Path(__file__).parents[2] / "docs" / "results" / "keep.py"
KILLED = {"state": "running", "pid": 2**31 - 1, "heartbeat": "2020-01-01T00:00:00Z"}
keep = runpy.run_path(str(KEEP))["main"]


def made_run(folder: Path, seed: int = 0) -> Path:
    run = write_run(folder, config(seed=seed, data__path="/home/me/books/war.txt", **CAUSAL))
    write_eval(run, 2.5)
    write_divergence(run)
    return run


def test_a_study_file_has_the_records_of_the_folders(tmp_path: Path):
    problems: list[str] = []
    lines = [read_run(made_run(tmp_path / "runs", seed), problems) for seed in (0, 1)]
    study = tmp_path / "study.jsonl"
    write_study(study, lines)
    assert is_study(study) and not is_study(tmp_path / "runs")
    assert read_study(study, problems) == lines and problems == []


def test_a_damaged_line_is_named_and_the_others_are_read(tmp_path: Path):
    study = tmp_path / "study.jsonl"
    write_study(study, [StudyLine(run="a"), StudyLine(run="b")])
    with open(study, "a") as file:
        file.write('{"run": "c", "status": {"state": "asleep"}}\n')
    problems: list[str] = []
    assert [line.run for line in read_study(study, problems)] == ["a", "b"]
    (problem,) = problems
    assert problem.startswith(f"{study}: 1 broken row left out (line 3: status.state is damaged: ")


def test_a_run_with_damaged_records_keeps_those_that_are_whole(tmp_path: Path):
    run = made_run(tmp_path)
    (run / "environment.json").write_text("{")
    (run / "eval" / "0.json").write_text("{}")
    problems: list[str] = []
    line = read_run(run, problems)
    assert line.status is not None and line.environment is None and line.evaluations == []
    assert len(line.metrics) > 2 and len(line.analyses) == 1
    assert [problem.partition(": ")[0] for problem in problems] == [
        str(run / "environment.json"),
        str(run / "eval" / "0.json"),
    ]


@pytest.mark.parametrize("program", ["/opt/rtx/__main__.py", "/opt/.venv/bin/rtx", "rtx"])
def test_keep_leaves_out_what_names_a_machine(tmp_path: Path, program: str):
    runs = tmp_path / "runs"
    run = made_run(runs)
    environment = json.loads((run / "environment.json").read_text())
    environment["command"] = f"{program} train data.path=/home/me/books/war.txt"
    environment["host"] = "secret"
    (run / "environment.json").write_text(json.dumps(environment))
    cells = {"time": "2026", "command": "rtx train -m", "cells": {run.name: "seed=0"}}
    (runs / "sweeps.jsonl").write_text(json.dumps(cells))
    write_record(runs, steps_record(timed_row(10.0)))
    study = tmp_path / "study.jsonl"
    keep(runs, study)
    text = study.read_text()
    assert "secret" not in text and "/home/me" not in text and '"pid"' not in text
    first, sweep, steps = read_study(study, [])
    assert first.environment is not None
    assert first.environment.command == "rtx train data.path=war.txt"
    assert sweep.sweep is not None and sweep.sweep.cells == {run.name: "seed=0"}
    assert steps.steps is not None and len(steps.steps.rows) == 1


def test_keep_records_a_killed_run_and_leaves_out_one_that_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    killed = write_run(tmp_path / "runs", config(seed=0), bits=None)
    (killed / "status.json").write_text(json.dumps({**KILLED, "host": "elsewhere", "step": 7}))
    running = write_run(tmp_path / "runs", config(seed=1), bits=None)
    here = {"state": "running", "pid": os.getpid(), "host": socket.gethostname()}
    (running / "status.json").write_text(json.dumps({**here, "heartbeat": utc_now()}))
    study = tmp_path / "study.jsonl"
    keep(tmp_path / "runs", study)
    assert f"{running}: is left out, because it is running" in capsys.readouterr().err
    (line,) = read_study(study, [])
    assert line.status is not None
    assert (line.status.state, line.status.reason, line.status.step) == ("failed", "killed", 7)


def test_a_report_of_a_study_file_is_that_of_the_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    draw_nothing(monkeypatch)
    runs = tmp_path / "runs"
    for seed in (0, 1):
        run = made_run(runs, seed)
        values = flat(yaml.safe_load((run / "config.yaml").read_text()))
        run.rename(runs / digest(values))
    study = tmp_path / "runs.jsonl"
    keep(runs, study)
    reports = [json.loads(as_json(build(collect([place]), "runs"))) for place in (runs, study)]
    assert reports[0] == reports[1]


def test_keep_has_pretrained_models_by_name(tmp_path: Path):
    folder = tmp_path / "pretrained" / "small"
    folder.mkdir(parents=True)
    record = pretrained_record("book", {("exact", 4): [0.1234567, 0.1]})
    (folder / "text-N64-00000000.json").write_text(json.dumps(record))
    study = tmp_path / "study.jsonl"
    keep(tmp_path, study)
    assert "/models" not in study.read_text() and "/texts" not in study.read_text()
    (line,) = read_study(study, [])
    assert line.pretrained is not None
    assert (line.pretrained.model, line.pretrained.text) == ("small", "book")
    assert line.pretrained.rows[0].above_of_windows == [0.123457, 0.1]
