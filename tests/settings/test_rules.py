"""Each rule of what fits together reads the keys that it names, and no others."""

from typing import Any

import pytest

from rtx.errors import UserError
from rtx.settings.compose import compose, compose_data
from rtx.settings.rules.rule import RULES, Rule
from rtx.settings.schema import SECTIONS, Config, all_fields

CONFIGS = (
    "",
    "routing=probed routing.candidates=256",
    "routing=blocks",
    "model.base=recurrent routing.heads=0 model.memory=32 model.compressed=16",
    "model.base=strided+fixed",
    "data=cifar10 model=rt12-cifar10",
    "data=mqar data.distance=4",
    "model=adaptive_input hardware=fsdp",
    "model.positions=xl model.base=recurrent routing.heads=0 model.tie_biases=false hardware=fsdp",
    "hardware.attention=native",
    "hardware.attention=triton hardware=gpu",
    "hardware.loss=liger",
)


@pytest.fixture(scope="module")
def configs() -> dict[str, Config]:
    return {words: compose(words.split()) for words in CONFIGS}


class Recorder:
    """A part of a configuration that notes which keys are read of it."""

    def __init__(self, part: Any, prefix: str, read: set[str]) -> None:
        self.part = part
        self.prefix = prefix
        self.read = read

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.part, name)
        if name in SECTIONS and not self.prefix:
            return Recorder(value, f"{name}.", self.read)
        self.read.add(self.prefix + name)
        return value


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.check.__name__)
def test_a_rule_names_the_keys_that_it_reads(rule: Rule, configs: dict[str, Config]) -> None:
    assert rule.keys <= set(all_fields())
    assert rule.check.__doc__
    for words, config in configs.items():
        read: set[str] = set()
        recorder: Any = Recorder(config, "", read)
        assert list(rule.check(recorder)) == [], words
        assert read <= rule.keys, words


def test_the_data_alone_are_checked_by_the_rules_of_data() -> None:
    # The default model has windows that are longer; no store depends on them.
    assert compose_data(["data.length=16"]).length == 16
    with pytest.raises(UserError, match=r"data\.pairs=20 must be at most data\.keys=16"):
        compose_data(["data=recall", "data.pairs=20"])
