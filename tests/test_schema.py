"""The schemas for editors: as committed, and every file of `conf/` keeps to its group's."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

from rtx.config import GROUPS
from rtx.keys import conf_dir, options

SCHEMAS = Path(__file__).resolve().parents[1] / "docs" / "schema"
text_of = runpy.run_path(str(SCHEMAS / "make.py"))["text_of"]
TYPES = {"integer": int, "number": (int, float), "boolean": bool, "string": str, "array": list, "object": dict}


def fits(schema: dict[str, Any], value: Any) -> bool:
    """Whether a schema allows a value; the words of JSON schema that ours use."""
    if "anyOf" in schema:
        return any(fits(each, value) for each in schema["anyOf"])
    if schema.get("type") in (None, "null"):
        return "type" not in schema or value is None
    kind = TYPES[schema["type"]]
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        return False
    if isinstance(value, dict) and (known := schema.get("properties")):
        return all(key in known and fits(known[key], each) for key, each in value.items())
    return (
        value in schema.get("enum", [value])
        and ("pattern" not in schema or bool(re.search(schema["pattern"], str(value))))
        and ("minimum" not in schema or value >= schema["minimum"])
        and ("maximum" not in schema or value <= schema["maximum"])
        and ("exclusiveMinimum" not in schema or value > schema["exclusiveMinimum"])
    )


@pytest.mark.parametrize("group", [*GROUPS, "config"])
def test_the_schema_is_the_committed_one_and_files_keep_to_it_but_for_a_slip(group: str) -> None:
    assert (SCHEMAS / f"{group}.json").read_text() == text_of(group), "run python docs/schema/make.py"
    for option in options(group):
        content = yaml.safe_load((conf_dir() / group / f"{option}.yaml").read_text())
        assert fits(json.loads(text_of(group)), content), option
        assert not fits(json.loads(text_of(group)), content | {"lenght": 3})


def test_values_are_held_against_type_list_and_range() -> None:
    schema = json.loads(text_of("model"))
    assert fits(schema, {"trainer": {"steps": "${optimizer.steps}"}, "model": {"base": "local+full"}})
    assert not fits(schema, {"model": {"layers": 0}}) and not fits(schema, {"model": {"base": "locl"}})
