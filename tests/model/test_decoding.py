"""Streaming equals parallel for every kind of model, ablated or not; caches; generation."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rtx.attention import positional
from rtx.attention.clusters import ClusterCache, Routing
from rtx.attention.members import normalise
from rtx.attention.positional import Local
from rtx.model.ablation import ablate
from rtx.model.decoding import Decoder, draw, generate
from rtx.model.transformer import Transformer
from tests.helpers.tiny_models import (
    BY_QUERY,
    SELECTIONS,
    SHALLOW,
    STREAMED,
    VOCABULARY,
    Kind,
    check_streams,
    covering,
    each_kind,
    tiny_config,
    tiny_model,
    tokens,
)

TOKENS_BN = tokens()


FEW = covering(STREAMED)


@pytest.fixture
def few_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches that grow have to make room soon."""
    monkeypatch.setattr(positional, "FIRST_SLOTS", 3)


def check_kind(kind: Kind, made_for: int, longer: int, *prompts: int) -> None:
    """Check streams that are `longer` than the model was made for if its positions have no end."""
    length = made_for
    if kind.get("positions") not in ("learned", "axial"):
        length += longer
    model = tiny_model(length=made_for, **SHALLOW, **kind)
    check_streams(model, tokens(length=length), *prompts)


@each_kind(FEW)
def test_streaming_equals_parallel_and_a_prompt_its_steps(kind: Kind, few_slots: None) -> None:
    prompt = 11 if FEW.index(kind) % 2 else 1
    check_kind(kind, 16, 2, prompt)


@each_kind(STREAMED)
def test_long_streams_of_all_kinds_equal_parallel(kind: Kind, few_slots: None) -> None:
    prompts = (0, 17) if STREAMED.index(kind) % 2 else (1, 5)
    check_kind(kind, 24, 13, *prompts)


def members_held(decoder: Decoder) -> list[list[list[int]]]:
    caches = [stream.stream.cache for streams in decoder.streams for stream in streams]
    return [
        held.position_LS.sort(dim=-1).values.tolist()
        for held in caches
        if isinstance(held, ClusterCache)
    ]


@pytest.mark.parametrize(("keys", "units"), [("shared", [5, 2]), ("separate", [5])])
def test_units_that_return_keep_the_members_that_came_first(keys: str, units: list[int]) -> None:
    """In float32, where products in prompts, steps and scoring are rounded differently."""
    sizes = {
        "hidden": 64,
        "ffn_hidden": 64,
        "routing_heads": 4,
        "routing_layers": 3,
        "routing_window": 12,
    }
    model = tiny_model(selection="topk", positions="none", routing_keys=keys, **sizes).float()
    tokens_BN = torch.tensor([units, [unit + 3 for unit in units]]).repeat(1, 60)[:, :60]
    quick = Decoder(model, 2)
    slow = Decoder(model, 2)
    prompt_BP, rest_BN = tokens_BN.split([40, 20], dim=1)
    logits = [slow.step(tokens_B) for tokens_B in [None, *prompt_BP.T]]
    torch.testing.assert_close(quick.prefill(prompt_BP), logits[-1], rtol=1e-4, atol=1e-4)
    assert members_held(quick) == members_held(slow)
    for tokens_B in rest_BN.T[:-1]:
        logits.append(slow.step(tokens_B))
        torch.testing.assert_close(quick.step(tokens_B), logits[-1], rtol=1e-4, atol=1e-4)
    assert members_held(quick) == members_held(slow)
    log_probabilities_BNV = torch.stack(logits, dim=1).log_softmax(-1)
    nats_BN = -log_probabilities_BNV.gather(-1, tokens_BN[..., None])[..., 0]
    with torch.no_grad():
        expected_BN, _ = model.loss(tokens_BN, streaming=True)
    torch.testing.assert_close(nats_BN, expected_BN, rtol=1e-4, atol=1e-4)


