"""`rtx <command> [overrides]`: finds the command, reads its flags, and imports only what it needs.

Exit codes: 0; 2 a mistake of the user; 1 a failed run or a bug of rtx; 130 after SIGINT; 143 after
SIGTERM, and after SIGUSR1 and SIGUSR2 where they stop a run. `sys.argv` is not changed: a run
starts its other ranks with it.
"""

import atexit
import dataclasses
import errno
import gc
import importlib
import io
import os
import select
import shlex
import signal
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from rtx.errors import RunFailed, UserError, nearest, printable, shorten
from rtx.machine import (
    OUT_OF_MEMORY,
    is_of_system,
    memory_is_exhausted,
    out_of_memory,
    system_reason,
)
from rtx.processes import check_launch, garbage_collection_paused, started_by_another
from rtx.runs.signals import EXIT_CODES, INTERRUPTED, PREEMPTED, Stopped, ignore_signals
from rtx.settings.hydra_words import hydra_flag
from rtx.version import __version__

if TYPE_CHECKING:
    from rtx.cli.commands import Command


LONGEST_LINE = 1000
"""Characters of the longest line of an error message that is printed whole."""
LINE_END = 250
"""Characters at the start and at the end that are printed of a longer line."""
FLAGS_WITH_VALUE = ("--cfg", "--config-dir")
SHORT_FLAGS = {"-c": "--cfg", "-cd": "--config-dir"}
"""The short forms of Hydra's flags that rtx takes, too."""


def entry() -> None:
    """The `rtx` script and `python -m rtx`."""
    open_streams()
    sys.unraisablehook = note_ignored
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A character that the terminal cannot encode is printed as "?", and raises no error.
        sys.stdout.reconfigure(errors="replace")
    # The first function registered is called last. After it Python restores the default handlers,
    # with which any signal would kill the process.
    atexit.register(ignore_signals)
    try:
        handle_signals(sys.argv[1:2])
        code = main()
    except Stopped as stopped:
        # The signal came just before or after `main`.
        code = stopped.code
    # From here on a signal may end the process at once: nothing but waits for threads is left.
    for number in EXIT_CODES:
        if signal.getsignal(number) not in (signal.SIG_IGN, signal.SIG_DFL):
            signal.signal(number, lambda *_: os._exit(code))
    # Without this, garbage is collected at the exit, which takes a second once torch is loaded.
    gc.freeze()
    sys.exit(code)


def note_ignored(ignored: "sys.UnraisableHookArgs") -> None:
    """Print a line on an error that nothing can handle, such as one of torch's in a destructor."""
    line = f"note: ignored: {shorten(repr(ignored.exc_value))} in {shorten(repr(ignored.object))}"
    print(line, file=sys.stderr)


class Lossy(io.FileIO):
    """A stream for messages: what cannot be written is lost, and raises no error."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data) or 0
        except OSError:
            return memoryview(data).nbytes


def open_streams() -> None:
    """Open os.devnull in place of standard streams that are closed, and make stderr lossy.

    A daemon may have closed them. Otherwise the next file that is opened would get the number of
    one, and what is printed.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # It gets the lowest number that is free, which is this one.
            # by path: the system's null device
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stdout is None:
        # by path: a descriptor that is open
        sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
    encoding = sys.stderr.encoding if sys.stderr else None
    messages = io.BufferedWriter(Lossy(2, "w", closefd=False))
    sys.stderr = io.TextIOWrapper(messages, encoding, "backslashreplace", line_buffering=True)


