"""Passes as CUDA graphs, without a GPU: what is recorded, when it is recorded again, and what that
leaves as it was.
"""

import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from rtx.attention import Thresholds
from rtx.attention.centroids import all_centroids
from rtx.errors import UserError
from rtx.model.transformer import Transformer
from rtx.settings.compose import compose
from rtx.training.cuda_graphs import Loss, RecordedLoss, without_cast_cache
from rtx.training.hardware import resolve_hardware
from rtx.training.passes import Passes

WORDS = "model.layers=2 model.hidden=64 model.window=16 model.ffn_hidden=64 data.length=64"
WORDS += " routing.layers=1 routing.window=16"


class Recorder:
    """Stands for `torch.cuda.make_graphed_callables`: runs a module three times, and counts its
    calls.
    """

    def __init__(self) -> None:
        self.count = 0

    def __call__(
        self, module: Loss, given: tuple[Tensor], allow_unused_input: bool
    ) -> Callable[..., Any]:
        assert allow_unused_input and module.training
        assert {*map(id, module.parameters())} == {*map(id, module.model.parameters())}
        self.count += 1
        for _ in range(3):
            nats_BN, _ = module(*given)
            nats_BN.mean().backward()
        module.model.zero_grad()
        return module


@pytest.mark.parametrize("selection", ["causal", "probed"])
def test_what_runs_before_recording_leaves_no_trace(selection: str) -> None:
    torch.manual_seed(0)
    model = Transformer(compose(f"{WORDS} routing={selection}".split()), 256).train()
    tokens_BN = torch.randint(0, 256, (2, 64))
    state = torch.get_rng_state()
    with mock.patch.object(torch.cuda, "make_graphed_callables", Recorder()) as recorder:
        loss = RecordedLoss(model, model.loss, tokens_BN)
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(centroids.total_Z.any() for centroids in all_centroids(model)), (
        "passes that count gather alone"
    )
    torch.testing.assert_close(loss(tokens_BN), model.loss(tokens_BN))
    assert all(centroids.total_Z.any() for centroids in all_centroids(model))
    loss(tokens_BN[:1])
    assert recorder.count == 1


def test_a_failure_to_record_leaves_no_trace_and_the_loss_as_it_was() -> None:
    passes = tiny_run()
    plain = passes.loss
    passes.first_BN = torch.randint(0, 256, (2, 64))

    def fails(loss: Loss, given: tuple[Tensor], **_: Any) -> None:
        loss(*given)
        raise RuntimeError("operation not permitted when stream is capturing")

    with mock.patch.object(torch.cuda, "make_graphed_callables", fails):
        line = passes.record_now()
    assert "not recorded as CUDA graphs" in line and "not permitted" in line
    assert passes.loss is plain and not passes.recorded
    assert not any(centroids.total_Z.any() for centroids in all_centroids(passes.model))


def test_passes_are_recorded_again_where_lists_get_more_room() -> None:
    passes = tiny_run()
    with mock.patch.object(torch.cuda, "make_graphed_callables", Recorder()) as recorder:
        assert passes.prepare(torch.randint(0, 256, (2, 64))) == "recorded as CUDA graphs"
        assert passes.raise_capacities() == [] and recorder.count == 1
        (routed,) = (each for each in passes.model.modules() if isinstance(each, Thresholds))
        routed.lost_members.fill_(3)
        lines = passes.raise_capacities()
    assert "3 members exceeded the capacity" in lines[0] and lines[1:] == [
        "recorded as CUDA graphs"
    ]
    assert recorder.count == 2 and isinstance(passes.loss, RecordedLoss)
    assert not isinstance(passes.loss.loss, RecordedLoss)


def test_passes_of_several_micro_batches_are_not_recorded() -> None:
    passes = tiny_run(graphs=True, accumulate=2)
    with pytest.raises(UserError, match="needs one forward pass a step, not 2: raise"):
        passes.record_now()


def tiny_run(graphs: bool | str = "auto", accumulate: int = 1) -> Passes:
    """Return the passes, to be recorded, of a model with causal clusters."""
    config = compose([*WORDS.split(), "routing=causal", "hardware.precision=fp32"])
    hardware = dataclasses.replace(resolve_hardware(config), graphs=True, accumulate=accumulate)
    config = dataclasses.replace(
        config, hardware=dataclasses.replace(config.hardware, graphs=graphs)
    )
    return Passes(Transformer(config, 256).train(), config, hardware)


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_autocast_keeps_no_narrow_weights_between_passes() -> None:
    def loss() -> bool:
        return torch.is_autocast_cache_enabled()

    with torch.autocast("cpu", torch.bfloat16):
        assert loss() and not without_cast_cache(loss, torch.bfloat16)()
    assert without_cast_cache(loss, None) is loss
