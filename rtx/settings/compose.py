"""Overrides and the files of `conf/` -> one checked `Config`; a `Config` -> plain dictionaries, its hash, and back.

Hydra composes the groups; keys are set on what it gives, so that cells of a sweep with the same groups share that.
"""

import functools
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict as to_dict
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rtx.data.sets import SETS, image_side
from rtx.disk import read_file
from rtx.errors import UserError, refuse, shorten
from rtx.settings.extensions import run_files
from rtx.settings.fields import unknown, unquoted
from rtx.settings.overrides import Override, check_overrides
from rtx.settings.presets import CONFIG_DIRS, conf_dir, preset
from rtx.settings.rules import data_problems, default_where_unread, idle, resolve
from rtx.settings.schema import (
    GROUPS,
    NAMELIKE,
    OUTSIDE,
    ROUTING_SIZES,
    SECTIONS,
    YOUNGER,
    Config,
    DataConfig,
    RoutingConfig,
    all_fields,
    flat,
    reads_self,
    with_values,
)
from rtx.variables import SWEEP_VARIABLE

RUN_CONFIG = "config.yaml"


def compose(overrides: Iterable[str]) -> Config:
    """Return the configuration that `rtx train <overrides>` runs; `UserError` for all that is wrong with the words."""
    checked = check_overrides(overrides)
    told = SWEEP_VARIABLE in os.environ  # of a cell: a key that others of its sweep read
    return resolve(compose_unresolved(checked), () if told else (entry.key for entry in checked))


def compose_data(overrides: Iterable[str]) -> DataConfig:
    """Return the data that overrides of data alone choose, checked whatever the model; errors as of `compose`."""
    checked = check_overrides(overrides)
    config = compose_unresolved(checked)
    refuse([*data_problems(config), *idle(config, (entry.key for entry in checked)).values()])
    return config.data


def compose_unresolved(checked: Sequence[Override]) -> Config:
    """As `compose`, before it is checked what fits together."""
    values = {entry.key: entry.values[0] for entry in checked if entry.key in all_fields()}
    if (
        "extensions" in values
    ):  # by their names and sha256: a run has copies, wherever they came from
        values["extensions"] = re.sub(f"[^{os.pathsep}]*/", "", values["extensions"])
    node = OmegaConf.masked_copy(
        composed(chosen(checked)), [*SECTIONS, "seed", "name", "extensions"]
    )
    with user_errors():
        for key, text in values.items():
            # What refers to another key is OmegaConf's to read.
            value = unquoted(text.strip()) if "${" in text else all_fields()[key].read_word(text)
            OmegaConf.update(node, key, value)
        # Without types: OmegaConf takes any number that a reference names for a truth value.
        plain = OmegaConf.create(OmegaConf.to_container(node))
        config = to_config(OmegaConf.to_container(plain, resolve=True))  # type: ignore[arg-type]
    given = dict(word.split("=", 1) for word in chosen(checked))
    if {
        "experiment",
        "model",
    } <= given.keys():  # which lays out its own where it has a name that no preset gave it
        experiment = f"experiment={given['experiment']}"
        if (own := composed((experiment, "model=tiny")).model.name) != "tiny":
            said = f"{experiment} lays out a model of its own, {own}; leave it out, or set keys of that one"
            raise UserError(f"model={given['model']}: {said} (model.layers=...)")
    if not SETS[config.data.name].image or "data.length" in values:
        return config
    # Whatever a model preset wrote, N is what the images ask for; of data=images as conf/data has it.
    return with_values(config, {"data.length": 3 * (image_side(config.data) or 32) ** 2})


def chosen(checked: Iterable[Override]) -> tuple[str, ...]:
    """Return the options of groups among overrides as Hydra takes them: the last of each; it knows no null."""
    found = {entry.key: entry.values[0] for entry in checked if entry.key in GROUPS}
    return tuple(f"{group}={option}" for group, option in found.items() if option.lower() != "null")


