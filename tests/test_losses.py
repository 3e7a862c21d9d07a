"""A refactor must reproduce recorded losses: a few training steps of every selection, in float64, on a fixed text.

`python tests/test_losses.py` records them anew, for a change that is meant to move them.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from rtx.attention.kmeans import update_centroids
from rtx.checks import resolve
from rtx.config import Config, DataConfig, ModelConfig, OptimizerConfig, RoutingConfig, TrainerConfig
from rtx.data.sampler import TrainingItems
from rtx.data.tokenizers import ByteTokenizer, encode_text
from rtx.model.transformer import Transformer
from rtx.training.optimizers import build_optimizer, learning_rate, set_learning_rate

RECORD = Path(__file__).parent / "losses" / "selections.json"
SELECTIONS = ("causal", "topk", "random")
STEPS = 12


def text() -> bytes:
    """Return the same made-up words everywhere: python's generator is the same on every machine."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 6))) for _ in range(40)]
    return " ".join(draw.choices(words, k=1_500)).encode()


def losses(selection: str) -> list[float]:
    """Return the mean nats of each step, weights drawn by python's generator (torch's differs between versions)."""
    config = resolve(
        Config(
            data=DataConfig(length=64),
            routing=RoutingConfig(selection=selection, heads=1, layers=1, window=16, decay=0.9, commitment=1e-2),
            model=ModelConfig(layers=2, heads=2, hidden=16, window=8, ffn_hidden=32, positions="shaw", max_distance=8),
            optimizer=OptimizerConfig(name="adam", lr=3e-2, warmup=3),
            trainer=TrainerConfig(steps=STEPS, batch_size=2),
        )
    )
    model = Transformer(config, 256).double()
    draw = random.Random(1)
    with torch.no_grad():
        for value in (*model.parameters(), *(b for name, b in model.named_buffers() if name.endswith("centroid_HCD"))):
            drawn = torch.tensor([draw.gauss(0, 1) for _ in range(value.numel())], dtype=torch.float64)
            value.copy_(drawn.view(value.shape) * (1.0 if value.dtype == torch.float32 else 0.2))
    items = TrainingItems(encode_text(ByteTokenizer(), text()), 64, 0, 2)
    optimizer = build_optimizer(model, config.optimizer)
    seen = []
    for step in range(STEPS):
        nats_BN, auxiliary = model.loss(torch.stack([items.item(step, i) for i in range(2)]))
        set_learning_rate(optimizer, learning_rate(config, step + 1))
        optimizer.zero_grad()
        (nats_BN.mean() + auxiliary).backward()
        optimizer.step()
        update_centroids(model)
        seen.append(nats_BN.mean().item())
    return seen


@pytest.mark.parametrize("selection", SELECTIONS)
def test_losses_are_those_on_record(selection: str) -> None:
    recorded = json.loads(RECORD.read_text())[selection]
    assert losses(selection) == pytest.approx(recorded, rel=1e-8)
    assert recorded[-1] < recorded[0] - 0.5, "it learns"


if __name__ == "__main__":
    RECORD.write_text(json.dumps({selection: losses(selection) for selection in SELECTIONS}, indent=1) + "\n")
