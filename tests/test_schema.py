"""The schemas for editors are as committed, and say of a key what rtx takes."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest

from rtx.config import GROUPS

SCHEMAS = Path(__file__).resolve().parents[1] / "docs" / "schema"
text_of = runpy.run_path(str(SCHEMAS / "make.py"))["text_of"]


@pytest.mark.parametrize("group", [*GROUPS, "config"])
def test_the_schema_is_the_committed_one(group: str) -> None:
    assert (SCHEMAS / f"{group}.json").read_text() == text_of(group), "run python docs/schema/make.py"


def test_a_key_has_its_type_list_range_and_docstring() -> None:
    sections = json.loads(text_of("model"))["properties"]
    model, trainer = sections["model"]["properties"], sections["trainer"]["properties"]
    assert not sections["model"]["additionalProperties"] and "defaults" in sections
    assert model["layers"]["anyOf"][0] == {"type": "integer", "minimum": 1, "maximum": 10_000}
    assert model["layers"]["description"] == "Decoder blocks." and {"type": "null"} in model["axes"]["anyOf"]
    assert model["norm"]["anyOf"][0]["enum"] == ["pre", "post"]
    assert re.search(model["base"]["anyOf"][0]["pattern"], "local+full")
    assert not re.search(model["base"]["anyOf"][0]["pattern"], "local+locl")
    assert re.search(trainer["steps"]["anyOf"][-1]["pattern"], "${optimizer.steps}")
    assert {"type": "string", "enum": ["auto"]} in trainer["micro_batch_size"]["anyOf"]
