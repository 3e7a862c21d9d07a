"""The screen of docs/start.md and the heads of README, of one real run: `python docs/screens.py` (two minutes on two cores).

Trains on Python's standard library in a terminal of 80 columns; writes docs/pictures/terminal.svg and heads.png.
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

COLUMNS, LINES = 80, 40
ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
WORDS = (
    "trainer.steps=400",
    "trainer.val_every=200",
    "data.length=512",
    "model.window=32",
    "logger=jsonl",
)
WIDTH = 1200  # pixels of the picture of the heads


def main() -> None:
    """Train, record the screen, and draw the heads of the topmost layer."""
    with tempfile.TemporaryDirectory() as place:
        os.environ |= {
            "PYTHONPATH": str(ROOT),
            "TERM": "xterm",
            "RTX_DATA": str(Path(place) / "data"),
        }
        recorded(["data", "prepare"], place)
        lines = screen(recorded(["train", *WORDS], place).replace(f"{place}/", ""))
        console = Console(record=True, width=COLUMNS, file=io.StringIO())
        console.print(
            Text(
                "\n".join(
                    [f"$ rtx train {' '.join(WORDS[:2])} \\", f"    {' '.join(WORDS[2:])}", *lines]
                )
            )
        )
        drawing = console.export_svg(title="rtx train")
        drawing = re.sub(
            r"@font-face \{.*?\}", "", drawing, flags=re.DOTALL
        )  # those of another site
        (PICTURES / "terminal.svg").write_text(drawing, encoding="utf-8")
        recorded(["analyze", "patterns", "last"], place)
        (path,) = Path(place).glob("outputs/*/*/analysis/*.png")
        with Image.open(path) as image:
            small = image.convert("RGB").resize(
                (WIDTH, WIDTH * image.height // image.width), Image.Resampling.LANCZOS
            )
            small.quantize(64).save(PICTURES / "heads.png", optimize=True)


def recorded(words: list[str], folder: str) -> str:
    """Return all that a command writes to a terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    command = [sys.executable, "-m", "rtx", *words]
    process = subprocess.Popen(
        command, cwd=folder, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    said = b""
    try:
        while part := os.read(ours, 65_536):
            said += part
    except OSError:  # a terminal that nobody writes to any more
        pass
    assert process.wait() == 0, said.decode(errors="replace")
    return said.decode(errors="replace")


def screen(said: str) -> list[str]:
    """Return the lines that stand on the terminal in the end: of a bar that was drawn again the last state."""
    lines, row, column = [[" "] * COLUMNS], 0, 0
    for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]", said):
        if part == "\x1b[A":
            row -= 1
        elif part in ("\r", "\n"):
            row, column = row + (part == "\n"), 0 if part == "\r" else column
        elif len(part) == 1:
            if column == COLUMNS:
                row, column = row + 1, 0
            while row >= len(lines):
                lines.append([" "] * COLUMNS)
            lines[row][column] = part
            column += 1
        while row >= len(lines):
            lines.append([" "] * COLUMNS)
    return ["".join(line).rstrip() for line in lines]


if __name__ == "__main__":
    main()
