"""Fields that differ are named as on the command line, and few of them may differ in a run that goes on."""

from __future__ import annotations

import pytest

from rtx.training.config_diff import differences, makes_another, may_change


def test_differences_have_dotted_names() -> None:
    old = {"a": 1, "b": {"c": None, "d": 2}, "e": [1]}
    assert differences(old, old) == {}
    assert differences(old, {"a": 1, "b": {"c": 3, "d": 2}, "f": 0}) == {
        "b.c": (None, 3),
        "e": ([1], None),
        "f": (None, 0),
    }


@pytest.mark.parametrize("key", ["trainer.steps", "trainer.micro_batch_size", "hardware.devices", "logger.project"])
def test_what_may_change(key: str) -> None:
    assert may_change(key)


@pytest.mark.parametrize("key", ["trainer.batch_size", "trainer.clip", "optimizer.lr", "model.dropout", "seed"])
def test_what_may_not_change(key: str) -> None:
    assert not may_change(key) and not makes_another(key)
