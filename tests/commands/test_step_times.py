"""`benchmarks/steps.py`: real steps of tiny rows in turn, rows that fail, interruption, mistakes of
a user.
"""

import importlib
import json
import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock, patch

import pytest

from rtx.analysis.cost import cost
from rtx.runs.records import TIMED_STEPS
from rtx.settings.schema import to_config
from rtx.training import module
from tests.helpers.small_runs import ROOT, SMALL_RUN, Workshop

KINDS = "routing.heads=0,1"
"""A row of local heads alone, and one with a routing head."""
Ask = Callable[..., str]


@pytest.fixture
def steps(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    for name, value in workshop.environment("").items():
        monkeypatch.setenv(name, value)
    return importlib.import_module("steps")


@pytest.fixture
def ask(
    workshop: Workshop,
    steps: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Ask:
    """Runs the script with its words, checks the exit code, and returns all that was printed."""

    def run(*words: str, code: int = 0) -> str:
        text = [] if "data=recall" in words else [workshop.text]
        given = (*text, *SMALL_RUN, "turns=3", "per_turn=1", "warmup=1", *words)
        monkeypatch.setattr(sys, "argv", ["benchmarks/steps.py", *given])
        assert steps.entry() == code
        return "".join(capsys.readouterr())

    return run


def record_of(workshop: Workshop, name: str) -> dict[str, Any]:
    (path,) = (workshop.folder / "out" / name / "bench").glob("*.json")
    return json.loads(path.read_text())


def test_rows_are_timed_in_turn_and_seeds_of_a_row_once(
    workshop: Workshop, steps: Any, ask: Ask
) -> None:
    with patch.object(module, "after_step", wraps=module.after_step) as moved:
        said = ask("name=timed", KINDS, "seed=1,0")
    assert moved.call_count == 2 * (1 + 3), "once for each step of a row"
    assert "2 rows, 3 turns of 1 step" in said and "local" in said and "routing" in said
    record = record_of(workshop, "timed")
    assert (
        record["what"] == TIMED_STEPS
        and record["device"] == "CPU, 1 thread"
        and record["versions"]["torch"]
    )
    assert record["bench"] == {"turns": 3, "per_turn": 1, "warmup": 1}
    rows = [(len(row["ms_turns"]), row["reason"], row["config"]["seed"]) for row in record["rows"]]
    assert rows == [(3, None, 1)] * 2
    for row in record["rows"]:
        assert row["parameters"] == cost(to_config(row["config"]), 256).parameters
    assert "steps/s" in workshop.command("report", str(workshop.folder / "out" / "timed"))


@pytest.mark.parametrize("extra", [(), ("routing.init=data",), ("data=recall", "data.length=64")])
def test_a_row_that_fails_leaves_the_others_running(
    workshop: Workshop, ask: Ask, extra: tuple[str, ...]
) -> None:
    said = ask(
        f"name=fails{len(extra)}", *extra, "optimizer.lr=1e-4,1e30", code=1
    )  # no step that trains nothing fails
    good, bad = record_of(workshop, f"fails{len(extra)}")["rows"]
    assert len(good["ms_turns"]) == 3 and good["reason"] is None
    assert bad["ms_turns"] == [] and " at learning rate 1e+30" in bad["reason"]
    assert "learning rate 1e+30" in " ".join(said.split())
    assert "rtx: no row could be timed" in ask("name=none", "optimizer.lr=1e30", code=1)
    assert not list((workshop.folder / "out" / "none" / "bench").iterdir())


def test_ctrl_c_prints_and_keeps_what_is_there(workshop: Workshop, steps: Any, ask: Ask) -> None:
    turns = [map(Mock(side_effect=[10.0, then]), range(2)) for then in (10.0, KeyboardInterrupt)]
    with patch.object(steps, "turns_of", side_effect=turns):
        said = ask("name=stopped", KINDS, code=130)
    assert "3 turns of 1 step" in said and "stopped by SIGINT" in said
    assert [len(row["ms_turns"]) for row in record_of(workshop, "stopped")["rows"]] == [2, 1]


def test_what_a_user_may_get_wrong(workshop: Workshop, ask: Ask) -> None:
    (workshop.folder / "out").mkdir(exist_ok=True)
    (workshop.folder / "out" / "taken").write_text("a file")
    for words, said in (
        (("experiment=cifar10_gird",), "did you mean 'cifar10_grid'"),
        (("turns=0",), "turns=0: must be an integer, at least 1"),
        (
            ("routing.heads=2,4", "hydra.launcher.x=1"),
            "hydra.launcher.x=1: rows are timed in turn on one device",
        ),
        (("hardware=slurm",), "hardware takes auto, cpu or gpu"),
        (("name=taken",), "set RTX_OUTPUTS"),
    ):
        assert said in ask(*words, code=2)
