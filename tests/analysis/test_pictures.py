"""Pictures of the patterns are what the patterns read."""

from __future__ import annotations

import importlib.util
import inspect
import re
from pathlib import Path
from typing import Any

import rtx.attention

DOCS = Path(__file__).parents[2] / "docs"


def pictures() -> Any:
    """Return docs/pictures.py as a module."""
    spec = importlib.util.spec_from_file_location("pictures", DOCS / "pictures.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_shows_what_every_pattern_reads() -> None:
    drawing, page = pictures(), (DOCS / "attention.md").read_text(encoding="utf-8")
    assert drawing.redraw(page) == page, "python docs/pictures.py docs/attention.md"
    patterns = drawing.patterns()
    assert all(f"<!-- picture: {name} -->" in page for name in patterns)
    kinds = {type(pattern).__name__ for pattern in patterns.values()}
    public = {
        name
        for name in rtx.attention.__all__
        if inspect.isclass(kind := getattr(rtx.attention, name)) and issubclass(kind, rtx.attention.Pattern)
    }
    assert public - kinds == {"Pattern", "PositionPattern", "RandomBlocks"}
    parts = re.split(r"^## (.*)$", page, flags=re.MULTILINE)[1:]
    for name in kinds:
        own = [text for heading, text in zip(parts[::2], parts[1::2], strict=True) if f": `{name}" in heading]
        assert own and all("<!-- picture: " in text and re.search("S_i|[ko]_[ij] = ", text) for text in own), name
