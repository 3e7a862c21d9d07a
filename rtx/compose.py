"""Overrides and the files of `conf/` -> one checked `Config`; a `Config` -> plain dictionaries and back.

Hydra composes the groups (through its compose API, which touches no folder, no logging and no `sys.argv`); keys are set
on what it gives, so that cells of a sweep with the same groups share one composition.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError

from rtx import __version__
from rtx.checks import check_data, idle, refuse, resolve
from rtx.commandline.overrides import Override, check_overrides
from rtx.config import GROUPS, Config, DataConfig, all_fields, sections
from rtx.data.sets import IMAGE_SETS, image_side
from rtx.errors import UserError, collect
from rtx.identity import digest
from rtx.keys import conf_dir, suggest_key, unquoted
from rtx.options import read_words
from rtx.wording import shorten

RUN_CONFIG = "config.yaml"
LARGEST = 1 << 20  # bytes of a run's configuration; ours have 4,000


def compose(overrides: Iterable[str]) -> Config:
    """Return the configuration that `rtx train <overrides>` runs, checked, with routing.clusters frozen.

    Raises:
        UserError: a key, option, type or range is wrong, nothing reads a key that is set, or two values do not fit
            together; a line for each.
    """
    checked = check_overrides(overrides)
    config = resolve(compose_unresolved(checked))
    refuse(idle(config, (entry.key for entry in checked)).values())
    return config


def compose_data(overrides: Iterable[str]) -> DataConfig:
    """Return the data that overrides of data alone choose, checked whatever the model.

    Raises:
        UserError: as `compose`, or another key or group.
    """
    checked = check_overrides(read_words("data", list(overrides)).overrides)
    config = compose_unresolved(checked)
    refuse(idle(config, (entry.key for entry in checked)).values())
    return check_data(config)


def compose_unresolved(checked: Sequence[Override]) -> Config:
    """As `compose`, before it is checked what fits together."""
    node = OmegaConf.masked_copy(composed(chosen(checked)), [*sections(), "seed", "name"])
    set_keys(node, checked)
    with user_errors():
        values = OmegaConf.to_container(node, resolve=True)
    assert isinstance(values, dict)
    config = to_config({str(key): value for key, value in values.items()})
    data = config.data
    if data.name not in IMAGE_SETS or any(entry.key == "data.length" for entry in checked):
        return config
    # Whatever a model preset wrote, N is what the images ask for; of data=images as conf/data has it.
    return with_values(config, {"data.length": 3 * (image_side(data) or 32) ** 2})


def chosen(checked: Iterable[Override]) -> tuple[str, ...]:
    """Return the options of groups among overrides as Hydra takes them: the last of each; it knows no null."""
    found = {entry.key: entry.values[0] for entry in checked if entry.key in GROUPS}
    return tuple(f"{group}={option}" for group, option in found.items() if option != "null")


@functools.lru_cache(maxsize=64)
def composed(words: tuple[str, ...]) -> DictConfig:
    """Return what the files of `conf/` give for options of groups, Hydra's own part included; not to be changed."""
    ConfigStore.instance().store(name="schema", node=Config)
    with user_errors(), hydra.initialize_config_dir(str(conf_dir()), job_name="rtx", version_base="1.3"):
        return hydra.compose("config", list(words), return_hydra_config=True)


def set_keys(node: DictConfig, checked: Iterable[Override]) -> None:
    """Set the keys of overrides; a value that refers to another key (`${...}`) is left to OmegaConf."""
    for entry in checked:
        if field := all_fields().get(entry.key):
            (text,) = entry.values
            with user_errors():
                OmegaConf.update(node, entry.key, unquoted(text.strip()) if "${" in text else field.read_word(text))


@contextmanager
def user_errors(where: str = "") -> Iterator[None]:
    """Turn what Hydra, OmegaConf and YAML raise into a `UserError` of one line; `where` before each line of any."""
    try:
        yield
    except UserError as error:
        raise UserError("\n".join(where + line for line in str(error).splitlines())) from error.__cause__
    except YAMLError as error:
        mark = error.problem_mark if isinstance(error, MarkedYAMLError) else None
        said = error.problem if isinstance(error, MarkedYAMLError) else first_line(error)
        raise UserError(f"{where}not valid YAML{f', line {mark.line + 1}' if mark else ''}: {said}") from error
    except (HydraException, OmegaConfBaseException) as error:
        inner = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else None
        said = ": ".join(first_line(each) for each in (error, inner) if each)
        key = getattr(inner or error, "full_key", None)
        raise UserError(f"{where}{key}: {said}" if key and key not in said else where + said) from error


def first_line(error: BaseException) -> str:
    """Return what an error says, without the advice on its further lines (`+key=...`, search paths, internals)."""
    return str(error).strip().partition("\n")[0].rstrip(".")


