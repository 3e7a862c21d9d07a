"""Memories of Transformer-XL and the Compressive Transformer against loops in float64; streams."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rtx.data.batches import token_ids
from rtx.data.sampler import ContiguousStreams
from rtx.model.memory import Compression, Memory, MemoryBlock
from rtx.model.multihead import MultiheadAttention
from rtx.model.positions import SinusoidKeys
from rtx.model.transformer import Transformer
from tests.helpers.tiny_models import check_alike, check_streams, tiny_config, tiny_model, tokens

XL: dict[str, Any] = {
    "base": "recurrent",
    "positions": "xl",
    "routing_heads": 0,
    "routing_layers": 0,
}
KEPT: dict[str, Any] = {**XL, "memory": 4, "compressed": 6, "compression_rate": 2, "norm": "post"}
KINDS = ("conv", "mean", "max")


def read_by_loops(
    attention: MultiheadAttention, x_KE: Tensor, memory: int, most: int | None
) -> Tensor:
    """Return the outputs of the last positions, `[N, E]`, by Dai et al. 2019, section 3.3."""
    (group,) = attention.head_groups()
    positions = group.tables
    size = group.size
    assert isinstance(positions, SinusoidKeys)
    (H, D) = positions.content_HD.shape
    E = x_KE.shape[1]
    W_q, W_k, W_v = attention.qkv.weight.split(H * D)
    rows = []
    for i in range(memory, len(x_KE)):
        heads = []
        for h in range(H):
            own = slice(h * D, (h + 1) * D)
            q = W_q[own] @ x_KE[i]
            logits = []
            values = []
            for j in range(0 if most is None else max(0, i + 1 - most), i + 1):
                distance = min(i - j, positions.clamp or i - j)
                angles = [distance / 10_000 ** (2 * f / E) for f in range(math.ceil(E / 2))]
                r_E = torch.tensor(
                    [*map(math.sin, angles), *map(math.cos, angles)][:E], dtype=torch.float64
                )
                content = (q + positions.content_HD[h]) @ (W_k[own] @ x_KE[j])
                place = (q + positions.place_HD[h]) @ (positions.project.weight[own] @ r_E)
                logits.append((content + place) / math.sqrt(size))
                values.append(W_v[own] @ x_KE[j])
            heads.append(torch.stack(logits).softmax(0) @ torch.stack(values))
        rows.append(attention.out.weight @ torch.cat(heads))
    return torch.stack(rows)


@pytest.mark.parametrize("memory", [0, 3, 8])
@pytest.mark.parametrize("own", [{}, {"clamp": 2}, {"same_length": True}], ids=str)
def test_attention_over_a_memory_is_the_papers(memory: int, own: dict[str, Any]) -> None:
    attention = tiny_model(length=6, memory=8, **XL, **own).blocks[0].attention
    assert isinstance(attention, MultiheadAttention)
    x_KE = torch.randn(
        memory + 6, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    x_KE = x_KE.requires_grad_()
    found, _ = attention(x_KE[None], memory_length=memory)
    expected = read_by_loops(attention, x_KE, memory, 8 if "same_length" in own else None)
    check_alike(found[0], expected, [x_KE, *attention.parameters()])


STREAMS = [
    {"memory": 6, "norm": "post"},
    {"memory": 4, "norm": "pre", "clamp": 5},
    {"memory": 9, "same_length": True, "positions": "rotary"},
    {"memory": 0, "positions": "shaw"},
    {"memory": 17, "positions": "none", "norm": "post"},
]


@pytest.mark.parametrize("own", STREAMS, ids=str)
def test_segments_are_one_pass_by_the_rule_and_streams_are_both(own: dict[str, Any]) -> None:
    model = tiny_model(length=6, **{**XL, **own})
    tokens_BN = tokens(length=33)
    with torch.no_grad():
        hidden_BNS, _ = model(tokens_BN)
        expected = (
            -model.logits(hidden_BNS).log_softmax(-1).gather(-1, tokens_BN[..., None])[..., 0]
        )
        found, _ = model.loss(tokens_BN)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    check_streams(model, tokens_BN, 5, 17)


@pytest.mark.parametrize("tied", [True, False])
def test_training_reads_a_memory_without_gradient_and_shares_biases_where_asked(tied: bool) -> None:
    torch.manual_seed(0)
    model = Transformer(tiny_config(length=6, memory=8, tie_biases=tied, **XL), 11).double().train()
    names = [
        name for name, _ in model.named_parameters() if name.endswith(("content_HD", "place_HD"))
    ]
    assert len(names) == (2 if tied else 2 * len(model.blocks))
    memory = Memory(model.model_config)
    segments = tokens(length=12).split(6, dim=1)
    model.loss(segments[0], memory=memory)[0].mean().backward()
    model.zero_grad()
    kept = [x_BME.clone() for x_BME in memory.layers]
    assert all(x_BME.shape == (2, 6, 16) and not x_BME.requires_grad for x_BME in memory.layers)
    loss = model.loss(segments[1], memory=memory)[0].mean()
    loss.backward()
    fresh = Memory(model.model_config)
    fresh.layers = kept
    fresh.last_B = segments[0][:, -1]
    again = model.loss(segments[1], memory=fresh)[0].mean()
    assert torch.equal(again, loss)  # nothing but what is kept counts
    assert all(
        p.grad is not None for p in model.parameters()
    )  # the start vector's, too: DDP waits for it
    assert memory.layers[0].shape == (2, 8, 16)


@pytest.mark.parametrize(("units", "length", "streams"), [(1000, 16, 4), (64, 16, 4), (999, 7, 3)])
def test_streams_go_on_from_step_to_step_and_read_all_of_the_ring(
    units: int, length: int, streams: int
) -> None:
    text = np.arange(units, dtype=np.uint16)
    sampler = ContiguousStreams(text, length, 5, streams)
    S = units // (length * streams)
    for stream in range(streams):
        starts = [sampler.start(step * streams + stream) for step in range(3 * S)]
        jumps = {b - a for a, b in itertools.pairwise(starts)}
        assert jumps <= {
            length,
            length - S * streams * length,
        }  # the next units, or once in a round the first again
        assert starts[S] == sampler.start((stream + 1) % streams)
    seen = [
        token_ids(sampler, step * streams + stream)
        for step in range(S)
        for stream in range(streams)
    ]
    assert torch.cat(seen).unique().numel() == S * streams * length
    again = ContiguousStreams(text, length, 5, streams)
    assert [again.start(index) for index in range(50)] == [
        sampler.start(index) for index in range(50)
    ]


def kept_by_loops(compression: Compression, old_OE: Tensor) -> Tensor:
    parts = old_OE.split(compression.rate)
    conv = compression.conv
    if conv is not None:
        assert conv.bias is not None
        return (
            torch.stack([torch.einsum("fen,ne->f", conv.weight, part_cE) for part_cE in parts])
            + conv.bias
        )
    return torch.stack(
        [part_cE.mean(0) if compression.kind == "mean" else part_cE.amax(0) for part_cE in parts]
    )


def loss_by_loops(
    block: MemoryBlock, norm: nn.LayerNorm | None, x_NE: Tensor, old_OE: Tensor, made_CE: Tensor
) -> Tensor:
    """Attention by content over old and compressed positions (Rae et al. 2020, Algorithm 2)."""
    size = block.attention.size
    errors = []
    x_NE, old_OE, made_CE = (y if norm is None else norm(y) for y in (x_NE, old_OE, made_CE))
    matrices = (
        weight.detach().split(size)
        for weight in block.attention.qkv.weight.split(block.attention.widths)
    )
    for W_q, W_k, W_v in zip(*matrices, strict=True):
        logits = [
            (x_NE @ W_q.T) @ (read_KE @ W_k.T).T / math.sqrt(size) for read_KE in (made_CE, old_OE)
        ]
        made_ND, old_ND = (
            w.softmax(-1) @ (y @ W_v.T) for w, y in zip(logits, (made_CE, old_OE), strict=True)
        )
        errors.append((made_ND - old_ND) ** 2)
    return torch.cat(errors).mean()


@pytest.mark.parametrize("kind", KINDS)
def test_memory_and_compressed_memory_are_those_of_the_definition(kind: str) -> None:
    model = tiny_model(length=6, compression=kind, **KEPT)
    memory = Memory(model.model_config)
    x_BNE = torch.randn(2, 30, 16, dtype=torch.float64)
    compression = model.blocks[0].compression
    assert isinstance(compression, Compression)
    for start in range(0, 30, 6):
        old = memory.append([x_BNE[:, start : start + 6]] * 3, tokens(length=6))
        memory.append_compressed([compression(old_BOE) for old_BOE in old])
    for b in range(2):
        assert torch.equal(memory.layers[0][b], x_BNE[b, 26:])
        expected_CE = kept_by_loops(compression, x_BNE[b, 14:26])
        torch.testing.assert_close(memory.compressed[0][b], expected_CE, rtol=1e-9, atol=1e-9)
    assert torch.equal(memory.read(0), torch.cat([memory.compressed[0], memory.layers[0]], dim=1))  # type: ignore[arg-type]


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_the_loss_is_algorithm_2_and_trains_the_compression_alone(norm: str) -> None:
    model = tiny_model(length=6, **{**KEPT, "norm": norm})
    block = model.blocks[1]
    assert isinstance(block, MemoryBlock) and block.compression is not None
    x_NE, old_OE = (torch.randn(n, 16, dtype=torch.float64, requires_grad=True) for n in (6, 8))
    used = block.attention_norm if norm == "pre" else None
    assert used is None or isinstance(used, nn.LayerNorm)
    made_BCE = block.compression(old_OE.detach()[None])
    loss = block.compression_loss(x_NE[None], old_OE[None], made_BCE)
    expected = loss_by_loops(
        block, used, x_NE, old_OE.detach(), kept_by_loops(block.compression, old_OE.detach())
    )
    check_alike(loss, expected, block.compression.parameters())
    others = [x_NE, old_OE, *block.attention.parameters(), *block.attention_norm.parameters()]
    assert torch.autograd.grad(loss, others, allow_unused=True) == (None,) * len(others)


def test_training_adds_the_loss_of_every_block_once_something_leaves() -> None:
    torch.manual_seed(0)
    model = Transformer(tiny_config(length=6, **{**KEPT, "memory": 6}), 11).double().train()
    memory = Memory(model.model_config)
    losses = []
    for tokens_BN in tokens(length=18).split(6, dim=1):
        nats_BN, auxiliary = model.loss(tokens_BN, memory=memory)
        model.zero_grad()
        (nats_BN.mean() + auxiliary).backward()
        losses.append(float(auxiliary.detach()))
        assert all(p.grad is not None for p in model.parameters())  # DDP waits for all of them
    assert losses[0] == 0 and losses[1] > 0 and losses[2] > 0
    conv = [p.grad for name, p in model.named_parameters() if name.endswith("conv.weight")]
    assert len(conv) == 3 and all(grad is not None and grad.any() for grad in conv)


@pytest.mark.parametrize(("kind", "prompts"), [("conv", (5, 17)), ("mean", (6,)), ("max", (0,))])
def test_streams_read_what_is_compressed(kind: str, prompts: tuple[int, ...]) -> None:
    """Prompts end within a segment, within a later one, with the first one, and before it."""
    two_layers = {**KEPT, "layers": 2}
    model = tiny_model(length=6, compression=kind, **two_layers)
    tokens_BN = tokens(length=33)
    check_streams(model, tokens_BN, *prompts)
    less = tiny_model(length=6, compression=kind, **{**two_layers, "compressed": 2})
    with torch.no_grad():
        (nats_BN, _), (fewer_BN, _) = (each.loss(tokens_BN) for each in (model, less))
    assert torch.equal(nats_BN[:, :12], fewer_BN[:, :12]) and not torch.equal(nats_BN, fewer_BN)


def test_a_sequence_of_segments_has_the_auxiliary_losses_of_all() -> None:
    torch.manual_seed(0)
    model = Transformer(tiny_config(length=6, **{**KEPT, "memory": 6}), 11).double().train()
    tokens_BN = tokens(length=18)
    _, of_sequence = model.loss(tokens_BN)
    memory = Memory(model.model_config)
    losses = []
    for segment_BN in tokens_BN.split(6, dim=1):
        _, loss = model.loss(segment_BN, memory=memory)
        losses.append(loss)
    assert float(of_sequence.detach()) > 0
    torch.testing.assert_close(of_sequence, torch.stack(losses).sum())
