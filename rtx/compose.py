"""Overrides and the files of `conf/` -> one checked `Config`; a `Config` -> plain dictionaries and back.

Hydra composes (through its compose API, which touches no folder, no logging and no `sys.argv`); the schema in
`rtx/config.py` checks types, and `rtx.checks.resolve` ranges and what fits with what.
"""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError

from rtx.checks import check_data, resolve
from rtx.commandline.fields import all_fields, conf_dir
from rtx.commandline.overrides import check_overrides
from rtx.commandline.vocabulary import LAUNCHED, vocabulary
from rtx.config import GROUPS, Config, DataConfig
from rtx.config_training import SPREAD
from rtx.errors import UserError
from rtx.identity import digest
from rtx.sets import IMAGE_SETS, image_side

CONFIG_NAME = "config"
RUN_CONFIG = "config.yaml"


def compose(overrides: Iterable[str]) -> Config:
    """Return the configuration that `rtx train <overrides>` runs, checked, with routing.clusters frozen.

    Raises:
        UserError: a key, option, type or range is wrong, or two values do not fit together; a line for each.
    """
    return compose_checked([str(override) for override in check_overrides(overrides)])


def compose_data(overrides: Iterable[str]) -> DataConfig:
    """Return the data that overrides of data alone choose, checked whatever the model.

    Raises:
        UserError: as `compose`, or another key or group.
    """
    checked = check_overrides(overrides, understood=vocabulary("data"))
    return check_data(compose_unresolved([str(override) for override in checked])[0])


def compose_checked(overrides: Sequence[str]) -> Config:
    """As `compose`, for overrides that `check_overrides` returned."""
    return resolve(compose_unresolved(overrides)[0])


def compose_unresolved(overrides: Sequence[str]) -> tuple[Config, dict[str, str | None]]:
    """As `compose_checked`, before ranges and fit are checked; returns also the option chosen in each group."""
    with hydra_session():
        node = hydra.compose(CONFIG_NAME, for_hydra(overrides), return_hydra_config=True)
        choices = {group: node.hydra.runtime.choices[group] for group in GROUPS}
        with open_dict(node):
            del node["hydra"]
        return with_image_length(to_config(node), overrides), choices


def for_hydra(overrides: Iterable[str]) -> list[str]:
    """Return overrides as Hydra takes them: the last experiment alone; `experiment=null` is unknown to it."""
    words = list(overrides)
    chosen = [word for word in words if word.startswith("experiment=")]
    kept = [word for word in chosen[-1:] if word != "experiment=null"]
    return [*kept, *(word for word in words if not word.startswith("experiment="))]


def with_image_length(config: Config, overrides: Sequence[str]) -> Config:
    """Return a configuration with the N that its images ask for, whatever a model preset wrote; overrides win."""
    data = config.data
    if data.name not in IMAGE_SETS or any(each.lstrip("+").startswith("data.length=") for each in overrides):
        return config
    side = image_side(data) or 32  # data=images: as conf/data has it; where it is wrong, the first image says so
    return dataclasses.replace(config, data=dataclasses.replace(data, length=3 * side**2))


@contextmanager
def hydra_session() -> Iterator[Any]:
    """Give Hydra the folder `conf/` and the schema; yields its own object, and turns its errors into `UserError`."""
    ConfigStore.instance().store(name="schema", node=Config)
    with user_errors(), hydra.initialize_config_dir(str(conf_dir()), job_name="rtx", version_base="1.3"):
        yield GlobalHydra.instance().hydra


@contextmanager
def user_errors(where: str = "") -> Iterator[None]:
    """Turn what Hydra, OmegaConf and YAML raise into a `UserError` of one line, `where` in front."""
    try:
        yield
    except YAMLError as error:
        raise UserError(where + yaml_problem(error)) from error
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(where + first_lines(error)) from error


def first_lines(error: BaseException) -> str:
    """Return what an error of Hydra or OmegaConf says, without its advice (`+key=...`, search paths, internals)."""
    said = [str(error).strip().partition("\n")[0]]
    if isinstance(error.__cause__, OmegaConfBaseException):
        said.append(str(error.__cause__).strip().partition("\n")[0])
    key = getattr(error, "full_key", None) or getattr(error.__cause__, "full_key", None)
    text = ": ".join(line.rstrip(".") for line in said if line)
    return f"{key}: {text}" if key and key not in text else text


def yaml_problem(error: YAMLError) -> str:
    """Return what a YAML parser found wrong, and where."""
    if isinstance(error, MarkedYAMLError) and error.problem and error.problem_mark:
        return f"not valid YAML, line {error.problem_mark.line + 1}: {error.problem}"
    return f"not valid YAML: {str(error).partition(chr(10))[0]}"


def to_config(node: Any) -> Config:
    """Return the `Config` that a composed OmegaConf node holds, its interpolations resolved and types checked."""
    config = OmegaConf.to_object(node)
    assert isinstance(config, Config)
    return config


def to_dict(config: Config) -> dict[str, Any]:
    """Return the configuration as nested dictionaries of plain values."""
    return dataclasses.asdict(config)


def to_yaml(config: Config) -> str:
    """Return the configuration as YAML, in the order of the schema: the text of a run's config.yaml."""
    return OmegaConf.to_yaml(OmegaConf.create(to_dict(config)))


