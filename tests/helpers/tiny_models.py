"""Tiny models of every kind, whose outputs tell hidden states apart, and tokens for them."""

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from rtx.model.decoding import Decoder
from rtx.model.transformer import Transformer
from rtx.settings.rules import resolve
from rtx.settings.schema import CLUSTERED, Config, DataConfig, ModelConfig, RoutingConfig

Kind = dict[str, Any]
"""Options of `tiny_config`."""

SHALLOW: Kind = {"layers": 2, "routing_layers": 1}
"""A base layer, and one with routing heads."""

VOCABULARY = 11
SELECTIONS = ("causal", "topk", "random")
POSITIONS = ("rotary", "shaw", "learned", "axial", "none")
BY_QUERY: dict[str, Kind] = {
    "exact": {"routing_key_shift": 1, "routing_key_conv": 3},
    "blocks": {"routing_block": 2, "routing_key_conv": 3},
    "blocks_random": {"routing_block": 3, "routing_key_shift": 2},
    "indexer": {},
    "probed": {"routing_key_shift": 1, "routing_key_conv": 2},
}
"""The selections in which each query chooses its keys, and options that two rows of each get."""
EVERY = (*SELECTIONS, *BY_QUERY)

BASED = itertools.product(SELECTIONS, POSITIONS, ("local", "full", "local+full"))
PLAIN = [
    (s, p, ("pre", "post")[n % 2], base) for n, (s, p, base) in enumerate(BASED)
]  # a norm with any two of these
PLAIN += [
    (*kind, "lsh+adaptive_span") for kind in (("causal", "rotary", "pre"), ("topk", "shaw", "post"))
]
PLAIN += [
    (*kind, "lsh+adaptive_span") for kind in (("random", "none", "post"), ("causal", "shaw", "pre"))
]
SPARSE = ("strided", "fixed", "fixed_block+fixed_summary")
PLAIN += [
    ("causal", positions, "pre", base) for positions, base in itertools.product(POSITIONS, SPARSE)
]
COMMON: list[Kind] = [
    dict(zip(("selection", "positions", "norm", "base"), kind, strict=True)) for kind in PLAIN
]
"""Selection by shared keys, positions, norm and base pattern."""

MIXED: Kind = {
    "norm": "post",
    "base": "local+full",
    "routing_attend_self": False,
    "attend_self": False,
}
TIED: Kind = {"routing_keys": "tied", "routing_key_shift": 1, "routing_rotary": False}
OTHERS: list[Kind] = [
    *(
        {"selection": s, "positions": p, **own}
        for s, own in BY_QUERY.items()
        for p in ("rotary", "shaw")
    ),
    *(
        {"selection": s, "positions": "none", "routing_keys": "separate", **BY_QUERY["exact"]}
        for s in CLUSTERED
    ),
    {
        "selection": "causal",
        "positions": "shaw",
        "routing_keys": "projected",
        "routing_key_shift": 1,
        **MIXED,
    },
    {"selection": "exact", "positions": "axial", "routing_window": 1, **MIXED},
    *({"selection": s, "positions": "rotary", **TIED} for s in ("causal", "exact")),
    {
        "selection": "blocks",
        "positions": "shaw",
        "routing_block": 4,
        "routing_compressed": True,
        **MIXED,
    },
    {
        "selection": "blocks",
        "positions": "learned",
        "routing_compressed": True,
        "routing_key_conv": 2,
        **MIXED,
    },
    {
        "selection": "probed",
        "positions": "rotary",
        "routing_window": 4,
        "routing_candidates": 6,
        **MIXED,
    },
    {"selection": "probed", "positions": "rotary", **TIED},
    {
        "selection": "indexer",
        "positions": "rotary",
        "routing_warmup": 3,
        "routing_key_conv": 2,
        **MIXED,
    },
]
"""Each query's own choice, keys that look back, and both branches of blocks."""

OWN_KEYS: list[Kind] = [
    {"selection": s, "routing_keys": keys, "positions": p}
    for s in ("causal", "topk", "nearest")
    for keys in ("shared", "separate", "projected")
    for p in ("rotary", "shaw")
    if s == "nearest" or keys != "shared"
]
"""Clusters that route queries and keys apart, and one cluster for each position."""

KINDS = COMMON + OTHERS + OWN_KEYS

NARROW: Kind = {"embedding": 6, "ffn": "geglu", "routing_attend_self": False}
HASHED: Kind = {"base": "lsh", "hash_buckets": 4, "window": 6}
STREAMED: list[Kind] = [
    *KINDS,
    *(
        {"selection": s, "routing_logit_scale": scale, **NARROW}
        for s in EVERY
        for scale in ("none", "sqrt_d")
    ),
    *(
        {"lsh": variant, "hash_rounds": rounds, **HASHED}
        for variant in ("causal", "reformer")
        for rounds in (1, 2)
    ),
    *(kind | NARROW for kind in OWN_KEYS[::2]),
]