@functools.lru_cache(maxsize=64)
def composed(words: tuple[str, ...]) -> DictConfig:
    """Return what the files of `conf/` give for options of groups, Hydra's own part included; not to be changed."""
    ConfigStore.instance().store(name="schema", node=Config)
    for name, known in SETS.items():
        if known.defaults is not None:
            ConfigStore.instance().store(group="data", name=name, node=dict(known.defaults))
    own = ["'file://{}'".format(str(folder).replace("'", r"\'")) for folder in CONFIG_DIRS]
    words += (f"hydra.searchpath=[{','.join(own)}]",) if own else ()
    with (
        user_errors(),
        hydra.initialize_config_dir(str(conf_dir()), job_name="rtx", version_base="1.3"),
    ):
        return hydra.compose("config", list(words), return_hydra_config=True)


def preset_routing(config: Config) -> dict[str, Any]:
    """Return the rules that conf/routing/ has for the selection of a configuration, by dotted keys, without sizes.

    Keys that the file leaves out have the schema's defaults; a selection of an extension, which has no file, none.
    """
    path = preset("routing", config.routing.selection)
    if path is None:
        return {}
    in_file = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.load(path)))
    rules = {key: value for key, value in in_file.items() if key not in ROUTING_SIZES}
    sizes = {size: getattr(config.routing, size) for size in ROUTING_SIZES}
    routing = RoutingConfig(**{**rules, **sizes})
    routing = replace(routing, attend_self=reads_self(routing))
    return {f"routing.{key}": value for key, value in to_dict(routing).items()}


@contextmanager
def user_errors(where: str = "") -> Iterator[None]:
    """Turn what Hydra, OmegaConf and YAML raise into a `UserError` of one line; `where` before each line of any."""
    try:
        yield
    except UserError as error:
        raise UserError("\n".join(where + line for line in str(error).splitlines())) from None
    except (HydraException, OmegaConfBaseException) as error:
        inner = [error.__cause__] if isinstance(error.__cause__, OmegaConfBaseException) else []
        key = getattr((*inner, error)[0], "full_key", None)
        # Without the advice on its further lines (`+key=...`, search paths, internals).
        said = ": ".join(
            str(each).strip().partition("\n")[0].rstrip(".") for each in (error, *inner)
        )
        raise UserError(
            f"{where}{key}: {said}" if key and key not in said else where + said
        ) from error
    except (yaml.YAMLError, OSError, UnicodeError, RecursionError) as error:
        what = "not valid YAML: " if isinstance(error, yaml.YAMLError) else ""
        raise UserError(where + what + " ".join(str(error).split())) from error


def to_yaml(config: Config) -> str:
    """Return the configuration as YAML, in the order of the schema: the text of a run's config.yaml."""
    return OmegaConf.to_yaml(OmegaConf.create(to_dict(config)))


def to_config(values: Mapping[str, Any]) -> Config:
    """Return the configuration that `to_dict` took apart, each value in its type and range; unset: the default."""
    known, found = all_fields(), flat(values)
    for key, value in found.items():
        if key not in known:
            raise UserError(unknown(str(key), known))
        if isinstance(value, (dict, list)):
            raise UserError(f"{key} must be one value")
        found[key] = known[key].read(value)
    return with_values(Config(), found)


def read_values(path: Path) -> dict[str, Any]:
    """Return the values in a run's config.yaml by dotted keys, see `values_of`; OSError as read."""
    return values_of(read_file(path).decode())


