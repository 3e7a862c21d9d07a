"""The wheel: it carries `conf/`, and works from a folder that is not the checkout."""

from __future__ import annotations

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
    """Build the wheel of this checkout without a network."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(folder), str(ROOT)], check=True, timeout=300)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel into a folder of its own; what it needs is taken from this environment."""
    folder = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(folder)]
    subprocess.run([*command, str(wheel)], check=True, timeout=300)
    return folder


def run(installed: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the installed rtx from another folder."""
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, "-W", "error", "-m", "rtx", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)


def test_the_wheel_holds_the_package_conf_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"rtx", f"rtx-{__version__}.dist-info"}
    inside = {name.removeprefix("rtx/") for name in names if name.startswith("rtx/conf/")}
    beside = {path.relative_to(ROOT).as_posix() for path in (ROOT / "conf").rglob("*.yaml")}
    assert inside == beside
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "rtx").rglob("*.py")}
    assert modules <= set(names)
    assert f"rtx-{__version__}.dist-info/licenses/LICENSE" in names


def test_the_wheel_works_from_another_folder(installed: Path, tmp_path: Path) -> None:
    page = run(installed, tmp_path, "train", "--help")
    assert (page.returncode, page.stderr) == (0, "")
    assert "  rt24 " in page.stdout
    shown = run(installed, tmp_path, "train", "--cfg", "job", "model=rt24", "data=enwik8")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "  length: 8192\n" in shown.stdout
    mistake = run(installed, tmp_path, "train", "model=rt25")
    assert mistake.returncode == 2
    assert "model=rt25: no such option" in mistake.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_wheel_has_the_script(installed: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    script = [sys.executable, str(installed / "bin" / "rtx"), "--version"]
    answer = subprocess.run(script, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert answer.stdout == f"rtx {__version__}\n"
