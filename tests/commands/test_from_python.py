"""`rtx.train` from Python: the run is that of its words, and however it ends the caller goes on."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import rtx
from rtx.errors import RunFailed, UserError
from tests.helpers.small_runs import (
    SMALL_RUN,
    Process,
    Workshop,
    after,
    children,
    patiently,
    status_of,
)

OWN = """
import json, os, signal, sys
import rtx
from rtx.errors import RunFailed

def handle(*_): print("the handler of the script", flush=True)

for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, handle)
before = {number: signal.getsignal(number) for number in signal.valid_signals()}
try:
    run = rtx.train(*json.loads(os.environ["WORDS"]))
    print("trained", run.folder, flush=True)
except RunFailed as error:
    print("caught", error, flush=True)
assert before == {number: signal.getsignal(number) for number in signal.valid_signals()}
os.kill(os.getpid(), signal.SIGTERM)
print("goes on with", sys.argv[1:], flush=True)
"""
"""A script whose options and signal handlers are its own."""

TWO = ("hardware=ddp", "hardware.devices=2", "hardware.threads=1", "trainer.micro_batch_size=1")
LONG = ("trainer.steps=1000000", "trainer.val_every=1000000", "trainer.checkpoint_every=1000000")


def begin(workshop: Workshop, name: str, *words: str) -> Process:
    """Start the script in a process of its own."""
    script = workshop.folder / "own.py"
    log = workshop.folder / f"{name}.log"
    script.write_text(OWN)
    every = json.dumps([workshop.text, *SMALL_RUN, *words])
    environment = {**os.environ, **workshop.environment(workshop.folder / name), "WORDS": every}
    command = [sys.executable, script, "--tag", "mine", "--steps", "3"]
    with open(log, "wb") as stream:
        process = subprocess.Popen(command, env=environment, stdout=stream, stderr=stream)
    return Process(process.pid, workshop.folder / name, log, process.wait)


def ended(process: Process) -> str:
    """Wait for the end of the script, which comes to its last line, and return what it printed."""
    code = process.wait()
    said = process.log.read_text()
    assert code == 0, said
    assert said.endswith(
        "the handler of the script\ngoes on with ['--tag', 'mine', '--steps', '3']\n"
    ), said
    return said


def command_of(run: Path) -> str:
    return json.loads((run / "environment.json").read_text())["command"]


def test_two_processes_train_by_the_words_of_the_call(workshop: Workshop) -> None:
    process = begin(workshop, "two", *TWO)
    said = ended(process)
    assert f"trained {process.run}\n" in said and ", 12 steps of 4 x 32, 2 x cpu\n" in said
    status = status_of(process.run)
    assert (status.state, status.step) == ("done", 12)
    assert command_of(process.run) == f"rtx train {workshop.text} {' '.join([*SMALL_RUN, *TWO])}"
    workshop.command("export", str(process.run))
    page = (process.run / "export" / "README.md").read_text()
    assert "hardware=ddp" in page and "--tag" not in page


def test_a_process_that_is_lost_is_an_exception(workshop: Workshop) -> None:
    process = begin(workshop, "lost", *TWO, *LONG)
    process.until(after(2))
    (first,) = children(process.number)
    (second,) = children(first)
    os.kill(second, signal.SIGKILL)
    assert (
        "caught another process of the run is gone; no checkpoint had been written yet\n"
        in ended(process)
    )
    assert status_of(process.run).state == "failed"


def test_a_signal_to_the_script_lets_both_processes_save(workshop: Workshop) -> None:
    process = begin(workshop, "stopped", *TWO, *LONG)
    process.until(after(2))
    process.send(signal.SIGINT)
    assert (
        f"caught {process.run}: stopped before its end; continue with: rtx resume {process.run}\n"
        in ended(process)
    )
    assert status_of(process.run).state == "interrupted"
    assert (process.run / "checkpoints" / "last.ckpt").exists()


@pytest.fixture
def named(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Path:
    """The folder of the run that a call in this process makes."""
    run = workshop.folder / request.function.__name__
    for name, value in workshop.environment(run).items():
        monkeypatch.setenv(name, value)
    return run


@contextmanager
def meanwhile(run: Path, act: Callable[[], object]) -> Iterator[None]:
    """Act in a thread as soon as a run has taken two steps."""

    def wait() -> None:
        for _ in patiently(lambda: "the run takes no steps"):
            if after(2)(run):
                break
        act()

    thread = threading.Thread(target=wait)
    thread.start()
    yield
    thread.join()


def test_one_process_is_the_callers_own_and_records_the_call(
    workshop: Workshop, named: Path
) -> None:
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    run = rtx.train(workshop.text, *SMALL_RUN, "trainer.steps=3")
    assert {number: signal.getsignal(number) for number in signal.valid_signals()} == before
    assert run.folder == named and run.config.trainer.steps == 3
    status = status_of(named)
    assert (status.state, status.pid) == ("done", os.getpid())
    assert command_of(named) == f"rtx train {workshop.text} {' '.join(SMALL_RUN)} trainer.steps=3"
    assert rtx.train(workshop.text, *SMALL_RUN, "trainer.steps=3").folder == named, "it is done"


def test_a_signal_saves_and_is_an_exception(workshop: Workshop, named: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    stopped = pytest.raises(RunFailed, match="stopped before its end; continue with: rtx resume ")
    with meanwhile(named, lambda: os.kill(os.getpid(), signal.SIGTERM)), stopped:
        rtx.train(workshop.text, *SMALL_RUN, *LONG)
    assert signal.getsignal(signal.SIGTERM) is before
    assert status_of(named).state == "preempted"
    assert (named / "checkpoints" / "last.ckpt").exists()


SLOW = "rtx.training.module.TrainingModule.take_step"


def test_a_second_interrupt_does_not_wait_for_the_step(
    workshop: Workshop, named: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def endless(*_: object, **__: object) -> None:
        for _pause in patiently(lambda: "no signal ends the step"):
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(SLOW, endless)
    with pytest.raises(RunFailed, match="stopped before its end"):
        rtx.train(workshop.text, *SMALL_RUN)
    status = status_of(named)
    assert (status.state, status.reason) == ("interrupted", "stopped at once by SIGINT")


def test_the_first_process_that_is_lost_is_an_exception(workshop: Workshop, named: Path) -> None:
    def kill() -> None:
        pid = status_of(named).pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    with (
        meanwhile(named, kill),
        pytest.raises(RunFailed, match="the first process of the run was killed by SIGKILL"),
    ):
        rtx.train(workshop.text, *SMALL_RUN, *TWO, *LONG)
    assert (named / "metrics.jsonl").exists()


def test_a_mistake_of_the_words_is_an_exception(
    workshop: Workshop, named: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, said in (
        (("data.path=nowhere.txt", *TWO), "nowhere.txt"),
        (("experiment=cifar10_baselines",), "experiment=cifar10_baselines is a sweep"),
        (("hardware=ddp", "hardware.devices=3"), "trainer.batch_size=4"),
    ):
        with pytest.raises(UserError, match=said):
            rtx.train(workshop.text, *SMALL_RUN, *words)
    assert not named.exists()
    assert "rtx: " not in capsys.readouterr().err, "the exception has the message"
