"""The plan's count of memory against what training keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import rtx.analysis.footprint
import rtx.attention.weights
from rtx.analysis.cost import cost
from rtx.analysis.footprint import saved
from rtx.attention.chunked import chunked
from rtx.attention.shaw import Dense, Sorted
from rtx.compose import compose
from rtx.config import Config
from rtx.model.transformer import Transformer

SHRUNK = (
    *("data=enwik8", "data.length=512", "model=rt12", "model.layers=2", "model.hidden=128", "model.heads=4"),
    *("model.ffn_hidden=256", "model.window=64", "model.max_distance=64", "routing.layers=1", "routing.heads=2"),
    *("routing.window=64", "routing.clusters=8", "trainer.batch_size=2", "hardware=cpu"),
)
NO_DROPOUT = ("model.dropout=0", "model.attention_dropout=0", "model.ffn_dropout=0")
LOCAL = ("routing.heads=0", "routing.layers=0")
TOPK = ("routing=topk", "routing.layers=2", "routing.heads=4")
CASES = [
    (*LOCAL, "model.positions=none", "model.norm=pre", "model.ffn=relu", *NO_DROPOUT),
    (*LOCAL, "model.positions=none", "model.norm=pre", "model.ffn=relu"),
    (*LOCAL, "model.positions=rotary"),
    (*LOCAL, "model.positions=rotary", "model.norm=pre", "model.ffn=gelu", *NO_DROPOUT),
    LOCAL,
    (*LOCAL, "trainer.batch_size=1"),
    (*LOCAL, "model.base=full"),
    (*LOCAL, "model.base=full", "model.positions=rotary", *NO_DROPOUT),
    (*LOCAL, "model.base=full", "model.positions=rotary", "trainer.batch_size=1", *NO_DROPOUT),
    (*LOCAL, "model.base=full", "model.positions=none", "data.length=2304", "trainer.batch_size=1", *NO_DROPOUT),
    (*LOCAL, "model.recompute=true"),
    (*LOCAL, "model.ffn_parts=4"),
    (*LOCAL, "model.positions=none", "model.ffn=relu", "model.ffn_parts=4", *NO_DROPOUT),
    (*LOCAL, "hardware.precision=bf16"),
    TOPK,
    (*TOPK, "model.positions=rotary", *NO_DROPOUT),
    (*TOPK, "routing.clusters=32", "model.positions=none"),
    (*TOPK, "trainer.batch_size=1"),
    (*TOPK, "hardware.precision=bf16", "model.positions=rotary"),
    ("routing=random", "routing.layers=2"),
    ("routing=causal", "routing.layers=2", "routing.heads=4", "model.positions=rotary"),
]
ROUGHLY = [
    (*LOCAL, "model.base=local+strided", "model.stride=16", "model.positions=none"),
    (*LOCAL, "model.base=fixed", "model.stride=16", "model.summary=4", "model.positions=none"),
    (*LOCAL, "model.base=lsh", "model.positions=none"),
    ("routing=topk", "routing.layers=2", "routing.keys=separate", "routing.clusters=16"),
    ("routing=nearest", "routing.layers=2", "model.positions=none"),
]
CHUNKED = chunked


@pytest.mark.parametrize("trusted", [True, False])
@pytest.mark.parametrize("overrides", CASES)
def test_what_is_kept_is_what_autograd_keeps(overrides: tuple[str, ...], trusted: bool, monkeypatch) -> None:
    for room in (rtx.attention.weights, rtx.analysis.footprint):
        monkeypatch.setattr(room, "trusted", lambda: trusted)
    config = compose([*SHRUNK, *overrides])
    narrowed = 2 * cost(config, 256).parameters if config.hardware.precision == "bf16" else 0
    assert 0.93 < (saved(config, config.trainer.batch_size, 256) + narrowed) / kept_for_backward(config) < 1.07


@pytest.mark.parametrize("overrides", ROUGHLY)
def test_what_less_usual_patterns_keep_is_known_roughly(overrides: tuple[str, ...]) -> None:
    config = compose([*SHRUNK, *overrides])
    assert 0.7 < saved(config, config.trainer.batch_size, 256) / kept_for_backward(config) < 1.4


def kept_for_backward(config: Config) -> int:
    """Return the bytes that a training forward pass leaves for the backward pass, each piece of memory counted once.

    Besides what autograd saves these are the pairs that Shaw's rules list, and what telemetry keeps.
    """
    torch.manual_seed(0)
    model = Transformer(config, 256).train()
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, torch.UntypedStorage] = {}
    beside: list[Any] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    def noted(q_GQD: Tensor, k_GKD: Tensor, v_GKD: Tensor, scale: float, mask: Tensor, **options: Any) -> Tensor:
        beside.extend([mask, options["rule"]])
        return CHUNKED(q_GQD, k_GKD, v_GKD, scale, mask, **options)

    tokens_BN = torch.randint(0, 256, (config.trainer.batch_size, config.data.length))
    with pytest.MonkeyPatch.context() as patch, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        patch.setattr("rtx.attention.weights.chunked", noted)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=config.hardware.precision == "bf16"):
            nats_BN, _ = model.loss(tokens_BN)
    assert nats_BN.requires_grad
    for each in beside:
        if isinstance(each, Sorted):
            for tensor in (each.query_GQ, each.key_GK, *(number for pair in each.listed.values() for number in pair)):
                keep(tensor)
        elif isinstance(each, Dense | torch.Tensor):
            keep(each.distance_GQK if isinstance(each, Dense) else each)
    shots = [heads.snapshot for heads in model.modules() if getattr(heads, "snapshot", None) is not None]
    looks = [tensor for shot in shots for tensor in (*shot.members[:2], shot.nearest_HN, shot.query_HND, shot.key_HND)]  # type: ignore[union-attr]
    for tensor in looks:
        keep(tensor)  # pyright: ignore[reportArgumentType]
    return sum(storage.nbytes() for storage in kept.values())
