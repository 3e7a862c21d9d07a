"""Option `length` of `rtx eval`: the lengths that a text names, and their configurations."""

import pytest

from rtx.cli.lengths import overrides_of_length, read_lengths, refuse_length
from rtx.errors import UserError
from rtx.settings.compose import compose
from rtx.settings.run_config import merge_checked


def test_lengths_are_read_in_their_order() -> None:
    assert read_lengths("512") == [512]
    assert read_lengths("4096, 512,1e3") == [4096, 512, 1000]
    for text, message in (
        ("512,", "data.length=: must be an integer"),
        ("1", "at least 2"),
        ("64,64", "length=64,64: names 64 twice"),
        ("long", "must be an integer"),
    ):
        with pytest.raises(UserError, match=message):
            read_lengths(text)


def test_a_window_as_wide_as_the_sequence_stays_so_and_a_narrower_one_stays_as_it_is() -> None:
    words = ["routing=exact", "data.length=64", "routing.window=64", "model.window=16"]
    config = compose([*words, "trainer.val_stride=32"])
    for length in (16, 256):
        longer = merge_checked(config, overrides_of_length(config, length))
        assert longer.data.length == longer.routing.window == length
        assert longer.model.window == 16
        assert longer.trainer.val_stride is None
        assert longer.routing.clusters == config.routing.clusters


@pytest.mark.parametrize("positions", ["learned", "axial"])
def test_positions_with_a_vector_each_are_refused_by_name(positions: str) -> None:
    words = [f"model.positions={positions}", "data.length=256"]
    if positions == "axial":
        words.append("model.axes=16x16")
    config = compose(words)
    refuse_length(config, 256)
    message = f"length=512: model.positions={positions} has a vector for each of the 256 positions"
    with pytest.raises(UserError, match=message):
        refuse_length(config, 512)


@pytest.mark.parametrize("positions", ["rotary", "shaw", "none"])
def test_other_positions_are_not(positions: str) -> None:
    refuse_length(compose([f"model.positions={positions}", "data.length=256"]), 512)


def test_a_memory_is_refused_by_name() -> None:
    words = "model.base=recurrent routing.heads=0 model.positions=xl"
    refuse_length(compose(words.split()), 512)
    with pytest.raises(UserError, match=r"length=512: not for model\.memory=32"):
        refuse_length(compose([*words.split(), "model.memory=32"]), 512)
