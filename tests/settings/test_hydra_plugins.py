"""Plug-ins of Hydra that cannot be imported, and what of Hydra is composed."""

import os
import subprocess
import sys
from pathlib import Path

import hydra
import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from omegaconf import OmegaConf

from rtx.settings.compose import compose, composed
from rtx.settings.presets import forget

PROGRAM = "import sys; from rtx.cli.main import main; sys.exit(main(sys.argv[1:]))"
UNREADABLE = """
import errno, os
listdir = os.listdir
def fail(folder="."):
    if str(folder).endswith("core_plugins"):
        raise OSError(errno.ENOMEM, "Cannot allocate memory", folder)
    return listdir(folder)
os.listdir = fail
"""


def printed_configuration(packages: Path, before: str = "") -> tuple[int, str]:
    """Return the exit code and stderr of a command that composes, with `packages` importable."""
    words = (sys.executable, "-c", before + PROGRAM, "train", "--cfg", "job")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(packages), *sys.path])}
    process = subprocess.run(words, env=environment, capture_output=True, text=True)
    return process.returncode, process.stderr


def test_a_folder_of_plugins_that_cannot_be_read_for_want_of_memory(tmp_path: Path) -> None:
    code, messages = printed_configuration(tmp_path, UNREADABLE)
    assert code == 1
    assert messages.startswith("rtx: out of memory: "), messages
    assert messages.count("\n") == 1


@pytest.mark.parametrize(
    ("reason", "code", "line"),
    [
        ("x.so: failed to map segment from shared object", 1, "rtx: out of memory: "),
        ("No module named 'y'", 0, ""),
    ],
)
def test_a_plugin_that_cannot_be_imported(
    tmp_path: Path, reason: str, code: int, line: str
) -> None:
    """Only too little memory ends the command: any other package of the user may be broken."""
    plugin = tmp_path / "hydra_plugins" / "broken.py"
    plugin.parent.mkdir()
    plugin.write_text(f"raise ImportError({reason!r})\n")
    exit_code, messages = printed_configuration(tmp_path)
    assert exit_code == code, messages
    assert messages.startswith(line)
    assert "Traceback" not in messages
    assert reason in messages


def test_another_program_with_hydra_in_the_same_process(tmp_path: Path) -> None:
    """Each reads its own folder, and only rtx's has the schema."""
    (tmp_path / "config.yaml").write_text("layers: 3\n")
    before = compose(["model=tiny"])
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        assert hydra_compose("config") == {"layers": 3}
    forget()
    assert compose(["model=tiny"]) == before


def test_values_of_groups_that_are_not_composed_are_those_of_hydras_files() -> None:
    folder = Path(hydra.__path__[0], "conf", "hydra")
    node = composed(("model=tiny",)).hydra
    output = OmegaConf.load(folder / "output" / "default.yaml")
    subdir = OmegaConf.to_container(output)["sweep"]["subdir"]  # type: ignore[call-overload,index]
    assert OmegaConf.to_container(node.sweep)["subdir"] == subdir  # type: ignore[call-overload,index]
    for group in ("hydra_logging", "job_logging"):
        content = OmegaConf.load(folder / group / "none.yaml")
        assert node[group] == content
