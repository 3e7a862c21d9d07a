"""The cells that a command stands for: what experiments lay out, and what the command line changes
of them.
"""

import itertools
from pathlib import Path

import pytest

from rtx.errors import UserError
from rtx.settings.compose import compose
from rtx.settings.identity import cell_hashes, config_hash
from rtx.settings.overrides import check_overrides
from rtx.settings.run_config import to_yaml
from rtx.settings.schema import Config
from rtx.sweeps.cells import Cell, lay_out, refuse_sweep, replaced_lines

LOCAL = " model.base=local routing.heads=0"
FULL = " model.base=full routing.heads=0"
SPARSE = " model=sparse_transformer"
LSH = " model=reformer trainer.batch_size=8"
SPANS = " model=adaptive_span"
T64 = (
    f"{FULL} model.layers=64 model.heads=2 model.hidden=512 model.ffn_hidden=2048 model.ffn=relu "
    "data.length=512"
    " model.positions=learned model.dropout=0.55 model.attention_dropout=0.55 "
    "model.ffn_dropout=0.55"
)
FAR = f"{SPANS} model.layers=36 model.window=4096 model.max_distance=4095 data.length=4096"
ROWS = {
    "cifar10": [FULL, LOCAL, " routing.selection=random"],
    "wikitext103": [
        " model.layers=16 routing.heads=0",
        FULL,
        FAR,
        " heads=adaptive_input",
        " heads=transformer_xl",
    ],
    "enwik8": [" model=rt24 routing.heads=0", FULL, SPARSE, SPANS, T64, " heads=transformer_xl"],
    "imagenet64": [LOCAL, FULL, f"{SPARSE}-imagenet64", f"{LSH} model.lsh=reformer", LSH],
    "pg19": [
        " model.layers=24 routing.heads=0",
        FULL,
        " heads=transformer_xl",
        " heads=compressive_transformer",
    ],
}
"""The rows beside each table's own model, as overrides of its experiment."""


def cells(*words: str) -> list[Cell]:
    return lay_out(check_overrides(words, sweep=True))


def configs(*words: str) -> list[Config]:
    return [cell.config for cell in cells(*words)]


def shape(config: Config) -> tuple[int, int, int]:
    return config.routing.window, config.routing.layers, config.routing.heads


@pytest.mark.parametrize("table", ROWS)
def test_the_rows_beside_a_tables_own_model(table: str) -> None:
    known = [compose(f"experiment={table}{row}".split()) for row in ROWS[table]]
    assert configs(f"experiment={table}_baselines") == known


def test_several_experiments_are_one_sweep_and_an_override_reaches_every_cell() -> None:
    both = "experiment=cifar10_grid,cifar10_baselines"
    every = configs(both, "trainer.steps=2000", "model.hidden=128", "seed=3")
    # In the paper's order: windows, then layers, then heads.
    grid = list(itertools.product((512, 1024), (2, 4, 8, 12), (2, 4, 8)))
    assert [shape(cell) for cell in every[:24]] == grid
    assert len(every) == 27
    for cell in every[:24]:
        assert (cell.model.window, cell.routing.clusters) == (512, 6)
        assert cell.routing.selection == "topk"
    for cell in every:
        assert (cell.trainer.steps, cell.model.hidden) == (2000, 128)
        assert (cell.seed, cell.name) == (3, "cifar10")


def test_axes_of_the_command_line_replace_those_of_a_file() -> None:
    axes = ("routing.layers=1,2", "routing.heads=2", "routing.window=64")
    small = configs("experiment=cifar10_grid", *axes)
    assert [shape(cell) for cell in small] == [(64, 1, 2), (64, 2, 2)]


def test_experiments_and_heads_are_axes() -> None:
    names = [config.name for config in configs("experiment=smoke,null", "seed=1,2")]
    assert names == ["smoke", "smoke", "rtx", "rtx"]
    assert len(cells("experiment=cifar10,cifar10_baselines")) == 4
    assert len(cells("experiment=cifar10", "heads=local,full")) == 2


def test_a_cell_is_named_by_what_is_swept() -> None:
    laid_out = cells("experiment=pg19_steps", "seed=1,2")
    assert [cell.title for cell in laid_out] == [
        f"heads={name} seed={seed}" for name in ("local", "routing") for seed in (1, 2)
    ]
    assert laid_out[3].config == compose(["experiment=pg19", "routing.heads=2", "seed=2"])
    assert set(laid_out[0].overrides) == {"experiment=pg19_steps", "heads=local", "seed=1"}


