"""Every preset takes an optimizer step at reduced size: its own pattern, positions, norm, dropouts and optimizer."""

from __future__ import annotations

import pytest
import torch

from rtx.attention.centroids import Centroids, after_step
from rtx.attention.choices import Indexer
from rtx.cells import lay_out
from rtx.checks import resolve
from rtx.compose import compose, with_values
from rtx.config import Config
from rtx.data.sets import IMAGE_SETS, MADE
from rtx.keys import conf_dir, options
from rtx.model.transformer import Transformer
from rtx.options import check_overrides
from rtx.training.module import build_optimizer, learning_rate, set_learning_rate

VOCABULARY = 256


def reduced(*overrides: str) -> Config:
    """The composed configuration with a small model and short sequences; all else stays as the preset has it."""
    config = compose(overrides)
    images = config.data.name in IMAGE_SETS
    model = {"layers": 2, "hidden": config.model.heads * 4, "ffn_hidden": 24, "window": 8, "max_distance": 8}
    model |= {
        "stride": 4,
        "summary": 2,
        "embedding": "adaptive" if config.model.cutoffs else config.model.embedding and 8,
    }
    model |= {"cutoffs": config.model.cutoffs and "16x64", "band_factor": 2}
    model |= {"axes": config.model.axes and f"4x4x{3 if images else 2}"}
    model |= {"memory": 12 if config.model.memory else 0, "compressed": 8 if config.model.compressed else 0}
    model |= {"compression_rate": 2}
    routing = {"layers": min(config.routing.layers, 2), "window": 8, "clusters": 4, "block": 4}
    values = {"data.size": 4 if images else None, "data.length": 48 if images else 32, "trainer.batch_size": 2}
    values |= {f"model.{key}": value for key, value in model.items()}
    values |= {"data.pairs": 4, "data.distance": 0} if config.data.name in MADE else {}
    return resolve(with_values(config, values | {f"routing.{key}": value for key, value in routing.items()}))


def stands_for_others(experiment: str) -> bool:
    """Tell whether an experiment is several others, which are tried by themselves."""
    return "\n      experiment:" in (conf_dir() / "experiment" / f"{experiment}.yaml").read_text()


def take_step(config: Config) -> None:
    """Take one step and check that it changes weights and centroids, and that everything stays finite."""
    torch.manual_seed(0)
    model = Transformer(config, VOCABULARY).train()
    optimizer = build_optimizer(model, config.optimizer)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    nats_BN, auxiliary = model.loss(torch.randint(0, VOCABULARY, (2, config.data.length)))
    (nats_BN.mean() + auxiliary).backward()
    set_learning_rate(optimizer, learning_rate(config, 1))
    optimizer.step()
    after_step(model)
    after = model.state_dict()
    assert nats_BN.shape == (2, config.data.length)
    assert all(torch.isfinite(value).all() for value in after.values())
    output = "output_VS" if model.softmax is None else "softmax.bands.tables.1"
    assert not torch.equal(before[output], after[output])
    for module in model.modules():
        assert not isinstance(module, Centroids | Indexer) or int(module.steps) == 1


@pytest.mark.parametrize("routing", options("routing"))
@pytest.mark.parametrize("preset", options("model"))
def test_model_presets(preset: str, routing: str) -> None:
    take_step(reduced(f"model={preset}", f"routing={routing}"))


@pytest.mark.parametrize("optimizer", options("optimizer"))
def test_optimizer_presets(optimizer: str) -> None:
    take_step(reduced(f"optimizer={optimizer}"))


@pytest.mark.parametrize("experiment", [name for name in options("experiment") if not stands_for_others(name)])
def test_every_cell_of_every_experiment(experiment: str) -> None:
    laid_out = [cell.overrides for cell in lay_out(check_overrides([f"experiment={experiment}"], sweep=True))]
    sizes = ("routing.layers=", "routing.window=", "seed=")  # cells that differ by these alone are one at reduced size
    alike = {tuple(word for word in cell if not word.startswith(sizes)): cell for cell in laid_out}
    assert len(alike) >= min(len(laid_out), 2)
    for cell in alike.values():
        take_step(reduced(*cell))
