"""The flags behind a command, and what is found wrong with its words before torch is imported."""

from __future__ import annotations

import argparse
import os
from typing import NoReturn

from rtx.errors import UserError, nearest
from rtx.keys import suggest_key
from rtx.options import READS, read_words, what_to_do

FLAGS = {
    "train": (("--help", "-h"), ("--cfg", "-c"), ("--package", "-p"), ("--multirun", "-m")),
    "plan": (("--help", "-h"), ("--cfg", "-c"), ("--package", "-p")),
    "": (("--help", "-h"),),
}
"""The flags of the commands that have more than --help."""


class FlagParser(argparse.ArgumentParser):
    """Reads the flags, wherever they stand, and leaves the other words."""

    def error(self, message: str) -> NoReturn:
        """Raise `UserError` in place of leaving."""
        raise UserError(f"{message}; see rtx --help")


def parse_flags(word: str, arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Take the flags out of the arguments of command `word`; returns them and the rest.

    Raises:
        UserError: a flag that the command does not have, a value that it does not take, or two that exclude each other.
    """
    parser = FlagParser(prog=f"rtx {word}", add_help=False, allow_abbrev=False)
    parser.set_defaults(multirun=False, cfg="", package="")
    known = FLAGS.get(word, FLAGS[""])
    for names in known:
        parser.add_argument(*names, action="store_true" if names[0] in ("--help", "--multirun") else "store")
    flags, words = parser.parse_known_args(arguments)
    for unknown in (each for each in words if each.startswith("-") and not os.path.isdir(each)):
        near = nearest(unknown, [name for names in known for name in names])
        raise UserError(f"{unknown}: unknown flag of rtx {word}{near}; see rtx {word} --help")
    if flags.cfg not in ("", "job"):
        raise UserError(f"--cfg {flags.cfg}: must be job")
    if flags.multirun and flags.cfg:
        raise UserError("only one of --multirun and --cfg can be given")
    if flags.package and not flags.cfg:
        raise UserError("--package goes with --cfg")
    return flags, words


def show(words: list[str], package: str) -> int:
    """Print the configuration as a run records it, or the part of it at the dotted key `package`.

    Raises:
        UserError: an override is wrong, or `package` names no part of the configuration.
    """
    from omegaconf import OmegaConf

    from rtx.compose import compose, to_dict
    from rtx.config import all_fields, sections
    from rtx.sweep.cells import refuse_axes

    node = OmegaConf.create(to_dict(compose(words)))
    refuse_axes(words)
    known = [*sections(), *all_fields()]
    if package and package not in known:
        raise UserError(f"--package {package}: no such part of the configuration{suggest_key(package, known)}")
    part = OmegaConf.select(node, package) if package else node
    print(OmegaConf.to_yaml(part) if OmegaConf.is_config(part) else f"{part}\n", end="")
    return 0


def check_first(word: str, arguments: list[str]) -> None:
    """Raise `UserError` for a wrong configuration, or for data that are not there, before the imports of the command:
    torch takes seconds.
    """
    command, words = word, arguments
    if word in ("data", "schema", "completion"):
        return
    if command not in READS:
        what, words = what_to_do(word, arguments)
        command = f"{word} {what}"
    if command == "bench steps":
        return  # it reads its words itself, before torch
    from rtx.compose import compose, load_run_config, merge
    from rtx.sweep.cells import refuse_axes, refuse_half_a_sweep

    if word == "train":
        from rtx.data.catalog import check_source, data_root

        config = compose(words)
        refuse_half_a_sweep(words)
        check_source(config.data, data_root())
    elif word == "plan":
        compose(words)
        refuse_axes(words)
    elif word == "resume":
        from rtx.commands.resume import changed

        read = read_words(command, words)
        changed(load_run_config(read.runs[0]), read.overrides)
    elif word not in ("report", "sweep"):
        read = read_words(command, words)
        for run in read.runs:
            merge(load_run_config(run), read.overrides)
        if READS[command].composes and not read.runs:
            compose(read.overrides)
            refuse_axes(read.overrides)
