"""The schemas for editors: as committed, and every file of `conf/` keeps to its group's."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from rtx.cli import main
from rtx.commands.schema import text_of
from rtx.config import GROUPS
from rtx.keys import conf_dir, options

ROOT = Path(__file__).resolve().parents[2]
TYPES = {"integer": int, "number": (int, float), "boolean": bool, "string": str, "array": list, "object": dict}


def problems(schema: dict[str, Any], value: Any, where: str = "") -> list[str]:
    """Return what of a value a schema does not allow; the words of JSON schema that ours use."""
    if "anyOf" in schema:
        tried = [problems(each, value, where) for each in schema["anyOf"]]
        return [] if not all(tried) else tried[0]
    if "type" not in schema:
        return []
    if schema["type"] == "null":
        return [] if value is None else [f"{where}: {value!r} is not null"]
    kind = TYPES[schema["type"]]
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        return [f"{where}: {value!r} is not {schema['type']}"]
    if isinstance(value, dict) and "properties" in schema:
        known = schema["properties"]
        unknown = [f"{where}.{key}: unknown" for key in value if key not in known]
        inner = [problems(known[key], each, f"{where}.{key}") for key, each in value.items() if key in known]
        return [*unknown, *(line for lines in inner for line in lines)]
    fits = (
        value in schema.get("enum", [value])
        and ("pattern" not in schema or re.search(schema["pattern"], str(value)))
        and ("minimum" not in schema or value >= schema["minimum"])
        and ("maximum" not in schema or value <= schema["maximum"])
        and ("exclusiveMinimum" not in schema or value > schema["exclusiveMinimum"])
    )
    return [] if fits else [f"{where}: {value!r} is out of range"]


@pytest.mark.parametrize("group", [*GROUPS, "config"])
def test_the_committed_schema_is_current(group: str) -> None:
    path = ROOT / "docs" / "schema" / f"{group}.json"
    assert path.read_text() == text_of(group), f"rtx schema {group} > {path.relative_to(ROOT)}"


@pytest.mark.parametrize("group", GROUPS)
def test_files_keep_to_the_schema_and_a_slip_is_seen(group: str) -> None:
    schema = json.loads(text_of(group))
    for option in options(group):
        content = yaml.safe_load((conf_dir() / group / f"{option}.yaml").read_text())
        assert not problems(schema, content, option)
        assert problems(schema, content | {"lenght": 3})
    if group == "model":
        assert problems(schema, {"model": {"layers": 0}}) and problems(schema, {"model": {"base": "locl"}})
        assert not problems(schema, {"trainer": {"steps": "${optimizer.steps}"}, "model": {"base": "local+full"}})


def test_a_group_is_printed_and_an_unknown_one_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", "data"]) == 0
    assert json.loads(capsys.readouterr().out)["properties"]["name"]["anyOf"][0]["enum"][0] == "stdlib"
    assert main(["schema", "modle"]) == 2
    assert "did you mean 'model'?" in capsys.readouterr().err
