"""Pictures of a report as a reader meets it: `python docs/results/pictures.py RUNS FOLDER` (needs Chromium).

Writes the first screen of the page of the runs below RUNS, light, dark and on a phone, and the first lines of a
terminal, as `rtx report` prints them.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from rich.console import Console
from rich.text import Text

from rtx.cli import main as cli

SCREENS = {"page": (1280, 800, 1), "page-dark": (1280, 800, 0), "page-phone": (375, 800, 1)}
"""Width, height, and Chromium's number for a light or a dark scheme."""
LINES, COLUMNS = 25, 100


def main(runs: str, folder: Path) -> None:
    """Write the report of `runs` to a temporary folder, and its pictures to `folder`."""
    os.environ["COLUMNS"] = str(COLUMNS)
    with tempfile.TemporaryDirectory() as place:
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            assert cli.main(["report", runs, f"output={place}"]) == 0
        for name, (width, height, scheme) in SCREENS.items():
            screen(Path(place), width, height, scheme).save(folder / f"{name}.png", optimize=True)
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text("\n".join(said.getvalue().splitlines()[:LINES])))
    drawing = console.export_svg(title=f"rtx report {runs}")
    drawing = re.sub(r"@font-face \{.*?\}", "", drawing, flags=re.DOTALL)  # those of another site
    (folder / "terminal.svg").write_text(drawing, encoding="utf-8")


def screen(place: Path, width: int, height: int, scheme: int) -> Image.Image:
    """Return what a browser shows of report.html in a window of some size (its own windows have a least width)."""
    frame, shot = place / "frame.html", place / "shot.png"
    style = f"border:0;width:{width}px;height:{height}px"
    frame.write_text(
        f'<body style="margin:0"><iframe src="report.html" scrolling="no" style="{style}"></iframe>'
    )
    browser = shutil.which("chromium") or shutil.which("google-chrome") or "chrome"
    command = [
        browser,
        *[
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--window-size=1300,900",
        ],
    ]
    command += [f"--blink-settings=preferredColorScheme={scheme}", "--virtual-time-budget=3000"]
    command += [f"--user-data-dir={place / 'profile'}", f"--screenshot={shot}", frame.as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    with Image.open(shot) as image:
        return image.convert("RGB").crop((0, 0, width, height))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
