"""`rtx bench steps`: real steps of tiny rows in turn, rows that fail, interruption, and what a user may get wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from small_runs import SIZES, Workshop

from rtx import cli
from rtx.attention.centroids import all_centroids
from rtx.commands import bench
from rtx.compose import compose
from rtx.data.catalog import data_root, open_data
from rtx.model.transformer import Transformer
from rtx.report.steps import WHAT
from rtx.training.module import build_model

TURNS = ("bench.turns=3", "bench.per_turn=1", "bench.warmup=1")
KINDS = "routing.heads=0,1"
"""A row of local heads alone, and one with a routing head."""


def record_of(workshop: Workshop, name: str) -> dict[str, Any]:
    """The one record below outputs/<name>."""
    (path,) = (workshop.folder / "out" / name / "bench").glob("*.json")
    return json.loads(path.read_text())


def bench_steps(workshop: Workshop, name: str, *words: str, code: int = 0) -> str:
    return workshop.command("bench", "steps", workshop.text, *SIZES, *TURNS, *words, f"name={name}", code=code)


def test_rows_are_timed_in_turn_on_the_batches_of_training(workshop: Workshop) -> None:
    said = bench_steps(workshop, "timed", KINDS)
    assert "2 rows, 3 turns of 1 step" in said
    assert "local" in said and "routing" in said
    record = record_of(workshop, "timed")
    assert record["what"] == WHAT and record["device"] == "CPU, 1 thread" and record["versions"]["torch"]
    assert record["bench"] == {"turns": 3, "per_turn": 1, "warmup": 1}
    assert all(len(row["ms_turns"]) == 3 and not row["reason"] for row in record["rows"])
    assert "steps/s" in workshop.command("report", str(workshop.folder / "out" / "timed"))


@pytest.mark.parametrize("extra", [(), ("routing.init=data",), ("data=recall", "data.length=64")])
def test_a_step_trains_the_model_in_micro_batches(
    workshop: Workshop, extra: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in workshop.environment("").items():
        monkeypatch.setenv(name, value)
    config = compose([*([] if "data=recall" in extra else [workshop.text]), *SIZES, *extra])
    made: list[Transformer] = []

    def keep(*arguments: Any) -> Any:
        made.append(build_model(*arguments))
        return made[0]

    monkeypatch.setattr("rtx.training.module.build_model", keep)
    step, parameters = bench.training_step(config, open_data(config.data, data_root()), torch.device("cpu"))
    first = {name: value.clone() for name, value in made[0].state_dict().items()}
    assert all(bool(step().isfinite()) for _ in range(3)) and parameters == made[0].count_parameters()
    assert any(not torch.equal(value, first[name]) for name, value in made[0].state_dict().items())
    # Thresholds set by the data count as a step, too.
    steps = 3 + (config.routing.init == "data")
    assert {int(centroids.steps) for centroids in all_centroids(made[0])} == {steps}


def test_rows_that_differ_by_their_seed_alone_are_timed_once(workshop: Workshop) -> None:
    said = bench_steps(workshop, "seeds", KINDS, "seed=1,0,2")
    assert "of 6 cells those that differ by their seed alone are one row\n2 rows, 3 turns of 1 step" in said
    assert [row["config"]["seed"] for row in record_of(workshop, "seeds")["rows"]] == [1, 1]


def test_a_row_that_fails_leaves_the_others_running(workshop: Workshop) -> None:
    said = bench_steps(workshop, "fails", "optimizer.lr=1e-4,1e38", code=1)
    good, bad = record_of(workshop, "fails")["rows"]
    assert len(good["ms_turns"]) == 3 and good["reason"] is None
    assert (
        bad["ms_turns"] == []
        and " at learning rate 1e+38" in bad["reason"]
        and "learning rate 1e+38" in " ".join(said.split())
    )
    assert "rtx: no row could be timed" in bench_steps(workshop, "none", "optimizer.lr=1e38", code=1)
    assert not list((workshop.folder / "out" / "none" / "bench").iterdir())


def test_ctrl_c_prints_and_keeps_what_is_there(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[bench.Row] = []
    after = 3

    def take(row: bench.Row, options: Any) -> None:
        taken.append(row)
        if len(taken) > after:
            raise KeyboardInterrupt
        row.ms_turns.append(10.0 + len(taken))

    monkeypatch.setattr(bench, "take_turn", take)
    said = bench_steps(workshop, "stopped", KINDS, code=130)
    assert "3 turns of 1 step" in said and "stopped by SIGINT" in said
    assert [len(row["ms_turns"]) for row in record_of(workshop, "stopped")["rows"]] == [2, 1]
    taken, after = [], 6
    bench_steps(workshop, "stopped", KINDS)
    taken, after = [], 5
    assert "stays as it was" in bench_steps(workshop, "stopped", KINDS, code=130)
    assert [len(row["ms_turns"]) for row in record_of(workshop, "stopped")["rows"]] == [3, 3]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "rtx bench: say steps"),
        (("stpes",), "did you mean 'steps'"),
        (("steps", "experiment=cifar10_gird"), "did you mean 'cifar10_grid'"),
        (("steps", "bench.turns=0"), "bench.turns=0: must be an integer, at least 1"),
        (("steps", "routing.heads=2,4", "hydra.launcher.x=1"), "hydra.launcher.x=1: has no effect"),
        (("steps", "hardware=ddp"), "hardware takes auto, cpu or gpu"),
        (("steps", "hardware=slurm"), "hardware takes auto, cpu or gpu"),
        (("steps", "seed=1,1"), "are the same run"),
        (("steps", "-m"), "unknown flag"),
    ],
)
def test_what_a_user_may_get_wrong(words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_folder_that_cannot_be_written(workshop: Workshop) -> None:
    (workshop.folder / "out").mkdir(exist_ok=True)
    (workshop.folder / "out" / "taken").write_text("a file")
    assert "set RTX_OUTPUTS" in bench_steps(workshop, "taken", code=2)
