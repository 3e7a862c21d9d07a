"""How fast training is as a share of a chip's peak, and how fast it is expected to be.

Peaks and the constants of the expectation are in rates.json in this folder, with their sources.
"""

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

from rtx.analysis.cost import Cost, passes_of_step
from rtx.settings.requirements import precision_on
from rtx.settings.schema import Config

RATES = Path(__file__).with_name("rates.json")
ARITHMETIC = {"bf16": "bf16", "bf16-true": "bf16", "tf32": "tf32", "fp32": "fp32"}
"""The column of the peaks for each hardware.precision. fp64, which is for tests, has none."""


@functools.cache
def rates() -> dict[str, Any]:
    # by path: installed with rtx
    return json.loads(RATES.read_text())


def peak_of(device: str, precision: str) -> float | None:
    """Return the most operations a second of a device; None if the table does not have it."""
    peaks = rates()["peaks"]["devices"].get(device, {})
    return peaks.get(ARITHMETIC.get(precision, ""))


class Meter(NamedTuple):
    """Converts units a second into a share of the peak.

    Its operations are those that are computed, recomputation included.
    """

    operations_per_unit: float
    peak: float | None
    """Of all devices together; None if it is not known."""

    def share(self, units_per_second: float) -> float | None:
        """Return the share of the peak (model FLOPs utilisation, MFU)."""
        if self.peak is None:
            return None
        return units_per_second * self.operations_per_unit / self.peak


def meter(config: Config, total: Cost, device: str | None, precision: str, world: int = 1) -> Meter:
    """Return the meter of a run on `world` devices.

    Args:
        device: the name of each; None: a CPU, whose peak is not known.
    """
    units = config.trainer.batch_size * config.data.length
    operations_per_unit = total.step(config) / units
    if device is None:
        return Meter(operations_per_unit, None)
    peak = peak_of(device, precision)
    if peak is None:
        return Meter(operations_per_unit, None)
    return Meter(operations_per_unit, world * peak)


class Expected(NamedTuple):
    """The time of an optimizer step by a roofline, in seconds.

    Products and memory traffic add up. Launches by the CPU count only if they take longer.
    """

    products: float
    traffic: float
    launches: float

    @property
    def step(self) -> float:
        return max(self.products + self.traffic, self.launches)


def expected_step(
    config: Config,
    total: Cost,
    micro_batch: int,
    vocabulary: int,
    world: int,
) -> Expected | None:
    """Return the expected time of a step on the device of the roofline.

    It is None for a precision without a peak.

    Args:
        config: has the micro-batch and recomputation that are chosen.
    """
    roofline = rates()["roofline"]
    precision = precision_on(config.hardware, gpu=True)
    peak = peak_of(roofline["device"], precision)
    if peak is None:
        return None
    passes = passes_of_step(config)
    sequences = config.trainer.batch_size / world
    dense = passes * total.dense / roofline["product_share"]
    attention = passes * total.attention / roofline["attention_share"]
    selection = total.selection / roofline["product_share"]
    bytes_moved = sequences * bytes_of_sequence(config, vocabulary)
    bytes_moved += roofline["optimizer_bytes_per_parameter"] * total.parameters
    micro_batches = sequences / micro_batch
    launches = roofline["launches_per_layer"] * config.model.layers * micro_batches
    return Expected(
        products=sequences * (dense + attention + selection) / peak,
        traffic=bytes_moved / roofline["bytes_per_second"],
        launches=launches * roofline["launch_seconds"],
    )


def bytes_of_sequence(config: Config, vocabulary: int) -> float:
    """Return the bytes that a step moves for a sequence, through all layers and the logits."""
    roofline = rates()["roofline"]
    number_bytes = 4
    if precision_on(config.hardware, gpu=True) == "bf16-true":
        number_bytes = 2
    stream_bytes = config.model.hidden * config.model.layers * number_bytes
    stream = roofline["passes_per_layer"] * stream_bytes * passes_of_step(config) / 3
    logits = roofline["passes_of_logits"] * vocabulary * 4
    return config.data.length * (stream + logits)
