"""Overrides and the files of `conf/` -> one checked `Config`.

Hydra composes the groups. Keys are set on the result, so that cells of a sweep with the same groups
share it.
"""

import functools
import os
import warnings
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import hydra
import yaml

# Hydra has no public name for the folder of its own plug-ins.
from hydra._internal import core_plugins
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import hydra_plugins
from rtx.errors import RunFailed, UserError
from rtx.machine import names_lack_of_memory
from rtx.processes import SWEEP_VARIABLE
from rtx.settings.data_sets import SETS
from rtx.settings.derived import image_side, reads_self
from rtx.settings.extensions import recorded
from rtx.settings.fields import unquoted
from rtx.settings.overrides import Override, check_overrides
from rtx.settings.preset_files import load_preset
from rtx.settings.presets import CACHES, CONFIG_DIRS, conf_dir, options, preset, read_text
from rtx.settings.rules import check_data, resolve
from rtx.settings.schema import (
    GROUPS,
    ROUTING_SIZES,
    Config,
    DataConfig,
    RoutingConfig,
    all_fields,
    flat,
    to_config,
    with_values,
)
from rtx.settings.sources import PRIMARY, ConfSearchPath, ConfSource, PresetSource

NAMED_BY_FILE = ("data", "optimizer", "hardware", "model")
"""Groups whose options have the names of their files as `<group>.name`, by conf/config.yaml."""
PLUGINS = {"ImportlibResourcesConfigSource", "StructuredConfigSource", "GridSweeper"}
"""Plug-ins of both folders that Hydra reads, its own and `hydra_plugins`.

Where one is missing, a folder was not read.
"""
COMPOSITIONS_KEPT = 256
"""How many compositions each cache has; one takes 0.45 MB."""
OWN_IMAGE_SIDE = 32
"""Height and width of data=images that conf/data has for images of unknown size."""


def compose(overrides: Iterable[str]) -> Config:
    """Return the configuration that `rtx train <overrides>` runs; UserError for wrong overrides."""
    return compose_checked(check_overrides(overrides))


def compose_checked(checked: Sequence[Override]) -> Config:
    """As `compose`, of checked overrides."""
    config = compose_unresolved(checked)
    keys = [entry.key for entry in checked]
    if config.model.start is not None:
        # Imported here, because pydantic delays the start of all commands.
        from rtx.settings.pretrained import with_start

        config = with_start(config, keys)
    if SWEEP_VARIABLE in os.environ:
        # A cell gets every key of its sweep, also those that only other cells read.
        return resolve(config)
    return resolve(config, keys)


def compose_data(overrides: Iterable[str]) -> DataConfig:
    """Return the data that overrides choose; only rules of data are checked. Errors: `compose`."""
    return compose_data_checked(check_overrides(overrides))


def compose_data_checked(checked: Sequence[Override]) -> DataConfig:
    """As `compose_data`, of checked overrides."""
    config = compose_unresolved(checked)
    check_data(config, [entry.key for entry in checked])
    return config.data


def compose_unresolved(checked: Sequence[Override]) -> Config:
    """As `compose_checked`, without derived values and without a check of the rules."""
    words = chosen(checked)
    groups = composed(words)
    refuse_second_model(dict(word.split("=", 1) for word in words), groups.model.name)
    values = {entry.key: entry.values[0] for entry in checked if entry.key in all_fields()}
    with user_errors():
        config = to_config(with_references(words, values))
    if not SETS[config.data.name].image or "data.length" in values:
        return config
    # The size of the images decides N, whatever a preset of the model sets.
    side = image_side(config.data) or OWN_IMAGE_SIDE
    return with_values(config, {"data.length": 3 * side**2})


def with_references(words: tuple[str, ...], texts: Mapping[str, str]) -> dict[str, Any]:
    """Return the values for options of groups, with those of some keys, and references resolved.

    A copy of the composed files takes longer than all else, and the cells of a sweep need one each.
    So they share one, which gets its own values back.
    """
    node, former = changeable(words)
    try:
        for key, text in texts.items():
            OmegaConf.update(node, key, value_of(key, text))
        return cast(dict[str, Any], OmegaConf.to_container(node, resolve=True))
    finally:
        for key in texts:
            OmegaConf.update(node, key, former[key])


