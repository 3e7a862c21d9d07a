"""Writes the JSON schemas beside this file: editors complete and check `conf/` and runs by them.

Run `python docs/schema/make.py` after a change of a key, its range or its docstring in
rtx/settings/schema.py.
"""

from __future__ import annotations

import json
import math
import typing
from pathlib import Path
from typing import Any

from rtx.settings.fields import Field, fields_of
from rtx.settings.schema import GROUPS, Config

TYPES = {int: "integer", float: "number", bool: "boolean", str: "string"}
REFERENCE = {"type": "string", "pattern": r"^\$\{.+\}$"}
"""The value of another key, such as ${optimizer.steps}."""
DEFAULTS = {"type": "array", "description": "Options of this and of other groups."}
"""Hydra's list of what a file builds on."""


def text_of(group: str) -> str:
    """Return the JSON schema of a group's files, or of a run's config.yaml (`config`)."""
    section = typing.get_type_hints(Config).get(group)
    whole = of_section(Config, f"conf/{group}" if group != "config" else "config.yaml")
    schema = of_section(section, f"conf/{group}") if section and group != "model" else whole
    if group != "config":
        whole["properties"] |= {"defaults": DEFAULTS, "hydra": {}}
        schema["properties"]["defaults"] = DEFAULTS
    if group in ("hardware", "trainer"):  # some of their files set keys of other sections
        schema = {"title": schema["title"], "anyOf": [schema, whole]}
    return (
        json.dumps({"$schema": "http://json-schema.org/draft-07/schema#", **schema}, indent=1)
        + "\n"
    )


def of_section(cls: type, title: str) -> dict[str, Any]:
    """Return the schema of a dataclass, and of those in it."""
    fields, hints = fields_of(cls), typing.get_type_hints(cls).items()
    inner = {
        name: of_field(fields[name]) if name in fields else of_section(hint, name)
        for name, hint in hints
    }
    facts = {"title": title, "description": cls.__doc__, "type": "object"}
    return {**facts, "additionalProperties": False, "properties": inner}


def of_field(field: Field) -> dict[str, Any]:
    """Return the schema of a key: its type and range, or the value of another key."""
    value: dict[str, Any] = {"type": TYPES[field.kind]}
    if field.joined:
        value["pattern"] = r"^({0})(\+({0}))*$".format("|".join(field.values))
    elif field.values:
        value["enum"] = list(field.values)
    bounds = {"minimum": field.low, "maximum": field.high, "exclusiveMinimum": field.above}
    value |= {word: limit for word, limit in bounds.items() if math.isfinite(limit)}
    other = [{"type": "null"}] * field.optional
    other += [{"type": "string", "enum": [word]} for word in field.words]
    return {"description": field.doc, "default": field.default, "anyOf": [value, *other, REFERENCE]}


if __name__ == "__main__":
    for name in (*GROUPS, "config"):
        Path(__file__).with_name(f"{name}.json").write_text(text_of(name))
