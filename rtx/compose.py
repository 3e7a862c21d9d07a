"""Overrides and the files of `conf/` -> one checked `Config`; a `Config` -> plain dictionaries and back.

Hydra composes (through its compose API, which touches no folder, no logging and no `sys.argv`); the schema in
`rtx/config.py` checks types, and `rtx.checks.resolve` ranges and what fits with what.
"""

from __future__ import annotations

import dataclasses
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError

from rtx import __version__
from rtx.checks import check_data, resolve
from rtx.commandline.overrides import check_overrides
from rtx.config import GROUPS, Config, DataConfig, all_fields, sections
from rtx.errors import UserError
from rtx.identity import digest
from rtx.keys import conf_dir, suggest_key
from rtx.options import read_words
from rtx.sets import IMAGE_SETS, image_side
from rtx.wording import shorten

CONFIG_NAME = "config"
RUN_CONFIG = "config.yaml"
LARGEST = 1 << 20  # bytes of a run's configuration; ours have 4,000


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
    checked = check_overrides(read_words("data", list(overrides)).overrides)
    return check_data(compose_unresolved([str(override) for override in checked])[0])


def compose_checked(overrides: Sequence[str]) -> Config:
    """As `compose`, for overrides that `check_overrides` returned."""
    return resolve(compose_unresolved(overrides)[0])


def compose_unresolved(overrides: Sequence[str]) -> tuple[Config, dict[str, str | None]]:
    """As `compose_checked`, before ranges and fit are checked; returns also the option chosen in each group."""
    with hydra_session():
        node = hydra.compose(CONFIG_NAME, for_hydra(overrides), return_hydra_config=True)
        choices = {group: node.hydra.runtime.choices[group] for group in GROUPS}
        values = OmegaConf.to_container(OmegaConf.masked_copy(node, [*sections(), "seed", "name"]), resolve=True)
    assert isinstance(values, dict)
    return with_image_length(to_config({str(key): value for key, value in values.items()}), overrides), choices


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
    """Turn what Hydra, OmegaConf and YAML raise into a `UserError` of one line; `where` before each line of any."""
    try:
        yield
    except UserError as error:
        raise UserError("\n".join(where + line for line in str(error).splitlines())) from error.__cause__
    except MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{where}not valid YAML{line}: {error.problem}") from error
    except YAMLError as error:
        raise UserError(f"{where}not valid YAML: {first_line(error)}") from error
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
    known, found, problems = all_fields(), {}, []
    for key, value in flat(values).items():
        try:
            if key not in known:
                raise UserError(f"unknown key {shorten(str(key))!r}{suggest_key(key, known)}")
            found[key] = known[key].read(value)
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError("\n".join(problems))
    return with_values(Config(), found)


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested dictionaries as one with dotted keys."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and name in sections():
            found |= {f"{name}.{key}": each for key, each in value.items()}
        else:
            found[name] = value
    return found


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """Return a copy of a configuration with other values at some dotted keys."""
    for section in sections():
        own = {key.partition(".")[2]: value for key, value in values.items() if key.startswith(f"{section}.")}
        config = dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **own)})
    return dataclasses.replace(config, **{key: value for key, value in values.items() if "." not in key})


def load_run_config(run_dir: str | Path) -> Config:
    """Return the configuration of a run from its folder; nothing in it is interpolated.

    Raises:
        UserError: there is no such run, its config.yaml is not one, or is of rtx 0.1.
    """
    path = Path(run_dir) / RUN_CONFIG
    try:
        with user_errors(f"{path}: "):
            values = entries(parsed_run(path))
            if "eval" in values and "audit" in values:
                raise UserError(f"the run was made by rtx 0.1, which alone can read it; this is {__version__}")
            return resolve(to_config(values))
    except (FileNotFoundError, NotADirectoryError):
        what = "has no config.yaml" if Path(run_dir).is_dir() else "no such folder"
        raise UserError(f"{run_dir}: {what}; a run is a folder such as outputs/<name>/<run>") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None


def parsed_run(path: Path) -> yaml.MappingNode:
    """Return the syntax of a run's config.yaml, aliases unfollowed; raises `UserError` and what reading raises."""
    try:
        whole = stat.S_ISREG(path.stat().st_mode) and path.stat().st_size <= LARGEST
        node = yaml.compose(path.read_text("utf-8"), Loader=yaml.SafeLoader) if whole else None
    except RecursionError:
        node = None
    if not isinstance(node, yaml.MappingNode) or not node.value:
        raise UserError("is not the configuration of a run")
    return node


def entries(node: yaml.MappingNode, depth: int = 2) -> dict[str, Any]:
    """Return a mapping of a YAML file with every scalar as its text (None for null), two levels deep at the most.

    Raises:
        UserError: a key stands there twice, or there are lists or deeper levels.
    """
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
    parser, values = OverridesParser.create(), {}
    for override in check_overrides(overrides):
        if override.key in GROUPS:
            group = getattr(compose_checked([str(override)]), override.key)
            config = dataclasses.replace(config, **{override.key: group})
        else:
            with user_errors():
                values[override.key] = parser.parse_override(str(override)).value()
    return resolve(with_values(config, {key: all_fields()[key].read(value) for key, value in values.items()}))


def config_hash(config: Config) -> str:
    """Return 12 hexadecimal digits that two configurations share exactly where all that can change results is equal.

    Names, the logger, and how often is saved are left out (`rtx.identity`). A path counts from the current folder: the
    same words in another folder may mean other files.
    """
    return digest(flat(to_dict(with_absolute_path(config))))


def with_absolute_path(config: Config) -> Config:
    """Return a configuration whose data.path means the same from any folder."""
    if config.data.path is None:
        return config
    path = os.path.abspath(os.path.expanduser(config.data.path))
    return dataclasses.replace(config, data=dataclasses.replace(config.data, path=path))
