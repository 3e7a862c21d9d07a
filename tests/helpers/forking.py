"""A process that imports torch and Lightning once, and then forks runs of rtx.

The imports take ten seconds. All workers of pytest-xdist share one such process: the one that hands
out tests starts it, and it imports at the first question. It ends with the process that started it.
"""

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SMALL_RUNS = "tests.helpers.small_runs:import_and_compose"
"""What prepares the process for the tests."""
WORKER_KEY = "rtx_forker"
"""The name by which workers of pytest-xdist get the address of the process."""


@dataclass(frozen=True)
class Forker:
    """The address of a process that forks runs: the path of its socket."""

    address: str

    def fork(
        self, arguments: Sequence[str], log: Path, inside: str, variables: Mapping[str, str]
    ) -> int:
        """Run a command in a forked process, and return the number of the process.

        Args:
            log: the file to which its output is added.
            inside: a program that the process executes first. It knows the modules os, signal and
                sys, and `arguments` and `log`.
            variables: what it adds to the environment of this process.
        """
        environment = {**os.environ, **variables}
        return self.ask(
            arguments=list(arguments), log=str(log), inside=inside, environment=environment
        )

    def wait(self, number: int) -> int:
        """Wait for a forked process, and return its exit code; negative for a signal."""
        return self.ask(wait=number)

    def ask(self, **question: Any) -> int:
        """Send one question and return the answer."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self.address)
            with connection.makefile("rw") as stream:
                print(json.dumps(question), file=stream, flush=True)
                return int(stream.readline())


@contextlib.contextmanager
def forking_server(preparation: str) -> Iterator[Forker]:
    """Yield a process that forks runs.

    Args:
        preparation: the function, as module:function, that it calls before it forks the first run.
    """
    with (
        tempfile.TemporaryDirectory(prefix="rtx-forker-") as folder,
        socket.socket(socket.AF_UNIX) as listening,
    ):
        address = str(Path(folder, "socket"))
        listening.bind(address)
        listening.listen()
        number = listening.fileno()
        command = [sys.executable, "-m", "tests.helpers.forking", str(number), preparation]
        with subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[number]):
            # At the end of this block its standard input is closed. Then it ends.
            yield Forker(address)


def main() -> None:
    """Answer questions until standard input ends."""
    # Ctrl-C also reaches this process, which ends with the one that started it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    is_prepared = False
    with socket.socket(fileno=int(sys.argv[1])) as listening:
        while True:
            readable, _, _ = select.select([listening, sys.stdin], [], [])
            if sys.stdin in readable:
                return
            if not is_prepared:
                prepare(sys.argv[2])
                is_prepared = True
            connection, _ = listening.accept()
            answer(connection, listening)


def prepare(preparation: str) -> None:
    """Call the function that prepares this process, and keep what it made out of collections."""
    module, _, function = preparation.partition(":")
    gc.disable()
    getattr(importlib.import_module(module), function)()
    gc.enable()
    # Else garbage collection in each forked process would write to these objects, and so copy them.
    gc.freeze()


def answer(connection: socket.socket, listening: socket.socket) -> None:
    """Answer one question: start a run, or wait for one."""
    with connection, connection.makefile("rw") as stream:
        question = json.loads(stream.readline())
        if "wait" in question:
            status = os.waitpid(question["wait"], 0)[1]
            print(os.waitstatus_to_exitcode(status), file=stream, flush=True)
            return
        child = os.fork()
        if child:
            print(child, file=stream, flush=True)
            return
    listening.close()
    run(**question)


def run(arguments: list[str], log: str, inside: str, environment: dict[str, str]) -> None:
    """Run a command in this process, which was forked for it, and end."""
    from rtx.cli.main import main

    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    names = {"os": os, "signal": signal, "sys": sys, "arguments": arguments, "log": log}
    exec(inside, names)
    code = main(arguments)
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
