"""Signals: noted while a step is under way, obeyed at once before and after; a second Ctrl-C always at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from rtx.training.signals import INTERRUPTED, PREEMPTED, Signals, Stopped

CODES = {
    signal.SIGINT: INTERRUPTED,
    signal.SIGTERM: PREEMPTED,
    signal.SIGUSR1: PREEMPTED,
    signal.SIGUSR2: PREEMPTED,
    signal.SIGHUP: PREEMPTED,
}


@pytest.mark.parametrize(("number", "code"), CODES.items())
def test_a_signal_waits_for_the_step(number: int, code: int) -> None:
    before = signal.getsignal(number)
    with Signals() as signals:
        signals.holding = True
        os.kill(os.getpid(), number)
        assert signals.requested == code
    assert signal.getsignal(number) is before


@pytest.mark.parametrize(("number", "code"), CODES.items())
def test_without_a_step_it_ends_the_work_where_it_is(number: signal.Signals, code: int) -> None:
    with Signals(), pytest.raises(Stopped) as caught:
        os.kill(os.getpid(), number)
    assert caught.value.code == code
    assert str(caught.value) == f"stopped by {number.name} while no step was under way"
    assert caught.value.state == ("interrupted" if code == INTERRUPTED else "preempted")


def test_no_handler_for_exceptions_swallows_it() -> None:
    with Signals(), pytest.raises(Stopped):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except Exception:
            pytest.fail("swallowed")


def test_the_first_signal_decides_the_code() -> None:
    with Signals() as signals:
        signals.holding = True
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.requested == PREEMPTED


def test_what_is_ignored_from_outside_stays_ignored() -> None:
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        with Signals() as signals:
            os.kill(os.getpid(), signal.SIGUSR2)
            assert signals.requested == 0
    finally:
        signal.signal(signal.SIGUSR2, before)


BUSY = """
import hashlib, sys, threading
import rtx.training.signals as room
from rtx.training.signals import Signals
room.AGAIN_SECONDS = 0.3
with Signals() as signals:
    signals.holding = sys.argv[1] == "holding"
    signals.at_once = lambda code: print("leaving with", code, flush=True)
    signals.acknowledge = lambda line: print(line, flush=True)
    threading.Timer(0.5, print, ["ready"], {"flush": True}).start()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 1 << 30)  # a single call, during which Python runs no handler
"""


def busy(how: str) -> subprocess.Popen[bytes]:
    """Start a process whose main thread does not come round to its signals."""
    process = subprocess.Popen([sys.executable, "-c", BUSY, how], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def test_a_second_interrupt_ends_the_process_at_once() -> None:
    process = busy("holding")
    end = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < end:  # signals sent in one breath may arrive as one
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
    process.kill()
    assert process.communicate()[0] == b"finishing this step; Ctrl-C again stops at once\nleaving with 130\n"
    assert process.returncode == INTERRUPTED


def test_a_second_sigterm_some_time_later_ends_the_process_at_once() -> None:
    process = busy("holding")
    for _ in range(3):  # those that come together are one
        process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    assert process.poll() is None
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60)[0] == b"leaving with 143\n"
    assert process.returncode == PREEMPTED


def test_a_main_thread_that_does_not_react_is_not_waited_for() -> None:
    process = busy("free")
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60)[0] == b"leaving with 143\n"
    assert process.returncode == PREEMPTED


@pytest.mark.parametrize("number", CODES)
@pytest.mark.parametrize("command", ["train", "resume"])
def test_while_imports_take_their_seconds(command: str, number: signal.Signals) -> None:
    script = (
        "import os, sys; sys.argv = ['rtx', sys.argv[1]]; import rtx.cli;"
        f"rtx.cli.main = lambda: os.kill(os.getpid(), {int(number)}); rtx.cli.entry()"
    )
    code = subprocess.run([sys.executable, "-c", script, command], stderr=subprocess.DEVNULL).returncode
    assert code == (CODES[number] if number != signal.SIGINT else -signal.SIGINT)


def test_processes_that_the_first_one_starts_leave_signals_to_it() -> None:
    script = (
        "import sys; from rtx.training.signals import *; ignore_signals(); print('ok', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ok\n"
    for number in CODES:
        process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == 0


def test_a_child_goes_with_its_parent() -> None:
    child = "from rtx.training.signals import *; go_with_parent(); print('up', flush=True); time.sleep(60)"
    script = (
        "import subprocess, sys; from rtx.training.signals import *; announce_parent();"
        f"subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        process.kill()
        assert process.stdout.read() == b""  # comes to its end when the child, too, has closed it
