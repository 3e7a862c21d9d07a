"""The configuration of a run: from its config.yaml, as its text, and changes of it."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

# OmegaConf has no public name for it.
from omegaconf._utils import get_omega_conf_dumper

from rtx.disk import is_file_inside
from rtx.errors import UserError, shorten
from rtx.settings.compose import compose_unresolved, user_errors, value_of
from rtx.settings.extensions import refuse_unloaded
from rtx.settings.overrides import Override, check_overrides
from rtx.settings.rules import resolve
from rtx.settings.run_values import RUN_CONFIG, read_values
from rtx.settings.schema import GROUPS, SPREAD, Config, to_config, to_dict, with_values


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
