"""The configuration of a run: its config.yaml, read and written, and changes of it."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

# OmegaConf has no public name for it.
from omegaconf._utils import get_omega_conf_dumper

from rtx.disk import is_file_inside, read_inside
from rtx.errors import UserError, shorten
from rtx.settings.compose import compose_unresolved, user_errors, value_of
from rtx.settings.extensions import refuse_unloaded
from rtx.settings.overrides import Override, check_overrides
from rtx.settings.preset_files import events_of
from rtx.settings.rules import resolve
from rtx.settings.schema import GROUPS, SPREAD, Config, all_fields, to_config, to_dict, with_values

RUN_CONFIG = "config.yaml"
LARGEST_CONFIG = 1 << 20
"""The most bytes of a config.yaml."""
FORMER_LOGGERS = {
    "auto": {"logger.wandb": True},
    "online": {"logger.wandb": True, "logger.mode": "online"},
    "offline": {"logger.wandb": True, "logger.mode": "offline"},
    "csv": {"logger.csv": True},
    "tensorboard": {"logger.tensorboard": True},
    "jsonl": {},
}
"""What the values of logger.name, which runs up to version 0.4 have, stand for."""
LOADER = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
"""Reads every value as text."""


def to_yaml(config: Config) -> str:
    """Return a configuration as YAML in the order of the schema: the text of config.yaml.

    It is that of `OmegaConf.to_yaml`, which takes three times as long to make its own nodes first.
    """
    return yaml.dump(
        to_dict(config),
        default_flow_style=False,
        allow_unicode=True,
        sort_keys=False,
        Dumper=get_omega_conf_dumper(),
    )


def read_values(run: Path) -> dict[str, Any]:
    """Return the values in a run's config.yaml by dotted keys, see `values_of`; OSError as read."""
    return values_of(read_inside(run, RUN_CONFIG, LARGEST_CONFIG).decode())


def values_of(content: str) -> dict[str, Any]:
    """Return the values in the text of a config.yaml by dotted keys, in their types and ranges.

    Texts are not checked: an extension that is not loaded may have registered the name.

    Raises:
        UserError: whatever YAML can express beside keys with a value each: aliases, lists,
            deeper or repeated keys.
        yaml.YAMLError: the text is no YAML.
    """
    texts = texts_of(content)
    if not texts:
        raise UserError("is not the configuration of a run")
    fields = all_fields()
    values: dict[str, Any] = {}
    if texts.get("logger.name") in FORMER_LOGGERS:
        values |= FORMER_LOGGERS[texts.pop("logger.name")]
    for key, text in texts.items():
        field = fields.get(key)
        if field is not None and field.optional and text == "null":
            values[key] = None
        elif field is None or field.kind is str:
            values[key] = text
        else:
            values[key] = field.read(text)
    return values


def texts_of(content: str) -> dict[str, str]:
    """Return the text of each value in the text of a config.yaml; see `values_of`.

    It is read as a stream of YAML events: a document built from aliases could be endless.
    """
    # Section and key of the next value.
    path_of_names: list[str] = []
    depth = 0
    texts: dict[str, str] = {}
    for event in events_of(content, LOADER):
        expects_name = len(path_of_names) < depth
        key = ".".join(path_of_names)
        match event:
            case yaml.ScalarEvent(value=text) if expects_name:
                path_of_names.append(text)
            case yaml.ScalarEvent(value=text) if depth and key not in texts:
                texts[key] = text
                path_of_names.pop()
            case yaml.MappingStartEvent() if not expects_name and depth < 2:
                depth += 1
            case yaml.MappingEndEvent():
                depth -= 1
                del path_of_names[-1:]
            case yaml.NodeEvent():
                raise UserError(f"{key or 'it'} must be one value, or keys with one each, once")
            case _:
                pass
    return texts


def load_run_config(run: str | Path) -> Config:
    """Return the configuration of a run from its folder; references in it are texts.

    Raises UserError if it is missing or damaged, or if the run needs code that is not loaded.
    """
    folder = Path(run)
    path = folder / RUN_CONFIG
    with user_errors():
        is_run = is_file_inside(folder, RUN_CONFIG)
    if not is_run:
        problem = "has no config.yaml" if folder.is_dir() else "no such folder"
        raise UserError(f"{run}: {problem}; a run is a folder such as outputs/<name>/<run>")
    with user_errors(f"{path}: "):
        values = read_values(folder)
        if values.get("extensions") is not None:
            refuse_unloaded(values["extensions"])
        return resolve(to_config(values))


def merge(config: Config, overrides: Iterable[str]) -> Config:
    """Return a run's configuration with overrides on top, checked."""
    return merge_checked(config, check_overrides(overrides))


def merge_checked(config: Config, checked: Iterable[Override]) -> Config:
    """As `merge`, of checked overrides."""
    values: dict[str, Any] = {}
    for entry in checked:
        text = entry.values[0]
        if entry.key in GROUPS:
            section = getattr(compose_unresolved([entry]), entry.key)
            config = replace(config, **{entry.key: section})
        elif "${" in text:
            problem = "a run takes no references; write the value"
            raise UserError(f"{entry.key}={shorten(text)}: {problem}")
        else:
            values[entry.key] = value_of(entry.key, text)
    return resolve(with_values(config, values), values)


def on_one_device(config: Config, checked: Iterable[Override] = ()) -> Config:
    """Return a run's configuration with overrides, for work on one device, not compiled.

    Overrides are checked against the changed hardware: options that exclude several devices, or
    compilation, are allowed.
    """
    name = "auto" if config.hardware.name in SPREAD else config.hardware.name
    hardware = replace(config.hardware, name=name, devices=None, nodes=1, compile=False)
    return merge_checked(replace(config, hardware=hardware), checked)
