"""Draw a report as its readers see it: `python docs/results/pictures.py RUNS FOLDER`.

Writes the first screen of the page of the runs below RUNS (in light, in dark and on a phone) and
the first lines that `rtx report` prints. Needs Chromium or Chrome.
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
from typing import NamedTuple

from PIL import Image
from rich.console import Console
from rich.text import Text

from rtx.cli import main as cli


class Window(NamedTuple):
    """A browser's window, in pixels, and Chromium's number of a colour scheme."""

    width: int
    height: int
    scheme: int


DARK = 0
LIGHT = 1
WINDOWS = {
    "page": Window(1280, 800, LIGHT),
    "page-dark": Window(1280, 800, DARK),
    "page-phone": Window(375, 800, LIGHT),
}
LINES = 25
COLUMNS = 100
FONTS = re.compile(r"@font-face \{.*?\}", re.DOTALL)
"""Fonts that rich loads from another site."""
BROWSERS = ("chromium", "google-chrome", "chrome")
BROWSER_OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--hide-scrollbars",
    "--window-size=1300,900",
    "--virtual-time-budget=3000",
)


def main(runs: str, folder: Path) -> None:
    """Write the report of `runs` to a temporary folder, and its pictures to `folder`."""
    os.environ["COLUMNS"] = str(COLUMNS)
    printed = io.StringIO()
    with tempfile.TemporaryDirectory() as place:
        with contextlib.redirect_stdout(printed):
            code = cli.main(["report", runs, f"output={place}"])
        assert code == 0
        for name, window in WINDOWS.items():
            picture = shown_by_browser(Path(place), window)
            picture.save(folder / f"{name}.png", optimize=True)
    first_lines = printed.getvalue().splitlines()[:LINES]
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text("\n".join(first_lines)))
    drawing = FONTS.sub("", console.export_svg(title=f"rtx report {runs}"))
    (folder / "terminal.svg").write_text(drawing, encoding="utf-8")


def shown_by_browser(place: Path, window: Window) -> Image.Image:
    """Return what a browser shows of report.html in a window of some size.

    The page is in a frame of that size, because the browser's own windows have a minimum width.
    """
    frame = place / "frame.html"
    shot = place / "shot.png"
    style = f"border:0;width:{window.width}px;height:{window.height}px"
    page = f'<iframe src="report.html" scrolling="no" style="{style}"></iframe>'
    frame.write_text(f'<body style="margin:0">{page}')
    found = [name for name in BROWSERS if shutil.which(name)]
    assert found, f"none of {', '.join(BROWSERS)} is installed"
    command = [
        found[0],
        *BROWSER_OPTIONS,
        f"--blink-settings=preferredColorScheme={window.scheme}",
        f"--user-data-dir={place / 'profile'}",
        f"--screenshot={shot}",
        frame.as_uri(),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    with Image.open(shot) as image:
        return image.convert("RGB").crop((0, 0, window.width, window.height))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
