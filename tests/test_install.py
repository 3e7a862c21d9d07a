"""The wheel: it carries `conf/`, and works from a folder that is not the checkout."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from rtx import __version__

ROOT = Path(__file__).resolve().parents[1]


def test_the_wheel_holds_the_package_conf_and_nothing_else_and_works_anywhere(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "installed"
    here = tmp_path / "here"
    here.mkdir()
    # pip makes a wheel and installs it. What it needs is taken from this environment.
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    install += ["--no-build-isolation", "--no-compile", "--target", str(folder), str(ROOT)]
    subprocess.run(install, check=True, timeout=300)
    files = [path for path in folder.rglob("*") if path.is_file()]
    names = {path.relative_to(folder).as_posix() for path in files}
    folders = {name.partition("/")[0] for name in names}
    assert folders == {"rtx", "hydra_plugins", f"rtx-{__version__}.dist-info", "bin"}
    plugins = [name for name in names if name.startswith("hydra_plugins/")]
    assert plugins == ["hydra_plugins/rtx_sweeps.py"], "others share this namespace"
    inside = {name.removeprefix("rtx/") for name in names if name.startswith("rtx/conf/")}
    assert inside == {path.relative_to(ROOT).as_posix() for path in (ROOT / "conf").rglob("*.yaml")}
    code = {path.relative_to(ROOT).as_posix() for path in (ROOT / "rtx").rglob("*.py")}
    assert code | {"rtx/py.typed"} <= names
    assert f"rtx-{__version__}.dist-info/licenses/LICENSE" in names
    script = [sys.executable, "-W", "error", str(folder / "bin" / "rtx")]
    place: dict[str, Any] = {"cwd": here, "env": {**os.environ, "PYTHONPATH": str(folder)}}
    for words, said in (
        ("--version", f"rtx {__version__}\n"),
        ("train --cfg job model=rt24", "  length: 8192\n"),
    ):
        answer = subprocess.run(
            [*script, *words.split()], **place, capture_output=True, text=True, timeout=600
        )
        assert (answer.returncode, answer.stderr) == (0, "") and said in answer.stdout
    assert list(here.iterdir()) == []
