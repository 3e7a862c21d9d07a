"""`rtx plan` for every preset."""

from __future__ import annotations

import pytest

from rtx.commandline.fields import options
from rtx.commands import plan


@pytest.mark.parametrize("preset", sorted(options("model")))
def test_every_preset_has_a_plan(preset: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main([f"model={preset}"]) == 0
    printed = capsys.readouterr().out
    assert f"{preset}: " in printed
    for word in ("parameters", "operations", "memory", "run"):
        assert any(line.startswith(word) for line in printed.splitlines())


def test_the_figures_of_a_known_model(capsys: pytest.CaptureFixture[str]) -> None:
    plan.main(["data=enwik8", "model=rt24", "trainer.steps=1000"])
    printed = capsys.readouterr().out
    assert "24 layers, 8 heads, width 1024" in printed
    assert "N = 8,192 enwik8 bytes" in printed
    assert "C = 32 clusters of W = 256" in printed
    assert "1,000 steps, 131,072,000 units" in printed
