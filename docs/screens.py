"""Draw the terminal of docs/start.md and the heads of README, from one real run.

`python docs/screens.py` takes two minutes on two cores. It trains on Python's standard library in a
terminal of 80 columns, and writes docs/pictures/terminal.svg and heads.png.
"""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

from PIL import Image
from rich.console import Console
from rich.text import Text

COLUMNS = 80
LINES = 40
ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
OPTIONS = (
    "trainer.steps=400",
    "trainer.val_every=200",
    "data.length=512",
    "model.window=32",
    "logger=jsonl",
)
WIDTH = 1200
"""Pixels of the picture of the heads."""
COLOURS = 64
"""The number of colours of that picture."""
FONTS = re.compile(r"@font-face \{.*?\}", re.DOTALL)
"""Fonts that rich loads from another site."""
CURSOR_UP = "\x1b[A"
PARTS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]")
"""A control sequence, a return, a new line, or a letter."""


def main() -> None:
    """Train in a temporary folder, and draw both pictures."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PYTHONPATH"] = str(ROOT)
        os.environ["TERM"] = "xterm"
        os.environ["RTX_DATA"] = str(Path(folder) / "data")
        output_of(["data", "prepare"], folder)
        output = output_of(["train", *OPTIONS], folder)
        draw_terminal(lines_shown(output.replace(f"{folder}/", "")))
        output_of(["analyze", "patterns", "last"], folder)
        (picture,) = Path(folder).glob("outputs/*/*/analysis/*.png")
        draw_heads(picture)


def draw_terminal(lines: list[str]) -> None:
    """Write terminal.svg: the command, and the lines that it leaves on the terminal."""
    command = [f"$ rtx train {' '.join(OPTIONS[:2])} \\", f"    {' '.join(OPTIONS[2:])}"]
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text("\n".join([*command, *lines])))
    drawing = FONTS.sub("", console.export_svg(title="rtx train"))
    (PICTURES / "terminal.svg").write_text(drawing, encoding="utf-8")


def draw_heads(picture: Path) -> None:
    """Write heads.png: a picture of `rtx analyze patterns`, smaller."""
    with Image.open(picture) as image:
        height = WIDTH * image.height // image.width
        small = image.convert("RGB").resize((WIDTH, height), Image.Resampling.LANCZOS)
    small.quantize(COLOURS).save(PICTURES / "heads.png", optimize=True)


def output_of(words: list[str], folder: str) -> str:
    """Return all that `rtx WORDS` writes to a terminal, with its control sequences."""
    ours, theirs = pty.openpty()
    size = struct.pack("HHHH", LINES, COLUMNS, 0, 0)
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, size)
    process = subprocess.Popen(
        [sys.executable, "-m", "rtx", *words],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    output = read_to_end(ours).decode(errors="replace")
    assert process.wait() == 0, output
    return output


def read_to_end(terminal: int) -> bytes:
    """Return all that is written to a terminal until its last writer has closed it."""
    content = b""
    while True:
        try:
            part = os.read(terminal, 65_536)
        except OSError:
            # Linux reports the end of a terminal as an error.
            return content
        if not part:
            return content
        content += part


def lines_shown(output: str) -> list[str]:
    """Return the lines that output leaves on a terminal, of a progress bar its last state."""
    terminal = Terminal()
    for part in PARTS.findall(output):
        terminal.write(part)
    return ["".join(line).rstrip() for line in terminal.lines]


class Terminal:
    """A terminal that keeps all lines, and knows the control sequences that rtx writes."""

    def __init__(self) -> None:
        self.lines = [[" "] * COLUMNS]
        self.row = 0
        self.column = 0

    def write(self, part: str) -> None:
        """Take a letter or a control sequence; those of colours have no effect."""
        if part == CURSOR_UP:
            self.row -= 1
        elif part == "\r":
            self.column = 0
        elif part == "\n":
            self.move_down()
        elif len(part) == 1:
            self.put(part)

    def put(self, letter: str) -> None:
        """Write a letter; past the last column it goes to the next line."""
        if self.column == COLUMNS:
            self.column = 0
            self.move_down()
        self.lines[self.row][self.column] = letter
        self.column += 1

    def move_down(self) -> None:
        """Go one row down, in the same column."""
        self.row += 1
        if self.row == len(self.lines):
            self.lines.append([" "] * COLUMNS)


if __name__ == "__main__":
    main()
