"""Sweeps of very many cells: refused by their number, or printed as they are composed."""

from typing import Any

import pytest

from rtx.cli import main as cli
from rtx.settings import compose
from rtx.settings.overrides import check_overrides
from rtx.settings.run_config import to_yaml
from rtx.settings.schema import to_dict
from rtx.sweeps import cells, sweep
from rtx.sweeps.cells import MOST_CELLS, lay_out


def test_a_grid_of_too_many_cells_is_refused_before_any_is_made(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*words: Any, **options: Any) -> None:
        pytest.fail("cells were laid out")

    monkeypatch.setattr(cells, "jobs_of", fail)
    words = ["seed=range(0,3000)", "optimizer.lr=range(1,3001)", "data.length=64,128,256"]
    for more in ([], ["--cfg", "job"]):
        assert cli.main(["train", "-m", *words, *more]) == 2
        said = capsys.readouterr().err
        assert said.startswith("rtx: 27,000,000 cells (values of seed: 3,000 optimizer.lr: 3,000 ")
        assert "a sweep has at most 10,000; list fewer values" in said
    experiments = "experiment=enwik8,enwik8_baselines"
    with pytest.raises(ValueError, match=r"^12,000 cells"):
        lay_out(
            check_overrides(["seed=range(0,3000)", experiments, "heads=local,full"], sweep=True)
        )


def test_the_most_cells_are_not_refused() -> None:
    axes = [f"seed=range(0,{MOST_CELLS // 10})", "data.length=" + ",".join(map(str, range(64, 74)))]
    cells.refuse_many_cells(check_overrides(axes, sweep=True))


def test_configurations_are_printed_as_they_are_composed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed: list[int] = []
    composed: list[int] = []
    resolve = cells.resolve

    def counted(config: Any) -> Any:
        composed.append(len(printed))
        return resolve(config)

    monkeypatch.setattr(cells, "resolve", counted)
    monkeypatch.setattr(sweep, "print_configuration", lambda cell: printed.append(cell.number))
    assert cli.main(["train", "-m", "seed=1,2,3", "--cfg", "job"]) == 0
    assert composed == [0, 1, 2] and printed == [1, 2, 3]


def test_cells_that_share_composed_files_do_not_change_each_other() -> None:
    """References of one cell are of its own values, in whatever order cells are composed."""
    words = (["optimizer.steps=7", "seed=3"], [], ["trainer.steps=9"], ["trainer.max_minutes=2"])
    first = [to_dict(compose.compose(list(one))) for one in words]
    compose.changeable.cache_clear()
    again = [to_dict(compose.compose(list(one))) for one in reversed(words)]
    assert first == again[::-1]
    steps = [values["trainer"]["steps"] for values in first]
    assert steps[0] == 7 and steps[2] == 9 and steps[1] == steps[3] != 7
    assert first[1]["trainer"]["max_minutes"] is None


def test_the_text_of_a_configuration_is_that_of_omegaconf() -> None:
    from omegaconf import OmegaConf

    config = compose.compose(["name='a: b'", "data=text", "data.path=/007/ü"])
    assert to_yaml(config) == OmegaConf.to_yaml(OmegaConf.create(to_dict(config)))
