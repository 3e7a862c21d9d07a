"""What fits together in a configuration: `resolve` fills in derived values and checks the rules.

One rule is one function that yields a line for each problem; the line says what to change.
"""

from collections.abc import Iterable
from typing import Any

from rtx.errors import refuse
from rtx.settings.derived import clusters, hash_buckets, reads_self
from rtx.settings.readers import without_effect
from rtx.settings.rules.rule import RULES, problems
from rtx.settings.schema import Config, with_values

# Each adds its rules to RULES, in this order.
from rtx.settings.rules import data as data  # isort: skip
from rtx.settings.rules import model as model  # isort: skip
from rtx.settings.rules import training as training  # isort: skip


def resolve(config: Config, keys: Iterable[str] = ()) -> Config:
    """Return a copy with the derived values filled in.

    Raises UserError for values that contradict each other, and for `keys` without effect.
    """
    config = with_values(config, derived_values(config))
    refuse([*problems(config, RULES), *without_effect(config, keys).values()])
    return config


def derived_values(config: Config) -> dict[str, Any]:
    """Return the values, by dotted keys, of keys that follow others where they are unset."""
    values: dict[str, Any] = {
        "routing.clusters": clusters(config),
        "routing.attend_self": reads_self(config.routing),
    }
    if "lsh" in config.model.base.split("+"):
        values["model.hash_buckets"] = hash_buckets(config)
    return values


def check_data(config: Config, keys: Iterable[str]) -> None:
    """Raise UserError for data that contradict each other, and for `keys` without effect."""
    rules = [rule for rule in RULES if all(key.startswith("data.") for key in rule.keys)]
    refuse([*problems(config, rules), *without_effect(config, keys).values()])
