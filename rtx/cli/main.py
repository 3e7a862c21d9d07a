"""`rtx <command> [overrides]`: finds the command, reads its flags, and imports only what that
command needs.

Exit codes: 0; 2 a mistake of the user; 1 a failed run or a fault of ours; 130 after SIGINT; 143
after SIGTERM, and after SIGUSR1 and SIGUSR2 where they stop a run. `sys.argv` stays as it is: a run
starts its other ranks with it.
"""

import atexit
import errno
import importlib
import io
import os
import select
import signal
import sys
import traceback
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from rtx import __version__
from rtx.errors import RunFailed, UserError, nearest, printable, shorten
from rtx.machine import out_of_memory
from rtx.runs.signals import EXIT_CODES, INTERRUPTED, PREEMPTED, Stopped, ignore_signals
from rtx.settings.hydra_words import hydra_flag
from rtx.variables import started_by_another

if TYPE_CHECKING:
    from rtx.cli.commands import Command


LONGEST_LINE = 1000
LINE_END = 250
"""Characters that a line of an error message keeps at both ends if it is longer than that."""


def entry() -> None:
    """The `rtx` script and `python -m rtx`."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that lacks a letter is no reason to fail.
        sys.stdout.reconfigure(errors="replace")
    # Called last: Python then lets go of handlers, and any signal would kill the process.
    atexit.register(ignore_signals)
    try:
        handle_signals(sys.argv[1:2])
        code = main()
    except Stopped as stopped:
        # A moment before or after `main`.
        code = stopped.code
    # The work is over: what is left, such as threads to wait for, may be cut short.
    for number in EXIT_CODES:
        if signal.getsignal(number) not in (signal.SIG_IGN, signal.SIG_DFL):
            signal.signal(number, lambda *_: os._exit(code))
    sys.exit(code)


def handle_signals(words: list[str]) -> None:
    """Exit upon a signal with the code that schedulers expect, while imports take their seconds.

    Later a run has handlers of its own.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped(PREEMPTED, f"stopped by {signal.Signals(number).name}")

    if started_by_another():
        # The first process of the run receives the signals from the beginning.
        ignore_signals()
        return
    trains = words in (["train"], ["resume"])
    for number, code in EXIT_CODES.items():
        preempts = code == PREEMPTED and (trains or number == signal.SIGTERM)
        # nohup ignores signals.
        if preempts and signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, stop)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `rtx` with `argv` (`sys.argv[1:]` if None) and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = dispatch(words)
        sys.stdout.flush()
        return code
    except UserError as error:
        return complain(str(error), 2)
    except RunFailed as error:
        return complain(str(error), 1)
    except Stopped as stopped:
        return complain(str(stopped), stopped.code)
    except SystemExit as exit_:
        # A code of 0 would pass for work that is done.
        caller = "by an extension or a package"
        return complain(f"sys.exit({exit_.code!r}) was called before the end, {caller}", 2)
    except KeyboardInterrupt:
        return complain("stopped by SIGINT", INTERRUPTED)
    except Exception as error:
        return unexpected(error, words)


def unexpected(error: Exception, words: Sequence[str]) -> int:
    """Return the exit code of an error that is neither the user's nor a run's, and explain it."""
    if isinstance(error, BrokenPipeError) and reader_is_gone():
        return 0 if only_prints(words) else 1
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return complain(f"{shorten(str(error.filename))}: {error.strerror}", 2)
    reason = out_of_memory(error)
    if reason:
        return complain(reason, 1)
    traceback.print_exc()
    return 1


def dispatch(arguments: list[str]) -> int:
    """Run the command that `arguments` begin with."""
    # OpenMP reads this when it is loaded. Threads that wait by spinning made a small model's step 2
    # to 5 times slower as soon as another program took one of two cores; sleeping costs a quarter
    # or more where nothing else runs.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from rtx.cli import help
    from rtx.cli.commands import HELP_FLAGS, WORDS, find_command

    word = arguments[0] if arguments else ""
    if word == "--version":
        print(f"rtx {__version__}")
        return 0
    if word in ("", *HELP_FLAGS):
        print(help.front_page())
        return 0 if word else 2
    if word not in WORDS:
        near = nearest(word, [*WORDS, "--help", "--version"])
        raise UserError(
            f"unknown command {word!r}{near or '; the commands are ' + ', '.join(WORDS)}"
        )
    flags, words = split_flags(word, arguments[1:])
    if flags & {*HELP_FLAGS}:
        print(help.command_page(word, words))
        return 0
    if word == "completion":
        print(help.completion(words))
        return 0
    command, words = find_command(word, words, sweep=bool(flags & {"-m", "--multirun"}))
    return run_command(command, words, preview="--cfg" in flags)


