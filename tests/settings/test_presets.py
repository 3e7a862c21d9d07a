"""Mistakes in presets of the user get the messages of the command line."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rtx.cli.main import main
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


def test_a_preset_is_read_again_after_an_edit_of_the_same_size_and_time(folder: Path) -> None:
    path = folder / "model" / "good.yaml"
    assert compose(["model=good"]).model.layers == 3
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    path.write_text("layers: 5\n")
    os.utime(path, ns=times)
    # Another choice of groups is composed anew.
    assert compose(["model=good", "optimizer=adam"]).model.layers == 5
    forget()
    assert compose(["model=good"]).model.layers == 5


def test_a_model_beside_an_experiment_with_another_one_is_refused(folder: Path) -> None:
    assert compose(["model=good", "experiment=smoke"]).model.layers == 3
    for model in ("good", "tiny"):
        with pytest.raises(UserError, match="experiment=memory lays out a model of its own"):
            compose([f"model={model}", "experiment=memory"])
    (folder / "model" / "named.yaml").write_text(f"{GLOBAL}name: run\nmodel:\n  layers: 5\n")
    forget()
    config = compose(["model=named", "experiment=smoke"])
    assert (config.model.layers, config.model.name) == (5, "named")


BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))
"""A list of 2^40 letters."""
MAPPINGS = "a0: &a0 {x: 1}\n" + "".join(
    f"a{n}: &a{n} {{x: *a{n - 1}, y: *a{n - 1}}}\n" for n in range(1, 40)
)
"""The same number of values in mappings."""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layers: ${oc.env:RTX_SECRET}\n", "line 1: ${oc.env:RTX_SECRET}: a preset may refer to"),
        ('layers: "\\x24{oc.env:RTX_SECRET}"\n', "line 1: ${oc.env:RTX_SECRET}: a preset may"),
        ("layers: ${${name}.env:RTX_SECRET}\n", "a preset may refer to keys alone"),
        ("defaults:\n  - ${oc.env:RTX_SECRET}\n", "line 2: ${oc.env:RTX_SECRET}: a preset may"),
        (BOMB, "its aliases expand to more than 10,000 values"),
        (MAPPINGS, "its aliases expand to more than 10,000 values"),
        ("layers: &a [*a]\n", "line 1: *a is nothing before it"),
        ("layers: [\n", "not valid YAML"),
        ("layers: 3\nlayers: 4\n", "not valid YAML"),
        ("layers: 3\n---\nlayers: 4\n", "not valid YAML"),
        ("- layers\n", "must have keys with values"),
        ("3\n", "must have keys with values"),
        ("# caf\udce9\nlayers: 3\n", "line 1: is not UTF-8"),
    ],
)
@pytest.mark.parametrize("group", ["model", "experiment", "routing"])
def test_a_preset_is_plain_values(
    folder: Path, monkeypatch: pytest.MonkeyPatch, group: str, text: str, message: str
) -> None:
    monkeypatch.setenv("RTX_SECRET", "3")
    file = folder / group / "wrong.yaml"
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(text.encode(errors="surrogateescape"))
    forget()
    with pytest.raises(UserError) as caught:
        compose([f"{group}=wrong"])
    assert message in str(caught.value)
    assert str(caught.value).count(str(file)) == 1


def test_a_preset_may_refer_to_keys_and_the_command_line_to_the_environment(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RTX_SECRET", "5")
    (folder / "model" / "wide.yaml").write_text("layers: &n 2\nwindow: ${data.length}\n")
    forget()
    config = compose(["model=wide", "data.length=512", "trainer.steps=${oc.env:RTX_SECRET}"])
    assert (config.model.layers, config.model.window, config.trainer.steps) == (2, 512, 5)


def test_help_names_a_preset_that_is_not_utf_8(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "model" / "wrong.yaml").write_bytes(b"# caf\xe9\n")
    assert main(["train", "--help", "--config-dir", str(folder)]) == 2
    assert f"rtx: {folder}/model/wrong.yaml, line 1: is not UTF-8" in capsys.readouterr().err
