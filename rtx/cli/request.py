"""A command line, read once into a `Request`, which the command gets. No torch.

Mistakes are found here, before torch is imported, which takes seconds: a wrong configuration,
missing data, no driver of a GPU, a run in use, a run that the command cannot work on.
"""

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rtx.cli.commands import COMMANDS, Command, Positional
from rtx.cli.options import KEY_OPTIONS
from rtx.errors import UserError, listed, shorten, written
from rtx.settings.extensions import load_extensions
from rtx.settings.fields import unknown, unquoted
from rtx.settings.hydra_words import is_hydra_key
from rtx.settings.overrides import LAUNCHED, Override, check_overrides, is_unset, split_words
from rtx.settings.schema import GROUPS, SPREAD, all_fields, settings

if TYPE_CHECKING:
    from rtx.settings.schema import Config


@dataclass(frozen=True)
class Request:
    """What a command line asks for, its values of the right type and range."""

    command: Command
    words: tuple[str, ...]
    """All words after the command, as they were written."""
    names: tuple[str, ...]
    """The words before the first `key=value`: runs, folders, or an action."""
    runs: tuple[Path, ...]
    """The folders that `names` mean: runs, or a sweep."""
    options: Any
    """The dataclass of the command's options."""
    named: frozenset[str]
    """The options that were written."""
    overrides: tuple[Override, ...]
    configs: tuple["Config", ...] = ()
    """For train and plan: the composed configuration; else the one of each run, with overrides.

    For eval: one for each length.
    """
    trained_length: int | None = None
    """For eval: `data.length` of the run."""
    state: str = ""
    """For train and resume: how the run had ended (stopped, failed, ...) that now goes on.

    Empty for a new run.
    """

    @property
    def run(self) -> Path:
        """The folder of a command on one run."""
        (run,) = self.runs
        return run

    @property
    def config(self) -> "Config":
        """The configuration of a command on one run, or for a new one."""
        (config,) = self.configs
        return config


def read_request(command: Command, words: Sequence[str]) -> Request:
    """Return the words after a command as a request; `UserError` for keys that it does not read."""
    names = leading_names(command, words)
    options: dict[str, Any] = {}
    changed = []
    for word, key, text in split_words(words[len(names) :], command.own):
        if command.positional.takes_runs:
            refuse_several_devices(command, word, key, text)
        if key == "extensions" and command.positional.needs_run:
            # The code that the run was trained with.
            load_extensions(unquoted(text.strip()))
        elif key in command.own:
            options[key.removeprefix(command.prefix)] = command.own[key].read_word(text)
        else:
            refuse_foreign(command, key)
            changed.append(word)
    runs = find_runs(command, names)
    overrides = check_overrides(changed, sweep=command.prefix == "sweep.")
    return Request(
        command,
        tuple(words),
        tuple(names),
        tuple(runs),
        command.options(**options) if command.options else None,
        frozenset(options),
        tuple(overrides),
    )


def leading_names(command: Command, words: Sequence[str]) -> list[str]:
    """Return the words before the first `key=value`.

    A folder that exists may have "=" in its name.
    """
    if command.positional is Positional.NONE:
        return []
    names = list(itertools.takewhile(is_name, words))
    if command.positional is Positional.ACTION:
        return names
    after = words[len(names)] if len(words) > len(names) else ""
    if names and after.startswith("="):
        # A key, with blanks around its "=".
        names.pop()
    if not names and command.positional.needs_run:
        first = f"rtx {command.name} needs the run's folder first"
        raise UserError(f"{first}; usage: {command.usage()}")
    if len(names) > 1 and not command.positional.takes_several:
        raise UserError(f"rtx {command.name} takes 1 run, not also {shorten(names[1])!r}")
    return names


def is_name(word: str) -> bool:
    """Whether a word is the name of a run, a folder or an action."""
    return os.path.isdir(word) or not ("=" in word or is_unset(word))


def find_runs(command: Command, names: Sequence[str]) -> list[Path]:
    """Return the folders that names stand for; `UserError` where a run does not exist."""
    if command.positional in (Positional.NONE, Positional.ACTION):
        return []
    folders = [Path(name) for name in names]
    if not command.positional.takes_runs:
        return folders
    from rtx.runs.folder import find_run

    # A report is of many runs.
    keeps_folders = command.positional is Positional.MAYBE_RUNS
    runs: list[Path] = []
    for folder in folders:
        # Path.exists would raise in a folder that may not be read; `find_run` reports that.
        is_kept = keeps_folders and os.path.exists(folder)
        runs.append(folder if is_kept else find_run(folder))
    return runs


def refuse_several_devices(command: Command, word: str, key: str, text: str) -> None:
    """Raise `UserError` for hardware of several devices where a command works on one."""
    several = LAUNCHED if command.name == "resume" else (*LAUNCHED, *SPREAD)
    if key in ("hardware", "hardware.name") and unquoted(text.strip()) in several:
        reason = f"not for rtx {command.name}, which takes one run on this machine"
        raise UserError(f"{word}: {reason}")


