"""What `auto` takes for the micro-batch and for recomputation, by the plan's count, on devices that are made up."""

from __future__ import annotations

import itertools

import pytest

from rtx.analysis.cost import cost
from rtx.analysis.fitting import FILLED, choose_micro_batch, fit_to_device, with_choice, with_less_memory
from rtx.analysis.footprint import footprint
from rtx.compose import compose, config_hash
from rtx.config import Config
from rtx.data.catalog import vocabulary_size
from rtx.keys import options

GIB = 2**30
DATA = {
    "tiny": "stdlib",
    "rt10": "wikitext103",
    "rt12": "enwik8",
    "rt12-cifar10": "cifar10",
    "rt22": "pg19",
    "rt24": "enwik8",
    "rt24-imagenet64": "imagenet64",
    "adaptive_span": "enwik8",
    "reformer": "imagenet64",
    "sparse_transformer": "enwik8",
    "sparse_transformer-cifar10": "cifar10",
    "sparse_transformer-imagenet64": "imagenet64",
}
"""The data set of every preset."""
SMALL = (
    *("data=enwik8", "model=rt12", "data.length=1024", "model.layers=4", "routing.layers=4", "model.hidden=256"),
    *("model.ffn_hidden=768", "trainer.batch_size=12", "hardware=gpu"),
)


@pytest.mark.parametrize("preset", options("model"))
def test_every_preset_starts_on_a_gpu_of_16_gib(preset: str) -> None:
    config = compose([f"data={DATA[preset]}", f"model={preset}", "hardware=gpu"])
    known = vocabulary_size(config.data)
    choices = [choose_micro_batch(config, known, size * GIB) for size in (16, 24, 80)]
    for size, choice in zip((16, 24, 80), choices, strict=True):
        assert choice.fits and choice.peak <= FILLED * size * GIB
        assert config.trainer.batch_size % choice.micro_batch_size == 0
    for less, more in itertools.pairwise(choices):
        assert more.recompute <= less.recompute  # a larger device takes no dearer way
        assert more.recompute < less.recompute or more.micro_batch_size >= less.micro_batch_size


def peak(config: Config, size: int, recompute: bool) -> float:
    """Return the planned peak of a choice."""
    tried = with_choice(config, size, recompute)
    return sum(footprint(tried, cost(tried, 256), size, 256).values())


def test_the_largest_that_fits_is_taken_and_blocks_are_recomputed_last() -> None:
    config = compose(SMALL)
    for size, recompute in ((12, False), (4, False), (1, False)):
        room = peak(config, size, recompute) / FILLED
        assert choose_micro_batch(config, 256, 1.001 * room)[:2] == (size, recompute)
        assert choose_micro_batch(config, 256, 0.999 * room)[:2] != (size, recompute)
    tight = choose_micro_batch(config, 256, 0.999 * peak(config, 1, False) / FILLED)
    assert tight.recompute and tight.fits
    nothing = choose_micro_batch(config, 256, 1e6)
    assert nothing[:2] == (1, True) and not nothing.fits


def test_what_is_asked_for_is_not_chosen_anew() -> None:
    asked = compose([*SMALL, "trainer.micro_batch_size=6", "model.recompute=false"])
    assert fit_to_device(asked, 256, 1e6) == (asked, "")
    part = compose([*SMALL, "trainer.micro_batch_size=6"])
    assert choose_micro_batch(part, 256, 1e6)[:2] == (6, True)
    part = compose([*SMALL, "model.recompute=true"])
    assert choose_micro_batch(part, 256, 80 * GIB)[:2] == (12, True)


def test_devices_share_the_batch() -> None:
    config = compose(SMALL)
    assert choose_micro_batch(config, 256, 80 * GIB, world=3).micro_batch_size == 4
    assert choose_micro_batch(config, 256, 1e6, world=12).micro_batch_size == 1


def test_the_line_says_what_was_chosen_and_the_cell_stays_the_same() -> None:
    config = compose(SMALL)
    chosen, line = fit_to_device(config, 256, 16 * GIB)
    assert (chosen.trainer.micro_batch_size, chosen.model.recompute) == (12, False)
    assert line.startswith("auto: hardware.precision=bf16 trainer.micro_batch_size=12 model.recompute=false: about ")
    assert line.endswith(" of 16.0 GiB, by rtx plan")
    assert config_hash(chosen) == config_hash(config)
    assert "should it not fit: optimizer=adafactor" in fit_to_device(config, 256, 1e6)[1]


def test_where_memory_runs_out_the_micro_batch_is_halved_and_then_blocks_are_recomputed() -> None:
    config = compose(SMALL)
    found, now = [], with_choice(config, 12, False)
    while less := with_less_memory(now, config):
        found.append((less.trainer.micro_batch_size, less.model.recompute))
        now = less
    assert found == [(6, False), (3, False), (1, False), (1, True)]
    asked = compose([*SMALL, "trainer.micro_batch_size=12", "model.recompute=false"])
    assert with_less_memory(asked, asked) is None
