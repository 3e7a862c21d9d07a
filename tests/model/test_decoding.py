"""Streaming equals parallel for every kind of model, its state is bounded, and generation does what it is told."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tiny_models import KINDS, SELECTIONS, tiny_model, tokens
from torch import Tensor

from rtx.attention.routing_state import RoutingState
from rtx.model.decoding import Decoder, draw, generate
from rtx.model.transformer import Transformer


def streamed_nats(model: Transformer, tokens_BN: Tensor) -> Tensor:
    """The nats of every unit, one step after the other."""
    decoder = Decoder(model, len(tokens_BN))
    inputs = [None, *tokens_BN.T[:-1]]
    logits_BNV = torch.stack([decoder.step(x) for x in inputs], dim=1)
    return -logits_BNV.log_softmax(-1).gather(-1, tokens_BN[..., None])[..., 0]


@pytest.mark.parametrize(("selection", "positions", "norm", "base"), KINDS)
def test_streaming_equals_parallel(selection: str, positions: str, norm: str, base: str) -> None:
    model = tiny_model(selection=selection, positions=positions, norm=norm, base=base)
    # Where the positions allow it, longer than the model was made for.
    tokens_BN = tokens(length=24 if positions in ("learned", "axial") else 37)
    with torch.no_grad():
        expected, _ = model.loss(tokens_BN, streaming=True)
    torch.testing.assert_close(streamed_nats(model, tokens_BN), expected, rtol=1e-10, atol=1e-10)


def same_after_a_prompt(model: Transformer, tokens_BN: Tensor, prompt: int) -> None:
    """Steps behind a prompt taken in at once give what they give behind the prompt's own steps."""
    quick, slow = Decoder(model, len(tokens_BN)), Decoder(model, len(tokens_BN))
    logits_BV = quick.prefill(tokens_BN[:, :prompt])
    for tokens_B in [None, *tokens_BN.T[:prompt]]:
        expected_BV = slow.step(tokens_B)
    torch.testing.assert_close(logits_BV, expected_BV, rtol=1e-10, atol=1e-10)
    for tokens_B in tokens_BN.T[prompt:-1]:
        torch.testing.assert_close(quick.step(tokens_B), slow.step(tokens_B), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("selection", "positions", "norm", "base"), KINDS[::3])
def test_a_prompt_in_one_pass_leaves_the_state_of_its_steps(
    selection: str, positions: str, norm: str, base: str
) -> None:
    model = tiny_model(selection=selection, positions=positions, norm=norm, base=base)
    tokens_BN = tokens(length=24 if positions in ("learned", "axial") else 37)
    for prompt in (0, 1, 5, 17):
        same_after_a_prompt(model, tokens_BN, prompt)


@pytest.mark.parametrize("keys", ["separate", "projected"])
@pytest.mark.parametrize("selection", ["causal", "topk", "nearest"])
def test_a_prompt_for_keys_of_their_own(selection: str, keys: str) -> None:
    model = tiny_model(selection=selection, routing_keys=keys, routing_attend_self=False)
    same_after_a_prompt(model, tokens(length=37), 17)


def members_held(decoder: Decoder) -> list[list[list[int]]]:
    """The positions that each cluster of each layer holds."""
    groups = [group for states in decoder.states for group in states if isinstance(group, RoutingState)]
    return [group.clusters.position_LW.sort(dim=-1).values.tolist() for group in groups]