CODE = b"""for block, streams in zip(model.blocks, self.streams):
    x = block.decode(x, streams, position)
"""


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("selection", ["exact", "indexer", "blocks", "topk", "causal", "nearest"])
def test_bytes_that_return_are_read_alike_in_steps_and_in_a_pass(
    selection: str, wide: bool
) -> None:
    """Every layer routes, without positions: the same bytes are the same vectors.

    Keys that look back are not.
    """
    sizes: Kind = {
        "layers": 2,
        "hidden": 64,
        "ffn_hidden": 64,
        "positions": "rotary",
        "base": "local",
    }
    routing: Kind = {
        "selection": selection,
        "keys": "tied",
        "key_shift": 1,
        "rotary": False,
        "layers": 2,
        "window": 12,
    }
    options = sizes | {f"routing_{name}": value for name, value in routing.items()}
    options |= {"routing_block": 4} if selection == "blocks" else {}
    letters = sorted(set(CODE))
    unit_1N = torch.tensor([[letters.index(byte) % VOCABULARY for byte in CODE]])
    model = tiny_model(length=len(CODE), **options)
    if wide:
        check_streams(model, unit_1N, 40)
    else:
        check_streams(model.float(), unit_1N, 40, tolerance=1e-4)


def held(node: Any) -> int:
    if isinstance(node, Tensor | nn.Module):
        return node.numel() if isinstance(node, Tensor) else 0
    parts = node if isinstance(node, list | tuple) else getattr(node, "__dict__", {}).values()
    return sum(held(part) for part in parts)


BOUNDED: list[Kind] = [
    *({"selection": s, "base": "local"} for s in (*SELECTIONS, "nearest")),
    {"selection": "topk", "routing_keys": "separate"},
    {"base": "lsh+adaptive_span"},
]
GROWING: list[Kind] = [*({"selection": s} for s in BY_QUERY), {"base": "full"}]


@each_kind(BOUNDED + GROWING)
def test_caches_grow_only_where_any_position_may_be_read(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(positional, "FIRST_SLOTS", 1)
    decoder = Decoder(tiny_model(positions="shaw", **SHALLOW, **kind), 2)
    prompt_BP, *parts = tokens(length=24).split(8, dim=1)
    decoder.prefill(prompt_BP)
    sizes = [held(decoder.streams)]
    for part_BN in parts:
        for tokens_B in part_BN.T:
            decoder.step(tokens_B)
        sizes.append(held(decoder.streams))
    if kind in BOUNDED:
        assert sizes[0] == sizes[1] == sizes[2] > 0
    else:
        assert sizes[0] < sizes[2] < 5 * sizes[0]


def test_a_stream_says_what_it_takes_at_its_start_and_later() -> None:
    decoder = Decoder(tiny_model(), 2)
    with pytest.raises(ValueError, match="the first step takes no tokens"):
        decoder.step(TOKENS_BN[:, 0])
    decoder.step()
    with pytest.raises(ValueError, match="which only the first step takes"):
        decoder.step()
    with pytest.raises(ValueError, match="a prompt is read at position 0, not at position 1"):
        decoder.prefill(TOKENS_BN)


def sample(
    model: Transformer, prompt: list[int], length: int = 12, seed: int = 0, **options: Any
) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    units = generate(
        model, torch.tensor([prompt], dtype=torch.int64), length, generator=generator, **options
    )
    return [int(x_B) for x_B in units]


@pytest.mark.parametrize("prompt", [[], [3, 1, 4]])
def test_temperature_0_takes_the_most_likely_unit_without_dropout(prompt: list[int]) -> None:
    model = tiny_model(dropout=0.5).train()
    units = sample(model, prompt, temperature=0)
    assert len(units) == 12 and units == sample(model, prompt, seed=9, top_k=1) == sample(
        model, prompt, top_p=1e-9
    )
    prompts = torch.tensor([prompt, [unit + 3 for unit in prompt]], dtype=torch.int64)
    whole = torch.cat(
        [prompts, torch.stack(list(generate(model, prompts, 12, temperature=0)), dim=1)], dim=1
    )
    assert whole[0].tolist() == prompt + units
    decoder = Decoder(tiny_model(), 2)
    for i, inputs in enumerate([None, *whole.T[:-1]]):
        best_B = decoder.step(inputs).argmax(-1)
        assert i < len(prompt) or torch.equal(best_B, whole[:, i])


LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).expand(4000, 4)
DRAWS: list[tuple[Kind, int]] = [({"temperature": t}, 4) for t in (0.5, 1.0, 3.0)]
DRAWS += [({"temperature": t}, 1) for t in (1e-3, 1e-30, 1e-45, 1e-300)]
DRAWS += [
    ({"top_k": 2}, 2),
    ({"top_k": 9}, 4),
    ({"top_p": 0.7}, 2),
    ({"top_p": 0.6}, 1),
    ({"top_p": 1.0}, 4),
]


