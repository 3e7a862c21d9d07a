"""Transformer-XL: segments with a memory against loops in float64, streams, and the segments of the training text."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from test_decoding import same_after_a_prompt, streams_as_it_scores
from tiny_models import check_alike, tiny_config, tiny_model, tokens
from torch import Tensor

from rtx.data.datamodule import StreamItems
from rtx.model.block import Memory
from rtx.model.multihead import MultiheadAttention
from rtx.model.transformer import Transformer

XL: dict[str, Any] = {"base": "recurrent", "positions": "xl", "routing_heads": 0, "routing_layers": 0}


def by_loops(attention: MultiheadAttention, x_KE: Tensor, memory: int, most: int | None) -> Tensor:
    """Dai et al. 2019, section 3.3, position by position: what the last positions of a sequence get, `[N, E]`."""
    positions, size = attention.xl, attention.size
    assert positions is not None
    (H, D), E = positions.content_HD.shape, x_KE.shape[1]
    W_q, W_k, W_v = attention.qkv.weight.split(H * D)
    rows = []
    for i in range(memory, len(x_KE)):
        heads = []
        for h in range(H):
            own = slice(h * D, (h + 1) * D)
            q, logits, values = W_q[own] @ x_KE[i], [], []
            for j in range(0 if most is None else max(0, i + 1 - most), i + 1):
                distance = min(i - j, positions.clamp or i - j)
                angles = [distance / 10_000 ** (2 * f / E) for f in range(math.ceil(E / 2))]
                r_E = torch.tensor([*map(math.sin, angles), *map(math.cos, angles)][:E], dtype=torch.float64)
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
    x_KE = torch.randn(memory + 6, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x_KE = x_KE.requires_grad_()
    found, _ = attention(x_KE[None], memory=memory)
    expected = by_loops(attention, x_KE, memory, 8 if "same_length" in own else None)
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
        expected = -model.logits(hidden_BNS).log_softmax(-1).gather(-1, tokens_BN[..., None])[..., 0]
        found, _ = model.loss(tokens_BN)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    streams_as_it_scores(model, tokens_BN)
    same_after_a_prompt(model, tokens_BN, 0, 5, 6, 17)


@pytest.mark.parametrize("tied", [True, False])
def test_training_reads_a_memory_without_gradient_and_shares_biases_where_asked(tied: bool) -> None:
    torch.manual_seed(0)
    model = Transformer(tiny_config(length=6, memory=8, tie_biases=tied, **XL), 11).double().train()
    names = [name for name, _ in model.named_parameters() if name.endswith(("content_HD", "place_HD"))]
    assert len(names) == (2 if tied else 2 * len(model.blocks))
    memory, segments = Memory(model.config), tokens(length=12).split(6, dim=1)
    model.loss(segments[0], memory=memory)[0].mean().backward()
    model.zero_grad()
    kept = [x_BME.clone() for x_BME in memory.layers]
    assert all(x_BME.shape == (2, 6, 16) and not x_BME.requires_grad for x_BME in memory.layers)
    loss = model.loss(segments[1], memory=memory)[0].mean()
    loss.backward()
    fresh = Memory(model.config)
    fresh.layers, fresh.last_B = kept, segments[0][:, -1]
    again = model.loss(segments[1], memory=fresh)[0].mean()
    assert torch.equal(again, loss)  # nothing but what is kept counts
    assert all(p.grad is not None for p in model.parameters())  # the start vector's, too: DDP waits for it
    assert memory.layers[0].shape == (2, 8, 16)


@pytest.mark.parametrize(("units", "length", "streams"), [(1000, 16, 4), (64, 16, 4), (999, 7, 3)])
def test_streams_go_on_from_step_to_step_and_read_all_of_the_ring(units: int, length: int, streams: int) -> None:
    text = np.arange(units, dtype=np.uint16)
    items = StreamItems(text, length, 5, streams)
    S = units // (length * streams)
    for stream in range(streams):
        starts = [items.start(step * streams + stream) for step in range(3 * S)]
        jumps = {b - a for a, b in itertools.pairwise(starts)}
        assert jumps <= {length, length - S * streams * length}  # the next units, or once in a round the first again
        assert starts[S] == items.start((stream + 1) % streams)
    seen = [items[step * streams + stream] for step in range(S) for stream in range(streams)]
    assert torch.cat(seen).unique().numel() == S * streams * length
    again = StreamItems(text, length, 5, streams)
    assert [again.start(index) for index in range(50)] == [items.start(index) for index in range(50)]
