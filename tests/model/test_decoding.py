"""Streaming equals parallel for every kind of model, its state is bounded, and generation does what it is told."""

from typing import Any

import pytest
import torch
from tiny_models import (
    BY_QUERY,
    COMMON,
    EVERY,
    KINDS,
    OTHERS,
    OWN_KEYS,
    SELECTIONS,
    Kind,
    each_kind,
    tiny_model,
    tokens,
    tokens_for,
)
from torch import Tensor

from rtx.attention import cache
from rtx.attention.routing import RoutingCache
from rtx.model.decoding import Decoder, draw, generate
from rtx.model.transformer import Transformer


def streamed_nats(model: Transformer, tokens_BN: Tensor) -> Tensor:
    decoder = Decoder(model, len(tokens_BN))
    inputs = [None, *tokens_BN.T[:-1]]
    logits_BNV = torch.stack([decoder.step(x) for x in inputs], dim=1)
    return -logits_BNV.log_softmax(-1).gather(-1, tokens_BN[..., None])[..., 0]


def streams_as_it_scores(model: Transformer, tokens_BN: Tensor) -> None:
    """Steps give the nats of one pass in which every choice is made from the prefix."""
    with torch.no_grad():
        expected, _ = model.loss(tokens_BN, prefix=True)
    torch.testing.assert_close(streamed_nats(model, tokens_BN), expected, rtol=1e-10, atol=1e-10)


NARROW: Kind = {"embedding": 6, "ffn": "geglu", "routing_attend_self": False}
HASHED: Kind = {"base": "lsh", "hash_buckets": 4, "window": 6}
MORE: list[Kind] = [
    *({"selection": s, "routing_logit_scale": scale, **NARROW} for s in EVERY for scale in ("none", "sqrt_d")),
    *({"lsh": variant, "hash_rounds": rounds, **HASHED} for variant in ("causal", "reformer") for rounds in (1, 2)),
]


@each_kind(KINDS + MORE)
def test_streaming_equals_parallel(kind: Kind) -> None:
    streams_as_it_scores(tiny_model(**kind), tokens_for(kind))


def same_after_a_prompt(model: Transformer, tokens_BN: Tensor, *prompts: int) -> None:
    """Steps behind a prompt taken in at once give what they give behind the prompt's own steps."""
    slow, inputs = Decoder(model, len(tokens_BN)), [None, *tokens_BN.T]
    expected = [slow.step(tokens_B) for tokens_B in inputs[: max(prompts) + 13]]
    for prompt in prompts:
        quick = Decoder(model, len(tokens_BN))
        found = [quick.prefill(tokens_BN[:, :prompt])]
        found += [quick.step(tokens_B) for tokens_B in inputs[prompt + 1 : prompt + 13]]
        for mine_BV, expected_BV in zip(found, expected[prompt:], strict=False):
            torch.testing.assert_close(mine_BV, expected_BV, rtol=1e-10, atol=1e-10)


@each_kind(COMMON[::3] + OTHERS + MORE + [kind | NARROW for kind in OWN_KEYS[::2]])
def test_a_prompt_in_one_pass_leaves_the_caches_of_its_steps(kind: Kind) -> None:
    same_after_a_prompt(tiny_model(**kind), tokens_for(kind)[:, :23], 0, 1, 5, 17)


def members_held(decoder: Decoder) -> list[list[list[int]]]:
    caches = [stream.cache for streams in decoder.streams for stream in streams]
    return [held.position_LS.sort(dim=-1).values.tolist() for held in caches if isinstance(held, RoutingCache)]


@pytest.mark.parametrize("units", [[5], [5, 2]])
@pytest.mark.parametrize("keys", ["shared", "separate"])
def test_units_that_return_keep_the_members_that_came_first(keys: str, units: list[int]) -> None:
    """In float32, where the products of one unit in prompts, in steps and in scoring round apart."""
    sizes = {"hidden": 64, "ffn_hidden": 64, "routing_heads": 4, "routing_layers": 3, "routing_window": 12}
    model = tiny_model(selection="topk", positions="none", routing_keys=keys, **sizes).float()
    tokens_BN = torch.tensor([units, [unit + 3 for unit in units]]).repeat(1, 120)[:, :120]
    quick, slow = Decoder(model, 2), Decoder(model, 2)
    with torch.no_grad():
        scored_BN, _ = model.loss(tokens_BN, prefix=True)
        logits_BV = quick.prefill(tokens_BN[:, :80])
        for tokens_B in [None, *tokens_BN.T[:80]]:
            expected_BV = slow.step(tokens_B)
        torch.testing.assert_close(logits_BV, expected_BV, rtol=1e-4, atol=1e-4)
        assert members_held(quick) == members_held(slow)
        for tokens_B in tokens_BN.T[80:-1]:
            torch.testing.assert_close(quick.step(tokens_B), slow.step(tokens_B), rtol=1e-4, atol=1e-4)
        assert members_held(quick) == members_held(slow)
        torch.testing.assert_close(streamed_nats(model, tokens_BN), scored_BN, rtol=1e-4, atol=1e-4)


