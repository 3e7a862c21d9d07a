"""The wheel: it carries `conf/`, and works from a folder that is not the checkout."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from rtx import __version__

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(folder), str(ROOT)], check=True, timeout=300)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_the_package_conf_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names} == {"rtx", f"rtx-{__version__}.dist-info"}
    inside = {name.removeprefix("rtx/") for name in names if name.startswith("rtx/conf/")}
    assert inside == {path.relative_to(ROOT).as_posix() for path in (ROOT / "conf").rglob("*.yaml")}
    assert {path.relative_to(ROOT).as_posix() for path in (ROOT / "rtx").rglob("*.py")} | {"rtx/py.typed"} <= set(names)
    assert f"rtx-{__version__}.dist-info/licenses/LICENSE" in names


def test_the_wheel_works_from_another_folder(wheel: Path, tmp_path: Path) -> None:
    folder, here = tmp_path / "installed", tmp_path / "here"
    here.mkdir()
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(folder)]
    subprocess.run([*command, str(wheel)], check=True, timeout=300)  # what it needs is taken from this environment
    script = [sys.executable, "-W", "error", str(folder / "bin" / "rtx")]

    def run(*words: str) -> tuple[int, str, str]:
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        answer = subprocess.run(
            [*script, *words], cwd=here, env=environment, capture_output=True, text=True, timeout=60
        )
        return answer.returncode, answer.stdout, answer.stderr

    assert run("--version") == (0, f"rtx {__version__}\n", "")
    assert "  rt24 " in run("train", "--help")[1]
    code, shown, error = run("train", "--cfg", "job", "model=rt24", "data=enwik8")
    assert (code, error) == (0, "") and "  length: 8192\n" in shown
    code, shown, error = run("train", "model=rt25")
    assert code == 2 and "model=rt25: must be one of" in error
    assert list(here.iterdir()) == []
