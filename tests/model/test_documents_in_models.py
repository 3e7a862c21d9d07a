"""A model reads documents that are packed into a sequence as if each were a sequence by itself."""

import pytest
import torch
from torch import Tensor

from rtx.attention import Documents
from rtx.model.key_mix import KeyMix
from rtx.model.transformer import Transformer
from tests.helpers.tiny_models import (
    COMMON,
    HASHED,
    OTHERS,
    OWN_KEYS,
    SHALLOW,
    Kind,
    covering,
    each_kind,
    gradients,
    tiny_model,
    tokens,
    without,
)

FIRST_BN = torch.tensor([[0] * 7 + [7] * 17, [0] + [1] * 11 + [12] * 12])
"""Documents of 7 and 17 tokens in the first sequence, of 1, 11 and 12 in the second."""
BLOCKS: Kind = {"norm_kind": "rmsnorm", "ffn": "swiglu", "qk_norm": True, "sinks": True}
MODERN: list[Kind] = [
    {**BLOCKS, "kv_heads": 2, "selection": selection, "routing_keys": "separate"}
    for selection in ("causal", "probed")
]
"""The parts of model=modern, with lists bounded by documents and with documents apart."""
HASHES: Kind = {"lsh": "reformer", **HASHED}
KINDS: list[Kind] = [*COMMON[::4], *OTHERS, *OWN_KEYS[::5], HASHES, *MODERN]
FEW = covering([HASHES, *MODERN, *OTHERS, *COMMON[::4], *OWN_KEYS[::5]])


def apart(model: Transformer, tokens_BN: Tensor, streaming: bool = False) -> Tensor:
    """Return the nats of every token, each document read as a sequence by itself."""
    nats_BN = torch.zeros(tokens_BN.shape, dtype=torch.float64)
    for b, first_N in enumerate(FIRST_BN):
        for first in first_N.unique():
            at_N = first_N == first
            nats_1J, _ = model.loss(tokens_BN[b : b + 1, at_N], streaming)
            nats_BN[b, at_N] = nats_1J[0].double()
    return nats_BN


@each_kind(FEW)
def test_tokens_get_the_likelihood_that_they_have_apart(kind: Kind) -> None:
    check_apart(kind)


@each_kind(without(FEW, KINDS))
def test_tokens_get_it_in_models_of_the_other_kinds(kind: Kind) -> None:
    check_apart(kind)


@torch.no_grad()
def check_apart(kind: Kind) -> None:
    """Compare with documents read apart, whether or not heads choose from the prefix alone."""
    model = tiny_model(**SHALLOW, **kind)
    sees_future = kind.get("selection") == "topk" or kind.get("lsh") == "reformer"
    theirs_BN = apart(model, tokens())
    for streaming in (False, True):
        if streaming and sees_future:
            theirs_BN = apart(model, tokens(), streaming)
        ours_BN, _ = model.loss(tokens(), streaming, first_BN=FIRST_BN)
        torch.testing.assert_close(ours_BN.double(), theirs_BN, rtol=1e-9, atol=1e-9)


LOOKING_BACK: Kind = {
    "base": "local+full",
    "positions": "learned",
    "routing_keys": "tied",
    "routing_key_shift": 1,
    "routing_key_conv": 2,
}


@pytest.mark.parametrize("recompute", [False, True])
@each_kind([LOOKING_BACK, *MODERN])
def test_training_and_recomputed_blocks_keep_to_documents(kind: Kind, recompute: bool) -> None:
    model = tiny_model(**SHALLOW, **kind)
    model.recompute = recompute
    model.train()
    nats_BN, _ = model.loss(tokens(), first_BN=FIRST_BN)
    nats_BN.sum().backward()
    mine = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    apart(model, tokens()).sum().backward()
    for name, parameter in model.named_parameters():
        if name in mine:
            torch.testing.assert_close(mine[name], parameter.grad, rtol=1e-8, atol=1e-8)
    assert len(mine) == len(gradients(model, tokens()))


def test_one_document_a_sequence_gives_the_same_bits_as_none() -> None:
    model = tiny_model()
    whole_BN = torch.zeros(2, 24, dtype=torch.int64)
    assert torch.equal(model.loss(tokens(), first_BN=whole_BN)[0], model.loss(tokens())[0])


@pytest.mark.parametrize(("shift", "width"), [(0, 3), (1, 1), (2, 4)])
def test_keys_look_back_within_their_document(shift: int, width: int) -> None:
    mix = KeyMix(heads=3, size=4, shift=shift, width=width).double()
    if mix.taps_HDK is not None:
        torch.nn.init.normal_(mix.taps_HDK)
    k = torch.randn(2, 3, 24, 4, dtype=torch.float64)
    mixed, _ = mix(k, documents=Documents(FIRST_BN))
    for b, first_N in enumerate(FIRST_BN):
        for first in first_N.unique():
            at_N = first_N == first
            alone, _ = mix(k[b : b + 1, :, at_N])
            torch.testing.assert_close(mixed[b, :, at_N], alone[0])
