"""`rtx report` on records that are not whole: a line for each, and the rest of the report is written."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml
from records import config, write_divergence, write_eval, write_run

from rtx import cli
from rtx.report.cells import collect
from rtx.report.formats import comma_separated, markdown
from rtx.report.latex import latex
from rtx.report.page import html
from rtx.report.report import Report, build
from rtx.report.terminal import terminal

IMAGES = {"name": "cifar10", "unit": "byte", "fingerprint": "abcd" * 4}


def test_records_that_are_not_whole_are_told_and_the_rest_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = write_run(tmp_path, config(), data=IMAGES)
    torn = write_run(tmp_path, config(routing__heads=2), data=IMAGES)
    with open(torn / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "st')
    (torn / "status.json").write_text('{"state": "do')
    gone = write_run(tmp_path, config(routing__heads=8), data=IMAGES)
    shutil.rmtree(gone / "checkpoints")
    changed = write_run(tmp_path, config(routing__layers=4), data=IMAGES)
    (changed / "config.yaml").write_text((changed / "config.yaml").read_text().replace("lr: 0.0002", "lr: 0.5"))
    resumed = write_run(tmp_path, config(routing__layers=2), data=IMAGES)
    (resumed / "resumes.jsonl").write_text(json.dumps({"changed": {"trainer.steps": [1, 2]}}) + "\n")
    bare = write_run(tmp_path, config(routing__layers=12), data=IMAGES)
    (bare / "config.yaml").write_text("{[")
    (bare / "environment.json").unlink()
    killed = write_run(tmp_path, config(routing__heads=2, routing__layers=4), bits=None, state="running")
    waiting = {"1" * 12: "seed=2", "0" * 12: "seed=3"}
    row = {"time": "t", "command": "rtx train -m seed=1,2,3", "folder": "/", "cells": waiting}
    (tmp_path / "sweeps.jsonl").write_text(json.dumps(row) + "\n{half")
    assert cli.main(["report", str(tmp_path), str(tmp_path / "nowhere")]) == 2
    captured = capsys.readouterr()
    assert "nowhere: no such folder" in captured.err
    for part in (
        f"{torn.name}/metrics.jsonl: 1 broken row left out",
        f"{torn.name}/status.json: cannot be read; half written, or damaged",
        f"{gone.name}: no checkpoint is left",
        f"{changed.name}: its configuration changed under the sweep",
        f"{resumed.name}: resumed with other values of trainer.steps",
        f"{bare.name}/config.yaml: cannot be read",
        f"{bare.name}/environment.json: missing",
        "sweeps.jsonl: 1 broken row left out",
    ):
        assert part in captured.out, part
    assert f"{whole.name}:" not in captured.out
    assert "Traceback" not in captured.err
    page = (tmp_path / "report" / "report.md").read_text()
    assert "not started" in page and "killed at step 2,000" in page and killed.name in page
    assert "rtx train -m seed=1,2,3" in page
    assert page.index("| seed=2 |") < page.index("| seed=3 |"), "as the sweep has them, behind all others"
    assert page.rindex("\n| Routing Transformer | ", 0, page.index("| seed=3 |")) < page.index("| seed=2 |")


ODD = [None, "x", float("nan"), [1, "a"], 10**30]


@pytest.mark.parametrize("odd", ODD, ids=repr)
def test_values_that_are_none_are_left_out(odd: object, tmp_path: Path) -> None:
    """Each value of each record in turn: the report is written, and no drawing has a place that is none."""
    run = write_run(tmp_path, config(), bits=3.0, data=IMAGES, hash_name=False)
    write_run(tmp_path / "run", config(routing__heads=2), bits=3.0, data=IMAGES)
    write_eval(run, 3.1)
    write_divergence(run)
    write_eval(run, 3.2, partial=True)
    small = ("data", "routing", "trainer", "model", "seed")
    for path in (run / "status.json", run / "environment.json", run / "eval" / "0.json", run / "config.yaml"):
        whole = path.read_text()
        record = yaml.safe_load(whole)
        for key in [name for name in record if path.suffix == ".json" or name in small]:
            path.write_text(json.dumps({**record, key: odd}))
            check_all_formats(build(collect([run]), "a report"))
        path.write_text(whole)
    for key in ("step", "bits", "kind", "tokens_per_second"):
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        (run / "metrics.jsonl").write_text(
            "".join(json.dumps({**row, key: odd}) + "\n" for row in rows[:9]) + "[]\n3\n"
        )
        check_all_formats(build(collect([run]), "a report"))


def check_all_formats(report: Report) -> None:
    """Write a report in every format."""
    for form in (markdown, comma_separated, latex, html):
        written = form(report)
        assert not re.search(r"<(?:polyline|circle|path|text)[^>]* (?:points|cx|cy|d|x|y)=\"[^\"]*(?:nan|inf)", written)
    for view in report.views:
        assert terminal(view)
