"""The Compressive Transformer: what it keeps and its loss against loops in float64, and streams."""

import math
from typing import Any

import pytest
import torch
from test_decoding import same_after_a_prompt, streams_as_it_scores
from test_recurrent import XL
from tiny_models import check_alike, tiny_config, tiny_model, tokens
from torch import Tensor, nn

from rtx.model.block import Block, Compression, Memory
from rtx.model.transformer import Transformer

KEPT: dict[str, Any] = {**XL, "memory": 4, "compressed": 6, "compression_rate": 2, "norm": "post"}
KINDS = ("conv", "mean", "max")


def by_loops(compression: Compression, old_OE: Tensor) -> Tensor:
    rows, c = [], compression.rate
    for start in range(0, len(old_OE), c):
        part_cE = old_OE[start : start + c]
        if compression.conv is not None:
            weight, bias = compression.conv.weight, compression.conv.bias
            assert bias is not None
            units = [bias[e] + torch.stack([weight[e, :, n] @ part_cE[n] for n in range(c)]).sum() for e in range(16)]
            rows.append(torch.stack(units))
        else:
            rows.append(part_cE.mean(0) if compression.kind == "mean" else part_cE.max(0).values)
    return torch.stack(rows)


def loss_by_loops(block: Block, norm: nn.LayerNorm | None, x_NE: Tensor, old_OE: Tensor, made_CE: Tensor) -> Tensor:
    """Rae et al. 2020, Algorithm 2: attention by content over the old positions and over the compressed ones."""
    attention, errors = block.attention, []
    W_q, W_k, W_v = (weight.detach() for weight in attention.qkv.weight.split(attention.widths))
    x_NE, old_OE, made_CE = (y if norm is None else norm(y) for y in (x_NE, old_OE, made_CE))
    for x_E in x_NE:
        for h in range(len(W_q) // attention.size):
            own = slice(h * attention.size, (h + 1) * attention.size)
            outs = []
            for read_KE in (made_CE, old_OE):
                logits = [(W_q[own] @ x_E) @ (W_k[own] @ y_E) / math.sqrt(attention.size) for y_E in read_KE]
                values = torch.stack([W_v[own] @ y_E for y_E in read_KE])
                outs.append(torch.stack(logits).softmax(0) @ values)
            errors.append((outs[0] - outs[1]) ** 2)
    return torch.cat(errors).mean()


@pytest.mark.parametrize("kind", KINDS)
def test_memory_and_compressed_memory_are_those_of_the_definition(kind: str) -> None:
    model = tiny_model(length=6, compression=kind, **KEPT)
    memory, x_BNE = Memory(model.config), torch.randn(2, 30, 16, dtype=torch.float64)
    compression = model.blocks[0].compression
    assert isinstance(compression, Compression)
    for start in range(0, 30, 6):
        old = memory.take([x_BNE[:, start : start + 6]] * 3, tokens(length=6))
        memory.compress([compression(old_BOE) for old_BOE in old])
    for b in range(2):
        assert torch.equal(memory.layers[0][b], x_BNE[b, 26:])
        expected_CE = by_loops(compression, x_BNE[b, 14:26])
        torch.testing.assert_close(memory.compressed[0][b], expected_CE, rtol=1e-9, atol=1e-9)
    assert torch.equal(memory.read(0), torch.cat([memory.compressed[0], memory.layers[0]], dim=1))  # type: ignore[arg-type]


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_the_loss_is_algorithm_2_and_trains_the_compression_alone(norm: str) -> None:
    model = tiny_model(length=6, **{**KEPT, "norm": norm})
    block = model.blocks[1]
    assert isinstance(block, Block) and block.compression is not None
    x_NE, old_OE = (torch.randn(n, 16, dtype=torch.float64, requires_grad=True) for n in (6, 8))
    used = block.attention_norm if norm == "pre" else None
    made_BCE = block.compression(old_OE.detach()[None])
    loss = block.reconstruction_loss(x_NE[None], old_OE[None], made_BCE)
    expected = loss_by_loops(block, used, x_NE, old_OE.detach(), by_loops(block.compression, old_OE.detach()))
    check_alike(loss, expected, block.compression.parameters())
    others = [x_NE, old_OE, *block.attention.parameters(), *block.attention_norm.parameters()]
    assert torch.autograd.grad(loss, others, allow_unused=True) == (None,) * len(others)


def test_training_adds_the_loss_of_every_block_once_something_leaves() -> None:
    torch.manual_seed(0)
    model = Transformer(tiny_config(length=6, **{**KEPT, "memory": 6}), 11).double().train()
    memory, losses = Memory(model.config), []
    for tokens_BN in tokens(length=18).split(6, dim=1):
        nats_BN, auxiliary = model.loss(tokens_BN, memory=memory)
        model.zero_grad()
        (nats_BN.mean() + auxiliary).backward()
        losses.append(float(auxiliary.detach()))
        assert all(p.grad is not None for p in model.parameters())  # DDP waits for all of them
    assert losses[0] == 0 and losses[1] > 0 and losses[2] > 0
    for block in model.blocks:
        assert isinstance(block, Block) and block.compression is not None and block.compression.conv is not None
        grad = block.compression.conv.weight.grad
        assert grad is not None and float(grad.abs().sum()) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_streaming_equals_parallel(kind: str) -> None:
    model = tiny_model(length=6, compression=kind, **KEPT)
    tokens_BN = tokens(length=33)
    streams_as_it_scores(model, tokens_BN)
    same_after_a_prompt(model, tokens_BN, 0, 5, 6, 17)
    less = tiny_model(length=6, compression=kind, **{**KEPT, "compressed": 2})
    with torch.no_grad():
        (nats_BN, _), (fewer_BN, _) = (each.loss(tokens_BN) for each in (model, less))
    assert torch.equal(nats_BN[:, :12], fewer_BN[:, :12]) and not torch.equal(nats_BN, fewer_BN)
