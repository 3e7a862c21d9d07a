"""`rtx bench steps`: real steps of tiny rows in turn, rows that fail, interruption, and what a user may get wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small_runs import Workshop

from rtx import cli
from rtx.report.steps import WHAT
from rtx.training import turns
from rtx.training.stepping import Failure, Turn

SIZES = (
    *("experiment=cifar10_grid,cifar10_baselines", "data.size=4", "model.layers=3", "model.hidden=16"),
    *("model.ffn_hidden=16", "model.window=8", "routing.window=8", "routing.clusters=6", "trainer.batch_size=2"),
    *("hardware=cpu", "hardware.threads=1", "optimizer.schedule=constant", "optimizer.warmup=0"),
    *("routing.layers=2", "routing.heads=4", "bench.turns=2", "bench.per_turn=1", "bench.warmup=1"),
)
"""A routing row, full attention, local heads and random members; the routing row is the 4 x 8 of 8 x 12."""


def record_of(workshop: Workshop, name: str) -> dict[str, Any]:
    """The one record below outputs/<name>."""
    (path,) = (workshop.folder / "out" / name / "bench").glob("*.json")
    return json.loads(path.read_text())


def test_rows_are_timed_in_turn_and_stand_beside_the_papers(workshop: Workshop) -> None:
    said = workshop.command("bench", "steps", *SIZES, "name=timed")
    assert all(len(line) <= 80 for line in said.splitlines() if "/" not in line), said
    assert "4 rows, 2 turns of 1 step" in said
    table = [line for line in said.splitlines() if line.startswith(("Transformer", "Local", "Routing", "Random"))]
    assert [line.split()[0] for line in table] == ["Transformer", "Local", "Random", "Routing"]
    assert table[0].split()[-2:] == ["5.608", "0.62"] and table[1].split()[-2:] == ["9.023", "1.00"]
    assert "data.length=48 (paper: 3072)" in " ".join(said.split())
    record = record_of(workshop, "timed")
    assert record["what"] == WHAT and record["device"] == "CPU, 1 thread" and record["versions"]["torch"]
    assert record["bench"] == {"turns": 2, "per_turn": 1, "warmup": 1, "together": True}
    assert [len(row["ms_turns"]) for row in record["rows"]] == [2, 2, 2, 2]
    for row in record["rows"]:
        assert row["ms"] == pytest.approx(sum(row["ms_turns"]) / 2) and row["parameters"] > 0 and not row["reason"]
    report = workshop.command("report", str(workshop.folder / "out" / "timed"))
    assert "measured training steps" in " ".join(report.split()) and "Random" in report
    page = (workshop.folder / "out" / "timed" / "report" / "report.html").read_text()
    assert "9.023" in page and "over turns" in page


def test_rows_that_differ_by_their_seed_alone_are_timed_once(workshop: Workshop) -> None:
    words = [*SIZES, "name=seeds", "experiment=cifar10_grid", "model.base=full,local", "routing.heads=0"]
    said = workshop.command("bench", "steps", *words, "seed=1,0,2")
    assert "of 6 cells those that differ by their seed alone are one row\n2 rows, 2 turns of 1 step" in said
    assert [row["config"]["seed"] for row in record_of(workshop, "seeds")["rows"]] == [1, 1]


def test_a_row_that_fails_leaves_the_others_running(workshop: Workshop) -> None:
    words = [*SIZES, "name=fails", "experiment=cifar10_grid", "optimizer.lr=1e-4,1e38", "bench.together=false"]
    said = workshop.command("bench", "steps", *words, code=1)
    good, bad = record_of(workshop, "fails")["rows"]
    assert len(good["ms_turns"]) == 2 and good["reason"] is None
    assert bad["ms_turns"] == [] and " at learning rate 1e+38" in bad["reason"]
    assert "Failed: Routing 4x2 W=8 lr=1e+38: step " in said
    assert "No ratios:" in said


def test_no_row_could_be_timed(workshop: Workshop) -> None:
    words = [*SIZES, "name=none", "experiment=cifar10_grid", "optimizer.lr=1e38"]
    assert "rtx: no row could be timed" in workshop.command("bench", "steps", *words, code=1)
    assert not list((workshop.folder / "out" / "none" / "bench").iterdir())


def test_ctrl_c_prints_and_keeps_what_is_there(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    after = 0

    def take(self: turns.Row, steps: int) -> Turn | Failure:
        taken.append(steps)
        if len(taken) > after:
            raise KeyboardInterrupt
        return Turn(10.0 + len(taken), 1000, 10, "CPU", 1)

    monkeypatch.setattr(turns.Row, "take", take)
    words = [*SIZES, "name=stopped"]
    said = workshop.command("bench", "steps", *words, code=130)
    assert "no row had been timed yet" in said and "stopped by SIGINT" in said
    taken, after = [], 6
    said = workshop.command("bench", "steps", *words, code=130)
    assert "2 turns of 1 step" in said and "stopped by SIGINT" in said
    assert [len(row["ms_turns"]) for row in record_of(workshop, "stopped")["rows"]] == [2, 2, 1, 1]
    taken, after = [], 8
    workshop.command("bench", "steps", *words)
    taken, after = [], 5
    assert "stays as it was" in workshop.command("bench", "steps", *words, code=130)
    assert [len(row["ms_turns"]) for row in record_of(workshop, "stopped")["rows"]] == [2, 2, 2, 2]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "rtx bench: say steps"),
        (("stpes",), "did you mean 'steps'"),
        (("steps", "experiment=cifar10_gird"), "did you mean 'cifar10_grid'"),
        (("steps", "routing.heds=2"), "did you mean 'routing.heads'"),
        (("steps", "bench.turns=0"), "bench.turns=0: must be an integer, at least 1"),
        (("steps", "routing.heads=2,4", "hydra/launcher=basic"), "hydra/launcher=basic: has no effect"),
        (("steps", "hardware=ddp"), "hardware takes auto, cpu or gpu"),
        (("steps", "hardware=fsdp"), "hardware=fsdp: rtx bench times a row on one device"),
        (("steps", "hardware.devices=2"), "needs hardware=ddp"),
        (("steps", "seed=1,1"), "are the same run"),
        (("steps", "routing.heads=2,99"), "routing.heads=99"),
        (("steps", "-m"), "unknown flag"),
    ],
)
def test_what_a_user_may_get_wrong(words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_folder_that_cannot_be_written(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    (workshop.folder / "out").mkdir(exist_ok=True)
    (workshop.folder / "out" / "taken").write_text("a file")
    said = workshop.command("bench", "steps", *SIZES, "name=taken", code=2)
    assert "set RTX_OUTPUTS" in said


def test_inside_torchrun(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert cli.main(["bench", "steps"]) == 2
    assert "without torchrun" in capsys.readouterr().err
