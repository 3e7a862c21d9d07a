"""Passes as CUDA graphs, without a GPU: what is recorded, when it is recorded again, and what that leaves as it was."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from rtx.attention import Probed, Routing
from rtx.attention.routing import all_centroids
from rtx.compose import compose
from rtx.model.transformer import Transformer
from rtx.training.cuda_graphs import Loss, RecordedLoss, without_cast_cache

WORDS = "model.layers=2 model.hidden=64 model.window=16 model.ffn_hidden=64 data.length=64"
WORDS += " routing.layers=1 routing.window=16"


class Recorder:
    """Stands for `torch.cuda.make_graphed_callables`: runs a module three times, and counts its calls."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, module: Loss, given: tuple[Tensor], allow_unused_input: bool) -> Callable[..., Any]:
        assert allow_unused_input and module.training and not torch.is_autocast_enabled("cpu")
        assert {*map(id, module.parameters())} == {*map(id, module.model.parameters())}
        self.count += 1
        for _ in range(3):
            nats_BN, _ = module(*given)
            nats_BN.mean().backward()
        module.model.zero_grad()
        return module


@pytest.mark.parametrize("selection", ["causal", "probed"])
def test_a_loss_is_recorded_once_for_a_shape_and_again_where_lists_get_more_room(selection: str) -> None:
    torch.manual_seed(0)
    model = Transformer(compose(f"{WORDS} routing={selection}".split()), 256).train()
    tokens_BN = torch.randint(0, 256, (2, 64))
    state = torch.get_rng_state()
    with mock.patch.object(torch.cuda, "make_graphed_callables", Recorder()) as recorder:
        loss = RecordedLoss(model, model.loss, tokens_BN)
        assert torch.equal(torch.get_rng_state(), state)
        assert all(not centroids.total_T.any() for centroids in all_centroids(model)), "passes that count gather alone"
        torch.testing.assert_close(loss(tokens_BN), model.loss(tokens_BN))
        assert all(centroids.total_T.any() for centroids in all_centroids(model))
        loss(tokens_BN[:1])
        assert recorder.count == 1
        (routed,) = (module for module in model.modules() if isinstance(module, Routing | Probed))
        routed.room_factor *= 2
        with torch.autocast("cpu", torch.bfloat16):
            loss(tokens_BN)
            loss(tokens_BN)
        assert recorder.count == 2


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_autocast_keeps_no_narrow_weights_between_passes() -> None:
    def loss() -> bool:
        return torch.is_autocast_cache_enabled()

    with torch.autocast("cpu", torch.bfloat16):
        assert loss() and not without_cast_cache(loss, torch.bfloat16)()
    assert without_cast_cache(loss, None) is loss
