"""`rtx bench steps`: real steps of tiny rows in turn, rows that fail, interruption, and what a user may get wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import SIZES as TINY
from small_runs import Workshop

from rtx import cli
from rtx.attention.centroids import all_centroids
from rtx.commands import bench
from rtx.compose import compose
from rtx.data.catalog import vocabulary_size
from rtx.report.cells import Cell, collect
from rtx.report.scores import row_key
from rtx.report.steps import DRAWN, READ, WHAT, read_record
from rtx.training.module import build_model

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
    assert record["bench"] == {"turns": 2, "per_turn": 1, "warmup": 1}
    for row in record["rows"]:
        first, second = row["ms_turns"]
        assert row["ms"] == pytest.approx((first + second) / 2) and row["ms_error"] == pytest.approx(
            abs(first - second) / 2
        )
        assert row["parameters"] > 0 and not row["reason"]
    report = workshop.command("report", str(workshop.folder / "out" / "timed"))
    assert "measured training steps" in " ".join(report.split()) and "Random" in report
    page = (workshop.folder / "out" / "timed" / "report" / "report.html").read_text()
    assert "9.023" in page and "over turns" in page


@pytest.mark.parametrize("extra", [(), ("routing.init=data",), ("experiment=recall", "data.length=64")])
def test_a_step_trains_the_model_in_micro_batches(extra: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = ("data.length=32", "model.layers=2", "model.hidden=16", "model.heads=2", "model.ffn_hidden=16")
    heads = ("model.window=8", "routing.heads=1", "routing.layers=1", "routing.window=8", "hardware=cpu")
    config = compose([*sizes, *heads, "trainer.batch_size=4", "trainer.micro_batch_size=2", *extra])
    made: list[torch.nn.Module] = []
    fresh = build_model

    def keep(*arguments: Any) -> Any:
        made.append(fresh(*arguments))
        return made[0]

    monkeypatch.setattr("rtx.training.module.build_model", keep)
    size = vocabulary_size(config.data)
    ids = bench.training_ids(config, bench.prepared_data(config.data), size)
    step, parameters = bench.training_step(config, size, torch.device("cpu"), ids)
    first = {name: value.clone() for name, value in made[0].state_dict().items()}
    losses = [step() for _ in range(3)]
    assert all(bool(loss.isfinite()) for loss in losses)
    assert parameters == sum(parameter.numel() for parameter in made[0].parameters())
    assert any(not torch.equal(value, first[name]) for name, value in made[0].state_dict().items())
    # Thresholds set by the data count as a step, too.
    steps = 3 + (config.routing.init == "data")
    assert {int(centroids.steps) for centroids in all_centroids(made[0])} == {steps}


def test_rows_that_differ_by_their_seed_alone_are_timed_once(workshop: Workshop) -> None:
    words = [*SIZES, "name=seeds", "experiment=cifar10_grid", "model.base=full,local", "routing.heads=0"]
    said = workshop.command("bench", "steps", *words, "seed=1,0,2")
    assert "of 6 cells those that differ by their seed alone are one row\n2 rows, 2 turns of 1 step" in said
    assert [row["config"]["seed"] for row in record_of(workshop, "seeds")["rows"]] == [1, 1]


def test_batches_are_those_of_training_and_rows_those_of_runs(workshop: Workshop) -> None:
    run = workshop.train("prepares", "trainer.steps=1", "hardware=auto")
    words = [workshop.text, *TINY, "trainer.steps=1", "hardware=auto", "bench.turns=2", "bench.per_turn=1", "name=real"]
    assert "2 rows" in workshop.command("bench", "steps", *words, "routing.window=8,4")
    record = record_of(workshop, "real")
    assert record["ids"] == READ and record_of(workshop, "timed")["ids"] == DRAWN
    same, other = (row_key(Cell(Path(), row.config)) for row in read_record(record).rows)
    assert row_key(collect([run]).cells[0]) == same != other


def test_a_row_that_fails_leaves_the_others_running(workshop: Workshop) -> None:
    words = [*SIZES, "name=fails", "experiment=cifar10_grid"]
    said = workshop.command("bench", "steps", *words, "optimizer.lr=1e-4,1e38", code=1)
    good, bad = record_of(workshop, "fails")["rows"]
    assert len(good["ms_turns"]) == 2 and good["reason"] is None
    assert bad["ms_turns"] == [] and " at learning rate 1e+38" in bad["reason"]
    assert "Failed: Routing 4x2 W=8 lr=1e+38: " in said and "No ratios:" in said
    said = workshop.command("bench", "steps", *words, "name=none", "optimizer.lr=1e38", code=1)
    assert "rtx: no row could be timed" in said
    assert not list((workshop.folder / "out" / "none" / "bench").iterdir())


def test_ctrl_c_prints_and_keeps_what_is_there(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[bench.Row] = []
    after = 6

    def take(row: bench.Row, options: Any) -> None:
        taken.append(row)
        if len(taken) > after:
            raise KeyboardInterrupt
        row.ms_turns.append(10.0 + len(taken))

    monkeypatch.setattr(bench, "take_turn", take)
    words = [*SIZES, "name=stopped"]
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
        (("steps", "bench.turns=0"), "bench.turns=0: must be an integer, at least 1"),
        (("steps", "routing.heads=2,4", "hydra/launcher=basic"), "hydra/launcher=basic: has no effect"),
        (("steps", "hardware=ddp"), "hardware takes auto, cpu or gpu"),
        (("steps", "hardware=slurm"), "hardware=slurm: has no effect"),
        (("steps", "seed=1,1"), "are the same run"),
        (("steps", "routing.heads=2,99"), "routing.heads=99"),
        (("steps", "-m"), "unknown flag"),
    ],
)
def test_what_a_user_may_get_wrong(words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_folder_that_cannot_be_written(workshop: Workshop) -> None:
    (workshop.folder / "out").mkdir(exist_ok=True)
    (workshop.folder / "out" / "taken").write_text("a file")
    assert "set RTX_OUTPUTS" in workshop.command("bench", "steps", *SIZES, "name=taken", code=2)
