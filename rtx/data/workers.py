"""Work on jobs in several processes, none of which outlives the first one or speaks for it.

The processes are fresh ones of the same interpreter, not forks (which would copy torch's threads in an unknown state),
and import nothing but what their jobs need. Errors come back; Ctrl-C and SIGTERM end them with the first process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from rtx.errors import RunFailed, UserError

Job = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function that can be imported, and its arguments; it is also given `advance(amount)` to say that it goes on."""

START = """
import sys
from multiprocessing.connection import Connection
link = Connection(int(sys.argv[1]))
sys.path[:] = link.recv()
from rtx.data.workers import serve
serve(link, int(sys.argv[2]))
"""
PAUSE = 0.1  # seconds between two reports of a worker's progress


def run_jobs(
    jobs: Sequence[Job], processes: int, advance: Callable[[int], object] = lambda amount: None
) -> Iterator[tuple[int, Any]]:
    """Yield (index, result) of each job as it is done; with one process (or one job) they are done here, in order.

    Args:
        advance: called, in this process, with what the jobs' functions passed on to theirs.

    Raises:
        UserError, RunFailed, OSError: what a job raised; the others are ended.
        RunFailed: a process was killed.
    """
    if min(processes, len(jobs)) <= 1:
        for index, (function, arguments) in enumerate(jobs):
            yield index, function(*arguments, advance)
        return
    team: dict[Connection, subprocess.Popen[bytes]] = {}
    waiting = list(enumerate(jobs))[::-1]
    working: dict[Connection, int] = {}
    try:
        for _ in range(min(processes, len(jobs))):
            link, process = _start()
            team[link] = process
            index, job = waiting.pop()
            link.send(job)
            working[link] = index
        while working:
            for link in wait(list(working)):
                assert isinstance(link, Connection)
                kind, value = _receive(link, team[link])
                if kind == "advance":
                    advance(value)
                    continue
                done = working.pop(link)
                if waiting:
                    working[link], job = waiting.pop()
                    link.send(job)
                yield done, value
    finally:
        for link, process in team.items():
            process.kill()
            process.wait()
            link.close()


def _start() -> tuple[Connection, subprocess.Popen[bytes]]:
    """Start a process with a group of its own, so that Ctrl-C reaches the first process alone."""
    link, far = Pipe()
    command = [sys.executable, "-c", START, str(far.fileno()), str(os.getpid())]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[far.fileno()], process_group=0)
    far.close()
    link.send(sys.path)
    return link, process


def _receive(link: Connection, process: subprocess.Popen[bytes]) -> tuple[str, Any]:
    """Return a worker's next message: ("advance", amount) or ("done", result)."""
    try:
        kind, value = link.recv()
    except (EOFError, ConnectionError):
        code = process.wait()
        ended = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        raise RunFailed(
            f"a process that prepares data {ended}; if memory ran out, data.processes=1 needs the least"
        ) from None
    if kind == "failed":
        raise value
    if kind == "fault":
        raise RuntimeError(f"in a process that prepares data:\n{value}")
    return kind, value


def serve(link: Connection, parent: int) -> None:
    """Do the jobs that come, until there are no more or the first process is gone."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    amount, told = 0, 0.0

    def advance(more: int) -> None:
        nonlocal amount, told
        amount += more
        if time.monotonic() - told > PAUSE:
            link.send(("advance", amount))
            amount, told = 0, time.monotonic()

    while True:
        try:
            function, arguments = link.recv()
            result = function(*arguments, advance)
            link.send(("advance", amount))
            amount = 0
            link.send(("done", result))
        except (EOFError, BrokenPipeError, ConnectionError):
            return
        except (UserError, RunFailed, OSError) as error:
            link.send(("failed", error))
        except Exception:
            link.send(("fault", traceback.format_exc()))
