"""The page on reliability names tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_test_that_the_page_names_exists() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page)
    assert len(named) > 20
    for path, name in named:
        content = (ROOT / path).read_text(encoding="utf-8")
        assert not name or re.search(rf"^def {name}\(", content, re.MULTILINE), f"{path}::{name}"