def values_of(text: str) -> dict[str, Any]:
    """Return the values in the text of a config.yaml by dotted keys.

    Texts, which an extension may know, are not checked. `UserError` for whatever YAML can do
    besides: aliases, lists, deeper or repeated keys; YAMLError for what is no YAML.
    """
    names, depth, known = [], 0, all_fields()  # names: section and key of what comes next
    found: dict[str, Any] = {}
    for event in yaml.parse(text, Loader=getattr(yaml, "CBaseLoader", yaml.BaseLoader)):
        match event:
            case yaml.ScalarEvent(value=text) if len(names) < depth:
                names.append(text)
            case yaml.ScalarEvent(value=text) if depth and (key := ".".join(names)) not in found:
                found[key] = text
                names.pop()
            case yaml.MappingStartEvent() if len(names) == depth < 2:
                depth += 1
            case yaml.MappingEndEvent():
                depth -= 1
                del names[-1:]
            case yaml.NodeEvent():
                raise UserError(
                    f"{'.'.join(names) or 'it'} must be one value, or keys with one each, once"
                )
    if not found:
        raise UserError("is not the configuration of a run")
    for field in (known[key] for key in found if key in known):
        text = None if field.optional and found[field.key] == "null" else found[field.key]
        found[field.key] = text if text is None or field.kind is str else field.read(text)
    return found


def load_run_config(run_dir: str | Path) -> Config:
    """Return the configuration of a run from its folder; nothing in it is interpolated."""
    path = Path(run_dir) / RUN_CONFIG
    if not path.is_file():
        what = "has no config.yaml" if Path(run_dir).is_dir() else "no such folder"
        raise UserError(f"{run_dir}: {what}; a run is a folder such as outputs/<name>/<run>")
    with user_errors(f"{path}: "):
        values = read_values(path)
        if (text := values.get("extensions")) is not None:
            run_files(text, path.parent)
        return resolve(to_config(values))


def merge(config: Config, overrides: Iterable[str]) -> Config:
    """Return a run's configuration with overrides on top, checked; `rtx.cli.options` says which a command takes."""
    values: dict[str, Any] = {}
    for entry in check_overrides(overrides):
        if entry.key in GROUPS:
            config = replace(config, **{entry.key: getattr(compose_unresolved([entry]), entry.key)})
        elif "${" in entry.values[0]:
            raise UserError(
                f"{entry.key}={shorten(entry.values[0])}: a run takes no references; write the value"
            )
        else:
            values[entry.key] = all_fields()[entry.key].read_word(entry.values[0])
    return resolve(with_values(config, values), values)


def config_hash(config: Config) -> str:
    """Return 12 hexadecimal digits that two configurations share where all that can change results is equal."""
    return digest(flat(to_dict(with_absolute_path(config))))


def former_hash(config: Config) -> str:
    """Return the hash as up to version 0.3: it told configurations apart by keys that a run does not read, too."""
    return former_digest(flat(to_dict(with_absolute_path(config))))


def cell_hashes(config: Config) -> tuple[str, str]:
    """Return the names that the folder of a cell may have."""
    return config_hash(config), former_hash(config)


def with_absolute_path(config: Config) -> Config:
    """Return a configuration whose data.path means the same from any folder."""
    if config.data.path is None or (
        config.data.name == "hub" and not os.path.exists(config.data.path)
    ):
        return config
    return with_values(config, {"data.path": os.path.abspath(os.path.expanduser(config.data.path))})


def digest(values: Mapping[str, Any]) -> str:
    """Return 12 hexadecimal digits of a configuration's values by their dotted keys.

    Keys that cannot change results are left out, and a key that the run does not read counts as its default.
    """
    return former_digest(default_where_unread(values))


def former_digest(values: Mapping[str, Any]) -> str:
    """Return the digits as up to version 0.3, which counted keys that a run does not read, too."""
    if (
        values.get("hardware.compile") == "auto"
    ):  # decided by the machine, as the device is; it once was false
        values = {**values, "hardware.compile": False}
    idle = (*NAMELIKE, *(key for key, value in values.items() if (key, value) in YOUNGER))
    kept = {
        key: value
        for key, value in values.items()
        if key not in idle and not key.startswith(OUTSIDE)
    }
    return short_hash(kept, 12)


def short_hash(values: Mapping[str, Any], digits: int = 8) -> str:
    """Return hexadecimal digits that tell values apart, in whatever order their keys stand; what JSON lacks as text."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[
        :digits
    ]
