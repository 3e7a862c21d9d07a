"""The flags behind a command: `--help`, and Hydra's own where they mean something."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rtx.errors import UserError, nearest

# Flag -> the attribute of Flags it sets.
SWITCHES = {"--help": "help", "-h": "help", "--multirun": "multirun", "-m": "multirun", "--resolve": "resolve"}
VALUED = {"--cfg": "cfg", "-c": "cfg", "--info": "info", "-i": "info", "--package": "package", "-p": "package"}
VALUES = {
    "cfg": ("job", "hydra", "all"),
    "info": ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
}
# The commands that compose a configuration take Hydra's flags; the others read the configuration of a run.
TAKES = {
    "train": ("help", "multirun", "cfg", "resolve", "package", "info"),
    "plan": ("help", "cfg", "resolve", "package", "info"),
}


@dataclass
class Flags:
    """What the flags of a command line said; a text is empty where its flag was not given."""

    help: bool = False
    multirun: bool = False
    resolve: bool = False
    cfg: str = ""
    info: str = ""
    package: str = ""


def parse_flags(word: str, arguments: Sequence[str]) -> tuple[Flags, list[str]]:
    """Take the flags out of the arguments of command `word`, wherever they stand; returns them and the rest.

    Raises:
        UserError: a flag that the command does not have, a value that it does not take, or two that exclude each other.
    """
    flags, rest, waiting = Flags(), [], list(arguments)
    taken = TAKES.get(word, ("help",))
    known = [flag for flag, name in (SWITCHES | VALUED).items() if name in taken]
    while waiting:
        argument = waiting.pop(0)
        flag, equals, value = argument.partition("=")
        if not argument.startswith("-"):
            rest.append(argument)
        elif flag not in known:
            raise UserError(f"{flag}: unknown flag of rtx {word}{nearest(flag, known)}; see rtx {word} --help")
        elif flag in SWITCHES:
            if equals:
                raise UserError(f"{argument}: {flag} takes no value")
            setattr(flags, SWITCHES[flag], True)
        else:
            setattr(flags, VALUED[flag], value if equals else next_value(flag, waiting))
    check_flags(flags)
    return flags, rest


def next_value(flag: str, waiting: list[str]) -> str:
    """Take the value of `flag` from the front of `waiting`; `--info` alone means `--info all`."""
    allowed = VALUES.get(VALUED[flag], ())
    if VALUED[flag] == "info" and not (waiting and waiting[0] in allowed):
        return "all"
    if not waiting or waiting[0].startswith("-"):
        raise UserError(f"{flag} needs a value" + (f": one of {', '.join(allowed)}" if allowed else ""))
    return waiting.pop(0)


def check_flags(flags: Flags) -> None:
    """Refuse a value that a flag does not take, and flags that mean nothing together."""
    for name, allowed in VALUES.items():
        value = getattr(flags, name)
        if value and value not in allowed:
            raise UserError(f"--{name} {value}: must be one of {', '.join(allowed)}{nearest(value, allowed)}")
    if not flags.help and sum((flags.multirun, bool(flags.cfg), bool(flags.info))) > 1:
        raise UserError("only one of --multirun, --cfg and --info can be given")
    if not flags.cfg and (flags.resolve or flags.package):
        raise UserError("--resolve and --package go with --cfg")
