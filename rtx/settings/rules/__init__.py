"""What fits together in a configuration: `resolve` fills in derived values and checks the rules.

One rule is one function that yields a line for each problem; the line says what to change.
"""

from collections.abc import Iterable
from dataclasses import replace

from rtx.errors import refuse
from rtx.settings.derived import clusters, hash_buckets, reads_self
from rtx.settings.readers import without_effect
from rtx.settings.rules import data, model, training
from rtx.settings.rules.rule import RULES, problems
from rtx.settings.schema import Config

__all__ = ["check_data", "data", "model", "resolve", "training"]


def resolve(config: Config, keys: Iterable[str] = ()) -> Config:
    """Return a copy with the derived values filled in.

    Raises UserError for values that contradict each other, and for `keys` without effect.
    """
    routing = replace(
        config.routing, clusters=clusters(config), attend_self=reads_self(config.routing)
    )
    model_config = config.model
    if "lsh" in model_config.base.split("+"):
        model_config = replace(model_config, hash_buckets=hash_buckets(config))
    config = replace(config, routing=routing, model=model_config)
    refuse([*problems(config, RULES), *without_effect(config, keys).values()])
    return config


def check_data(config: Config, keys: Iterable[str]) -> None:
    """Raise UserError for data that contradict each other, and for `keys` without effect."""
    rules = [rule for rule in RULES if all(key.startswith("data.") for key in rule.keys)]
    refuse([*problems(config, rules), *without_effect(config, keys).values()])
