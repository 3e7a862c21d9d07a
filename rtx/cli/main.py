"""`rtx <command> [overrides]`: finds the command, reads its flags, and imports only what that command needs.

Exit codes: 0; 2 a mistake of the user; 1 a failed run or a fault of ours; 130 after SIGINT; 143 after SIGTERM, and
after SIGUSR1 and SIGUSR2 where they stop a run. `sys.argv` stays as it is: a run starts its other ranks with it.
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
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from rtx import __version__
from rtx.errors import RunFailed, UserError, nearest, printable, shorten
from rtx.machine import out_of_memory
from rtx.runs.signals import EXIT_CODES, INTERRUPTED, PREEMPTED, Stopped, ignore_signals
from rtx.settings.hydra_words import hydra_flag
from rtx.variables import started_by_another

if TYPE_CHECKING:
    from rtx.settings.schema import Config

FLAGS = {"--help", "-h"}
OF_GROUPS = {"--cfg", "--config-dir"}
MORE_FLAGS = {
    "train": {"-m", "--multirun", *OF_GROUPS},
    "plan": OF_GROUPS,
    "data": {"--config-dir"},
}
PRINTING = {"plan", "runs", "sweep", "completion", *FLAGS}
"""What only prints, so that no harm is done where the reader has seen enough (`rtx plan | head -1`)."""


def entry() -> None:
    """The `rtx` script and `python -m rtx`."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(
            errors="replace"
        )  # a terminal that lacks a letter is no reason to fail
    atexit.register(
        ignore_signals
    )  # called last: then Python lets go of handlers, and any signal would kill it
    try:
        handle_signals(sys.argv[1:2])
        code = main()
    except Stopped as stopped:  # a moment before or after `main`
        code = stopped.code
    for number in (
        EXIT_CODES
    ):  # the work is over: what is left, such as threads to wait for, may be cut short
        if signal.getsignal(number) not in (signal.SIG_IGN, signal.SIG_DFL):
            signal.signal(number, lambda *_: os._exit(code))
    sys.exit(code)


