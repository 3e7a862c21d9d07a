"""Fields that differ are named as on the command line."""

from __future__ import annotations

from rtx.training.changes import differences


def test_differences_have_dotted_names() -> None:
    old = {"a": 1, "b": {"c": None, "d": 2}, "e": [1]}
    assert differences(old, old) == {}
    assert differences(old, {"a": 1, "b": {"c": 3, "d": 2}, "f": 0}) == {
        "b.c": (None, 3),
        "e": ([1], None),
        "f": (None, 0),
    }
