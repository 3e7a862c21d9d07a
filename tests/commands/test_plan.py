"""`rtx plan`: the figures of a model, and what each device is given."""

import dataclasses
import re
import types
from typing import Any

import pytest
import torch

from rtx.analysis import head_memory
from rtx.attention.engine import packed_attention
from rtx.cli import main as cli
from rtx.commands import plan, train
from rtx.report.summary import routing_lines
from rtx.settings.compose import compose
from rtx.training.hardware import resolve_hardware


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the words of a plan, whose lines fit a terminal of 80 columns."""
    assert cli.main(["plan", *words]) == 0
    text = capsys.readouterr().out
    assert all(len(line) <= 80 for line in text.splitlines())
    assert all(f"\n{word}" in text for word in ("parameters", "operations", "memory"))
    return " ".join(text.split())


def test_the_figures_of_a_known_model_and_one_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    printed = planned(
        capsys, "data=enwik8", "model=rt24", "trainer.steps=1000", "trainer.batch_size=16"
    )
    assert (
        "rt24: 24 layers, local heads; routing=topk: 4 of 8 heads route in 24 of 24 layers (32 "
        "clusters, W = 256)" in printed
    )
    assert "1,000 steps, 131,072,000 units" in printed
    printed = planned(
        capsys, "model.layers=1", "routing.layers=1", "trainer.steps=1", "trainer.batch_size=1"
    )
    assert all(
        said in printed
        for said in ("tiny: 1 layer,", "(1 device, 1 sequence at a time)", "run 1 step,")
    )
    assert " TFLOP: less than 0.001 seconds at 100 TFLOP/s memory about " in printed
    assert re.search(r" TFLOP: 0\.\d{3} seconds at 100 TFLOP/s ", planned(capsys))
    assert re.search(
        r" MiB a device: weights \d+ MiB, gradients \d+ MiB, optimizer \d+ MiB, ", printed
    )
    printed = planned(capsys, "data=enwik8", "model=rt24")
    assert " hours at 100 TFLOP/s" in printed and re.search(
        r"about \d+\.\d\d GiB a device", printed
    )
    assert re.search(
        r"speed about [\d.,]+ ms a step, [\d,]+ units/s on an H100 in bf16, predicted, not meas",
        printed,
    )
    two = planned(capsys, "hardware=ddp", "hardware.devices=2", "trainer.batch_size=4")
    assert "units/s on 2 devices like an H100" in two
    assert "(2 devices, 2 sequences at a time)" in two


@pytest.mark.parametrize("batch", [2**20, 720_720])
def test_a_batch_with_many_divisors_is_planned(
    batch: int, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = planned(capsys, f"trainer.batch_size={batch}", "plan.memory=16")
    assert f"step {batch:,} sequences, " in printed and " sequences at a time, " in printed


@pytest.mark.parametrize(("columns", "longest"), [(110, 110), (300, 120)])
def test_a_wide_terminal_is_used(
    columns: int, longest: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert cli.main(["plan", "data=enwik8", "model=rt24"]) == 0
    lengths = [len(line) for line in capsys.readouterr().out.splitlines()]
    assert longest - 20 < max(lengths) <= longest


def test_the_plan_says_what_each_device_is_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        plan, "device_memory", lambda config: None if config.hardware.name == "gpu" else 15 * 2**30
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)

    def given(*words: str) -> list[str]:
        """Return what a plan says of devices, a line for each, on a machine of 15 GiB without a
        GPU.
        """
        told = planned(capsys, "data=enwik8", "model=rt24", *words)
        return re.split(r" (?=a GPU of|this machine)", told.partition(" what fits ")[2])

    gpus = [f"a GPU of {size} GiB" for size in (16, 24, 80)]
    machine = ["this machine (15.0 GiB)"]
    for words, devices in (
        ([], gpus + machine),
        (["hardware=gpu"], gpus),
        (["hardware=cpu"], machine),
        (["plan.memory=80"], gpus[2:]),  # to be rented
    ):
        assert [line.partition(":")[0] for line in given(*words)] == devices
    first, _, last, _ = given()
    assert (
        " at a time, recomputed, " in first
        and "recomputed" not in last
        and "does not fit" not in first
    )
    asked = given("trainer.micro_batch_size=8", "model.recompute=false")[0]
    assert "does not fit (8 sequences at a time, " in asked and "optimizer=adafactor" in asked
    assert "a machine of 0.001 GiB: does not fit (" in planned(
        capsys, "plan.memory=0.001", "hardware=cpu"
    )


OURS = "our kernels for packed lists"
SDPA = "torch's scaled_dot_product_attention"
FLASH = "torch's flash kernel"
TILES = "torch's operations on tiles of the lists"
ENGINES = [
    (
        (
            "model.base=full+local",
            "routing=topk",
            "model.positions=rotary",
            "model.attention_dropout=0",
        ),
        f"full by {SDPA}, local by {OURS}, topk by {OURS}",
    ),
    (
        ("model.base=full+local", "model.positions=rotary", "model.attention_dropout=0.1"),
        f"full by {SDPA}, local by {OURS}, ",
    ),
    (
        ("model.base=full", "model.positions=shaw"),
        f"full by {OURS} (not {SDPA}: it has no terms by distance), ",
    ),
    (
        ("model.hidden=32", "model.heads=4"),
        f"causal by {TILES} (not {OURS}: it computes with heads of 16 to 128 units)",
    ),
    (
        ("model.base=adaptive_span", "model.positions=none"),
        f"not {OURS}: it has no adaptive spans; not {FLASH}: it has no terms by distance)",
    ),
    (
        ("hardware.precision=fp64",),
        f"local by {TILES} (not {OURS}: it computes in float32, float16 or bfloat16; "
        f"not {FLASH}: it computes in float32 or narrower), ",
    ),
    (("hardware.precision=fp32",), f"local by {OURS}, "),
    (
        ("model.hidden=576",),
        f"local by {FLASH} (not {OURS}: it computes with heads of 16 to 128 units), ",
    ),
    (("hardware.attention=torch",), f"local by {FLASH}, causal by {TILES} "),
    (
        ("hardware.attention=flex",),
        "local by torch's FlexAttention, causal by torch's FlexAttention ",
    ),
    (
        ("hardware.attention=native",),
        "local by no engine (not hardware.attention=native: it computes in float32 on a CPU), ",
    ),
    (
        ("routing=indexer", "routing.warmup=10"),
        f", indexer by {OURS} in 10 steps, then by torch's operations on all scores ",
    ),
    (("model.base=fixed", "model.stride=64"), f"attention fixed by {OURS}, causal by {OURS} "),
]
"""Overrides, and what the plan for a GPU says by which engine it computes."""


@pytest.mark.parametrize(("words", "phrase"), ENGINES)
def test_a_plan_for_a_gpu_names_the_engine_of_each_pattern(
    words: tuple[str, ...],
    phrase: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(packed_attention, "HAS_TRITON", True)
    monkeypatch.setattr(packed_attention, "HAS_COMPILER", True)
    assert phrase in planned(capsys, *words, "plan.memory=80")


def test_a_plan_says_what_a_gpu_lacks_for_our_kernels(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(packed_attention, "HAS_TRITON", False)
    monkeypatch.setattr(head_memory, "saved_by_key", {})
    printed = planned(capsys, "plan.memory=80")
    lacks = f"not {OURS}: Triton is not installed"
    assert f"local by {FLASH} ({lacks}), causal by {TILES} ({lacks}) " in printed


def test_a_plan_for_a_cpu_names_no_engine_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for words in ([], ["hardware=cpu"], ["hardware=cpu", "plan.memory=80"]):
        assert " attention local by " not in planned(capsys, *words)
    assert " attention local by " in planned(capsys, "hardware=gpu")


def test_a_run_on_a_gpu_begins_with_the_engines_and_one_on_a_cpu_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packed_attention, "HAS_TRITON", True)
    monkeypatch.setattr(packed_attention, "HAS_COMPILER", True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)  # what stands for a recent GPU
    config = compose(["routing=topk"])
    on_cpu = resolve_hardware(config)
    store: Any = types.SimpleNamespace(name="text")
    session: Any = types.SimpleNamespace(config=config, hardware=on_cpu, store=store)
    assert train.opening_lines(session, 1)[1:] == routing_lines(config)
    session.hardware = dataclasses.replace(on_cpu, accelerator="gpu")
    engines = f"attention: local by {OURS}, topk by {OURS}"
    assert train.opening_lines(session, 1)[1:] == [*routing_lines(config), engines]