def handle_signals(words: list[str]) -> None:
    """Let signals end the process with the code that schedulers expect, during the slow imports.

    A run sets its own handlers later (`rtx.runs.signals.Signals`).
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped(PREEMPTED, f"stopped by {signal.Signals(number).name}")

    if started_by_another():
        # The first process of the run obeys signals for all.
        ignore_signals()
        return
    trains = words in (["train"], ["resume"])
    for number, code in EXIT_CODES.items():
        preempts = code == PREEMPTED and (trains or number == signal.SIGTERM)
        # A signal that nohup has set to be ignored stays ignored.
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
        # An exit code of 0 would mean success.
        caller = "by an extension or a package"
        return complain(f"sys.exit({exit_.code!r}) was called before the end, {caller}", 2)
    except KeyboardInterrupt:
        return complain("stopped by SIGINT", INTERRUPTED)
    except Exception as error:
        return unexpected(error, words)


def unexpected(error: Exception, words: Sequence[str]) -> int:
    """Print an error that is neither `UserError` nor `RunFailed`, and return its exit code."""
    if isinstance(error, BrokenPipeError) and reader_is_gone():
        return 0 if only_prints(words) else 1
    reason = out_of_memory(error)
    if not reason and memory_is_exhausted():
        # Python and its libraries also raise other errors then, which mislead.
        reason = f"{OUT_OF_MEMORY}: {type(error).__name__}: {shorten(str(error), 200)}"
    if reason:
        return complain(reason, 1)
    if isinstance(error, OSError) and is_of_system(error):
        # A name on the command line is too long, or the system fails: its disk, its limits.
        return complain(system_reason(error), 2 if error.errno == errno.ENAMETOOLONG else 1)
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
    refuse_lost_folder()
    flags, words = split_flags(word, arguments[1:])
    if flags & {*HELP_FLAGS}:
        print(help.command_page(word, words))
        return 0
    if word == "completion":
        print(help.completion(words))
        return 0
    command, words = find_command(word, words, sweep=bool(flags & {"-m", "--multirun"}))
    return run_command(command, words, preview="--cfg" in flags)


def refuse_lost_folder() -> None:
    """Raise `UserError` if the current folder is gone, since paths are relative to it."""
    try:
        os.getcwd()
    except OSError as error:
        problem = f"the current folder cannot be found ({error.strerror})"
        raise UserError(f"{problem}; change to one that exists: cd") from error


def run_command(command: "Command", words: list[str], *, preview: bool) -> int:
    """Read and check the words after a command, then import it and run it.

    Args:
        preview: print the configuration instead.
    """
    from rtx.cli.request import read_request, startable, with_configuration

    if command.loads_torch:
        check_launch()
    request = read_request(command, words)
    word = command.name.split()[0]
    if command.prefix == "sweep.":
        from rtx.sweeps.sweep import sweep

        command_line = shlex.join(["rtx", "train", "-m", *request.words])
        options = dataclasses.asdict(request.options)
        return sweep(request.overrides, command_line, **options, preview=preview)
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
    # Almost all objects that torch and Lightning create live until the exit. To scan them for
    # garbage takes a sixth of the time of the import.
    with garbage_collection_paused():
        module = importlib.import_module(f"rtx.commands.{word}")
    return module.main(request)


def split_flags(word: str, words: Sequence[str]) -> tuple[set[str], list[str]]:
    """Return the flags among the words of a command, and all other words but the values of flags.

    A folder of presets that --config-dir names is added to the options of groups.
    """
    from rtx.cli.commands import BY_NAME, HELP_FLAGS

    command = BY_NAME.get(word)
    known = {*HELP_FLAGS, *(command.flags if command else ())}
    remaining: list[str] = []
    values: dict[str, str] = {}
    rest = iter(words)
    for text in rest:
        if not text.startswith("-"):
            remaining.append(text)
            continue
        name, equals, value = text.partition("=")
        flag = SHORT_FLAGS.get(name, name)
        has_value = flag in FLAGS_WITH_VALUE
        if flag not in known or (equals and not has_value):
            refuse_flag(word, text, known)
        if has_value and not equals:
            value = next(rest, "")
        values[flag] = value
    check_preview(values)
    if "--config-dir" in values:
        from rtx.settings.extensions import add_config_dir

        add_config_dir(values["--config-dir"])
    return set(values), remaining


def check_preview(values: Mapping[str, str]) -> None:
    """Raise `UserError` for a part of the configuration that cannot be printed alone."""
    part = values.get("--cfg")
    if part is None and "--resolve" in values:
        raise UserError("--resolve: goes with --cfg job, which prints the configuration")
    if part not in (None, "job"):
        instead = "say --cfg job; --help <group> prints one group"
        raise UserError(f"{shorten(f'--cfg {part}'.strip())}: {instead}")


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
    flush_or_discard()
    for line in message.splitlines():
        if len(line) > LONGEST_LINE:
            line = f"{line[:LINE_END]} ... {line[-LINE_END:]}"
        print(printable(f"rtx: {line}"), file=sys.stderr)
    return code


def only_prints(words: Sequence[str]) -> bool:
    """Whether a command may end without an error when its output is read no further."""
    from rtx.cli.commands import BY_NAME, HELP_FLAGS

    if {*words} & {*HELP_FLAGS, "--cfg", "-c"}:
        return True
    command = BY_NAME.get(words[0]) if words else None
    return command is not None and command.only_prints


def reader_is_gone() -> bool:
    """Whether the reader of stdout has ended (`rtx train --help | head`).

    If it has, stdout becomes os.devnull.
    """
    poller = select.poll()
    # poll reports errors even for an empty set of events.
    poller.register(sys.stdout.fileno(), 0)
    if not poller.poll(0):
        return False
    discard_stdout()
    return True


def flush_or_discard() -> None:
    """Write what stdout holds; if that fails, stdout becomes os.devnull."""
    try:
        sys.stdout.flush()
    except OSError:
        discard_stdout()


def discard_stdout() -> None:
    """Let stdout be os.devnull, so that Python does not try again to write when it ends."""
    # by path: the system's null device
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
