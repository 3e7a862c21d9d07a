"""`--cfg` and `--info`: print what would be composed, and run nothing."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from rtx.commandline.fields import all_fields, sections, suggest_key
from rtx.commandline.flags import Flags
from rtx.commandline.overrides import check_overrides
from rtx.compose import CONFIG_NAME, compose, hydra_session, to_dict
from rtx.errors import UserError


def show(flags: Flags, overrides: list[str]) -> int:
    """Print what the flags ask for.

    `--cfg job` prints the configuration as a run records it: checked, every interpolation resolved, routing.clusters
    frozen. `--cfg hydra`, `--cfg all` and `--info` are Hydra's own views.

    Raises:
        UserError: an override is wrong, or `--package` names no part of the configuration.
    """
    config = compose(overrides)
    if flags.cfg == "job":
        print(job_yaml(to_dict(config), flags.package), end="")
        return 0
    checked = [str(override) for override in check_overrides(overrides)]
    with hydra_session() as hydra:
        if flags.info:
            hydra.show_info(flags.info, config_name=CONFIG_NAME, overrides=checked)
        else:
            hydra.show_cfg(CONFIG_NAME, checked, flags.cfg, flags.package or None, flags.resolve)
    return 0


def job_yaml(values: dict, package: str) -> str:
    """Return the configuration, or the part of it at the dotted key `package`, as YAML."""
    node = OmegaConf.create(values)
    if package in ("", "_global_"):
        return OmegaConf.to_yaml(node)
    known = [*sections(), *all_fields()]
    if package not in known:
        raise UserError(f"--package {package}: no such part of the configuration{suggest_key(package, known)}")
    part = OmegaConf.select(node, package)
    return f"# @package {package}\n{OmegaConf.to_yaml(part)}" if isinstance(part, DictConfig) else f"{part}\n"
