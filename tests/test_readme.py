"""What a newcomer reads first."""

from __future__ import annotations

from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"


def test_the_first_screens_fit_a_terminal_of_80_columns() -> None:
    first = README.read_text(encoding="utf-8").partition("\n| group |")[0]
    assert "rtx train --help" in first
    assert max(map(len, first.splitlines())) <= 80
