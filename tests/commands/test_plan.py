"""`rtx plan` for every preset."""

from __future__ import annotations

import pytest

from rtx.commands import plan
from rtx.keys import options


@pytest.mark.parametrize("preset", sorted(options("model")))
def test_every_preset_has_a_plan(preset: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main([f"model={preset}"]) == 0
    printed = capsys.readouterr().out
    assert f"{preset}: " in printed
    for word in ("parameters", "operations", "memory", "run"):
        assert any(line.startswith(word) for line in printed.splitlines())


def test_the_figures_of_a_known_model(capsys: pytest.CaptureFixture[str]) -> None:
    plan.main(["data=enwik8", "model=rt24", "trainer.steps=1000", "trainer.batch_size=16"])
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    printed = " ".join(" ".join(lines).split())
    assert "24 layers, 8 heads, width 1024" in printed
    assert "N = 8,192 enwik8 bytes" in printed
    assert "C = 32 clusters of W = 256" in printed
    assert "1,000 steps, 131,072,000 units" in printed


def printed_with(memory: int | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the lines of a plan of 15 GiB or more on a machine of so much memory."""
    monkeypatch.setattr(plan, "device_memory", lambda config: memory)
    assert plan.main(["data=enwik8", "model=rt12", "trainer.batch_size=2", "hardware=cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    return lines


def test_the_plan_says_whether_a_run_fits_and_what_would_make_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    large = " ".join(" ".join(printed_with(500 * 2**30, monkeypatch, capsys)).split())
    assert "this machine has 500.0 GiB for it" in large and "it fits" in large
    small = printed_with(30 * 2**30, monkeypatch, capsys)
    advice = [line.strip() for line in small if "GiB" in line and "=" in line]
    assert any(line.startswith("model.recompute=true: ") for line in advice)
    tiny = " ".join(" ".join(printed_with(2**30, monkeypatch, capsys)).split())
    assert "does not fit, nor would it with every switch" in tiny
    assert "this machine has none" in " ".join(printed_with(None, monkeypatch, capsys))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("trainer.batch_size=8",), "(1 device, 8 sequences at a time)"),
        (("hardware=ddp", "trainer.batch_size=8"), "(1 process (hardware.devices unset), 8 sequences at a time)"),
        (("hardware=ddp", "hardware.devices=2", "trainer.batch_size=2"), "(2 devices, 1 sequence at a time)"),
        (("routing.heads=1", "routing.layers=1", "trainer.steps=1"), "1 head in each of the top 1 layer,"),
    ],
)
def test_one_is_one(overrides: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    plan.main(list(overrides))
    assert said in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.01, "under 0.1 seconds"),
        (0.4, "0.4 seconds"),
        (119.0, "119.0 seconds"),
        (120.0, "2.0 minutes"),
        (7_200.0, "2.0 hours"),
        (518_400.0, "6.0 days"),
        (3.2e10, "1.0e3 years"),
        (6.6e16, "2.1e9 years"),
        (3.2e20, "1.0e13 years"),
    ],
)
def test_durations(seconds: float, said: str) -> None:
    assert plan.duration(seconds) == said
