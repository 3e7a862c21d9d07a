"""A rule of what fits together: the keys that it reads, and the problems that it finds."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter

from rtx.settings.schema import Config

Check = Callable[[Config], Iterator[str]]


@dataclass(frozen=True)
class Rule:
    """One rule of a configuration."""

    keys: frozenset[str]
    """The keys that the check reads."""
    check: Check
    """Yields a line for each problem; the line says what to change."""


RULES: list[Rule] = []
"""Every rule, in the order of the messages."""


def rule(*keys: str) -> Callable[[Check], Check]:
    """Add a function that yields problems to `RULES`, as the rule of the keys that it reads."""

    def add(check: Check) -> Check:
        RULES.append(Rule(frozenset(keys), check))
        return check

    return add


def problems(config: Config, rules: Iterable[Rule]) -> list[str]:
    """Return a line for each problem of a configuration."""
    lines: list[str] = []
    for entry in rules:
        lines.extend(entry.check(config))
    return lines


def at_most(config: Config, key: str, limit: str) -> Iterator[str]:
    """Yield a line if the value of a key is larger than that of another one."""
    value = attrgetter(key)(config)
    most = attrgetter(limit)(config)
    if value is not None and value > most:
        yield f"{key}={value} must be at most {limit}={most}"
