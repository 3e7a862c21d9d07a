"""Shares of a chip's peak, and the time of a step that a roofline expects."""

from types import SimpleNamespace
from typing import Any

import pytest

from rtx.analysis.cost import cost
from rtx.analysis.speed import expected_step, meter, peak_of, rates
from rtx.commands.train import run_meter
from rtx.settings.compose import compose
from rtx.settings.schema import Config, with_values


def planned(*words: str) -> Config:
    config = compose(["data=enwik8", "model=rt12", "hardware=gpu", *words])
    return with_values(config, {"model.recompute": False})


@pytest.mark.parametrize(
    ("device", "precision", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4e12),
        ("NVIDIA H100 80GB HBM3", "bf16-true", 989.4e12),
        ("NVIDIA H100 80GB HBM3", "tf32", 494.7e12),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("NVIDIA L4", "bf16", 121e12),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2e12),
        ("NVIDIA H100 80GB HBM3", "fp64", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", None),
        ("Radeon", "bf16", None),
    ],
)
def test_the_peak_of_a_device_is_that_of_its_whole_name(
    device: str, precision: str, peak: float | None
) -> None:
    assert peak_of(device, precision) == peak


def test_a_step_a_second_is_its_operations_over_the_peak_of_all_devices() -> None:
    config = planned()
    total = cost(config, 256)
    units = config.trainer.batch_size * config.data.length
    two = meter(config, total, "NVIDIA H100 80GB HBM3", "bf16", world=2)
    assert two.share(units) == pytest.approx(total.step(config) / (2 * 989.4e12))
    recomputed = meter(
        with_values(config, {"model.recompute": True}), total, "NVIDIA H100 80GB HBM3", "bf16", 2
    )
    assert (recomputed.share(units) or 0) > 1.2 * (two.share(units) or 0), "what is computed counts"
    assert meter(config, total, None, "bf16").share(units) is None


def test_a_gpu_without_a_known_peak_is_told_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hardware = SimpleNamespace(on_gpu=True, precision="bf16", world=1)
    config = planned()
    session: Any = SimpleNamespace(config=config, hardware=hardware, cost=cost(config, 256))
    for name in ("Radeon", "NVIDIA H200"):
        monkeypatch.setattr("torch.cuda.get_device_name", lambda name=name: name)
        assert (run_meter(session).peak is None) == (name == "Radeon")
    out = capsys.readouterr().out
    assert out == "MFU is not computed: rtx does not know the peak of Radeon in bf16\n"


def test_the_expected_time_is_that_of_products_and_memory_or_of_launches() -> None:
    config = planned()
    total = cost(config, 256)
    whole, small = (expected_step(config, total, size, 256, 1) for size in (8, 1))
    assert whole is not None and small is not None
    floor = total.step(config) / 989.4e12
    assert floor < whole.products < 4 * floor
    assert whole.step == whole.products + whole.traffic > whole.launches
    assert small.launches == pytest.approx(8 * whole.launches)
    assert small._replace(products=0.0, traffic=0.0).step == small.launches
    alone = expected_step(config, total, 4, 256, 2)
    assert alone is not None and alone.products == pytest.approx(whole.products / 2)
    assert expected_step(planned("hardware.precision=fp64"), total, 8, 256, 1) is None
    assert not rates()["roofline"]["measured"] and rates()["roofline"]["source"]
