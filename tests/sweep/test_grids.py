"""The cells that a command stands for: what experiments lay out, and what the command line changes of them."""

import pytest

from rtx.cells import Cell, lay_out, refuse_sweep
from rtx.compose import compose
from rtx.config import Config
from rtx.errors import UserError
from rtx.options import check_overrides

LOCAL, FULL = ("model.base=local", "routing.heads=0"), ("model.base=full", "routing.heads=0")
ADAPTIVE = (
    "model=adaptive_span",
    "model.layers=36",
    "model.window=4096",
    "model.max_distance=4095",
    "data.length=4096",
)
T64 = (
    *("data.length=512", "model.layers=64", "model.heads=2", "model.hidden=512", "model.base=full", "routing.heads=0"),
    *("model.positions=learned", "model.ffn=relu", "model.ffn_hidden=2048"),
    *("model.dropout=0.55", "model.attention_dropout=0.55", "model.ffn_dropout=0.55"),
)
PUBLISHED = ("model=reformer", "model.lsh=reformer", "trainer.batch_size=8")

ROWS = {
    "cifar10_baselines": ("cifar10", [FULL, LOCAL, ("routing.selection=random",)]),
    "wikitext103_baselines": ("wikitext103", [("model.layers=16", "routing.heads=0"), FULL, ADAPTIVE]),
    "enwik8_baselines": (
        "enwik8",
        [("model=rt24", "routing.heads=0"), FULL, ("model=sparse_transformer",), ("model=adaptive_span",), T64],
    ),
    "imagenet64_baselines": (
        "imagenet64",
        [LOCAL, FULL, ("model=sparse_transformer-imagenet64",), PUBLISHED, (*PUBLISHED[:1], "trainer.batch_size=8")],
    ),
    "pg19_baselines": ("pg19", [("model.layers=24", "routing.heads=0"), FULL]),
    "pg19_steps": ("pg19", [("model.layers=24", "routing.heads=0"), ("routing.heads=2",)]),
}
"""What each experiment of several others stands for: overrides of a table's own model."""

OTHERS = {
    "wikitext103_baselines": ("wikitext103_adaptive_input", "wikitext103_transformer_xl"),
    "enwik8_baselines": ("enwik8_transformer_xl",),
    "pg19_baselines": ("pg19_transformer_xl", "pg19_compressive_transformer"),
}
"""Its further rows, which are models of their own."""


def cells(*words: str) -> list[Cell]:
    return lay_out(check_overrides(words, sweep=True))


def configs(*words: str) -> list[Config]:
    return [cell.config for cell in cells(*words)]


def shape(config: Config) -> tuple[int, int, int]:
    return config.routing.window, config.routing.layers, config.routing.heads


@pytest.mark.parametrize("experiment", ROWS)
def test_the_rows_beside_a_tables_own_model(experiment: str) -> None:
    base, rows = ROWS[experiment]
    known = [compose([f"experiment={base}", *row]) for row in rows]
    others = [compose([f"experiment={row}"]) for row in OTHERS.get(experiment, ())]
    assert configs(f"experiment={experiment}") == known + others


def test_several_experiments_are_one_sweep_and_an_override_reaches_every_cell() -> None:
    both = "experiment=cifar10_grid,cifar10_baselines"
    every = configs(both, "trainer.steps=2000", "model.hidden=128", "seed=3")
    grid = [(w, n, h) for w in (512, 1024) for n in (2, 4, 8, 12) for h in (2, 4, 8)]  # in the paper's order
    assert [shape(cell) for cell in every[:24]] == grid and len(every) == 27
    assert {(c.model.window, c.routing.clusters, c.routing.selection) for c in every[:24]} == {(512, 6, "topk")}
    assert {(cell.trainer.steps, cell.model.hidden, cell.seed, cell.name) for cell in every} == {
        (2000, 128, 3, "cifar10")
    }
    small = configs(both, "routing.layers=1,2", "routing.heads=2", "routing.window=64")  # axes replace the file's
    assert [shape(cell) for cell in small[:2]] == [(64, 1, 2), (64, 2, 2)]
    assert {cell.routing.heads for cell in small if cell.model.base == "full"} == {0}  # what makes it that row stands
    assert [config.name for config in configs("experiment=smoke,null", "seed=1,2")] == ["smoke", "smoke", "rtx", "rtx"]
    twice = "experiment=enwik8,enwik8_full,enwik8_baselines"  # which stands for six, and one of them is there already
    assert len(cells(twice)) == 7


def test_a_cell_is_named_by_what_is_swept() -> None:
    laid_out = cells("experiment=pg19_steps", "seed=1,2")
    assert [cell.title for cell in laid_out] == [
        f"experiment={name} seed={seed}" for name in ("pg19_local", "pg19") for seed in (1, 2)
    ]
    assert set(laid_out[0].overrides) == {"experiment=pg19_local", "seed=1"}


def test_one_cell_of_a_sweep_is_trained_only_where_the_words_say_which() -> None:
    with pytest.raises(UserError, match=r"is a sweep \(routing.window=512,1024 routing.layers=2,4,8,12\): rtx"):
        refuse_sweep(["experiment=cifar10_grid", "routing.heads=2"])
    for experiment in ("cifar10_grid", "cifar10_baselines"):
        refuse_sweep(cells(f"experiment={experiment}")[0].overrides)


def test_an_axis_that_every_row_sets_itself_is_not_dropped_without_a_word() -> None:
    rows = "experiment=far_text_local,mqar_local"
    with pytest.raises(UserError, match=r"routing\.heads=2,4: each of these experiments sets routing\.heads itself"):
        cells(rows, "routing.heads=2,4")
    assert len(cells(f"{rows},far_text_topk", "routing.heads=2,4")) == 4