def run_command(command: "Command", words: list[str], *, preview: bool) -> int:
    """Read the words after a command, and run it; `preview`: print what they compose instead."""
    from rtx.cli.request import read_request, startable, with_configuration

    request = read_request(command, words)
    word = command.name.split()[0]
    if command.prefix == "sweep.":
        from rtx.sweeps.sweep import sweep

        return sweep(request, preview=preview)
    if not command.loads_torch:
        return importlib.import_module(f"rtx.commands.{word}").main(request)
    request = with_configuration(request)
    if preview:
        from rtx.settings.run_config import to_yaml

        print(to_yaml(request.config), end="")
        return 0
    request = startable(request)
    if request is None:
        return 0
    if "torch" not in sys.modules and not started_by_another():
        line = f"rtx {word}: loading PyTorch, which takes some seconds"
        print(line, file=sys.stderr, flush=True)
    return importlib.import_module(f"rtx.commands.{word}").main(request)


def split_flags(word: str, words: Sequence[str]) -> tuple[set[str], list[str]]:
    """Return the flags among the words of a command, and the other words, without those that belong
    to a flag.

    Presets of a folder that --config-dir names are options from then on.
    """
    from rtx.cli.commands import BY_NAME, HELP_FLAGS

    command = BY_NAME.get(word)
    known = {*HELP_FLAGS, *(command.flags if command else ())}
    remaining: list[str] = []
    values: dict[str, str] = {}
    rest = iter(words)
    for text in rest:
        flag, equals, value = text.partition("=")
        if not text.startswith("-"):
            remaining.append(text)
        elif text in known and text in ("--cfg", "--config-dir"):
            values[text] = next(rest, "")
        elif equals and flag in known and flag == "--config-dir":
            values[flag] = value
        elif text in known:
            values[text] = ""
        else:
            refuse_flag(word, text, known)
    if values.get("--cfg", "job") != "job":
        raise UserError("--cfg: say --cfg job")
    if "--config-dir" in values:
        from rtx.settings.extensions import add_config_dir

        add_config_dir(values["--config-dir"])
    return set(values), remaining


def refuse_flag(word: str, flag: str, known: Iterable[str]) -> NoReturn:
    """Raise `UserError` for an unknown flag, with what to write instead."""
    if os.path.isdir(flag):
        raise UserError(f"{flag}: is taken for a flag; write ./{flag} for the folder")
    raise UserError(f"{shorten(flag)}: unknown flag of rtx {word}{flag_hint(flag, known)}")


def flag_hint(flag: str, known: Iterable[str]) -> str:
    """Return "; " and what to write instead of an unknown flag, else ""."""
    if "dry" in flag:
        return "; rtx plan says what a run would cost, --cfg job what it would be"
    if flag.startswith("--help="):
        return f"; write --help {flag.partition('=')[2]}"
    return hydra_flag(flag) or nearest(flag, known)


def complain(message: str, code: int) -> int:
    """Print an error message to stderr and return the exit code.

    The middle of a line is left out where a value makes it endless.
    """
    sys.stdout.flush()
    for line in message.splitlines():
        if len(line) > LONGEST_LINE:
            line = f"{line[:LINE_END]} ... {line[-LINE_END:]}"
        print(printable(f"rtx: {line}"), file=sys.stderr)
    return code


def only_prints(words: Sequence[str]) -> bool:
    """Whether nothing is lost where the reader of a command's output has seen enough."""
    from rtx.cli.commands import BY_NAME, HELP_FLAGS

    command = BY_NAME.get(words[0]) if words else None
    return bool({*words} & {*HELP_FLAGS}) or (command is not None and command.only_prints)


def reader_is_gone() -> bool:
    """Whether what reads our output has gone away (`rtx train --help | head`).

    Then nothing more is written to it.
    """
    poller = select.poll()
    # Errors are reported whatever events are named.
    poller.register(sys.stdout.fileno(), 0)
    if not poller.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True