@pytest.mark.parametrize(("options", "kept"), DRAWS)
def test_draws_follow_the_temperature_and_top_k_and_top_p_cut_the_tail(
    options: Kind, kept: int
) -> None:
    # Shares are 0.64, 0.24, 0.09 and 0.03; the unit that crosses the share of top_p still counts.
    settings: Kind = {"temperature": 1.0, "top_k": None, "top_p": None} | options
    drawn_B = draw(LOGITS, generator=torch.Generator().manual_seed(0), **settings)
    share_V = torch.bincount(drawn_B, minlength=4) / len(LOGITS)
    expected = (LOGITS[0, :kept].double() / settings["temperature"]).softmax(-1)
    assert (share_V[:kept] - expected).abs().max() < 0.03 and share_V[kept:].sum() == 0


def ablated(how: str, **options: object) -> Transformer:
    model = tiny_model(**options)  # type: ignore[arg-type]
    ablate(model, tiny_config(**options), how)  # type: ignore[arg-type]
    return model


ABLATIONS = ("routing", "local", "random")
ABLATED = [(selection, how) for selection in ("causal", "exact") for how in ABLATIONS]
ABLATED += [("topk", "local"), ("random", "local"), ("indexer", "routing"), ("probed", "random")]
ABLATED += [("blocks", "random"), ("blocks_random", "local")]


@pytest.mark.parametrize(("selection", "how"), ABLATED)
def test_an_ablated_model_streams_as_it_scores(selection: str, how: str) -> None:
    positions = "shaw" if selection in (*BY_QUERY, "random") else "rotary"
    options = {"selection": selection, "positions": positions, **BY_QUERY.get(selection, {})}
    options |= SHALLOW
    model = ablated(how, **options)
    with torch.no_grad():
        parallel_BN, _ = model.loss(TOKENS_BN)
        prefix_BN, _ = model.loss(TOKENS_BN, streaming=True)
        plain_BN, _ = ablated("none", **options).loss(TOKENS_BN)
    torch.testing.assert_close(prefix_BN, parallel_BN, rtol=1e-12, atol=1e-12)
    check_streams(model, TOKENS_BN[:, :16])
    assert not torch.allclose(plain_BN, parallel_BN)


def test_silent_heads_are_the_model_whose_routing_heads_give_zeros() -> None:
    with torch.no_grad():
        silent_BN, _ = ablated("routing").loss(TOKENS_BN)
        by_hand = tiny_model()
        for heads in (module for module in by_hand.modules() if isinstance(module, Routing)):
            heads.register_forward_hook(
                lambda heads, given, out: (torch.zeros_like(out[0]), out[1])
            )
        expected_BN, _ = by_hand.loss(TOKENS_BN)
    torch.testing.assert_close(silent_BN, expected_BN, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("attend_self", [True, False])
def test_the_local_swap_reads_the_last_window_of_queries(attend_self: bool) -> None:
    model = ablated("local", routing_attend_self=attend_self)
    heads: nn.Module = model.blocks[1].attention.groups["routed"].pattern  # type: ignore
    torch.manual_seed(0)
    q_BHND, v_BHND = torch.randn(2, 2, 2, 17, 4, dtype=torch.float64)
    out_BHND, _ = heads(q_BHND, None, v_BHND)
    q_BHND = normalise(q_BHND)
    expected_BHND, _ = Local(window=6, attend_self=attend_self)(q_BHND, q_BHND, v_BHND)
    torch.testing.assert_close(out_BHND, expected_BHND, rtol=1e-12, atol=1e-12)
