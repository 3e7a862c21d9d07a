"""Pictures of the patterns are what the patterns read."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch

import rtx.attention
from rtx.analysis.pictures import N, W, draw, patterns, reads, redraw, share

PAGE = Path(__file__).parents[2] / "docs/attention.md"


def test_the_page_shows_what_the_patterns_read() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert redraw(page) == page, "python -m rtx.analysis.pictures docs/attention.md"
    assert all(f"<!-- picture: {name} -->" in page for name in patterns())


def sections() -> dict[str, str]:
    """Return the text below each heading of the page."""
    parts = re.split(r"^## (.*)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_every_pattern_has_a_picture_and_a_formula() -> None:
    kinds = {type(pattern).__name__ for pattern in patterns().values()}
    public = {
        name
        for name in rtx.attention.__all__
        if inspect.isclass(kind := getattr(rtx.attention, name)) and issubclass(kind, rtx.attention.Pattern)
    }
    assert public - kinds == {"Pattern", "PositionPattern", "RandomBlocks"}
    for name in kinds:
        own = [text for heading, text in sections().items() if re.search(rf": `{name}[`(]", heading)]
        assert own, f"docs/attention.md has no section of {name}"
        assert all("<!-- picture: " in text and re.search("S_i|[ko]_[ij] = ", text) for text in own), name


def test_every_kind_of_routing_has_a_picture() -> None:
    headings = " ".join(sections())
    for kind in ("topk", "causal", "nearest"):
        assert f'selection="{kind}"' in headings
    for kind in ("separate", "projected"):
        assert f'keys="{kind}"' in headings


def test_pictures_of_known_patterns() -> None:
    distance_NN = torch.arange(N)[:, None] - torch.arange(N)
    assert torch.equal(reads(patterns()["full"]), distance_NN >= 0)
    assert torch.equal(reads(patterns()["local"]), (distance_NN >= 0) & (distance_NN < W))
    assert torch.equal(reads(patterns()["strided"]), (distance_NN >= 0) & (distance_NN % W == 0))
    assert share(reads(patterns()["full"])) == "100% of all pairs j <= i"
    for name in ("exact", "indexer"):
        assert torch.equal(reads(patterns()[name]).sum(-1), torch.arange(1, N + 1).clamp(max=W))
    assert draw(torch.eye(4, dtype=torch.bool)) == "▀▄··\n··▀▄"


def test_an_unknown_picture_is_refused() -> None:
    with pytest.raises(ValueError, match="sideways: must be one of full, local"):
        redraw("<!-- picture: sideways -->\n```text\n\n```")
