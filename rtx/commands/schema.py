"""`rtx schema GROUP`: a JSON schema of the files in `conf/<group>/`, by which editors complete and check them."""

from __future__ import annotations

import json
import typing
from typing import Any

from rtx.config import GROUPS, Config
from rtx.errors import UserError, nearest
from rtx.keys import Field, about, fields_of

TYPES = {int: "integer", float: "number", bool: "boolean", str: "string"}
REFERENCE = {"type": "string", "pattern": r"^\$\{.+\}$"}
"""The value of another key, such as ${optimizer.steps}."""


def main(arguments: list[str]) -> int:
    """Print the schema of a group's files, or with `config` that of a run's config.yaml.

    Raises:
        UserError: another word, or none.
    """
    known = (*GROUPS, "config")
    if len(arguments) != 1 or arguments[0] not in known:
        near = nearest(arguments[0], known) if arguments else ""
        raise UserError(f"{' '.join(['rtx schema', *arguments])}: say one of {', '.join(known)}{near}")
    print(text_of(arguments[0]), end="")
    return 0


def text_of(group: str) -> str:
    """Return the schema of a group's files as the text of a JSON file."""
    whole = of_section(Config, f"conf/{group}")
    whole["properties"] |= {"defaults": {"type": "array", "description": "Options of other groups."}, "hydra": {}}
    if group == "config":
        schema = of_section(Config, "config.yaml")
    elif group in ("model", "experiment"):
        schema = whole
    else:
        schema = of_section(typing.get_type_hints(Config)[group], f"conf/{group}")
        if group == "hardware":  # a launcher's option sets keys of hydra, too
            schema = {"title": schema["title"], "anyOf": [schema, whole]}
    return json.dumps({"$schema": "http://json-schema.org/draft-07/schema#", **schema}, indent=1) + "\n"


def of_section(cls: type, title: str) -> dict[str, Any]:
    """Return the schema of a dataclass, and of those in it."""
    hints, fields = typing.get_type_hints(cls), fields_of(cls)
    properties = {
        name: of_section(hint, name) if name not in fields else of_field(fields[name]) for name, hint in hints.items()
    }
    return {
        "title": title,
        "description": about(cls),
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
    }


def of_field(field: Field) -> dict[str, Any]:
    """Return the schema of a key: its type and range, or the value of another key."""
    value: dict[str, Any] = {"type": TYPES[field.kind]}
    if field.choices:
        value["enum"] = list(field.choices)
    if parts := field.metadata.get("parts"):
        value["pattern"] = rf"^({'|'.join(parts)})(\+({'|'.join(parts)}))*$"
    for bound, word in (("low", "minimum"), ("high", "maximum"), ("above", "exclusiveMinimum")):
        if (limit := field.metadata.get(bound)) is not None:
            value[word] = limit
    other = [{"type": "null"}] if field.optional else []
    other += [{"type": "string", "enum": ["auto"]}] if "auto" in field.metadata else []
    return {"description": field.doc, "default": field.default, "anyOf": [value, *other, REFERENCE]}
