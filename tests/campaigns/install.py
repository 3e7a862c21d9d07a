"""Install what a release holds into empty environments, and run README's commands there.

Run `make package`, or `python -m tests.campaigns.install --python 3.12` for one Python. It builds
the wheel and the source archive into `dist/`, in place of those that are there. For each Python and
each of the two files it makes an empty environment and installs the file with its dependencies from
the package index. `uv pip check` checks that the versions are compatible. Then the commands of rtx
that README.md shows run in a folder that contains only a copy of the records. Training takes few
steps. The output must contain the lines that README shows, but of training only the last part,
without the numbers of a long run.

It needs the package index and uv (`pip install 'uv>=0.9,<1'`), which shares installed files between
the environments. PyTorch with CUDA takes 5 GB; where PyTorch's own index is reached,
`UV_TORCH_BACKEND=cpu` gets the small build. A failure is printed with what the command wrote, and
the exit code is 1.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.helpers.pages import ROOT, commands_of, readme_shows

DIST = ROOT / "dist"
PYTHONS = ("3.11", "3.12", "3.13")
KINDS = ("*.whl", "*.tar.gz")
RECORDS = ROOT / "docs" / "results" / "records"
SHORT = ("trainer.steps=5", "trainer.final_windows=8", "hardware=cpu")
"""Overrides that shorten README's training, which takes minutes without them."""
REMOVED_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "RTX_OUTPUTS")
"""Variables that would let an environment find this checkout or other runs."""
SECONDS = 1800
"""Time that one command may take; the longest downloads PyTorch."""


class Failed(Exception):
    """A command failed, or did not print what README says; the message has what it wrote."""


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument(
        "--python", nargs="*", default=PYTHONS, help="versions or paths, as `uv venv` takes them"
    )
    pythons = parser.parse_args().python
    failures = 0
    for file in build():
        for python in pythons:
            failures += not check(file, python)
    return int(failures > 0)


def build() -> list[Path]:
    """Build the wheel and the source archive into `dist/`; return their paths."""
    for kind in KINDS:
        for former in DIST.glob(kind):
            former.unlink()
    run_command([uv(), "build", "--quiet", "--out-dir", str(DIST), str(ROOT)], ROOT)
    files = []
    for kind in KINDS:
        files += DIST.glob(kind)
    assert len(files) == len(KINDS), files
    return files


def check(file: Path, python: str) -> bool:
    """Install a file for a Python and run README's commands; return whether they passed."""
    start = time.monotonic()
    name = f"{file.name}, Python {python}"
    with tempfile.TemporaryDirectory(prefix="rtx-install-") as folder:
        try:
            count = check_in(Path(folder), file, python)
        except Failed as failure:
            print(f"{name}: FAILED\n{failure}", flush=True)
            return False
    seconds = round(time.monotonic() - start)
    print(f"{name}: {count} commands of README.md run, {seconds} s", flush=True)
    return True


def check_in(folder: Path, file: Path, python: str) -> int:
    """Install the file and run README's commands in an empty folder; return their number."""
    environment = folder / "environment"
    here = folder / "here"
    shutil.copytree(RECORDS, here / RECORDS.relative_to(ROOT))
    run_command([uv(), "venv", "--quiet", "--python", python, str(environment)], here)
    for words in (["install", "--quiet", str(file)], ["check", "--quiet"]):
        run_command([uv(), "pip", *words, "--python", str(environment)], here)
    rtx = str(environment / "bin" / "rtx")
    assert "rtx " in run_command([rtx, "--version"], here)
    count = 0
    for command in commands_of(ROOT / "README.md"):
        if not command.is_block or command.words[0] != "rtx":
            continue
        words = command.words[1:]
        if words[0] == "train":
            words += SHORT
        written = run_command([rtx, *words], here)
        # Line breaks depend on the width of the terminal, so all whitespace is left out.
        if "".join(readme_shows(words[0]).split()) not in "".join(written.split()):
            raise Failed(f"{command.text}: prints other lines than README.md shows:\n{written}")
        count += 1
    return count


def run_command(command: list[str], folder: Path) -> str:
    """Run a command in a folder; return what it wrote. `Failed` if its exit code is not 0."""
    variables = {name: value for name, value in os.environ.items() if name not in REMOVED_VARIABLES}
    try:
        result = subprocess.run(
            command,
            cwd=folder,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise Failed(f"{' '.join(command)}: not done after {SECONDS} s") from error
    if result.returncode:
        raise Failed(f"{' '.join(command)}: exit code {result.returncode}\n{result.stdout}")
    return result.stdout


def uv() -> str:
    """Return the path of uv, of this environment or another."""
    beside = Path(sys.executable).parent
    path = shutil.which("uv", path=f"{beside}{os.pathsep}{os.environ.get('PATH', '')}")
    if path is None:
        raise SystemExit("needs uv: pip install 'uv>=0.9,<1'")
    return path


if __name__ == "__main__":
    sys.exit(main())
