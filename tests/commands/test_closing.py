"""The closing score of a run, of the whole split or a marked sample, and what is said of memory before it begins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small_runs import SIZES, Workshop

from rtx.training import callbacks

SHORT = [*SIZES, "data.length=16"]
"""With 10 windows in the validation split of 150 bytes, of which validations take 5."""


def final(run: Path) -> dict[str, Any]:
    return json.loads((run / "status.json").read_text())["final"]


def test_a_number_of_windows_is_a_sample_and_marked_wherever_it_stands(workshop: Workshop) -> None:
    run = workshop.folder / "out/closing/few"
    printed = workshop.command("train", workshop.text, *SHORT, "trainer.final_windows=2", run=run)
    said = " ".join(printed.split())
    assert "on a sample of 2 windows of the validation split" in said and "(a sample of the windows)" in said
    assert "% of the schedule: optimizer=adamw is made for" in said and "zlib" not in said
    assert final(run)["windows"] == 2 and final(run)["units"] <= 32 and "baselines" not in final(run)
    assert f" ~{final(run)['bits']:.4f} " in workshop.command("runs")
    assert "bits/byte on 2 windows of the validation split" in workshop.command("resume", str(run))
    assert "a sample of 2 windows" in workshop.command("report", str(run))
    workshop.command("resume", str(run), "trainer.steps=13", "trainer.final_windows=null")
    assert "windows" not in final(run) and final(run)["units"] == 150 and "zlib" in final(run)["baselines"]
    assert f" {final(run)['bits']:.4f} " in workshop.command("runs")


@pytest.mark.parametrize(("seconds", "windows"), [(1e9, None), (1e-9, 5)])
def test_auto_takes_all_windows_where_there_is_time_else_no_fewer_than_a_validation(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, seconds: float, windows: int | None
) -> None:
    monkeypatch.setattr(callbacks, "FINAL_SECONDS", seconds)
    monkeypatch.setattr(callbacks.Watch, "seconds", 0.0)
    run = workshop.train(f"auto{windows}", "data.length=16")
    assert final(run).get("windows") == windows and (final(run)["units"] == 150) == (windows is None)


def test_what_does_not_fit_is_said_at_once_whatever_was_asked(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rtx.commands.train.device_memory", lambda config, processes=0: 2**10)
    said = workshop.command("train", workshop.text, *SHORT, "model.recompute=false", run=workshop.folder / "tight")
    line = next(line for line in said.splitlines() if not line.startswith(("preparing", "data=text")))
    assert line.startswith("warning: may not fit: hardware.precision=fp32 trainer.micro_batch_size=2 model.recompute=")
    assert "of 0.0 GiB, by rtx plan, which leaves too little; less is needed with" in line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan.memory=80"], "a GPU of 80 GiB: "),
        (["plan.memory=0.001", "hardware=cpu"], "a machine of 0.001 GiB: does not fit ("),
    ],
)
def test_a_plan_for_a_machine_to_be_rented(workshop: Workshop, words: list[str], said: str) -> None:
    (fit,) = [line for line in workshop.command("plan", *words).splitlines() if line.startswith("what fits ")]
    assert said in fit and "this machine" not in workshop.command("plan", *words)


def test_reports_of_several_runs_leave_that_of_one_alone(workshop: Workshop) -> None:
    one, two = workshop.train("one", "seed=1"), workshop.train("two", "seed=2")
    for runs, place in (([one], "report"), ([one, two], "report-two")):
        assert f"{one}/{place}/report.md" in workshop.command("report", *map(str, runs))