def to_dict(config: Config) -> dict[str, Any]:
    """Return the configuration as nested dictionaries of plain values."""
    return dataclasses.asdict(config)


def to_yaml(config: Config) -> str:
    """Return the configuration as YAML, in the order of the schema: the text of a run's config.yaml."""
    return OmegaConf.to_yaml(OmegaConf.create(to_dict(config)))


def to_config(values: Mapping[str, Any]) -> Config:
    """Return the configuration that `to_dict` took apart, each value in its type and range; unset: the default.

    Raises:
        UserError: with a line for each key or value that cannot be.
    """
    known = all_fields()

    def read(item: tuple[str, Any]) -> tuple[str, Any]:
        key, value = item
        if key not in known:
            raise UserError(f"unknown key {shorten(str(key))!r}{suggest_key(key, known)}")
        return key, known[key].read(value)

    return with_values(Config(), dict(collect(read, flat(values).items())))


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested dictionaries as one with dotted keys."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        inside = isinstance(value, Mapping) and name in sections()
        found |= {f"{name}.{key}": each for key, each in value.items()} if inside else {name: value}
    return found


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """Return a copy of a configuration with other values at some dotted keys."""
    nested = {key: value for key, value in values.items() if "." not in key}
    for section in sections():
        own = {key.partition(".")[2]: value for key, value in values.items() if key.startswith(f"{section}.")}
        nested[section] = dataclasses.replace(getattr(config, section), **own)
    return dataclasses.replace(config, **nested)


def load_run_config(run_dir: str | Path) -> Config:
    """Return the configuration of a run from its folder; nothing in it is interpolated.

    Raises:
        UserError: there is no such run, its config.yaml is not one, or is of rtx 0.1.
    """
    path = Path(run_dir) / RUN_CONFIG
    try:
        whole = stat.S_ISREG(path.stat().st_mode) and path.stat().st_size <= LARGEST
        with user_errors(f"{path}: "):
            values = entries(yaml.compose(path.read_text("utf-8"), Loader=yaml.SafeLoader) if whole else None)
            if "eval" in values and "audit" in values:
                raise UserError(f"the run was made by rtx 0.1, which alone can read it; this is {__version__}")
            return resolve(to_config(values))
    except (FileNotFoundError, NotADirectoryError):
        what = "has no config.yaml" if Path(run_dir).is_dir() else "no such folder"
        raise UserError(f"{run_dir}: {what}; a run is a folder such as outputs/<name>/<run>") from None
    except (OSError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None


def entries(node: yaml.Node | None, depth: int = 2) -> dict[str, Any]:
    """Return a mapping of a YAML file with every scalar as its text (None for null), two levels deep at the most; one
    with a key twice, lists, aliases or deeper levels is refused.
    """
    if not isinstance(node, yaml.MappingNode) or not node.value:
        raise UserError("is not the configuration of a run")
    found: dict[str, Any] = {}
    for key, value in node.value:
        line, name = f"line {key.start_mark.line + 1}", shorten(str(key.value))
        if not isinstance(key, yaml.ScalarNode) or key.value in found:
            raise UserError(f"{line}: found duplicate key {name}")
        if isinstance(value, yaml.MappingNode) and depth > 1:
            found[key.value] = entries(value, depth - 1)
        elif isinstance(value, yaml.ScalarNode):
            found[key.value] = None if value.tag == "tag:yaml.org,2002:null" else value.value
        else:
            raise UserError(f"{line}: {name} must be one value")
    return found


def merge(config: Config, overrides: Iterable[str]) -> Config:
    """Return a run's configuration with overrides on top, checked; `rtx.options` says which a command takes.

    Raises:
        UserError: as `compose`.
    """
    values: dict[str, Any] = {}
    checked = check_overrides(overrides)
    for entry in checked:
        if entry.key in GROUPS:
            group = getattr(resolve(compose_unresolved([entry])), entry.key)
            config = dataclasses.replace(config, **{entry.key: group})
        else:
            values[entry.key] = all_fields()[entry.key].read_word(entry.values[0])
    config = resolve(with_values(config, values))
    refuse(idle(config, values).values())
    return config


def config_hash(config: Config) -> str:
    """Return 12 hexadecimal digits that two configurations share exactly where all that can change results is equal.

    Names, the logger, and how often is saved are left out (`rtx.identity`). A path counts from the current folder: the
    same words in another folder may mean other files.
    """
    return digest(flat(to_dict(with_absolute_path(config))))


def with_absolute_path(config: Config) -> Config:
    """Return a configuration whose data.path means the same from any folder."""
    if config.data.path is None or (config.data.name == "hub" and not os.path.exists(config.data.path)):
        return config
    return with_values(config, {"data.path": os.path.abspath(os.path.expanduser(config.data.path))})
