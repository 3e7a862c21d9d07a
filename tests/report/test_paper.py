"""The paper's tables as data."""

from __future__ import annotations

from rtx.commandline.overrides import check_overrides
from rtx.compose import compose, to_dict
from rtx.config import all_fields
from rtx.keys import conf_dir, options
from rtx.report.cells import flat
from rtx.report.matching import kind_of, paper_row, settings_changed
from rtx.report.paper import paper_tables, table_of
from rtx.sweep.cells import lay_out


def test_the_tables_and_figures_that_one_remembers() -> None:
    tables = {table.number: table for table in paper_tables()}
    assert list(tables) == [1, 2, 3, 4, 5, 6, 7]
    assert [len(tables[number].rows) for number in (1, 2, 3, 4, 5, 7)] == [27, 7, 6, 8, 4, 2]
    first = tables[1]
    assert [row.value for row in first.rows[:3]] == [2.983, 3.009, 3.076]
    assert min(row.value or 9 for row in first.rows) == 2.95
    assert first.local_speed() == 9.023
    best = {number: min(row.value or 99 for row in tables[number].rows) for number in (2, 3, 4, 5)}
    assert best == {2: 15.8, 3: 0.98, 4: 3.43, 5: 33.2}
    assert len(tables[6].divergences) == 10
    assert all(0 < mean < 0.6931 for layer in tables[6].divergences for mean, _ in layer)
    assert tables[7].rows[1].steps_per_second == 0.7236
    assert all(table.footnotes for table in tables.values())


def test_settings_presets_and_commands_are_those_of_the_project() -> None:
    for table in paper_tables():
        assert set(table.setting) <= set(all_fields())
        assert set(table.presets) <= set(options("model"))
        assert set(table.data) <= set(options("data"))
        named = {word for line in table.commands for word in line.split() if word.startswith("experiment=")}
        for word in named:
            assert set(word.partition("=")[2].split(",")) <= set(options("experiment"))


def test_an_experiment_belongs_to_its_table_and_has_the_papers_setting() -> None:
    numbers = {"cifar10_grid": 1, "cifar10_baselines": 1, "wikitext103": 2, "enwik8": 3, "imagenet64": 4, "pg19": 5}
    for experiment, number in numbers.items():
        config = flat(to_dict(compose([f"experiment={experiment}"])))
        table = table_of(config)
        assert table is not None and table.number == number
        assert settings_changed(config, table) == []
        if "grid" not in experiment:
            row = paper_row(config, table)
            assert row is not None and row.model == "Routing Transformer"
    assert table_of({"model.name": "tiny", "data.name": "stdlib"}) is None


def test_every_experiment_of_the_paper_is_in_a_command_and_every_cell_a_row_of_the_papers_or_one_of_its_own() -> None:
    named = {
        name
        for table in paper_tables()
        for line in table.commands
        for word in line.split()
        if word.startswith("experiment=")
        for name in word.partition("=")[2].split(",")
    }
    headers = {name: (conf_dir() / "experiment" / f"{name}.yaml").read_text() for name in options("experiment")}
    assert named == {name for name, text in headers.items() if "\n# Table " in text}
    assert all(table.commands for table in paper_tables() if table.split)
    missing = {2: {"full"}, 3: {"full"}, 4: {"full", "local"}, 5: {"full"}}  # baselines that the paper does not have
    for experiment in (name for name in named if name.endswith("_baselines")):
        for cell in lay_out(check_overrides([f"experiment={experiment}"], sweep=True))[0]:
            config = flat(to_dict(cell.config))
            table = table_of(config)
            assert table is not None
            if paper_row(config, table) is None:
                assert kind_of(config) in missing[table.number]
            else:
                assert settings_changed(config, table) == []
