"""Values and numbers as one would write them."""

from __future__ import annotations

import pytest

from rtx.wording import plural, written


@pytest.mark.parametrize(
    ("value", "said"), [(None, "null"), (True, "true"), (False, "false"), (0.5, "0.5"), ("full", "full")]
)
def test_values_are_written_as_behind_a_key(value: object, said: str) -> None:
    assert written(value) == said


def test_plurals() -> None:
    assert [plural(number, "process") for number in (1, 2)] == ["1 process", "2 processes"]
    assert [plural(number, "step") for number in (0, 1, 2000)] == ["0 steps", "1 step", "2,000 steps"]
