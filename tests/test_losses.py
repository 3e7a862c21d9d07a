"""Whole models must train as recorded: the losses of the first four of twelve steps, in float64,
from drawn weights, on a fixed text.

losses/curves.json is held against the earlier implementation of every pattern, which made it:
routing by top-w, by the nearest centroid and at random, with shared and own keys, both of its rules
for centroids, and all base patterns. No change may move it, so nothing here writes it.

losses/changed.json is our own, made by this code, of what the earlier implementation had not or had
otherwise: thresholds that follow counts (causal), centroids that follow their members, selections
by query, keys that look back. `python tests/test_losses.py` records its cases anew, for a change
that is meant to move them.
"""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rtx.attention.centroids import after_step
from rtx.data.batches import MicroBatches
from rtx.data.sampler import ShuffledWindows
from rtx.data.tokenizers import Tokenizer, encode_text
from rtx.model.transformer import Transformer
from rtx.settings.rules import resolve
from rtx.settings.schema import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    RoutingConfig,
    TrainerConfig,
)
from rtx.training.optimizers import build_optimizer, learning_rate, set_learning_rate

STEPS = 12
"""Steps on record, by which the learning rate goes."""
FIRST = 4
"""Steps that a test takes: each moves weights and centroids, and the next loss shows it."""
ROUTING = {
    "heads": 1,
    "layers": 1,
    "window": 16,
    "decay": 0.9,
    "commitment": 1e-2,
    "update": "nearest",
}
MODEL = {"layers": 2, "heads": 2, "hidden": 16, "window": 8, "ffn_hidden": 32}
DRAWN = ("centroid_HCD", "rotation_HTDF", "projection_HDD")
"""Buffers that are drawn at the start, as weights are, but with variance 1."""

FOLDER = Path(__file__).parent / "losses"
CURVES, OURS = (json.loads((FOLDER / name).read_text()) for name in ("curves.json", "changed.json"))


RECORDED_NAMES = (
    (r"\.groups\.(\w+)\.pattern\.", r".groups.\1."),
    (r"\.groups\.(\w+)\.tables\.", r".shaw.\1."),
    (r"\.groups\.(\w+)\.key_mix\.", r".mix.\1."),
)
"""What in the names of weights replaced which part of the names that they had when curves.json was
recorded.
"""


def recorded_name(name: str) -> str:
    """Return the name by whose order a weight was drawn."""
    for pattern, replacement in RECORDED_NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def drawn_model(config: Config, dtype: torch.dtype) -> Transformer:
    """Return a model whose weights are drawn by python's generator: torch's differs between
    versions.
    """
    model = Transformer(config, 256).to(dtype)
    draw = random.Random(1)
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith(DRAWN)]
    for name, value in sorted(
        [*model.named_parameters(), *buffers], key=lambda pair: recorded_name(pair[0])
    ):
        drawn = torch.tensor(
            [draw.gauss(0, 1) for _ in range(value.numel())], dtype=torch.float64
        ).view(value.shape)
        if name.endswith("projection_HDD"):
            drawn = torch.linalg.qr(drawn).Q
        elif name.endswith("share_H"):
            drawn = drawn.abs() * 0.3
        elif not name.endswith(DRAWN):
            drawn = drawn * 0.2
        value.data.copy_(drawn)
    return model


def losses(
    routing: dict[str, Any],
    options: dict[str, Any],
    dtype: torch.dtype = torch.float64,
    steps: int = FIRST,
) -> list[float]:
    """Return what each of the first steps minimises: the mean nats and the auxiliary loss."""
    config = resolve(
        Config(
            data=DataConfig(length=64),
            routing=RoutingConfig(**{**ROUTING, **routing}),
            model=ModelConfig(**{**MODEL, **options}),
            optimizer=OptimizerConfig(name="adam", lr=3e-2, warmup=3),
            trainer=TrainerConfig(steps=STEPS, batch_size=2),
        )
    )
    model = drawn_model(config, dtype)
    # Letters whose order never repeats itself for long: no two positions are alike but for
    # rounding.
    text = "".join(random.Random(0).choices("abcdefghijkl", k=7_500)).encode()
    batches = MicroBatches(ShuffledWindows(encode_text(Tokenizer(), text), 64, 0, 2), 2)
    optimizer = build_optimizer(model, config.optimizer)
    seen: list[float] = []
    for step in range(steps):
        nats_BN, auxiliary = model.loss(batches[2 * step])
        loss: Tensor = nats_BN.mean() + auxiliary
        set_learning_rate(optimizer, learning_rate(config, step + 1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        after_step(model)
        seen.append(loss.item())
    return seen


@pytest.mark.parametrize("name", [*CURVES, *OURS])
def test_losses_are_those_on_record(name: str) -> None:
    case = (CURVES | OURS)[name]
    first = case["losses"][:FIRST]
    assert losses(case["routing"], case["model"]) == pytest.approx(first, rel=1e-9, abs=1e-9)
    assert case["losses"][-1] < case["losses"][0] - 1, "it learns"
    if name in ("nearest_rotary", "random_shaw", "local", "full_shaw", "sparse", "adaptive_span"):
        in_single = losses(case["routing"], case["model"], torch.float32)
        assert in_single == pytest.approx(first, rel=1e-6)


if __name__ == "__main__":
    rows = {
        name: {**row, "losses": losses(row["routing"], row["model"], steps=STEPS)}
        for name, row in OURS.items()
    }
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
    (FOLDER / "changed.json").write_text(f"{{\n{lines}\n}}\n")
