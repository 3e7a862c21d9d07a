"""The commands that README.md and the pages of docs/ show."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    ROOT / "README.md",
    *sorted((ROOT / ".github").glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "results").glob("*.md")),
)
PROGRAMS = ("rtx", "make", "python", "python3", "pytest", "pip", "apt-get", "tensorboard", "wandb")
"""The first words of what counts as a command in a text."""
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`]+)`")


@dataclass(frozen=True)
class PageCommand:
    """A command as a page has it."""

    page: str
    text: str
    is_block: bool
    """Whether it is a line to copy; else it is mentioned in a sentence, perhaps shortened."""

    @property
    def words(self) -> list[str]:
        """Its words, without variables before it and without the folder of an environment."""
        words = shlex.split(self.text, comments=True)
        while words and re.match(r"[A-Z_]+=", words[0]):
            words.pop(0)
        program = words[0].rpartition("/bin/")[2] if words else ""
        return [program, *words[1:]]

    def __str__(self) -> str:
        return f"{self.page}: {self.text}"


def commands_of(page: Path) -> Iterator[PageCommand]:
    """Yield the commands of a page, those in blocks first."""
    name = page.relative_to(ROOT).as_posix()
    text = page.read_text(encoding="utf-8")
    for language, block in FENCE.findall(text):
        if language in ("", "sh", "text"):
            for line in lines_of(block):
                yield PageCommand(name, line, is_block=True)
    for code in CODE.findall(FENCE.sub("", text)):
        span = " ".join(code.split())
        if is_command(span):
            yield PageCommand(name, span, is_block=False)


def lines_of(block: str) -> Iterator[str]:
    """Yield the commands of a block; several joined by && are several, a backslash joins lines."""
    for line in block.replace("\\\n", " ").splitlines():
        for part in line.strip().removeprefix("$ ").split(" && "):
            if is_command(part):
                yield part


def is_command(text: str) -> bool:
    """Whether a text begins with a program, perhaps that of an environment, and says more."""
    text = re.sub(r"^([A-Z_]+=\S+ +)+", "", text)
    program, _, rest = text.partition(" ")
    return program.rpartition("/bin/")[2] in PROGRAMS and bool(rest.strip())


def readme_shows(name: str) -> str:
    """Return what README says that a command prints, without the numbers of a long run."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    train, audit, report = [" ".join(paragraph.split()) for paragraph in block.split("\n\n")]
    _, comma, mode = train.partition(" teacher-forced;")
    return {"train": comma + mode, "audit": audit, "report": report}[name]
