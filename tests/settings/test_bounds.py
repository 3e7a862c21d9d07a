"""Every number that can be set has an upper bound, at which commands answer or refuse."""

import math

import pytest

from rtx.cli import main as cli
from rtx.cli.commands import COMMANDS
from rtx.settings.fields import Field, fields_of
from rtx.settings.schema import all_fields
from tests.helpers.disturbances import deadline

SMALL = [
    "model.layers=1",
    "routing.layers=1",
    "model.hidden=32",
    "model.ffn_hidden=64",
    "model.heads=2",
    "routing.heads=1",
    "model.window=16",
    "routing.window=16",
    "data.length=64",
    "hardware=cpu",
    "hardware.threads=1",
]


def all_options() -> dict[str, Field]:
    """Return the keys of the configuration and the options of every command."""
    found = dict(all_fields())
    for command in COMMANDS:
        if command.options is not None:
            for name, field in fields_of(command.options).items():
                found[f"{command.name} {name}"] = field
    return found


def test_every_number_has_an_upper_bound_and_a_lower_one() -> None:
    numbers = {name: field for name, field in all_options().items() if field.kind in (int, float)}
    assert len(numbers) > 90, "the keys and the options of several commands"
    unbounded = [name for name, field in numbers.items() if not math.isfinite(field.high)]
    assert not unbounded, f"give these an upper bound (high=...): {unbounded}"
    endless = [name for name, field in numbers.items() if math.isinf(max(field.low, field.above))]
    assert not endless, f"give these a lower bound (low= or above=): {endless}"


def test_a_number_above_its_bound_is_refused_with_the_bound(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for word in ("trainer.batch_size=1000000000", "hardware.workers=1000000", "data.length=1e15"):
        assert cli.main(["plan", word]) == 2
        assert f"rtx: {word.partition('=')[0]}=" in (said := capsys.readouterr().err)
        assert "at most " in said


@pytest.mark.parametrize(
    "name",
    [
        "data.sequences",
        "trainer.batch_size",
        "trainer.steps",
        "model.ffn_hidden",
        "model.hidden",
    ],
)
def test_a_plan_at_a_bound_answers_or_refuses(name: str) -> None:
    words = [*SMALL, f"{name}={all_fields()[name].high:.0f}"]
    if name == "data.sequences":
        words.append("data=mqar")
    with deadline():
        assert cli.main(["plan", *words]) in (0, 2)


def test_a_plan_refuses_a_selection_that_would_take_minutes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    length = f"data.length={all_fields()['data.length'].high}"
    with deadline():
        assert cli.main(["plan", *SMALL, length]) == 2
    said = capsys.readouterr().err
    assert "data.length=16777216 with 1,048,576 clusters: a plan compares at most " in said
