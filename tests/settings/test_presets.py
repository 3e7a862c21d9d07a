"""Mistakes in presets of the user get the messages of the command line."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rtx.errors import UserError
from rtx.settings.compose import compose
from rtx.settings.extensions import add_config_dir
from rtx.settings.presets import CONFIG_DIRS, forget

GLOBAL = "# @package _global_\n"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder of models that `--config-dir` names."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "good.yaml").write_text("layers: 3\n")
    add_config_dir(str(tmp_path))
    yield tmp_path
    CONFIG_DIRS.clear()
    forget()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layerz: 3\n", "unknown key 'model.layerz' (did you mean 'model.layers'?)"),
        (f"{GLOBAL}trainr:\n  steps: 3\n", "unknown key 'trainr' (did you mean 'trainer'?)"),
        ("layers: three\n", "model.layers=three: must be an integer, at least 1"),
        ("layers: [1, 2]\n", "model.layers must be one value"),
        ("layers: ${model.hedas}\n", "model.layers: Interpolation key 'model.hedas' not found"),
    ],
)
def test_a_mistake_in_a_preset(folder: Path, text: str, message: str) -> None:
    (folder / "model" / "wrong.yaml").write_text(text)
    forget()
    with pytest.raises(UserError) as caught:
        compose(["model=wrong"])
    assert message in str(caught.value)


def test_a_model_beside_an_experiment_with_another_one_is_refused(folder: Path) -> None:
    assert compose(["model=good", "experiment=smoke"]).model.layers == 3
    for model in ("good", "tiny"):
        with pytest.raises(UserError, match="experiment=memory lays out a model of its own"):
            compose([f"model={model}", "experiment=memory"])
    (folder / "model" / "named.yaml").write_text(f"{GLOBAL}name: run\nmodel:\n  layers: 5\n")
    forget()
    config = compose(["model=named", "experiment=smoke"])
    assert (config.model.layers, config.model.name) == (5, "named")
