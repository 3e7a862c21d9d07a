"""`rtx.train` from a script: the run is that of its words, and however it ends the script goes on."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from small_runs import SIZES, Process, Workshop, after, children

from rtx.training.run_folder import read_status

OWN = """
import json, os, signal, sys
import rtx
from rtx.errors import RunFailed, UserError

def handle(*_): print("the handler of the script", flush=True)

handlers = [signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
before = {number: signal.getsignal(number) for number in signal.valid_signals()}
try:
    run = rtx.train(*json.loads(os.environ["WORDS"]))
    print("trained", run.folder, flush=True)
except (RunFailed, UserError) as error:
    print("caught", type(error).__name__, error, flush=True)
assert before == {number: signal.getsignal(number) for number in signal.valid_signals()}
os.kill(os.getpid(), signal.SIGTERM)
print("goes on with", sys.argv[1:], flush=True)
"""
"""Has options and signal handlers that are none of rtx's."""

TWO = ("hardware=ddp", "hardware.devices=2", "hardware.threads=1", "trainer.micro_batch_size=1")
LONG = ("trainer.steps=1000000", "trainer.val_every=1000000")


def begin(workshop: Workshop, name: str, *words: str) -> Process:
    """Start the script in a process of its own."""
    import json

    script, log = workshop.folder / "own.py", workshop.folder / f"{name}.log"
    script.write_text(OWN)
    every = [workshop.text, *SIZES, *words]
    environment = {**os.environ, **workshop.environment(workshop.folder / name), "WORDS": json.dumps(every)}
    with open(log, "wb") as stream:
        process = subprocess.Popen(
            [sys.executable, script, "--tag", "mine", "--steps", "3"], env=environment, stdout=stream, stderr=stream
        )
    return Process(process.pid, workshop.folder / name, log, process.wait)


def ended(process: Process) -> str:
    """Wait for the end of the script, which comes to its last line, and return what it printed."""
    code, said = process.wait(), process.log.read_text()
    assert code == 0, said
    assert said.endswith("the handler of the script\ngoes on with ['--tag', 'mine', '--steps', '3']\n"), said
    return said


def test_two_processes_train_by_the_words_of_the_call(workshop: Workshop) -> None:
    process = begin(workshop, "two", *TWO)
    said = ended(process)
    assert f"trained {process.run}\n" in said and ", 12 steps of 4 x 32, 2 x cpu\n" in said
    status = read_status(process.run) or {}
    assert (status["state"], status["step"]) == ("done", 12)
    command = f"rtx train {workshop.text} {' '.join([*SIZES, *TWO])}"
    assert environment_command(process.run) == command
    workshop.command("export", str(process.run))
    assert "hardware=ddp" in (process.run / "export" / "README.md").read_text()


def environment_command(run: Path) -> str:
    import json

    return json.loads((run / "environment.json").read_text())["command"]


def test_one_process_is_the_callers_own_and_records_the_call(workshop: Workshop) -> None:
    process = begin(workshop, "one", "trainer.steps=3")
    assert f"trained {process.run}\n" in ended(process)
    status = read_status(process.run) or {}
    assert (status["state"], status["pid"]) == ("done", process.number)
    assert environment_command(process.run) == f"rtx train {workshop.text} {' '.join(SIZES)} trainer.steps=3"


def test_a_process_that_is_lost_is_an_exception(workshop: Workshop) -> None:
    process = begin(workshop, "lost", *TWO, *LONG)
    process.until(after(2))
    (first,) = children(process.number)
    (second,) = children(first)
    os.kill(second, signal.SIGKILL)
    said = ended(process)
    assert "caught RunFailed another process of the run is gone; the last good checkpoint is" in said
    assert (read_status(process.run) or {})["state"] == "failed"


def test_the_first_process_that_is_lost_is_an_exception(workshop: Workshop) -> None:
    process = begin(workshop, "first", *TWO, *LONG)
    process.until(after(2))
    (first,) = children(process.number)
    os.kill(first, signal.SIGKILL)
    assert f"caught RunFailed the first process of the run was killed by SIGKILL; rtx resume {process.run}" in ended(
        process
    )


@pytest.mark.parametrize("words", [TWO, ()], ids=["two", "one"])
def test_a_signal_saves_and_is_an_exception(workshop: Workshop, words: tuple[str, ...]) -> None:
    name = f"stopped{len(words)}"
    process = begin(workshop, name, *words, *LONG, "trainer.checkpoint_every=1000000")
    process.until(after(2))
    process.send(signal.SIGINT)
    assert f"caught RunFailed {process.run}: stopped before its end; rtx resume goes on" in ended(process)
    assert (read_status(process.run) or {})["state"] == "interrupted"
    assert (process.run / "checkpoints" / "last.ckpt").exists()


def test_a_mistake_of_the_words_is_an_exception(workshop: Workshop) -> None:
    said = ended(begin(workshop, "mistake", *TWO, "data.length=4000"))
    assert "caught UserError" in said and "data.length=4000" in said
    assert not (workshop.folder / "mistake").exists()
