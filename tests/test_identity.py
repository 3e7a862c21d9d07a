"""The hash that names a cell: as recorded, whatever keys have been added since."""

from __future__ import annotations

import pytest

from rtx.commandline.fields import Field, all_fields
from rtx.compose import compose, config_hash, to_dict
from rtx.identity import digest
from rtx.report.cells import flat

RECORDED = {
    "": "b68d239e87e6",
    "experiment=smoke": "770f968e48d0",
    "experiment=enwik8 model.base=local routing.heads=0": "4e982ca6e998",
    "experiment=cifar10_grid routing.heads=2 routing.layers=2 routing.window=512": "2614cc5a895a",
    "data=text data.path=/srv/book.txt seed=3": "8e52d03016dd",
}
"""Hashes under which cells lie on disks: if one changes, every finished cell is run again."""


@pytest.mark.parametrize("words", RECORDED)
def test_a_cell_keeps_its_hash(words: str) -> None:
    assert config_hash(compose(words.split())) == RECORDED[words]


def test_how_cells_are_run_tells_none_apart() -> None:
    for words in (
        "sweep.retry=true",
        "sweep.parallel=2",
        "sweep.once=true",
        "hardware=slurm",
        "hardware=submitit_local",
    ):
        assert config_hash(compose([words])) == RECORDED[""]


def test_a_key_that_is_added_counts_where_it_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    values = flat(to_dict(compose([])))
    new = Field("model.colour", str, False, "grey", {}, "")
    monkeypatch.setitem(all_fields(), "model.colour", new)
    assert digest(values | {"model.colour": "grey"}) == digest(values) == RECORDED[""]
    assert digest(values | {"model.colour": "red"}) != digest(values)
    assert digest(values | {"model.of_another_version": 1}) != digest(values)