def value_of(key: str, text: str) -> Any:
    """Return the value of an override, or its text where it refers to other keys."""
    if "${" in text:
        return unquoted(text.strip())
    value = all_fields()[key].read_word(text)
    return recorded(value) if key == "extensions" and value is not None else value


def chosen(checked: Iterable[Override]) -> tuple[str, ...]:
    """Return the last option of each group among overrides, in Hydra's words.

    `null` means no option; Hydra has no such word, so it is left out.
    """
    last = {entry.key: entry.values[0] for entry in checked if entry.key in GROUPS}
    choices = {group: option for group, option in last.items() if option.lower() != "null"}
    if "heads" in choices:
        choices["heads"] = heads_option(choices["heads"], choices.get("experiment", ""))
    # In the order of GROUPS, so that the cache of `composed` has one entry for the same choices.
    words = [f"{group}={choices[group]}" for group in GROUPS if group in choices]
    if choices.get("routing") == "none":
        # The file of a model, which is composed later, has the number of its routing heads.
        words += ["routing.heads=0", "routing.layers=0"]
    return tuple(words)


def heads_option(option: str, experiment: str) -> str:
    """Return the option of the group heads that a word chooses for an experiment.

    An experiment, or one that it builds on, may have options in a folder of its name: with
    `experiment=pg19_baselines` the word `local` chooses `pg19/local`. UserError: none of this name.
    """
    folders = lineage(experiment)
    for name in (*(f"{folder}/{option}" for folder in folders), option):
        if preset("heads", name):
            return name
    words = [name.rpartition("/") for name in options("heads")]
    names = dict.fromkeys(word for folder, _, word in words if folder in ("", *folders))
    chosen_experiment = f"experiment={experiment}" if experiment else "no experiment"
    raise UserError(f"heads={option}: with {chosen_experiment} heads is one of {', '.join(names)}")


def lineage(experiment: str) -> list[str]:
    """Return the name of an experiment and of those that its file builds on, the nearest first."""
    path = preset("experiment", experiment)
    if path is None:
        return []
    names = [experiment]
    defaults: list[Any] = load_preset(path).get("defaults", [])
    for entry in defaults:
        if isinstance(entry, str) and entry != "_self_":
            names += lineage(entry.removeprefix("/experiment/"))
    return names


def refuse_second_model(groups: Mapping[str, str], name: str) -> None:
    """Raise UserError for model= beside an experiment whose file sets the keys of another model.

    `name` is the model.name of the composed configuration: the experiment's, if it sets one.
    """
    if not {"experiment", "model"} <= groups.keys() or name == name_in_preset(groups["model"]):
        return
    experiment = f"experiment={groups['experiment']}"
    problem = f"{experiment} lays out a model of its own, {name}"
    raise UserError(
        f"model={groups['model']}: {problem}; leave it out, or set keys of that one"
        " (model.layers=...)"
    )


def name_in_preset(model: str) -> str:
    """Return the model.name that the file of a model sets, else the name of the file."""
    path = preset("model", model)
    if path is None:
        return model
    # Hydra's directive in the first line: the file sets keys of all groups.
    is_global = "@package _global_" in read_text(path).partition("\n")[0]
    key = "model.name" if is_global else "name"
    return OmegaConf.select(load_preset(path), key) or model


@functools.lru_cache(maxsize=COMPOSITIONS_KEPT)
def composed(words: tuple[str, ...]) -> DictConfig:
    """Return the composed files of `conf/` for options of groups, with Hydra's own part; read-only.

    Values have no types yet: `to_config` reads them.
    """
    load_plugins()
    store_data_sets()
    folder = str(conf_dir())
    with (
        user_errors(),
        hydra.initialize_config_dir(folder, job_name="rtx", version_base="1.3"),
    ):
        overrides = [*words, *search_path()]
        node = hydra.compose(PRIMARY, overrides, return_hydra_config=True)
        # Only the schema has this key.
        assert "seed" in node, "Hydra has read conf/ without the schema"
        for group in NAMED_BY_FILE:
            # The name refers to Hydra's choices, which only exist within this block.
            node[group].name = node[group].name
    OmegaConf.set_readonly(node, True)
    return node


CACHES.append(composed.cache_clear)


@functools.cache
def store_data_sets() -> None:
    """Give Hydra the defaults of registered data sets, once for all compositions."""
    store = ConfigStore.instance()
    for name, data_set in SETS.items():
        if data_set.defaults is not None:
            store.store(group="data", name=name, node=dict(data_set.defaults))