def from_dict(values: dict[str, Any], where: str = "") -> Config:
    """Return the checked configuration that `to_dict` took apart.

    Args:
        values: nested dictionaries; what is missing keeps the schema's default.
        where: stands before each line of an error, such as the file the values came from.

    Raises:
        UserError: an unknown key, a wrong type or range.
    """
    refuse_numbers_for_truth(values, where)
    with user_errors(where):
        merged = OmegaConf.merge(OmegaConf.structured(Config), values)
        config = to_config(merged)
    try:
        return resolve(config)
    except UserError as error:
        raise UserError("\n".join(where + line for line in str(error).splitlines())) from None


def refuse_numbers_for_truth(values: dict[str, Any], where: str) -> None:
    """Refuse numbers other than 0 and 1 for what is true or false: OmegaConf takes each but 0 for true.

    Raises:
        UserError: with a line for each.
    """
    wrong = []
    for key, field in all_fields().items():
        value = nested(values, key)
        if field.kind is bool and isinstance(value, int) and value not in (0, 1):
            wrong.append(f"{where}{key}={value}: must be {field.allowed}")
    if wrong:
        raise UserError("\n".join(wrong))


def load_run_config(run_dir: str | Path) -> Config:
    """Return the configuration of a run from its folder.

    Raises:
        UserError: there is no such run, or its config.yaml is not one.
    """
    path = Path(run_dir) / RUN_CONFIG
    try:
        with user_errors(f"{path}: "):
            text = path.read_text("utf-8")
            loaded = OmegaConf.to_container(OmegaConf.load(io.StringIO(text)), resolve=True)
            written = yaml.load(text, Loader=yaml.BaseLoader)
    except FileNotFoundError:
        what = "has no config.yaml" if Path(run_dir).is_dir() else "no such folder"
        raise UserError(f"{run_dir}: {what}; a run is a folder such as outputs/<name>/<run>") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None
    if not isinstance(loaded, dict) or not loaded:
        raise UserError(f"{path}: is not the configuration of a run")
    values = {str(key): value for key, value in loaded.items()}
    keep_texts(values, written)
    return from_dict(values, where=f"{path}: ")


def keep_texts(values: dict[str, Any], written: dict[str, Any]) -> None:
    """Put the letters of the file in the place of numbers where a text is meant: a name of 007 is not 7."""
    for key, field in all_fields().items():
        letters, number = nested(written, key), isinstance(nested(values, key), int | float)
        if field.kind is str and number and isinstance(letters, str) and "${" not in letters:
            section, _, name = key.rpartition(".")
            (values[section] if section else values)[name] = letters


def nested(values: dict[str, Any], key: str) -> Any:
    """Return the value at a dotted key of nested dictionaries, None where there is none."""
    section, _, name = key.rpartition(".")
    holder = values.get(section) if section else values
    return holder.get(name) if isinstance(holder, dict) else None


def merge(config: Config, overrides: Iterable[str], command: str = "resume") -> Config:
    """Return a run's configuration with overrides on top, checked.

    Args:
        config: the run's own.
        overrides: what the user wrote behind the run.
        command: the command on a run that reads them; `rtx.commandline.vocabulary` says which it takes.

    Raises:
        UserError: as `compose`, a key that the command does not read, or a group that a run keeps.
    """
    understood = vocabulary(command)
    checked = check_overrides(overrides, understood=understood)
    for override in checked:
        if override.key == "hardware" and override.values[0] in LAUNCHED:
            raise UserError(f"{override}: makes jobs of the cells of a sweep (rtx train -m), not of rtx {command}")
        spread = override.key in ("hardware", "hardware.name") and any(name in override.values[0] for name in SPREAD)
        if understood.one_device and spread:
            raise UserError(f"{override}: rtx {command} works on one device; hardware takes auto, cpu or gpu")
    node = OmegaConf.structured(config)
    parser = OverridesParser.create()
    with user_errors():
        for override in sorted(checked, key=lambda override: override.key not in GROUPS):
            if override.key in GROUPS:
                group = getattr(compose_checked([str(override)]), override.key)
                OmegaConf.update(node, override.key, group, merge=False)
            else:
                OmegaConf.update(node, override.key, parser.parse_override(str(override)).value())
        return resolve(to_config(node))


def config_hash(config: Config) -> str:
    """Return 12 hexadecimal digits that two configurations share exactly where all that can change results is equal.

    Names, the logger, the number of loading processes, and what is done beside training (OUTSIDE) are left out. A path
    counts from the current folder: the same words in another folder may mean other files.
    """
    config = with_absolute_path(config)
    return digest({key: get(config, key) for key in all_fields()})


def with_absolute_path(config: Config) -> Config:
    """Return a configuration whose data.path means the same from any folder."""
    if config.data.path is None:
        return config
    path = os.path.abspath(os.path.expanduser(config.data.path))
    return dataclasses.replace(config, data=dataclasses.replace(config.data, path=path))


def get(config: Config, key: str) -> Any:
    """Return the value at a dotted key."""
    node: Any = config
    for part in key.split("."):
        node = getattr(node, part)
    return node
