"""Pictures of the patterns are what the patterns read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rtx.analysis.pictures import PADDED, M, N, W, draw, patterns, reads, redraw

PAGE = Path(__file__).parents[2] / "docs/attention.md"


def test_the_page_shows_what_the_patterns_read() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert redraw(page) == page, "python -m rtx.analysis.pictures docs/attention.md"
    assert all(f"<!-- picture: {name} -->" in page for name in patterns())


def test_pictures_of_known_patterns() -> None:
    distance_NN = torch.arange(N)[:, None] - torch.arange(N)
    assert torch.equal(reads(patterns()["full"]), distance_NN >= 0)
    assert torch.equal(reads(patterns()["local"]), (distance_NN >= 0) & (distance_NN < W))
    assert torch.equal(reads(patterns()["strided"]), (distance_NN >= 0) & (distance_NN % W == 0))
    assert draw(torch.eye(4, dtype=torch.bool)) == "▀▄··\n··▀▄"


def test_pictures_of_two_sequences_and_of_encoders() -> None:
    crossed_NM, unmasked_NN = reads(patterns()["cross"]), reads(patterns()["separate-unmasked"])
    assert (
        crossed_NM.shape == (N, M) and crossed_NM.any(0)[: M - PADDED].any() and not crossed_NM[:, M - PADDED :].any()
    )
    assert unmasked_NN.triu(1).any()
    # Without its later positions it is the masked pattern.
    assert torch.equal(unmasked_NN.tril(), reads(patterns()["separate"]))


def test_an_unknown_picture_is_refused() -> None:
    with pytest.raises(ValueError, match="sideways: must be one of full, local"):
        redraw("<!-- picture: sideways -->\n```text\n\n```")