CACHES.append(store_data_sets.cache_clear)


def load_plugins() -> None:
    """Let Hydra import its plug-ins, and register those of rtx.

    Hydra itself ignores a folder that cannot be read, and only warns of a plug-in that cannot be
    imported, also where the reason is too little memory.

    Raises:
        OSError: a folder of plug-ins cannot be read.
        MemoryError: memory has run out at a plug-in.
    """
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        plugins = Plugins.instance()
    for warning in recorded:
        message = str(warning.message)
        if names_lack_of_memory(message):
            # Advice to remove the plug-in comes before the last line.
            reason = message.strip().splitlines()[-1].strip()
            raise MemoryError(reason)
        warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    if {plugin.__name__ for plugin in plugins.discover()} >= PLUGINS:
        for plugin in (ConfSource, PresetSource, ConfSearchPath):
            plugins.register(plugin)
        return
    for folder in [*core_plugins.__path__, *hydra_plugins.__path__]:
        # An error here says why Hydra could not read it either.
        os.listdir(folder)
    raise RunFailed("Hydra could not read its plug-ins: too little memory, or too many open files")


@functools.lru_cache(maxsize=COMPOSITIONS_KEPT)
def changeable(words: tuple[str, ...]) -> tuple[DictConfig, dict[str, Any]]:
    """Return a copy of `composed` without Hydra's part, and its values with their references."""
    groups = composed(words)
    node = OmegaConf.masked_copy(groups, [str(key) for key in groups if key != "hydra"])
    return node, flat(cast(dict[str, Any], OmegaConf.to_container(node)))


CACHES.append(changeable.cache_clear)


def search_path() -> list[str]:
    """Return the override of Hydra's search path that adds the user's folders, if there are any."""
    if not CONFIG_DIRS:
        return []
    urls: list[str] = []
    for folder in CONFIG_DIRS:
        escaped = str(folder).replace("'", r"\'")
        urls.append(f"'{PresetSource.scheme()}://{escaped}'")
    return [f"hydra.searchpath=[{','.join(urls)}]"]


def preset_routing(config: Config) -> dict[str, Any]:
    """Return the rules in conf/routing/ for the selection of a configuration, by dotted keys.

    Sizes are the configuration's; keys that the file leaves out have the schema's defaults. A
    selection of an extension has no file, and so no rules.
    """
    path = preset("routing", config.routing.selection)
    if path is None:
        return {}
    in_file = cast(dict[str, Any], OmegaConf.to_container(load_preset(path)))
    rules = {key: value for key, value in in_file.items() if key not in ROUTING_SIZES}
    sizes = {size: getattr(config.routing, size) for size in ROUTING_SIZES}
    routing = RoutingConfig(**{**rules, **sizes})
    routing = replace(routing, attend_self=reads_self(routing))
    return {f"routing.{key}": value for key, value in vars(routing).items()}


@contextmanager
def user_errors(where: str = "") -> Generator[None]:
    """Turn errors of Hydra, OmegaConf and YAML into a `UserError` of one line.

    `where` goes before each line of any error.
    """
    try:
        yield
    except UserError as error:
        raise UserError("\n".join(where + line for line in str(error).splitlines())) from None
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(where + hydra_message(error)) from error
    except yaml.YAMLError as error:
        raise UserError(f"{where}not valid YAML: {on_one_line(error)}") from error
    except BrokenPipeError:
        # The reader of stdout has ended, as in `rtx train -m seed=1,2 --cfg job | head`.
        raise
    except (OSError, UnicodeError, RecursionError) as error:
        raise UserError(where + on_one_line(error)) from error


def hydra_message(error: Exception) -> str:
    """Return an error of Hydra or OmegaConf on one line, with its key.

    Further lines are left out: their advice (`+key=...`, search paths) is wrong for rtx.
    """
    errors: list[BaseException] = [error]
    if isinstance(error.__cause__, OmegaConfBaseException):
        errors.append(error.__cause__)
    first_lines = [str(cause).strip().partition("\n")[0].rstrip(".") for cause in errors]
    message = ": ".join(first_lines)
    key = getattr(errors[-1], "full_key", None)
    return f"{key}: {message}" if key and key not in message else message


def on_one_line(error: Exception) -> str:
    """Return the message of an error on one line."""
    return " ".join(str(error).split())
