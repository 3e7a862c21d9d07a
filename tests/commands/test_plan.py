"""`rtx plan` for every preset."""

import re

import pytest
import torch

from rtx.commands import plan
from rtx.keys import conf_dir, options


@pytest.mark.parametrize("preset", sorted(options("model")))
def test_every_preset_has_a_plan(preset: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = "cutoffs:" in (conf_dir() / "model" / f"{preset}.yaml").read_text()  # bands are of many words
    data = ["data=wikitext103"] if words else []
    assert plan.main([*data, f"model={preset}"]) == 0
    printed = capsys.readouterr().out
    assert f"{preset}: " in printed
    for word in ("parameters", "operations", "memory", "run"):
        assert any(line.startswith(word) for line in printed.splitlines())


def test_the_figures_of_a_known_model(capsys: pytest.CaptureFixture[str]) -> None:
    plan.main(["data=enwik8", "model=rt24", "trainer.steps=1000", "trainer.batch_size=16"])
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    printed = " ".join(" ".join(lines).split())
    assert "rt24: 24 layers, local heads, N = 8,192 units of enwik8" in printed
    assert "1,000 steps, 131,072,000 units" in printed


def fit_lines(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return what a plan says of devices, a line for each, on a machine of 15 GiB without a GPU."""
    monkeypatch.setattr(plan, "device_memory", lambda config: None if config.hardware.name == "gpu" else 15 * 2**30)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert plan.main(["data=enwik8", "model=rt24", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    told = " ".join(" ".join(lines[next(i for i, line in enumerate(lines) if line.startswith("what fits ")) :]).split())
    return re.split(r" (?=a GPU of|this machine)", told.removeprefix("what fits"))[1:]


def test_the_plan_says_what_each_device_is_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = fit_lines([], monkeypatch, capsys)
    assert [line.partition(":")[0] for line in given] == [
        *("a GPU of 16 GiB", "a GPU of 24 GiB", "a GPU of 80 GiB", "this machine (15.0 GiB)"),
    ]
    assert " at a time, recomputed, " in given[0] and "recomputed" not in given[2] and "does not fit" not in given[0]
    asked = fit_lines(["trainer.micro_batch_size=8", "model.recompute=false"], monkeypatch, capsys)
    assert "does not fit (8 sequences at a time, " in asked[0] and "optimizer=adafactor" in asked[0]
    for words, devices in (
        (["hardware=gpu"], ["a GPU of 16 GiB", "a GPU of 24 GiB", "a GPU of 80 GiB"]),
        (["hardware=cpu"], ["this machine (15.0 GiB)"]),
        (["plan.memory=80"], ["a GPU of 80 GiB"]),  # to be rented
    ):
        assert [line.partition(":")[0] for line in fit_lines(words, monkeypatch, capsys)] == devices
    plan.main(["plan.memory=0.001", "hardware=cpu"])
    assert "a machine of 0.001 GiB: does not fit (" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("trainer.batch_size=8",), "(1 device, 8 sequences at a time)"),
        (("hardware=ddp", "hardware.devices=2", "trainer.batch_size=2"), "(2 devices, 1 sequence at a time)"),
        (("model.layers=1", "routing.layers=1", "trainer.steps=1"), "tiny: 1 layer,"),
    ],
)
def test_one_is_one(overrides: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    plan.main(list(overrides))
    assert said in " ".join(capsys.readouterr().out.split())
