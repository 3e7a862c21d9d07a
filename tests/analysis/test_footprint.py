"""The plan's count of memory against what training keeps."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from rtx.analysis.cost import cost
from rtx.analysis.footprint import saved
from rtx.compose import compose
from rtx.config import Config
from rtx.model.transformer import Transformer

SHRUNK = (
    *("data=enwik8", "data.length=512", "model=rt12", "model.layers=2", "model.hidden=128", "model.heads=4"),
    *("model.ffn_hidden=256", "model.window=64", "model.max_distance=64", "routing.layers=1", "routing.heads=2"),
    *("routing.window=64", "trainer.batch_size=2", "hardware=cpu"),
)
NO_DROPOUT = ("model.dropout=0", "model.attention_dropout=0", "model.ffn_dropout=0")
LOCAL = ("routing.heads=0", "routing.layers=0")
TOPK = ("routing=topk", "routing.layers=2", "routing.heads=4")
PLAIN = ("model.positions=rotary", *NO_DROPOUT)
ROUGHLY = [
    (*LOCAL, "model.recompute=true"),
    (*LOCAL, "model.base=local+strided", "model.stride=16", *PLAIN),
    (*LOCAL, "model.base=adaptive_span", *PLAIN),
    (*LOCAL, "model.base=lsh", "model.positions=none"),
    ("routing=blocks", "routing.layers=2", "routing.heads=4", "routing.compressed=true", *PLAIN),
]
"""What less usual patterns keep is known roughly."""
CASES = [
    (*LOCAL, "model.positions=none", "model.norm=pre", "model.ffn=relu"),
    (*LOCAL, "model.norm=pre", "model.ffn=gelu", *PLAIN),
    LOCAL,
    (*LOCAL, "trainer.batch_size=1"),
    (*LOCAL, "model.base=full", *PLAIN),
    (*LOCAL, "model.recompute=true", *PLAIN),
    (*LOCAL, "model.ffn_parts=4"),
    (*LOCAL, "hardware.precision=bf16"),
    (*LOCAL, *PLAIN, "hardware.attention=native"),
    TOPK,
    (*TOPK, *PLAIN),
    (*TOPK, *PLAIN, "hardware.attention=native"),
    (*TOPK, "hardware.precision=bf16", "model.positions=rotary"),
    ("routing=random", "routing.layers=2"),
    ("routing=causal", "routing.layers=2", "routing.heads=4"),
    ("routing=nearest", "routing.layers=2", *PLAIN),
    ("routing=exact", "routing.layers=2", "routing.heads=4", *PLAIN),
    ("routing=exact", "routing.layers=2", *PLAIN, "hardware.attention=native"),
    ("routing=indexer", "routing.layers=2", "routing.heads=4", "routing.warmup=1", *PLAIN),
    *ROUGHLY,
]


@pytest.mark.parametrize("overrides", CASES)
def test_what_is_kept_is_what_stays_behind(overrides: tuple[str, ...]) -> None:
    low, high = (0.7, 1.4) if overrides in ROUGHLY else (0.93, 1.07)
    assert low < planned_share(overrides) < high


def planned_share(overrides: tuple[str, ...]) -> float:
    """Return the bytes that are planned to be kept over those that are."""
    config = compose([*SHRUNK, *overrides])
    narrowed = 2 * cost(config, 256).parameters if config.hardware.precision == "bf16" else 0
    return (saved(config, config.trainer.batch_size, 256) + narrowed) / kept_for_backward(config)


class Made(TorchDispatchMode):
    """Notes every piece of memory that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.pieces[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out

    def alive(self, but: set[int]) -> int:
        """Return the bytes that are still there."""
        return sum(size for own, (piece, size) in self.pieces.items() if own not in but and not piece.expired())


def kept_for_backward(config: Config) -> int:
    """Return the bytes that a training forward pass leaves behind: for the backward pass, and for telemetry."""
    torch.manual_seed(0)
    model = Transformer(config, 256).train()
    tokens_BN = torch.randint(0, 256, (config.trainer.batch_size, config.data.length))
    own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    with Made() as made, torch.autocast("cpu", dtype=torch.bfloat16, enabled=config.hardware.precision == "bf16"):
        nats_BN, _ = model.loss(tokens_BN)
        assert nats_BN.requires_grad
        gc.collect()
        return made.alive(own)
