"""The cells that an experiment's file lays out by itself, and what the command line changes of them."""

from __future__ import annotations

import pytest

from rtx.commandline.axes import lay_out_cells, refuse_half_a_sweep
from rtx.commandline.overrides import check_overrides
from rtx.compose import compose
from rtx.config import Config
from rtx.errors import UserError


def laid_out(*words: str) -> list[list[str]]:
    """The overrides of each cell."""
    return lay_out_cells(check_overrides(words, sweep=True))[0]


def configs(*words: str) -> list[Config]:
    """The configuration of each cell."""
    return [compose(overrides) for overrides in laid_out(*words)]


def shape(config: Config) -> tuple[int, int, int]:
    """What Table 1 varies."""
    return config.routing.window, config.routing.layers, config.routing.heads


def test_the_grid_of_table_1_in_the_papers_order() -> None:
    cells = configs("experiment=cifar10_grid")
    assert [shape(cell) for cell in cells] == [(w, n, h) for w in (512, 1024) for n in (2, 4, 8, 12) for h in (2, 4, 8)]
    assert {(cell.model.window, cell.routing.clusters, cell.routing.selection) for cell in cells} == {(512, 6, "topk")}


def test_no_experiment_is_one_of_several() -> None:
    assert [config.name for config in configs("experiment=smoke,null", "seed=1,2")] == ["smoke", "smoke", "rtx", "rtx"]


def test_the_baselines_of_table_1() -> None:
    full, local, random = configs("experiment=cifar10_baselines")
    assert (full.model.base, full.routing.heads) == ("full", 0)
    assert (local.model.base, local.routing.heads, local.model.window) == ("local", 0, 512)
    assert (random.routing.selection, *shape(random)) == ("random", 512, 8, 4)
    assert lay_out_cells(check_overrides(["experiment=cifar10_baselines"], sweep=True))[1] == [
        "model.base",
        "routing.heads",
        "routing.selection",
    ]


def test_an_override_reaches_every_cell_and_an_axis_replaces_that_of_the_file() -> None:
    both = "experiment=cifar10_grid,cifar10_baselines"
    cells = configs(both, "trainer.steps=2000", "model.hidden=128", "seed=3")
    assert len(cells) == 27
    assert {(cell.trainer.steps, cell.model.hidden, cell.seed, cell.name) for cell in cells} == {
        (2000, 128, 3, "cifar10")
    }
    small = configs(both, "model.layers=4", "routing.layers=1,2", "routing.heads=2", "routing.window=64,128")
    assert [shape(cell) for cell in small[:4]] == [(64, 1, 2), (64, 2, 2), (128, 1, 2), (128, 2, 2)]
    assert [cell.routing.heads for cell in small if cell.model.base == "full"] == [0] * 4


def test_cells_listed_on_the_command_line_go_with_every_other_value() -> None:
    cells = laid_out("seed=1,2", "sweep.cells='routing.heads=0; routing.selection=random routing.heads=1'")
    assert cells == [
        ["seed=1", "sweep.cells=null", "routing.heads=0"],
        ["seed=2", "sweep.cells=null", "routing.heads=0"],
        ["seed=1", "sweep.cells=null", "routing.selection='random'", "routing.heads=1"],
        ["seed=2", "sweep.cells=null", "routing.selection='random'", "routing.heads=1"],
    ]


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ("routing.hads=0", "sweep.cells: unknown key 'routing.hads' (did you mean 'routing.heads'?)"),
        ("routing.heads=1,2", "sweep.cells: routing.heads=1,2: several values need -m"),
        ('routing.heads="1', "sweep.cells: "),
    ],
)
def test_a_wrong_cell(cells: str, said: str) -> None:
    with pytest.raises(UserError) as error:
        laid_out(f"sweep.cells='{cells}'")
    assert str(error.value).startswith(said)


def test_one_cell_of_a_sweep_is_trained_only_where_the_words_say_which() -> None:
    with pytest.raises(UserError, match=r"is a sweep \(routing.window=512,1024 routing.layers=2,4,8,12\): add -m"):
        refuse_half_a_sweep(["experiment=cifar10_grid", "routing.heads=2"])
    with pytest.raises(UserError, match=r"experiment=cifar10_baselines is a sweep \(3 cells\)"):
        refuse_half_a_sweep(["experiment=cifar10_baselines"])
    for cell in (laid_out("experiment=cifar10_grid")[0], laid_out("experiment=cifar10_baselines")[0]):
        refuse_half_a_sweep(cell)
    refuse_half_a_sweep(["experiment=smoke"])
    refuse_half_a_sweep(["seed=1"])
