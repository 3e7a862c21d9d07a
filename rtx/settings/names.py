"""The names of patterns and data sets: those of rtx, and those that extensions register."""

import functools
import inspect
import re
import sys
from typing import Any

from rtx.errors import shorten
from rtx.settings.data_sets import SETS, DataSet

BASES: dict[str, Any] = dict.fromkeys(
    (
        "local",
        "full",
        "recurrent",
        "lsh",
        "adaptive_span",
        "strided",
        "fixed",
        "fixed_block",
        "fixed_summary",
    )
)
"""The patterns of model.base by their names.

`rtx.model.heads` makes those with None. The others are extensions', each with the function that
makes it, or the dotted path of that function (docs/extending.md).
"""

SELECTIONS: dict[str, Any] = dict.fromkeys(
    (
        "causal",
        "topk",
        "nearest",
        "random",
        "exact",
        "blocks",
        "blocks_random",
        "indexer",
        "probed",
    )
)
"""The patterns of routing.selection, as `BASES`."""
REGISTERED: dict[str, str] = {}
"""Names that extensions added to BASES, SELECTIONS and SETS, each with its installed package.

The package of a name from a file is "".
"""
BUILT_IN = frozenset({*BASES, *SELECTIONS, *SETS})
"""The names of rtx, which no extension may have."""
KINDS_OF_HEADS = (
    "routed",
    "routing",
    "sparse",
    "random_blocks",
    "compressive",
    "adaptive_input",
)
"""Kinds of heads in models and reports that are no patterns; no extension may have these names."""


@functools.cache
def add_installed() -> None:
    """Add the patterns and data sets of installed packages by the names of their entry points.

    None of them is imported. A line on stderr says which ones are left out, and why.
    """
    from importlib import metadata  # takes longer than all else that `rtx --help` imports

    tables: dict[str, dict[str, Any]] = {
        "rtx.patterns": BASES,
        "rtx.selections": SELECTIONS,
        "rtx.data": SETS,
    }
    for group, table in tables.items():
        for point in metadata.entry_points(group=group):
            package = point.dist.name if point.dist else ""
            problem = name_problem(point.name, pattern=table is not SETS)
            if not problem and point.name in table:
                problem = f"{point.name!r} is of the package {REGISTERED[point.name]}"
            if problem:
                print(f"rtx: {package} is without {group} {point.name}: {problem}", file=sys.stderr)
                continue
            path = point.value.replace(":", ".")
            is_data = table is SETS
            entry = DataSet(path, defaults={"name": point.name}) if is_data else path
            table[point.name] = entry
            REGISTERED[point.name] = package


def name_problem(name: str, *, pattern: bool) -> str:
    """Return why an extension may not use a name for a pattern or a data set, "" if it may."""
    if not re.fullmatch("[a-z][a-z0-9_]*", name):
        return f"{shorten(name)!r} must be of small letters, digits and _, a letter first"
    if name in BUILT_IN:
        return f"{name!r} is one of rtx's own"
    if name == "null":
        return "'null' unsets a key"
    if pattern and name in KINDS_OF_HEADS:
        return f"{name!r} is what rtx calls heads of another kind"
    return ""


def maker_problem(make: Any) -> str:
    """Return why an object cannot make the heads of an extension's pattern, "" if it can."""
    if not callable(make):
        return f"{shorten(repr(make))} is no function"
    try:
        inspect.signature(make).bind(heads=1, config=None, layer=0)
    except TypeError as error:
        name = getattr(make, "__name__", repr(make))
        expected = f"{shorten(name)} is called with heads, config and layer"
        return f"{expected}: {error}{how_to_register(make)}"
    except ValueError:
        # Some functions of C have no signature that Python knows.
        return ""
    return ""


def how_to_register(make: Any) -> str:
    """Return how to register a class that takes other arguments; "" for a function."""
    if not isinstance(make, type):
        return ""
    return f"; register a function that makes it: lambda heads, config, layer: {make.__name__}(...)"