def test_one_cell_of_a_sweep_is_trained_only_where_the_words_say_which() -> None:
    with pytest.raises(
        UserError, match=r"is a sweep \(routing.window=512,1024 routing.layers=2,4,8,12\): rtx"
    ):
        refuse_sweep(check_overrides(["experiment=cifar10_grid", "routing.heads=2"]))
    for experiment in ("cifar10_grid", "cifar10_baselines"):
        refuse_sweep(check_overrides(cells(f"experiment={experiment}")[0].overrides))


def test_the_command_line_wins_in_every_row() -> None:
    layers = configs("experiment=pg19", "heads=routing,local", "model.layers=2")
    assert [config.model.layers for config in layers] == [2, 2]
    lengths = configs("experiment=enwik8", "heads=routing,t64", "data.length=1024")
    assert [config.data.length for config in lengths] == [1024, 1024]
    windows = configs("experiment=far_text", "heads=full,exact", "seed=0", "routing.window=64")
    assert [config.routing.window for config in windows] == [64, 64]
    words = ["experiment=cifar10_grid,cifar10_baselines", "trainer.steps=9", "routing.heads=2"]
    (line,) = replaced_lines(check_overrides(words, sweep=True))
    replaced = "routing.heads=2 replaces what the file says in "
    assert line.startswith(f"{replaced}heads=full (routing.heads=0), heads=local (")


def test_an_option_from_which_a_row_would_set_keys_is_refused_with_the_name_of_the_row() -> None:
    refused = {
        "experiment=cifar10 heads=routing,random routing=causal": (
            "heads=random (routing.selection=random); train such a row"
        ),
        "experiment=pg19 heads=routing,local model=rt12": (
            "model=rt12 conflicts with heads=local (model.layers=24)"
        ),
    }
    for words, message in refused.items():
        with pytest.raises(UserError) as caught:
            cells(*words.split())
        assert message in str(caught.value)
    words = "experiment=pg19 heads=routing,local model=rt12 model.layers=3 routing.layers=2"
    assert len(cells(*words.split())) == 2, "no row keeps its own layers"


def test_an_earlier_value_of_a_swept_key_takes_it_out_of_no_title() -> None:
    laid_out = cells("seed=1", "trainer.steps=9", "trainer.steps=9", "seed=1,2")
    assert [cell.title for cell in laid_out] == ["seed=1", "seed=2"]


def test_combinations_that_differ_by_keys_that_a_run_does_not_read_are_one_cell() -> None:
    laid_out = cells(
        "experiment=cifar10_grid,cifar10_baselines", "routing.layers=1,2", "routing.window=32,64"
    )
    titles = [cell.title for cell in laid_out]
    assert len(laid_out) == 12 + 1 + 1 + 4
    assert [len(cell.combinations) for cell in laid_out if cell.config.routing.heads == 0] == [4, 4]
    local = "heads=local experiment=cifar10_baselines"
    assert {local, local.replace("local", "full")} <= {*titles}
    assert len({*titles}) == len(titles)
    both = cells("routing=exact,causal", "routing.clusters=2,4")
    assert [cell.title for cell in both] == [
        "routing=exact",
        "routing=causal routing.clusters=2",
        "routing=causal routing.clusters=4",
    ]
    hashed = [
        config_hash(compose([*words.split(), "routing.heads=0"]))
        for words in ("", "routing=topk", "routing=exact")
    ]
    assert len({*hashed}) == 1
    for words in (("seed=1,1",), ("trainer.micro_batch_size=1,2",)):
        with pytest.raises(UserError, match="two cells are the same run"):
            cells(*words)


def test_a_cell_that_an_earlier_version_has_trained_is_found_in_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RTX_OUTPUTS", str(tmp_path))
    words = ["routing=exact"]
    config = compose(words)
    name, former_name = cell_hashes(config)
    assert cells(*words)[0].folder.name == name
    former = tmp_path / "rtx" / former_name
    former.mkdir(parents=True)
    (former / "config.yaml").write_text(to_yaml(config))
    assert cells(*words)[0].folder.name == former_name
    # A cell that had the same hash then, but not now, is another one.
    (former / "config.yaml").write_text(to_yaml(compose([*words, "hardware.products=torch"])))
    assert cells(*words)[0].folder.name == name
