"""Writes the JSON schemas beside this file, and the page docs/configuration.md.

Editors complete and check `conf/` and runs by the schemas. Run `python docs/schema/make.py` after a
change of a key, its range or its docstring in rtx/settings/schema.py, or of a file in conf/. With
`--check` nothing is written: it lists the files that are not current, and ends with 1.
"""

from __future__ import annotations

import json
import math
import runpy
import sys
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
    fields = fields_of(cls)
    inner: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(cls).items():
        if name in fields:
            inner[name] = of_field(fields[name])
        else:
            inner[name] = of_section(hint, name)
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


def files() -> dict[Path, str]:
    """Return every file that follows from the schema, with its text."""
    here = Path(__file__).parent
    texts = {here / f"{name}.json": text_of(name) for name in (*GROUPS, "config")}
    page = runpy.run_path(str(here.with_name("configuration.py")))
    return {**texts, page["PAGE"]: page["text"]()}


def main(words: list[str]) -> int:
    """Write the files that are not current, or only list them; return the exit code."""
    is_check = "--check" in words
    changed = False
    for path, text in files().items():
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        changed = True
        if is_check:
            print(f"{path.name} is not current: run python docs/schema/make.py")
        else:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.name}")
    return int(is_check and changed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
