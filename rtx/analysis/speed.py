"""How fast training is beside what a chip can do at the most, and how fast it is expected to be.

Peaks and the constants of the expectation are in rates.json beside this file, with their sources.
"""

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

from rtx.analysis.cost import Cost
from rtx.settings.devices import precision_on
from rtx.settings.schema import Config

RATES = Path(__file__).with_name("rates.json")
ARITHMETIC = {"bf16": "bf16", "bf16-true": "bf16", "tf32": "tf32", "fp32": "fp32"}
"""The column of the peaks for each hardware.precision; fp64, which is for tests, has none."""


@functools.cache
def rates() -> dict[str, Any]:
    return json.loads(RATES.read_text())


def peak_of(device: str, precision: str) -> float | None:
    """Return the operations a second that a device can do at the most, None where its name is not in the table."""
    known = rates()["peaks"]["devices"].get(device, {})
    return known.get(ARITHMETIC.get(precision, ""))


class Meter(NamedTuple):
    """What turns units a second into a share of the peak; the operations are those that are computed."""

    operations_per_unit: float
    peak: float | None
    """Of all devices together; None where it is not known."""

    def share(self, units_per_second: float) -> float | None:
        """Return the share of the peak (model FLOPs utilisation, MFU)."""
        return (
            None if self.peak is None else units_per_second * self.operations_per_unit / self.peak
        )


def meter(config: Config, total: Cost, device: str | None, precision: str, world: int = 1) -> Meter:
    """Return the meter of a run on `world` devices of a name; None: a CPU, of which no peak is known."""
    units = config.trainer.batch_size * config.data.length
    peak = peak_of(device, precision) if device else None
    return Meter(total.step(config) / units, peak and world * peak)


class Expected(NamedTuple):
    """The time of an optimizer step by a roofline, in seconds.

    Products and memory traffic add up; launches by the CPU count only where they take longer than both.
    """

    products: float
    traffic: float
    launches: float

    @property
    def step(self) -> float:
        return max(self.products + self.traffic, self.launches)


def expected_step(
    config: Config, total: Cost, micro_batch: int, vocabulary: int, world: int
) -> Expected | None:
    """Return the expected time of a step on the device of the roofline; None for a precision without a peak.

    `config` has the micro-batch and recomputation that are chosen.
    """
    known = rates()["roofline"]
    precision = precision_on(config.hardware, gpu=True)
    peak = peak_of(known["device"], precision)
    if peak is None:
        return None
    passes = 4 if config.model.recompute is True else 3
    sequences = config.trainer.batch_size / world
    dense = passes * total.dense / known["product_share"]
    attention = passes * total.attention / known["attention_share"]
    selection = total.selection / known["product_share"]
    width = 2 if precision == "bf16-true" else 4
    stream = (
        known["passes_per_layer"] * config.model.layers * config.model.hidden * width * passes / 3
    )
    logits = known["passes_of_logits"] * vocabulary * 4
    moved = sequences * config.data.length * (stream + logits)
    moved += known["optimizer_bytes_per_parameter"] * total.parameters
    launches = known["launches_per_layer"] * config.model.layers * sequences / micro_batch
    return Expected(
        products=sequences * (dense + attention + selection) / peak,
        traffic=moved / known["bytes_per_second"],
        launches=launches * known["launch_seconds"],
    )
