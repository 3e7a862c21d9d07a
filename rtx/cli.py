"""`rtx <command> [overrides]`: finds the command, reads its flags, and imports only what that command needs.

Exit codes: 0; 2 a mistake of the user, told in lines that begin with "rtx:"; 1 a run that failed or a fault of ours;
130 after SIGINT; 143 after SIGTERM, and after SIGUSR1 and SIGUSR2 where they stop a run.

`sys.argv` stays as it is, command word and all: the first process of a run starts the other ranks with it.
"""

from __future__ import annotations

import importlib
import io
import os
import select
import signal
import sys
import traceback
from collections.abc import Sequence
from types import FrameType

from rtx import __version__
from rtx.errors import RunFailed, UserError, nearest
from rtx.training.memory import out_of_memory
from rtx.training.signals import EXIT_CODES, INTERRUPTED, PREEMPTED, Stopped, ignore_signals, started_by_another
from rtx.wording import printable

# Each command is rtx/commands/<word>.py with `main(arguments: list[str]) -> int`.
COMMANDS = {
    "train": "train a model; every option has a default",
    "resume": "continue a run exactly where it stopped",
    "eval": "score a run on a split, every unit exactly once",
    "audit": "change the future and see what of the past moves, and its price in bits",
    "analyze": "what a run reads, and what far context is worth to it",
    "sample": "generate from a run",
    "export": "write a run's model as safetensors with a card, for others to load",
    "sweep": "watch a sweep: what is done, runs, failed, waits",
    "report": "set runs and sweeps beside the paper's tables",
    "bench": "time the training steps of a table's rows in turn",
    "plan": "count parameters, FLOPs and memory of a run, and run nothing",
    "data": "prepare, verify, look at, list or remove data sets",
    "schema": "print what a file of conf/ may hold, for editors",
    "completion": "print a script by which bash completes commands, options and keys",
}
RUNNING = ("train", "resume")
"""Commands that a scheduler may stop with SIGUSR1 and SIGUSR2 as well."""
HELP_FLAGS = ("--help", "-h", "help")


def entry() -> None:
    """The `rtx` script and `python -m rtx`."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a letter is no reason to fail
    try:
        handle_signals(sys.argv[1:2])
        sys.exit(main())
    except Stopped as stopped:  # a moment before or after `main`
        sys.exit(stopped.code)


def handle_signals(words: list[str]) -> None:
    """Leave with the code that schedulers expect while imports take their seconds; later a run has its own handlers.

    A process that the first one of a run has started leaves them to it from its first moment on.
    """
    if started_by_another():
        ignore_signals()
        return
    runs = words and words[0] in RUNNING
    for number, code in EXIT_CODES.items():
        if signal.getsignal(number) is signal.SIG_IGN:  # as by nohup
            continue
        if code == PREEMPTED and (runs or number == signal.SIGTERM):
            signal.signal(number, stop)


def stop(number: int, frame: FrameType | None) -> None:
    """Handle a signal that ends the work where it is.

    Raises:
        Stopped: always.
    """
    raise Stopped(PREEMPTED, f"stopped by {signal.Signals(number).name}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run `rtx` with `argv` (`sys.argv[1:]` if None) and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = dispatch(arguments)
        sys.stdout.flush()
    except UserError as error:
        return complain(str(error), 2)
    except RunFailed as error:
        return complain(str(error), 1)
    except Stopped as stopped:
        return complain(str(stopped), stopped.code)
    except KeyboardInterrupt:
        return complain("stopped by SIGINT", INTERRUPTED)
    except Exception as error:
        if isinstance(error, BrokenPipeError) and reader_is_gone():
            return 1
        if reason := out_of_memory(error):
            return complain(reason, 1)
        try:
            traceback.print_exc()
        except MemoryError:  # what ran out first may look like anything (a SystemError, say)
            return complain("out of memory", 1)
        return 1
    return code


def prepare_environment() -> None:
    """Set what OpenMP reads when it is loaded, unless the user has."""
    # Threads that wait by spinning made a small model's step 2 to 5 times slower as soon as another program took one
    # of two cores; sleeping costs a quarter or more where nothing else runs.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def dispatch(arguments: list[str]) -> int:
    """Run the command that `arguments` begin with."""
    prepare_environment()
    if not arguments or arguments[0] in HELP_FLAGS:
        return help_page(arguments[1:], 0 if arguments else 2)
    word, rest = arguments[0], arguments[1:]
    if word in ("--version", "-V"):
        print(f"rtx {__version__}")
        return 0
    if word not in COMMANDS:
        hint = nearest(word, [*COMMANDS, "--help", "--version"]) or f"; the commands are {', '.join(COMMANDS)}"
        raise UserError(f"unknown command {word!r}{hint}")
    from rtx.commandline.flags import check_first, parse_flags, show

    flags, words = parse_flags(word, rest)
    if flags.help:
        return help_page([word, *words], 0)
    if flags.multirun:
        from rtx.sweep.launcher import sweep

        return sweep(word, words)
    if flags.cfg:
        return show(words, flags.package)
    check_first(word, words)
    return importlib.import_module(f"rtx.commands.{word}").main(words)


def help_page(words: list[str], code: int) -> int:
    """Print the page of a command, or of rtx itself, and return `code`."""
    from rtx.commandline import help

    if words and words[0] in COMMANDS:
        print(help.command_page(words[0], words[1:], COMMANDS[words[0]]))
    else:
        print(help.front_page(COMMANDS))
    return code


def complain(message: str, code: int) -> int:
    """Write each line of an error message to stderr, and return `code`."""
    sys.stdout.flush()
    for line in message.splitlines():
        print(printable(f"rtx: {line}"), file=sys.stderr)
    return code


def reader_is_gone() -> bool:
    """Whether what reads our output has gone away (`rtx train --help | head`); then nothing more is written to it."""
    poller = select.poll()
    poller.register(sys.stdout.fileno(), 0)  # errors are reported whatever is asked for
    if not poller.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True
