"""Signals: noted while a step is under way, obeyed at once before and after; a second Ctrl-C always
at once.
"""

import os
import signal
import subprocess
import sys
import time

import pytest

from rtx.runs.signals import INTERRUPTED, PREEMPTED, Signals, Stopped

CODES = {
    signal.SIGINT: 130,
    signal.SIGTERM: 143,
    signal.SIGUSR1: 143,
    signal.SIGUSR2: 143,
    signal.SIGHUP: 143,
}


def test_the_first_signal_decides_none_is_swallowed_and_what_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        with Signals() as signals:
            signals.holding = True
            for number, code in (
                (signal.SIGUSR2, 0),
                (signal.SIGHUP, PREEMPTED),
                (signal.SIGINT, PREEMPTED),
            ):
                os.kill(os.getpid(), number)
                assert signals.requested == code
            with pytest.raises(Stopped):
                signals.release()
    finally:
        signal.signal(signal.SIGUSR2, before)
    with Signals(), pytest.raises(Stopped, match="stopped by SIGTERM while no step was under way"):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except Exception:
            pytest.fail("no handler for exceptions swallows it")


BUSY = """
import hashlib, sys, threading
import rtx.progress, rtx.runs.signals as room
with room.Signals() as signals:
    signals.holding = True
    signals.at_once = lambda code: print("leaving with", code, flush=True)
    threading.Timer(0.2, print, ["ready"], {"flush": True}).start()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 1 << 30)  # during this call Python runs no handler
"""


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, INTERRUPTED), (signal.SIGTERM, PREEMPTED)]
)
def test_a_second_signal_ends_the_process_at_once_and_those_that_come_together_are_one(
    number: int, code: int
) -> None:
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        for _ in range(3 if number == signal.SIGTERM else 1):
            process.send_signal(number)
        time.sleep(0.2)
        assert process.poll() is None
        end = time.monotonic() + 600
        while (
            process.poll() is None and time.monotonic() < end
        ):  # sent in one breath they may arrive as one
            process.send_signal(number)
            time.sleep(0.1)
        process.kill()
        said = b"finishing this step; Ctrl-C again stops at once\n" if code == INTERRUPTED else b""
        assert process.stdout.read() == said + b"leaving with %d\n" % code
    assert process.returncode == code


@pytest.mark.parametrize("number", CODES)
def test_while_imports_take_their_seconds(number: signal.Signals) -> None:
    script = "import os, sys; sys.argv = ['rtx', 'train']; import rtx.cli.main;"
    script += (
        f"rtx.cli.main.main = lambda: os.kill(os.getpid(), {int(number)}); rtx.cli.main.entry()"
    )
    code = subprocess.run([sys.executable, "-c", script], stderr=subprocess.DEVNULL).returncode
    assert code == (CODES[number] if number != signal.SIGINT else -signal.SIGINT)


def test_processes_that_the_first_one_starts_leave_signals_to_it_and_go_with_it() -> None:
    child = "import os, sys, time; from rtx.runs.signals import *; ignore_signals();"
    child += (
        "when_orphaned(sys.argv[1], lambda: os._exit(1)); print(os.getpid(), flush=True); "
        "time.sleep(600)"
    )
    script = "import os, subprocess, sys, time;"
    script += (
        f"subprocess.Popen([sys.executable, '-c', {child!r}, str(os.getpid())]); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        number = int(process.stdout.readline())
        for each in CODES:
            os.kill(number, each)
        time.sleep(0.2)
        os.kill(number, 0)  # it is still there
        process.kill()
        assert process.stdout.read() == b""  # comes to its end when the child, too, has closed it
