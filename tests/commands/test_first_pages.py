"""The commands of README.md and docs/start.md run to their end, made small."""

import re
from pathlib import Path

import pytest

from tests.helpers.pages import ROOT, PageCommand, commands_of, readme_shows
from tests.helpers.small_runs import Workshop, draw_nothing

PAGES = (ROOT / "README.md", ROOT / "docs" / "start.md")
SMALL = (
    *("trainer=debug", "trainer.batch_size=2", "hardware=cpu", "hardware.threads=1"),
    *("data.length=32", "model.layers=2", "model.hidden=16", "model.heads=2"),
    *("model.ffn_hidden=16", "model.window=8", "routing.window=8"),
)
NOT_HERE = {
    "data=enwik8": "it needs a download; tests/campaigns/presets.py runs its preset",
    " -m ": "it takes minutes; tests/sweep runs sweeps",
    "rtx sweep": "it needs a sweep; tests/sweep has one",
    "analyze coverage": "it needs a run with full heads: tests/commands/test_analyze.py",
    "analyze pretrained": "it needs a model: tests/hf",
}
"""Parts of commands that are not run here, and why."""


def block_commands() -> list[PageCommand]:
    """Return the commands of rtx in the blocks of the pages, each once."""
    commands = {}
    for page in PAGES:
        for command in commands_of(page):
            if command.is_block and command.words[0] == "rtx":
                commands.setdefault(tuple(command.words), command)
    return list(commands.values())


COMMANDS = block_commands()


@pytest.fixture
def folder(workshop: Workshop, run: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: it has texts, the records of docs/ and a trained run."""
    monkeypatch.chdir(workshop.folder)
    draw_nothing(monkeypatch)
    monkeypatch.setattr("rtx.commands.sample.TEXT_LENGTH", 40)
    books = workshop.folder / "books"
    books.mkdir(exist_ok=True)
    for name in ("book.txt", "other.txt"):
        (books / name).write_bytes((workshop.folder / "book.txt").read_bytes())
    if not Path("docs").exists():
        Path("docs").symlink_to(ROOT / "docs")
    return workshop.folder


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_a_command_of_the_first_pages_runs(
    command: PageCommand, folder: Path, workshop: Workshop, run: Path
) -> None:
    for part, reason in NOT_HERE.items():
        if part in command.text:
            pytest.skip(reason)
    text = re.sub(r"\blast\b|\boutputs/\w+", str(run), command.text)
    words = PageCommand(command.page, text, is_block=True).words[1:]
    if words[0] == "train":
        if "data=text" not in words:
            words += ["data=text", "data.path=book.txt"]
        words += SMALL
    out, error = workshop.answer(*words)
    assert out or error
    if command.page == "README.md":
        # Where lines are broken depends on the width of a terminal.
        assert "".join(readme_shows(words[0]).split()) in "".join(f"{out} {error}".split())


def test_most_commands_of_the_first_pages_run() -> None:
    elsewhere = [command for command in COMMANDS if any(part in command.text for part in NOT_HERE)]
    assert len(COMMANDS) > 30
    assert len(elsewhere) < len(COMMANDS) / 2
    unused = [part for part in NOT_HERE if not any(part in entry.text for entry in elsewhere)]
    assert unused == []
