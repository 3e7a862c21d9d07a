"""`rtx plan`: the figures of a model, and what each device is given."""

import re

import pytest
import torch

from rtx.commands import plan


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the words of a plan, whose lines fit a terminal of 80 columns."""
    assert plan.main(list(words)) == 0
    text = capsys.readouterr().out
    assert all(len(line) <= 80 for line in text.splitlines())
    assert all(f"\n{word}" in text for word in ("parameters", "operations", "memory"))
    return " ".join(text.split())


def test_the_figures_of_a_known_model_and_one_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    printed = planned(capsys, "data=enwik8", "model=rt24", "trainer.steps=1000", "trainer.batch_size=16")
    assert (
        "rt24: 24 layers, local heads; routing=topk: 4 of 8 heads route in 24 of 24 layers (32 clusters, W = 256)"
        in printed
    )
    assert "1,000 steps, 131,072,000 units" in printed
    printed = planned(capsys, "model.layers=1", "routing.layers=1", "trainer.steps=1", "trainer.batch_size=1")
    assert all(said in printed for said in ("tiny: 1 layer,", "(1 device, 1 sequence at a time)", "run 1 step,"))
    assert " TFLOP: less than 0.001 seconds at 100 TFLOP/s memory about " in printed
    assert re.search(r" TFLOP: 0\.\d{3} seconds at 100 TFLOP/s ", planned(capsys))
    assert re.search(r" MiB a device: weights \d+ MiB, gradients \d+ MiB, optimizer \d+ MiB, ", printed)
    printed = planned(capsys, "data=enwik8", "model=rt24")
    assert " hours at 100 TFLOP/s" in printed and re.search(r"about \d+\.\d\d GiB a device", printed)
    assert re.search(r"speed about [\d.,]+ ms a step, [\d,]+ units/s on an H100 in bf16, predicted, not meas", printed)
    two = planned(capsys, "hardware=ddp", "hardware.devices=2", "trainer.batch_size=4")
    assert "units/s on 2 devices like an H100" in two
    assert "(2 devices, 2 sequences at a time)" in two


@pytest.mark.parametrize("batch", [2**20, 720_720])
def test_a_batch_with_many_divisors_is_planned(batch: int, capsys: pytest.CaptureFixture[str]) -> None:
    printed = planned(capsys, f"trainer.batch_size={batch}", "plan.memory=16")
    assert f"step {batch:,} sequences, " in printed and " sequences at a time, " in printed


@pytest.mark.parametrize(("columns", "longest"), [(110, 110), (300, 120)])
def test_a_wide_terminal_is_used(
    columns: int, longest: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert plan.main(["data=enwik8", "model=rt24"]) == 0
    lengths = [len(line) for line in capsys.readouterr().out.splitlines()]
    assert longest - 20 < max(lengths) <= longest


def test_the_plan_says_what_each_device_is_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plan, "device_memory", lambda config: None if config.hardware.name == "gpu" else 15 * 2**30)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)

    def given(*words: str) -> list[str]:
        """Return what a plan says of devices, a line for each, on a machine of 15 GiB without a GPU."""
        told = planned(capsys, "data=enwik8", "model=rt24", *words)
        return re.split(r" (?=a GPU of|this machine)", told.partition(" what fits ")[2])

    gpus, machine = [f"a GPU of {size} GiB" for size in (16, 24, 80)], ["this machine (15.0 GiB)"]
    for words, devices in (
        ([], gpus + machine),
        (["hardware=gpu"], gpus),
        (["hardware=cpu"], machine),
        (["plan.memory=80"], gpus[2:]),  # to be rented
    ):
        assert [line.partition(":")[0] for line in given(*words)] == devices
    first, _, last, _ = given()
    assert " at a time, recomputed, " in first and "recomputed" not in last and "does not fit" not in first
    asked = given("trainer.micro_batch_size=8", "model.recompute=false")[0]
    assert "does not fit (8 sequences at a time, " in asked and "optimizer=adafactor" in asked
    assert "a machine of 0.001 GiB: does not fit (" in planned(capsys, "plan.memory=0.001", "hardware=cpu")
