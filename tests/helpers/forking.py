"""A process that imports torch and Lightning once, and then forks runs of rtx.

The imports take ten seconds. All workers of pytest-xdist share one such process. The main process
of pytest starts it and ends it. It imports at the first question, so that tests without runs need
not wait.

A client sends one line of JSON over a connection of its own, and gets one back:
`{"wait": 12}` or `{"run": {the arguments of run}}`; then `{"number": 34}` or `{"problem": "..."}`.
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
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PREPARATION = "tests.helpers.small_runs:import_and_compose"
"""The function that prepares the process for tests; by name, so that pytest's main process need
not import torch."""
WORKER_KEY = "rtx_forker"
"""The name by which workers of pytest-xdist get the address of the process."""


@dataclass(frozen=True)
class Forker:
    """Asks the process that forks runs, whose socket has the path `address`."""

    address: str

    def fork(
        self, arguments: Sequence[str], log: Path, inside: str, variables: Mapping[str, str]
    ) -> int:
        """Run a command in a forked process, and return the number of the process.

        Args:
            log: the file to which its output is added.
            inside: a program that the process executes before the command. It knows the modules os,
                signal and sys, and `arguments` and `log`.
            variables: added to the environment of the caller, which is that of the run.
        """
        environment = {**os.environ, **variables}
        run = {"arguments": list(arguments), "log": str(log), "inside": inside}
        return self.ask(run={**run, "environment": environment})

    def exit_code_of(self, number: int) -> int:
        """Wait for the end of a run, and return its exit code; negative for a signal.

        To be asked once, when the run is about to end: nobody else gets an answer until then.
        """
        return self.ask(wait=number)

    def ask(self, **question: Any) -> int:
        """Send a question, and return the number in the answer."""
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(self.address)
                with connection.makefile("rw") as stream:
                    print(json.dumps(question), file=stream, flush=True)
                    line = stream.readline()
        except ConnectionError:
            line = ""
        assert line, "the process that forks runs has ended; pytest's output may have its traceback"
        answer = json.loads(line)
        assert "number" in answer, answer["problem"]
        return answer["number"]


@contextlib.contextmanager
def forking_server(preparation: str) -> Iterator[Forker]:
    """Start a process that forks runs, and yield its `Forker`.

    At the end of the block it kills the runs that nobody has waited for, and ends.

    Args:
        preparation: the function, as module:function, that it calls before it forks the first run.
    """
    with tempfile.TemporaryDirectory(prefix="rtx-forker-") as folder:
        address = str(Path(folder, "socket"))
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(address)
            listening.listen()
            descriptor = listening.fileno()
            command = [sys.executable, "-m", "tests.helpers.forking", str(descriptor), preparation]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[descriptor])
        # Now the process alone has the socket: questions fail where it has ended, and do not wait.
        with process:
            # At the end of the block its standard input is closed, and it ends.
            yield Forker(address)


def main() -> None:
    """Answer questions until standard input ends."""
    # Ctrl-C also reaches this process, but tests that stop may still ask it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    listening = socket.socket(fileno=int(sys.argv[1]))
    server = Server(listening)
    is_prepared = False
    while True:
        readable, _, _ = select.select([listening, sys.stdin], [], [])
        if sys.stdin in readable:
            server.kill_runs()
            return
        if not is_prepared:
            prepare(sys.argv[2])
            is_prepared = True
        connection, _ = listening.accept()
        # A worker may have ended since it asked.
        with contextlib.suppress(ConnectionError):
            server.serve(connection)


def prepare(preparation: str) -> None:
    """Call the function that prepares this process, and exempt what it made from collections."""
    module, _, function = preparation.partition(":")
    gc.disable()
    getattr(importlib.import_module(module), function)()
    # Else garbage collection in each forked process would write to these objects, and so copy
    # their memory.
    gc.freeze()
    gc.enable()


@dataclass
class Server:
    """Starts runs, and tells how they ended."""

    listening: socket.socket
    runs: set[int] = field(default_factory=set[int])
    """The processes that nobody has waited for."""

    def serve(self, connection: socket.socket) -> None:
        """Answer the question that comes over a connection."""
        with connection, connection.makefile("rw") as stream:
            question = json.loads(stream.readline() or "{}")
            answer: dict[str, Any] = {}
            if "wait" in question:
                answer = self.end_of(question["wait"])
            elif "run" in question:
                child = os.fork()
                if child == 0:
                    # Else the run would keep the connection of whoever asked.
                    stream.close()
                    connection.close()
                    self.listening.close()
                    run_and_end(**question["run"])
                self.runs.add(child)
                answer = {"number": child}
            print(json.dumps(answer), file=stream, flush=True)

    def end_of(self, number: int) -> dict[str, Any]:
        """Wait for the end of a run, and return how it ended."""
        if number not in self.runs:
            return {"problem": f"no run has the number {number}, or its end has been told"}
        _, status = os.waitpid(number, 0)
        self.runs.remove(number)
        return {"number": os.waitstatus_to_exitcode(status)}

    def kill_runs(self) -> None:
        """End all runs that nobody has waited for."""
        for number in self.runs:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)


def run_and_end(**words: Any) -> None:
    """Run a command in this process, which was forked for it, and end.

    `SystemExit` and `KeyboardInterrupt` are not caught: Python ends the process for them.
    """
    try:
        code = run(**words)
    except Exception:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code)


def run(arguments: list[str], log: str, inside: str, environment: dict[str, str]) -> int:
    """Run a command, and return its exit code; see `Forker.fork`.

    Other than in a process of `rtx`, the working directory is the server's, modules have read the
    server's environment at their import, and the signal handlers that `rtx` sets first are missing.
    """
    from rtx.cli.main import main

    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["rtx", *arguments]
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(nothing)
    os.close(output)
    names = {"os": os, "signal": signal, "sys": sys, "arguments": arguments, "log": log}
    exec(inside, names)
    return main(arguments)


if __name__ == "__main__":
    main()
