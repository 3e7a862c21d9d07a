"""Ctrl-C and SIGTERM at any moment of a command that trains nothing: one line, no traceback, the
code of the signal.
"""

import signal
from pathlib import Path

import pytest

from tests.helpers.small_runs import Workshop

PAUSE = """
import importlib, time
from rtx.cli import main as cli

def wait(*_, **__):
    print("ready", flush=True)
    # Python would sleep over a signal that comes just before a long sleep.
    while True:
        time.sleep(0.01)

os.dup2(os.open({errors!r}, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
setattr(importlib.import_module({module!r}), {name!r}, wait)
cli.entry()
"""
"""Runs a command that waits where it would call a function; its errors go to a separate file."""


@pytest.fixture(scope="module")
def run(workshop: Workshop) -> Path:
    return workshop.train("run", "trainer.steps=1")


def test_a_stopped_command_says_so_in_a_line(workshop: Workshop, run: Path) -> None:
    for number, code, word, place in (
        (signal.SIGINT, 130, "eval", "open_run"),
        (signal.SIGTERM, 143, "eval", "score_split"),
        (signal.SIGINT, 130, "plan", "cost"),
    ):
        words = [word] if word == "plan" else [word, str(run)]
        printed, said, returned = interrupted(
            workshop, [f"rtx.commands.{word}", place, *words], number
        )
        assert (returned, said) == (code, f"rtx: stopped by {number.name}\n"), printed
    assert not (run / "eval").exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_sample_keeps_what_was_written(
    workshop: Workshop, run: Path, number: int, code: int
) -> None:
    before = set((run / "samples").iterdir())
    words = ["rtx.commands.sample", "generate", "sample", str(run), "prompt=abc", "length=50"]
    printed, said, returned = interrupted(workshop, words, number)
    assert returned == code and "Traceback" not in said and "stopped after 0 of 50 units\n" in said
    (kept,) = set((run / "samples").iterdir()) - before
    assert kept.read_bytes() == b"abc" and str(kept) in said and printed == "abc\n"


def interrupted(workshop: Workshop, words: list[str], number: int) -> tuple[str, str, int]:
    """Run a command that waits where it is told to, send the signal there; returns both streams and
    the exit code.
    """
    module, name, *command = words
    errors = workshop.folder / "errors.txt"
    printed = workshop.folder / "printed.log"
    printed.write_bytes(b"")
    inside = PAUSE.format(errors=str(errors), module=module, name=name)
    process = workshop.fork(Path("printed"), *command, inside=inside)
    code = process.kill_when(lambda _: printed.read_text().endswith("ready\n"), number)
    return printed.read_text().replace("ready\n", ""), errors.read_text(), code
