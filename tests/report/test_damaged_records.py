"""Records that are missing, half written or hold anything: told in a line, and the rest is written."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import yaml
from records import config, write_divergence, write_eval, write_run

from rtx import cli
from rtx.report.contents import build
from rtx.report.run_records import collect
from rtx.report.terminal import terminal
from rtx.report.write import comma_separated, html, latex, markdown

IMAGES = {"name": "cifar10", "unit": "dim", "fingerprint": "abcd" * 4}


def test_records_that_are_not_whole_are_told_and_the_rest_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = write_run(tmp_path, config(), data=IMAGES)
    torn = write_run(tmp_path, config(routing__heads=2), data=IMAGES)
    with open(torn / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "st')
    (torn / "status.json").write_text('{"state": "do')
    changed = write_run(tmp_path, config(routing__layers=4), data=IMAGES)
    (changed / "config.yaml").write_text((changed / "config.yaml").read_text().replace("lr: 0.0002", "lr: 0.5"))
    resumed = write_run(tmp_path, config(routing__layers=2), data=IMAGES)
    (resumed / "resumes.jsonl").write_text(json.dumps({"changed": {"trainer.steps": [1, 2]}}) + "\n")
    bare = write_run(tmp_path, config(routing__layers=12), data=IMAGES)
    (bare / "config.yaml").write_text("{[")
    (bare / "environment.json").unlink()
    killed = write_run(tmp_path, config(routing__heads=2, routing__layers=4), bits=None, state="running")
    row = {"time": "t", "command": "rtx train -m seed=1,2", "folder": "/", "cells": {"1" * 12: "seed=2"}}
    (tmp_path / "sweeps.jsonl").write_text(json.dumps(row) + "\n{half")
    assert cli.main(["report", str(tmp_path), str(tmp_path / "nowhere")]) == 2
    captured = capsys.readouterr()
    assert "nowhere: no such folder" in captured.err and "Traceback" not in captured.err
    for part in (
        f"{torn.name}/metrics.jsonl: 1 broken row left out",
        f"{torn.name}/status.json: cannot be read; half written, or damaged",
        f"{changed.name}: its configuration changed under the sweep",
        f"{resumed.name}: resumed with other values of trainer.steps",
        f"{bare.name}/config.yaml: cannot be read",
        f"{bare.name}/environment.json: missing",
        "sweeps.jsonl: 1 broken row left out",
    ):
        assert part in captured.out, part
    assert f"{whole.name}:" not in captured.out
    page = (tmp_path / "report" / "report.md").read_text()
    assert "not started" in page and "killed at step 2,000" in page and killed.name
    assert "rtx train -m seed=1,2" in page


ODD = itertools.cycle([None, "x", float("nan"), [1, "a"], 10**30, -1])


@pytest.mark.parametrize("name", ["status.json", "environment.json", "eval/0.json", "config.yaml", "metrics.jsonl"])
def test_values_that_are_none_are_left_out(name: str, tmp_path: Path) -> None:
    """Each value of a record in turn becomes something else: the report is written all the same."""
    run = write_run(tmp_path, config(), bits=3.0, data=IMAGES, hash_name=False)
    write_eval(run, 3.1)
    write_divergence(run)
    whole = (run / name).read_text()
    if name == "metrics.jsonl":
        rows = [json.loads(line) for line in whole.splitlines()][:9]
        for key in ("step", "bits", "kind", "tokens_per_second", "val_bits"):
            lines = [json.dumps({**row, key: next(ODD)}) for row in rows]
            (run / name).write_text("\n".join([*lines, "[]", "3", ""]))
            check_all_formats(run)
        return
    record = yaml.safe_load(whole)
    for key in [
        key for key in record if name != "config.yaml" or key in ("data", "routing", "trainer", "model", "seed")
    ]:
        (run / name).write_text(json.dumps({**record, key: next(ODD)}))
        check_all_formats(run)


def check_all_formats(run: Path) -> None:
    """Write a report in every format."""
    report = build(collect([run]), "a report")
    report.plots = report.plots[:1]
    for form in (markdown, comma_separated, latex, html):
        assert form(report)
    assert all(terminal(table) for table in report.tables)
