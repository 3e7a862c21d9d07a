"""What heads that choose keys for each query are made of: keys that look back, and an indexer that learns to choose."""

import pytest
import torch
import torch.nn.functional as F
from tiny_models import TIED, tiny_model, tokens

from rtx.attention.centroids import after_step
from rtx.attention.choices import Indexer
from rtx.attention.packed import Indexed
from rtx.attention.patterns import Full
from rtx.model.multihead import KeyMix, MultiheadAttention
from rtx.model.transformer import Transformer


def mix(shift: int, width: int) -> KeyMix:
    torch.manual_seed(0)
    mixed = KeyMix(2, 4, shift, width).double()
    if mixed.taps_HDK is not None:
        torch.nn.init.normal_(mixed.taps_HDK)
    return mixed


K_BHND = torch.randn(3, 2, 7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("shift", [0, 1, 2, 9])
@pytest.mark.parametrize("width", [1, 2, 3, 9])
def test_a_position_gets_the_key_so_far_back_and_the_convolution_adds_those_before(shift: int, width: int) -> None:
    mixed = mix(shift, width)
    expected = torch.zeros_like(K_BHND)
    for j in range(7):
        keys = [K_BHND[:, :, j - shift - back] if j >= shift + back else torch.zeros(2, 4) for back in range(width)]
        expected[:, :, j] = keys[0]
        if mixed.taps_HDK is not None:
            conv = sum(mixed.taps_HDK[..., -1 - back] * key for back, key in enumerate(keys))
            expected[:, :, j] += F.silu(torch.as_tensor(conv))
    torch.testing.assert_close(mixed(K_BHND, []), expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(KeyMix(2, 4, 0, width).double()(K_BHND, []), K_BHND), "it starts at nothing"


def test_tied_keys_are_the_queries_before_them_at_any_distance() -> None:
    model = tiny_model(selection="exact", positions="rotary", **TIED)
    attention: MultiheadAttention = model.blocks[2].attention  # type: ignore[assignment]
    assert attention.qkv.out_features == 16 + 8 + 16, "queries, keys of local heads alone, values"
    q_BHND, k_BHND, _ = attention.split(torch.randn(2, 9, 16, dtype=torch.float64))[1]
    assert k_BHND is not None and torch.equal(k_BHND[:, :, 1:], q_BHND[:, :, :-1])
    local, routed = attention.rotations()
    assert local is not None and routed is None


def indexers(model: Transformer) -> list[Indexer]:
    return [module for module in model.modules() if isinstance(module, Indexer)]


@pytest.mark.parametrize("attend_self", [True, False])
def test_an_indexer_reads_everything_while_it_warms_up_and_then_a_window(attend_self: bool) -> None:
    model = tiny_model(selection="indexer", routing_warmup=2, routing_attend_self=attend_self)
    q, k, v = torch.randn(3, 2, 2, 24, 4, dtype=torch.float64)
    full, _ = Full(scale=0.5)(q, k, v)
    for step in range(4):
        for heads in indexers(model):
            out, _ = heads(q, k, v)
            (part,) = heads.reads(heads.inputs(q, k, None), None, False)
            assert isinstance(part, Indexed)
            position_P, row_P1 = part.query_row_P % 24, part.query_row_P[:, None]
            read_P, earlier_P = (part.index_PK >= 0).sum(-1), position_P + attend_self
            assert (part.index_PK <= row_P1).all()
            if step < 2:
                assert torch.equal(read_P, earlier_P.clamp(min=1))
                assert torch.allclose(out, full, rtol=1e-10) == attend_self
            else:
                assert torch.equal(read_P, earlier_P.clamp(1, 6))
                assert not torch.isclose(out[:, :, 12:], full[:, :, 12:]).any()
        model.train().loss(tokens())
        after_step(model.eval())


@pytest.mark.parametrize("warmup", [0, 1000])
def test_an_indexer_learns_by_its_own_loss_alone(warmup: int) -> None:
    model = tiny_model(selection="indexer", routing_warmup=warmup, positions="rotary").train()
    own = {id(p): p for heads in indexers(model) for p in (heads.query_HDE, heads.key_HDE)}
    optimizer = torch.optim.Adam(own.values(), lr=0.03)
    losses = []
    for _ in range(30):
        model.zero_grad()
        _, auxiliary = model.loss(tokens())
        auxiliary.backward()
        for name, parameter in model.named_parameters():
            reached = parameter.grad is not None and bool((parameter.grad != 0).any())
            assert reached == (id(parameter) in own), name
        optimizer.step()
        after_step(model)
        losses.append(float(auxiliary.detach()))
    assert 0 < losses[-1] < 0.7 * losses[0]
    assert float(model.eval().loss(tokens())[1]) == 0