def test_growing_caches_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "FIRST_SLOTS", 3)
    for selection in ("causal", *BY_QUERY):
        model = tiny_model(selection=selection, base="full", routing_compressed=selection == "blocks")
        streams_as_it_scores(model, tokens(length=37))
        same_after_a_prompt(model, tokens(length=37), 5)


def test_only_top_w_scores_differently_when_it_streams() -> None:
    with torch.no_grad():
        for selection in EVERY:
            model = tiny_model(selection=selection)
            parallel, prefix = (model.loss(tokens(), mode)[0] for mode in (False, True))
            assert torch.equal(parallel, prefix) == (selection != "topk")


def held(node: Any) -> int:
    if isinstance(node, Tensor | torch.nn.Module):
        return node.numel() if isinstance(node, Tensor) else 0
    parts = node if isinstance(node, list | tuple) else getattr(node, "__dict__", {}).values()
    return sum(held(part) for part in parts)


BOUNDED: list[Kind] = [{"selection": s, "base": b} for s in SELECTIONS for b in ("local", "lsh+adaptive_span")]
BOUNDED += [{"selection": "nearest"}, {"selection": "topk", "routing_keys": "separate"}]
GROWING: list[Kind] = [*({"selection": s} for s in BY_QUERY), *({"selection": s, "base": "full"} for s in EVERY)]


@each_kind(BOUNDED + GROWING)
def test_caches_grow_only_where_any_position_may_be_read(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "FIRST_SLOTS", 1)
    decoder, sizes = Decoder(tiny_model(positions="shaw", **kind), 2), []
    for begin, end in ((0, 30), (30, 60), (60, 90)):
        part_BN = tokens(length=90)[:, begin:end]
        _ = [decoder.step(tokens_B) for tokens_B in part_BN.T] if begin else decoder.prefill(part_BN)
        sizes.append(held(decoder.streams))
    if kind in BOUNDED:
        assert sizes[0] == sizes[1] == sizes[2] > 0
    else:
        assert sizes[0] < sizes[2] < 5 * sizes[0]


def sample(model: Transformer, prompt: list[int], length: int = 12, seed: int = 0, **options: Any) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    units = generate(model, torch.tensor([prompt], dtype=torch.int64), length, generator=generator, **options)
    return [int(x_B) for x_B in units]


@pytest.mark.parametrize("prompt", [[], [3, 1, 4]])
def test_temperature_0_takes_the_most_likely_unit(prompt: list[int]) -> None:
    model = tiny_model()
    units = sample(model, prompt, temperature=0)
    assert len(units) == 12 and units == sample(model, prompt, seed=9, top_k=1) == sample(model, prompt, top_p=1e-9)
    whole = torch.tensor([prompt + units])
    decoder = Decoder(model)
    for i, inputs in enumerate([None, *whole.T[:-1]]):
        best = decoder.step(inputs).argmax(-1)
        assert i < len(prompt) or best == whole[0, i]


def test_streams_of_a_batch_do_not_mix() -> None:
    model = tiny_model()
    prompts = torch.tensor([[1, 2, 3], [4, 5, 6]])
    both = torch.stack(list(generate(model, prompts, 10, temperature=0)), dim=1)
    for b in range(2):
        assert both[b].tolist() == sample(model, prompts[b].tolist(), 10, temperature=0)


LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).expand(4000, 4)


def frequencies(**options: Any) -> Tensor:
    settings: dict[str, Any] = {"temperature": 1.0, "top_k": None, "top_p": None} | options
    drawn_B = draw(LOGITS, generator=torch.Generator().manual_seed(0), **settings)
    return torch.bincount(drawn_B, minlength=4) / len(LOGITS)


DRAWS: list[tuple[Kind, int]] = [({"temperature": t}, 4) for t in (0.5, 1.0, 3.0)]
DRAWS += [({"temperature": t}, 1) for t in (1e-3, 1e-30, 1e-45, 1e-300)]
DRAWS += [({"top_k": 2}, 2), ({"top_k": 9}, 4), ({"top_p": 0.7}, 2), ({"top_p": 0.6}, 1), ({"top_p": 1.0}, 4)]


@pytest.mark.parametrize(("options", "kept"), DRAWS)
def test_draws_follow_the_temperature_and_top_k_and_top_p_cut_the_tail(options: Kind, kept: int) -> None:
    # Shares are 0.64, 0.24, 0.09 and 0.03; the unit that crosses the share of top_p still counts.
    expected = (LOGITS[0, :kept].double() / options.get("temperature", 1.0)).softmax(-1)
    assert (frequencies(**options)[:kept] - expected).abs().max() < 0.03
    assert frequencies(**options)[kept:].sum() == 0


def test_a_model_is_put_in_evaluation_mode() -> None:
    model = tiny_model(dropout=0.5).train()
    assert sample(model, [1], temperature=0) == sample(tiny_model(dropout=0.5), [1], temperature=0)