def refuse_foreign(command: Command, key: str) -> None:
    """Raise `UserError` for a key that the command does not read, with the command that does, or
    the nearest key.
    """
    known = command.known()
    # Other functions refuse these keys, with messages that say more.
    refused_later = command.name == "resume" and key in all_fields()
    refused_later = refused_later or "@" in key or is_hydra_key(key)
    if key in known or refused_later:
        return
    # `model` is a group, and an option of rtx analyze pretrained.
    is_other = key not in GROUPS and not any(name.endswith(f".{key}") for name in known)
    if is_other:
        refuse_option_of_another(command, key)
    if key in settings():
        raise UserError(f"rtx {command.name} does not read {key}; it reads {listed(known, 300)}")
    raise UserError(unknown(key, known))


def refuse_option_of_another(command: Command, key: str) -> None:
    """Raise `UserError` for an option of another command."""
    for other in COMMANDS:
        option = key.removeprefix(f"{other.name.split()[0]}.")
        if option in other.own:
            reads = f"{option} is an option of rtx {other.name}"
            raise UserError(f"rtx {command.name} does not read {key}; {reads}")


def with_configuration(request: Request) -> Request:
    """Return a request with its configurations, composed or read from its runs, and checked."""
    from rtx.settings.compose import compose_checked
    from rtx.settings.run_config import load_run_config, on_one_device

    command = request.command
    if command.composes:
        from rtx.sweeps.cells import refuse_sweep

        config = compose_checked(request.overrides)
        refuse_sweep(request.overrides)
        return replace(request, configs=(config,))
    if command.name == "resume":
        from rtx.runs.resumption import changed_config

        folder = request.run.absolute()
        config = changed_config(load_run_config(folder), request.overrides)
        return replace(request, runs=(folder,), configs=(config,))
    if command.name == "export":
        configs = [load_run_config(run) for run in request.runs]
        return replace(request, configs=tuple(configs))
    if command.name == "eval":
        return with_lengths(request)
    configs = [on_one_device(load_run_config(run), request.overrides) for run in request.runs]
    return replace(request, configs=tuple(configs))


def with_lengths(request: Request) -> Request:
    """As `with_configuration`, of `rtx eval`: a configuration for each of its lengths."""
    from rtx.settings.run_config import load_run_config, on_one_device

    has_key = any(override.key == KEY_OPTIONS["length"] for override in request.overrides)
    if has_key and "length" in request.named:
        raise UserError(f"length= is {KEY_OPTIONS['length']}=; give one of them")
    trained = load_run_config(request.run)
    overrides = [*request.overrides, *key_overrides(request)]
    configs = []
    try:
        for of_length in overrides_of_lengths(request, trained):
            configs.append(on_one_device(trained, [*of_length, *overrides]))
    except UserError as error:
        raise UserError(in_words_of_options(str(error))) from error
    return replace(request, configs=tuple(configs), trained_length=trained.data.length)


def overrides_of_lengths(request: Request, trained: "Config") -> list[list[Override]]:
    """Return the overrides for each value of option `length`; none of them for a run's own."""
    from rtx.cli.lengths import overrides_of_length, read_lengths, refuse_length

    text = request.options.length
    if text is None:
        return [[]]
    lengths = read_lengths(text)
    for length in lengths:
        refuse_length(trained, length)
    return [overrides_of_length(trained, length) for length in lengths]


def key_overrides(request: Request) -> list[Override]:
    """Return the overrides that the other options of rtx eval in `KEY_OPTIONS` mean."""
    overrides = []
    for name, key in KEY_OPTIONS.items():
        if name in request.named and name != "length":
            value = written(getattr(request.options, name))
            overrides.append(Override(key, (value,)))
    return overrides


def in_words_of_options(message: str) -> str:
    """Return a message with the names of options in place of the keys that they change."""
    for option, key in KEY_OPTIONS.items():
        message = message.replace(key, option)
    return message


def startable(request: Request) -> Request | None:
    """Return a request whose command can start: its data, GPU driver and run are there.

    Returns None where nothing is left to do; then a line has been printed.
    """
    from rtx.cli.refusals import refuse
    from rtx.settings.requirements import refuse_without_driver

    name = request.command.name
    if name == "plan":
        return request
    if name == "train":
        return startable_training(request)
    if name == "resume":
        return startable_resumption(request)
    for config in request.configs:
        refuse(name, config, request.options)
        if name != "export":
            refuse_without_driver(config.hardware)
    return request


def startable_training(request: Request) -> Request | None:
    """As `startable`, of `rtx train`, which begins a new run or goes on with that of RTX_RUN."""
    from rtx.data.catalog import check_source, data_root
    from rtx.runs.folder import requested_folder
    from rtx.runs.lock import refuse_busy
    from rtx.runs.resumption import place_of
    from rtx.settings.identity import with_absolute_path
    from rtx.settings.requirements import refuse_without_driver

    check_source(request.config.data, data_root())
    config, folder, state = place_of(with_absolute_path(request.config))
    if state is None:
        # Nothing is left to do.
        return None
    refuse_without_driver(config.hardware)
    requested = requested_folder()
    if requested:
        refuse_busy(requested)
    runs = (folder,) if folder else ()
    return replace(request, configs=(config,), runs=runs, state=state)


def startable_resumption(request: Request) -> Request | None:
    """As `startable`, of `rtx resume`."""
    from rtx.runs.lock import refuse_busy
    from rtx.runs.resumption import plan_resumption
    from rtx.settings.requirements import refuse_without_driver

    state = plan_resumption(request.run, request.config)
    if not state:
        return None
    refuse_without_driver(request.config.hardware)
    refuse_busy(request.run)
    return replace(request, state=state)
