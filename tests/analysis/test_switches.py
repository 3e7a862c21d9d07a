"""Which switches bring a peak down far enough."""

from __future__ import annotations

import pytest

from rtx.analysis.switches import changed, fitting, micro_batch, peak
from rtx.compose import compose
from rtx.config import Config

WORDS = (
    *("data=enwik8", "model=rt12", "data.length=1024", "model.layers=4", "routing.layers=4", "model.hidden=256"),
    *("model.ffn_hidden=768", "trainer.batch_size=8", "hardware=cpu"),
)


@pytest.fixture(scope="module")
def config() -> Config:
    """A run of which every switch changes something."""
    return compose(WORDS)


def test_each_switch_that_is_enough_is_named_with_what_it_leaves(config: Config) -> None:
    whole = peak(config, 256)
    found = {switch.words: switch.peak for switch in fitting(config, 256, 0.8 * whole)}
    assert set(found) >= {"trainer.micro_batch_size=4", "model.recompute=true"}
    for words, left in found.items():
        assert left <= 0.8 * whole
        named = [word for word in words.split() if not word.startswith("hardware=")]
        if len(named) == len(words.split()):  # what is named is what the plan says of a run with it
            assert peak(compose([*WORDS, *named]), 256) == pytest.approx(left)


def test_the_batch_is_cut_no_further_than_it_must_be(config: Config) -> None:
    room = peak(changed(config, "trainer", micro_batch_size=2), 256)
    words = [switch.words for switch in fitting(config, 256, room)]
    assert "trainer.micro_batch_size=2" in words
    assert "trainer.micro_batch_size=1" not in words


def test_together_where_none_is_enough_alone_and_none_where_all_are_too_few(config: Config) -> None:
    smallest = changed(config, "trainer", micro_batch_size=1)
    room = peak(changed(smallest, "model", recompute=True), 256)
    (switch,) = fitting(config, 256, room)
    assert switch.words == "trainer.micro_batch_size=1 model.recompute=true"
    assert switch.peak == pytest.approx(room)
    assert fitting(config, 256, 1e6) == []


def test_what_is_on_already_is_not_offered() -> None:
    config = compose([*WORDS, "model.recompute=true", "hardware.precision=bf16", "optimizer=adafactor"])
    assert micro_batch(config) == 8
    kept = [words.words for words in fitting(config, 256, 0.7 * peak(config, 256))]
    assert all("micro_batch" in words or "fsdp" in words for words in kept)