def covering(kinds: list[Kind]) -> list[Kind]:
    """Return a few kinds that together have every value of every option.

    The next one is always the kind with the most values that are still missing.
    """
    chosen: list[Kind] = []
    missing = {value for kind in kinds for value in kind.items()}
    while missing:
        best = max(kinds, key=lambda kind: len(missing.intersection(kind.items())))
        chosen.append(best)
        missing.difference_update(best.items())
    return chosen


def without(removed: list[Kind], kinds: list[Kind]) -> list[Kind]:
    return [kind for kind in kinds if kind not in removed]


def each_kind(kinds: list[Kind]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "kind", kinds, ids=lambda kind: "-".join(map(str, kind.values()))
    )


def tiny_config(length: int = 24, selection: str = "causal", **options: Any) -> Config:
    """Three layers of four heads of four units: a base layer, and two with two routing heads.

    `options` are fields of the model, or of the routing behind `routing_`.
    """
    sizes: Kind = {
        "layers": 3,
        "heads": 4,
        "hidden": 16,
        "window": 5,
        "ffn_hidden": 24,
        "max_distance": 9,
    }
    sizes |= {
        "stride": 7,
        "summary": 3,
        "axes": f"{length // 2}x2" if options.get("positions") == "axial" else None,
    }
    clusters: Kind = {
        "selection": selection,
        "heads": 2,
        "layers": 2,
        "window": 6,
        "clusters": 4,
        "block": 3,
    }
    clusters |= {"keys": "separate"} if selection in BY_QUERY else {}
    for name, value in options.items():
        group = clusters if name.startswith("routing_") else sizes
        group[name.removeprefix("routing_")] = value
    routing = RoutingConfig(**clusters)
    model = ModelConfig(**sizes)
    data = DataConfig(length=length)
    if not model.causal:
        data = DataConfig(name="masked", length=length, pairs=1)
    return resolve(Config(data=data, routing=routing, model=model))


def tiny_model(seed: int = 0, **config: Any) -> Transformer:
    """Return a float64 model in evaluation mode; weights that start at zero are random."""
    torch.manual_seed(seed)
    model = Transformer(tiny_config(**config), VOCABULARY).double().eval()
    with torch.no_grad():
        model.output_VS.normal_()
        model.embedding.table_VS.normal_()
        model.embedding.start_S.normal_()
        for name, parameter in model.named_parameters():
            if name.endswith(("taps_HDK", "gate_H2D")):
                parameter.normal_()
    return model


def tokens(batch: int = 2, length: int = 24, seed: int = 0, vocabulary: int = VOCABULARY) -> Tensor:
    return torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


def gradients(model: Transformer, tokens_BN: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    nats_BN, auxiliary = model.loss(tokens_BN)
    (nats_BN.mean() + auxiliary).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def check_alike(
    found: Tensor, expected: Tensor, leaves: Iterable[Tensor], tolerance: float = 1e-9
) -> None:
    """Compare outputs, and the gradients of a projection of them."""
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    weight = torch.linspace(-1, 1, found.numel(), dtype=torch.float64).view(found.shape)
    leaves = list(leaves)
    ours, theirs = (
        torch.autograd.grad((out * weight).sum(), leaves, retain_graph=True)
        for out in (found, expected)
    )
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def check_streams(
    model: Transformer, tokens_BN: Tensor, *prompts: int, tolerance: float = 1e-10
) -> None:
    """Check that steps and prompts give the nats of one pass with decisions from the prefix."""
    slow = Decoder(model, len(tokens_BN))
    inputs = [None, *tokens_BN.T[:-1]]
    logits_NBV = torch.stack([slow.step(tokens_B) for tokens_B in inputs])
    found_NB = -logits_NBV.log_softmax(-1).gather(-1, tokens_BN.T[..., None])[..., 0]
    with torch.no_grad():
        expected_BN, _ = model.loss(tokens_BN, streaming=True)
    torch.testing.assert_close(found_NB.T, expected_BN, rtol=tolerance, atol=tolerance)
    for prompt in prompts:
        quick = Decoder(model, len(tokens_BN))
        end = prompt + 13
        found = [quick.prefill(tokens_BN[:, :prompt]), *map(quick.step, inputs[prompt + 1 : end])]
        torch.testing.assert_close(
            torch.stack(found), logits_NBV[prompt:end], rtol=tolerance, atol=tolerance
        )
