"""A key that is one entry of the schema: help, checks, hash, resume, report and editor follow."""

import json
import runpy
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rtx.cli.help import candidates, command_page
from rtx.errors import UserError
from rtx.report.score_rows import row_key
from rtx.settings import effects, schema, sources
from rtx.settings.compose import compose
from rtx.settings.effects import ROUNDING
from rtx.settings.fields import Since, key
from rtx.settings.identity import (
    cell_hashes,
    config_hash,
    may_change,
    ranks_must_agree,
    tells_rows_apart,
)
from rtx.settings.presets import forget
from rtx.settings.run_config import load_run_config, to_yaml
from rtx.settings.schema import Config, ModelConfig, all_fields, flat, to_dict

DOCS = Path(__file__).resolve().parents[2] / "docs"
SCHEMA = DOCS / "schema" / "make.py"
PAGE = DOCS / "extending.md"
STRIDED = "model.base=strided"


@dataclass
class ModelWithKey(ModelConfig):
    """The model with one more key."""

    groups: int = key(
        1,
        low=1,
        high=64,
        changes=ROUNDING,
        read_with={"model.base": ("strided",)},
        since=Since("9.9", 1),
    )
    """Groups of strided heads that are computed at once."""


@dataclass
class ConfigWithKey(Config):
    """A run with one more key."""

    model: ModelWithKey = field(default_factory=ModelWithKey)  # pyright: ignore[reportIncompatibleVariableOverride]


@pytest.fixture
def hash_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Add the key to a copy of the schema; return the hash that the default cell had before."""
    before = config_hash(compose([]))
    monkeypatch.setattr(schema, "Config", ConfigWithKey)
    monkeypatch.setattr(sources, "Config", ConfigWithKey)
    forget()
    yield before
    monkeypatch.undo()
    forget()


@pytest.mark.usefixtures("hash_before")
def test_help_and_completion_have_the_key() -> None:
    assert "model.groups" in command_page("train", ["model"])
    assert candidates("rtx train model.gro") == ["model.groups="]


@pytest.mark.usefixtures("hash_before")
@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("model.groups=65", "model.groups=65: must be an integer, at least 1, at most 64 (Groups"),
        ("model.groups=two", "model.groups=two: must be an integer"),
        ("model.gruops=2", "did you mean 'model.groups'?"),
        ("model.groups=2", "model.groups=2 has no effect with model.base=local; it is for strided"),
    ],
)
def test_values_of_the_key_are_checked(word: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        compose([word])
    assert message in str(caught.value)


def test_recorded_cells_keep_their_hash_and_other_values_are_other_cells(hash_before: str) -> None:
    assert config_hash(compose([])) == hash_before
    one = compose([STRIDED])
    two = compose([STRIDED, "model.groups=2"])
    assert set(cell_hashes(one)).isdisjoint(cell_hashes(two))


@pytest.mark.usefixtures("hash_before")
def test_the_effect_of_the_key_decides_on_resumption_rows_and_processes() -> None:
    assert may_change("model.groups")
    assert ranks_must_agree("model.groups")
    assert not tells_rows_apart("model.groups")
    one, two = (compose([STRIDED, f"model.groups={groups}"]) for groups in (1, 2))
    assert row_key(flat(to_dict(one))) == row_key(flat(to_dict(two)))


@pytest.mark.usefixtures("hash_before")
def test_the_record_of_a_run_has_the_key_or_is_older(tmp_path: Path) -> None:
    text = to_yaml(compose([STRIDED, "model.groups=2"]))
    for record, expected in ((text, 2), (text.replace("  groups: 2\n", ""), 1)):
        (tmp_path / "config.yaml").write_text(record)
        model = load_run_config(tmp_path).model
        assert isinstance(model, ModelWithKey)
        assert model.groups == expected


@pytest.mark.usefixtures("hash_before")
def test_the_schema_for_editors_has_the_key() -> None:
    whole = json.loads(runpy.run_path(str(SCHEMA))["text_of"]("config"))
    entry = whole["properties"]["model"]["properties"]["groups"]
    assert entry["description"] == "Groups of strided heads that are computed at once."
    assert {"type": "integer", "minimum": 1, "maximum": 64} in entry["anyOf"]


FIRST_KEYS = 85
"""Keys in the hashes of the first recorded cells; each later one says since when it exists."""


def test_every_younger_key_says_since_when_it_exists() -> None:
    fields = all_fields().values()
    first = [field for field in fields if field.changes.new_cell and field.since is None]
    assert len(first) == FIRST_KEYS
    for each in fields:
        if each.since is not None:
            assert each.read(each.since.value) == each.since.value, each.key


def test_the_page_has_the_effects_as_they_are() -> None:
    page = PAGE.read_text("utf-8")
    named = {name: effect for name, effect in vars(effects).items() if name.isupper()}
    for name, effect in named.items():
        assert isinstance(effect, effects.Effect)
        row = next(line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
        examples, *answers = row.strip("| ").split(" | ")[1:]
        facts = (effect.new_cell, effect.new_row, effect.resumable, effect.shared)
        assert answers == ["yes" if fact else "no" for fact in facts], name
        for example in examples.split(", "):
            assert all_fields()[example.strip("`")].changes is effect, example


def test_conditions_name_keys_and_values_that_exist() -> None:
    fields = all_fields()
    for each in fields.values():
        for other, values in each.read_with.items():
            assert values, each.key
            for value in values:
                fields[other].read(value)
