"""The processes that take steps in turn: what a step is, and how one ends."""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection
from typing import Any, cast

import pytest
import torch

from rtx.attention.centroids import all_centroids
from rtx.compose import compose
from rtx.data.recall import RecallStore
from rtx.errors import UserError
from rtx.options import BenchOptions
from rtx.training import stepping
from rtx.training.stepping import Failure, Turn, Work, reason_of, take_turns
from rtx.training.turns import ADVICE, Row, Timing, measure

SIZES = (
    *("data.length=32", "model.layers=2", "model.hidden=16", "model.heads=2", "model.ffn_hidden=16", "model.window=8"),
    *("routing.heads=1", "routing.layers=1", "routing.window=8", "trainer.batch_size=4", "trainer.micro_batch_size=2"),
    *("hardware=cpu", "hardware.threads=1"),
)


def work(*overrides: str) -> Work:
    """The work of a tiny row."""
    return Work(compose([*SIZES, *overrides]), 11)


class Asking:
    """Stands for the pipe: asks for steps, then hangs up."""

    def __init__(self, *asked: int) -> None:
        self.asked = list(asked)
        self.answers: list[Any] = []

    def recv(self) -> int:
        if not self.asked:
            raise EOFError
        return self.asked.pop(0)

    def send(self, answer: Any) -> None:
        self.answers.append(answer)


@pytest.mark.parametrize("extra", [(), ("routing.init=data",), ("experiment=recall", "data.length=64")])
def test_a_step_is_that_of_a_fit(extra: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    given = work(*extra)
    if given.config.data.name == "recall":
        store = RecallStore(given.config.data)
        given = Work(given.config, store.vocabulary, store.answers, store.sequence)
    made: list[torch.nn.Module] = []

    def keep(*arguments: Any) -> Any:
        made.append(fresh(*arguments))
        first.update({name: value.clone() for name, value in made[0].state_dict().items()})
        return made[0]

    first: dict[str, torch.Tensor] = {}
    fresh = stepping.fresh_model
    monkeypatch.setattr(stepping, "fresh_model", keep)
    door = Asking(1, 3)
    with pytest.raises(EOFError):
        take_turns(cast(Connection, door), given)
    assert [type(answer) for answer in door.answers] == [Turn, Turn]
    for turn in door.answers:
        assert turn.milliseconds > 0 and turn.peak_bytes > 0 and (turn.device, turn.threads) == ("CPU", 1)
    (model,) = made
    assert door.answers[0].parameters == sum(parameter.numel() for parameter in model.parameters())
    assert any(not torch.equal(value, first[name]) for name, value in model.state_dict().items())
    # Two micro-batches are one step; thresholds set by the data count as one, too.
    steps = 4 + (given.config.routing.init == "data")
    assert {int(centroids.steps) for centroids in all_centroids(model)} == {steps}


def test_a_killed_row_says_so_and_the_others_go_on() -> None:
    row = Row(work(), warmup=0)
    try:
        assert isinstance(row.take(1), Turn)
        assert row.process is not None and row.process.pid
        os.kill(row.process.pid, signal.SIGKILL)
        answer = row.take(1)
        assert isinstance(answer, Failure) and answer.reason.startswith("out of memory, it seems")
    finally:
        row.end()
    assert row.process is None
    timings, shown = [Timing(), Timing()], []
    rows = [work("model.hidden=1048576"), work()]
    measure(rows, BenchOptions(turns=2, per_turn=1, warmup=0), timings, lambda turn, row: shown.append((turn, row)))
    assert shown == [(1, 1), (1, 2), (2, 2)]
    assert timings[0].reason.startswith("out of memory: ") and timings[0].reason.endswith(ADVICE)
    assert timings[0].milliseconds is None and len(timings[1].turns) == 2 and timings[1].reason == ""


def test_reasons_are_one_line() -> None:
    assert reason_of(UserError("hardware=gpu, but")) == "hardware=gpu, but"
    assert reason_of(RuntimeError("CUDA out of memory. Tried\nmore")) == "out of memory: CUDA out of memory. Tried more"
    assert reason_of(MemoryError()) == "out of memory: MemoryError"
    assert reason_of(IndexError("at 3")) == "IndexError: at 3"