@pytest.mark.parametrize("units", [[5], [5, 2]])
@pytest.mark.parametrize("keys", ["shared", "separate"])
def test_units_that_return_keep_the_members_that_came_first(keys: str, units: list[int]) -> None:
    """In float32, where the products of one unit in prompts, in steps and in scoring round apart."""
    sizes = {"hidden": 64, "ffn_hidden": 64, "routing_heads": 4, "routing_layers": 3, "routing_window": 12}
    model = tiny_model(selection="topk", positions="none", routing_keys=keys, **sizes).float()
    tokens_BN = torch.tensor([units, [unit + 3 for unit in units]]).repeat(1, 120)[:, :120]
    quick, slow = Decoder(model, 2), Decoder(model, 2)
    with torch.no_grad():
        scored_BN, _ = model.loss(tokens_BN, streaming=True)
        logits_BV = quick.prefill(tokens_BN[:, :80])
        for tokens_B in [None, *tokens_BN.T[:80]]:
            expected_BV = slow.step(tokens_B)
        torch.testing.assert_close(logits_BV, expected_BV, rtol=1e-4, atol=1e-4)
        assert members_held(quick) == members_held(slow)
        for tokens_B in tokens_BN.T[80:-1]:
            torch.testing.assert_close(quick.step(tokens_B), slow.step(tokens_B), rtol=1e-4, atol=1e-4)
        assert members_held(quick) == members_held(slow)
        torch.testing.assert_close(streamed_nats(model, tokens_BN), scored_BN, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("variant", ["causal", "reformer"])
def test_streaming_of_hashing_heads(variant: str, rounds: int) -> None:
    model = tiny_model(base="lsh", lsh=variant, hash_rounds=rounds, hash_buckets=4, window=6)
    with torch.no_grad():
        expected, _ = model.loss(tokens(), streaming=True)
    torch.testing.assert_close(streamed_nats(model, tokens()), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("logit_scale", ["none", "sqrt_d"])
def test_streaming_without_reading_oneself(selection: str, logit_scale: str) -> None:
    model = tiny_model(
        selection=selection, routing_attend_self=False, routing_logit_scale=logit_scale, embedding=6, ffn="geglu"
    )
    with torch.no_grad():
        expected, _ = model.loss(tokens(), streaming=True)
    torch.testing.assert_close(streamed_nats(model, tokens()), expected, rtol=1e-10, atol=1e-10)


def test_only_top_w_scores_differently_when_it_streams() -> None:
    with torch.no_grad():
        for selection in SELECTIONS:
            model = tiny_model(selection=selection)
            parallel, streaming = (model.loss(tokens(), mode)[0] for mode in (False, True))
            assert torch.equal(parallel, streaming) == (selection != "topk")


def test_float32_streams_score_the_same_to_1e_4_bits() -> None:
    model, tokens_BN = tiny_model(length=200).float(), tokens(8, length=200)
    with torch.no_grad():
        parallel, _ = model.loss(tokens_BN)
    assert abs(float(streamed_nats(model, tokens_BN).mean() - parallel.mean())) < 1e-4 * math.log(2)


def held(decoder: Decoder) -> int:
    """Numbers in all tensors of a decoder's state."""
    total, seen, todo = 0, set(), list(decoder.states)
    while todo:
        node = todo.pop()
        if id(node) in seen or isinstance(node, torch.nn.Module):
            continue
        seen.add(id(node))
        if isinstance(node, Tensor):
            total += node.numel()
        elif isinstance(node, list):
            todo += node
        elif hasattr(node, "__dict__"):
            todo += vars(node).values()
    return total


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("base", ["local", "full"])
def test_the_state_is_bounded(selection: str, base: str) -> None:
    decoder = Decoder(tiny_model(selection=selection, base=base, positions="shaw"), 2)
    sizes = []
    for position in range(60):
        decoder.step(None if position == 0 else torch.tensor([position % 11, 3]))
        sizes.append(held(decoder))
    grows = sizes[59] - sizes[29]
    assert sizes[0] > 0
    assert grows == (0 if base == "local" else 30 * 2 * 8 * 4 * 2), "full: keys and values of 8 heads of 4, 2 streams"


def test_the_first_step_takes_no_unit() -> None:
    with pytest.raises(AssertionError, match="first step"):
        Decoder(tiny_model()).step(torch.tensor([1]))


def sample(model: Transformer, prompt: list[int], length: int = 12, seed: int = 0, **options: Any) -> list[int]:
    """Generate one continuation."""
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


def test_a_seed_gives_the_same_text() -> None:
    model = tiny_model()
    assert sample(model, [1], 30) == sample(model, [1], 30)
    assert sample(model, [1], 30) != sample(model, [1], 30, seed=1)


def test_streams_of_a_batch_do_not_mix() -> None:
    model = tiny_model()
    prompts = torch.tensor([[1, 2, 3], [4, 5, 6]])
    both = torch.stack(list(generate(model, prompts, 10, temperature=0)), dim=1)
    for b in range(2):
        assert both[b].tolist() == sample(model, prompts[b].tolist(), 10, temperature=0)


@pytest.mark.parametrize("positions", ["learned", "axial"])
def test_a_length_beyond_learned_positions_is_refused(positions: str) -> None:
    model = tiny_model(positions=positions)
    assert len(sample(model, [1, 2, 3, 4], 20)) == 20
    with pytest.raises(ValueError, match=r"25 units.* learned positions end at 24 \(data.length\)"):
        sample(model, [1, 2, 3, 4], 21)


LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).expand(4000, 4)


def frequencies(**options: Any) -> Tensor:
    """How often each of four units is drawn."""
    settings: dict[str, Any] = {"temperature": 1.0, "top_k": None, "top_p": None} | options
    drawn_B = draw(LOGITS, generator=torch.Generator().manual_seed(0), **settings)
    return torch.bincount(drawn_B, minlength=4) / len(LOGITS)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_draws_follow_the_temperature(temperature: float) -> None:
    expected = (LOGITS[0] / temperature).softmax(-1)
    assert (frequencies(temperature=temperature) - expected).abs().max() < 0.03


def test_top_k_and_top_p_cut_the_tail() -> None:
    # Shares are 0.64, 0.24, 0.09 and 0.03; the unit that crosses the share of top_p still counts.
    for options, kept in (
        ({"top_k": 2}, 2),
        ({"top_k": 9}, 4),
        ({"top_p": 0.7}, 2),
        ({"top_p": 0.6}, 1),
        ({"top_p": 1.0}, 4),
    ):
        expected = LOGITS[0, :kept].softmax(-1)
        assert (frequencies(**options)[:kept] - expected).abs().max() < 0.03
        assert frequencies(**options)[kept:].sum() == 0


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-45, 1e-300])
def test_the_smallest_temperatures(temperature: float) -> None:
    assert frequencies(temperature=temperature).tolist() == [1, 0, 0, 0]


def test_a_model_is_put_in_evaluation_mode() -> None:
    model = tiny_model(dropout=0.5).train()
    assert sample(model, [1], temperature=0) == sample(tiny_model(dropout=0.5), [1], temperature=0)