def handle_signals(words: list[str]) -> None:
    """Leave with the code that schedulers expect while imports take their seconds; later a run has its own handlers."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped(PREEMPTED, f"stopped by {signal.Signals(number).name}")

    if (
        started_by_another()
    ):  # by the first process of a run, which has the signals from this one's first moment on
        ignore_signals()
        return
    for number, code in EXIT_CODES.items():
        ours = code == PREEMPTED and (number == signal.SIGTERM or words in (["train"], ["resume"]))
        if ours and signal.getsignal(number) is not signal.SIG_IGN:  # as by nohup
            signal.signal(number, stop)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `rtx` with `argv` (`sys.argv[1:]` if None) and return its exit code."""
    try:
        code = dispatch(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except (UserError, RunFailed) as error:
        return complain(str(error), 2 if isinstance(error, UserError) else 1)
    except Stopped as stopped:
        return complain(str(stopped), stopped.code)
    except SystemExit as left:  # with 0, say, which would pass for work that is done
        return complain(
            f"sys.exit({left.code!r}) was called before the end, by an extension or a package", 2
        )
    except KeyboardInterrupt:
        return complain("stopped by SIGINT", INTERRUPTED)
    except Exception as error:
        if isinstance(error, BrokenPipeError) and reader_is_gone():
            return int(
                not {*(sys.argv[1:] if argv is None else argv)} & PRINTING
            )  # others have not done their work
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            return complain(f"{shorten(str(error.filename))}: {error.strerror}", 2)
        if reason := out_of_memory(error):
            return complain(reason, 1)
        traceback.print_exc()
        return 1


def dispatch(arguments: list[str]) -> int:
    """Run the command that `arguments` begin with."""
    # OpenMP reads this when it is loaded. Threads that wait by spinning made a small model's step 2 to 5 times slower
    # as soon as another program took one of two cores; sleeping costs a quarter or more where nothing else runs.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from rtx.cli import help, options

    word, *rest = arguments or [""]
    if word in ("", *FLAGS, "--version"):
        print(f"rtx {__version__}" if word == "--version" else help.front_page())
        return 0 if word else 2
    if word not in (commands := list(dict.fromkeys(name.split()[0] for name in options.READS))):
        hint = (
            nearest(word, [*commands, "--help", "--version"])
            or f"; the commands are {', '.join(commands)}"
        )
        raise UserError(f"unknown command {word!r}{hint}")
    flags, words = split_flags(word, rest)
    if flags & FLAGS or word == "completion":
        print(help.command_page(word, words) if flags else help.completion(words))
        return 0
    if flags & {"-m", "--multirun"}:
        from rtx.sweeps.sweep import sweep

        return sweep(words, preview="--cfg" in flags)
    if word not in (
        "runs",
        "sweep",
        "report",
        "data",
    ):  # which import no torch and check their words themselves
        if "--cfg" in flags:
            return print_configuration(word, words)
        if not check_first(word, words):
            return 0
        if "torch" not in sys.modules and not started_by_another():
            print(
                f"rtx {word}: loading PyTorch, which takes some seconds",
                file=sys.stderr,
                flush=True,
            )
    return importlib.import_module(f"rtx.commands.{word}").main(words)


def print_configuration(word: str, words: list[str]) -> int:
    """Print what the words of `rtx train` or `rtx plan` compose."""
    from rtx.settings.run_config import to_yaml

    print(to_yaml(composed(word, words)), end="")
    return 0


def composed(word: str, words: list[str]) -> "Config":
    """Return what the words of `rtx train` or `rtx plan` compose; `UserError` for a sweep, or missing data."""
    from rtx.cli.options import read_words
    from rtx.data.catalog import check_source, data_root
    from rtx.settings.compose import compose
    from rtx.settings.overrides import check_overrides
    from rtx.sweeps.cells import refuse_sweep

    overrides = read_words(word, words).overrides
    config = compose(overrides)
    refuse_sweep(check_overrides(overrides))
    if word == "train":
        check_source(config.data, data_root())
    return config


def split_flags(command: str, words: list[str]) -> tuple[set[str], list[str]]:
    """Return the flags among the words of a command, and the other words, without those that belong to a flag."""
    words = [
        part
        for word in words
        for part in (word.split("=", 1) if word.startswith("--config-dir=") else [word])
    ]
    flags, known = (
        {word for word in words if word.startswith("-")},
        FLAGS | MORE_FLAGS.get(command, set()),
    )
    if unknown := sorted(flags - known):
        if os.path.isdir(unknown[0]):
            raise UserError(
                f"{unknown[0]}: is taken for a flag; write ./{unknown[0]} for the folder"
            )
        raise UserError(
            f"{shorten(unknown[0])}: unknown flag of rtx {command}{flag_hint(unknown[0], known)}"
        )
    values = {}
    for flag in flags & OF_GROUPS:
        at = words.index(flag) + 1
        values[flag] = "".join(words[at : at + 1])
        del words[at : at + 1]
    if values.get("--cfg", "job") != "job":
        raise UserError("--cfg: say --cfg job")
    if "--config-dir" in values:
        from rtx.settings.extensions import add_config_dir

        add_config_dir(values["--config-dir"])
    return flags, [word for word in words if word not in flags]


def flag_hint(flag: str, known: Iterable[str]) -> str:
    """Return the way out for an unknown flag, to stand behind its refusal, or ""."""
    if "dry" in flag:
        return "; rtx plan says what a run would cost, --cfg job what it would be"
    if flag.startswith("--help="):
        return f"; write --help {flag.partition('=')[2]}"
    return hydra_flag(flag) or nearest(flag, known)


def check_first(word: str, words: list[str]) -> bool:
    """Return whether a command has work to do, which one on a run that is done has not (it has said so).

    `UserError` for all that can be refused before torch is imported, which takes seconds: a wrong configuration,
    missing data, a GPU without a driver, a run in use, a run that has nothing for the command.
    """
    from rtx.cli.options import read_words, what_to_do
    from rtx.cli.refusals import refuse
    from rtx.settings.devices import refuse_without_driver
    from rtx.settings.run_config import load_run_config, merge

    what, words = what_to_do(word, words)
    command = f"{word} {what}".strip()
    if word in ("train", "plan"):
        config = composed(word, words)
        return word == "plan" or check_training(config)
    read = read_words(command, words)
    if word == "resume":
        return check_resumption(read.runs[0].absolute(), read.overrides)
    for run in read.runs:
        config = merge(load_run_config(run), read.overrides)
        refuse(command, config, read.options)
        if word != "export":
            refuse_without_driver(config.hardware)
    return True


def check_training(config: "Config") -> bool:
    """As `check_first`, of `rtx train`."""
    from rtx.runs.folder import requested_folder
    from rtx.runs.lock import refuse_busy
    from rtx.runs.resumption import place_of
    from rtx.settings.devices import refuse_without_driver
    from rtx.settings.identity import with_absolute_path

    _, _, before = place_of(with_absolute_path(config))
    if before is None:
        return False
    refuse_without_driver(config.hardware)
    if folder := requested_folder():
        refuse_busy(folder)
    return True


def check_resumption(folder: Path, overrides: list[str]) -> bool:
    """As `check_first`, of `rtx resume`."""
    from rtx.commands.resume import changed
    from rtx.runs.lock import refuse_busy
    from rtx.runs.resumption import plan_resumption
    from rtx.settings.devices import refuse_without_driver
    from rtx.settings.run_config import load_run_config

    config = changed(load_run_config(folder), overrides)
    if not plan_resumption(folder, config):
        return False
    refuse_without_driver(config.hardware)
    refuse_busy(folder)
    return True


def complain(message: str, code: int) -> int:
    """Write each line of an error message to stderr, the middle of one left out that a value makes endless."""
    sys.stdout.flush()
    lines = (
        line if len(line) <= 1000 else f"{line[:250]} ... {line[-250:]}"
        for line in message.splitlines()
    )
    print("\n".join(printable(f"rtx: {line}") for line in lines), file=sys.stderr)
    return code


def reader_is_gone() -> bool:
    """Whether what reads our output has gone away (`rtx train --help | head`); then nothing more is written to it."""
    poller = select.poll()
    poller.register(sys.stdout.fileno(), 0)  # errors are reported whatever is asked for
    if not poller.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True
