"""Pictures of the patterns are what the patterns read."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch

import rtx.attention
from rtx.analysis.pictures import M, N, W, draw, patterns, reads, redraw, share

PAGE = Path(__file__).parents[2] / "docs/attention.md"


def test_the_page_shows_what_the_patterns_read() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert redraw(page) == page, "python -m rtx.analysis.pictures docs/attention.md"
    assert all(f"<!-- picture: {name} -->" in page for name in patterns())


def sections() -> dict[str, str]:
    """Return the text below each heading of the page."""
    parts = re.split(r"^## (.*)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_every_public_function_has_a_picture_and_a_formula() -> None:
    functions = {name: f for name in rtx.attention.__all__ if inspect.isfunction(f := getattr(rtx.attention, name))}
    patterns_of = [name for name, function in functions.items() if "q_BHND" in inspect.signature(function).parameters]
    assert len(patterns_of) >= 9
    for name in patterns_of:
        own = [text for heading, text in sections().items() if re.search(rf": `{name}[`(]", heading)]
        assert own, f"docs/attention.md has no section of {name}"
        assert all("<!-- picture: " in text and re.search("S_i|[ko]_[ij] = ", text) for text in own), name
    for name in functions.keys() - set(patterns_of):
        assert f"`{name}`" in PAGE.read_text(encoding="utf-8"), name


def test_every_kind_of_routing_has_a_picture() -> None:
    headings = " ".join(sections())
    for kind in ("topk", "causal", "nearest"):
        assert f'selection="{kind}"' in headings
    for argument in ("projection_HDD=", "causal=False", "(q, k, v, "):
        assert argument in headings


def test_pictures_without_a_causal_mask() -> None:
    encoder, across = (reads(patterns()[name]) for name in ("encoder", "cross"))
    assert encoder.triu(1).any() and torch.equal(encoder, encoder.T)
    # A cluster has W / 2 of the other sequence's keys; a query in none reads nothing, one in two what both have.
    assert across.shape == (N, M) and min(set(across.sum(1).tolist()) - {0}) == W // 2
    assert share(encoder).endswith("% of all pairs") and share(across).endswith("% of all pairs")
    assert share(reads(patterns()["full"])) == "100% of all pairs j <= i"


def test_pictures_of_known_patterns() -> None:
    distance_NN = torch.arange(N)[:, None] - torch.arange(N)
    assert torch.equal(reads(patterns()["full"]), distance_NN >= 0)
    assert torch.equal(reads(patterns()["local"]), (distance_NN >= 0) & (distance_NN < W))
    assert torch.equal(reads(patterns()["strided"]), (distance_NN >= 0) & (distance_NN % W == 0))
    assert draw(torch.eye(4, dtype=torch.bool)) == "▀▄··\n··▀▄"


def test_an_unknown_picture_is_refused() -> None:
    with pytest.raises(ValueError, match="sideways: must be one of full, local"):
        redraw("<!-- picture: sideways -->\n```text\n\n```")
