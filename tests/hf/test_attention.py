"""`rtx.hf`: what the heads of models of transformers read by a selection of rtx."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="the extra rtx[hf] is not installed")

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import rtx.hf
from rtx.attention.clusters import Routing
from rtx.hf.choice import Choice
from rtx.hf.far_keys import FarKeys
from rtx.hf.interface import attention as attention_function
from rtx.hf.rotary import turned_back, watch
from tests.hf.small_models import FAMILIES, random_tokens, small_mistral, small_model

CHOOSING = tuple(name for name in rtx.hf.NAMES if name != "none")
STREAMING = tuple(name for name in CHOOSING if name != "topk")
SMALL: dict[str, Any] = {
    "window": 4,
    "keys": 4,
    "sinks": 1,
    "clusters": 4,
    "block": 2,
    "rounds": 2,
    "buckets": 4,
    "length": 32,
}


def logits(model: PreTrainedModel, tokens_BN: Tensor, **options: Any) -> Tensor:
    with torch.no_grad():
        return model(tokens_BN, **options).logits


def configured(family: str, **options: Any) -> PreTrainedModel:
    """Return a small model with rtx's attention, its centroids fitted."""
    model = small_model(family)
    rtx.hf.configure(model, **{**SMALL, **options})
    rtx.hf.fit(model, random_tokens(2, 32), steps=3)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_whose_heads_may_read_all_keys_is_the_model(family: str) -> None:
    tokens_BN = random_tokens(2, 24)
    expected = logits(small_model(family), tokens_BN)
    for options in ({"window": 24}, {"keys": 24}, {"dense_layers": 2}):
        model = configured(family, **{"selection": "exact", **options})
        torch.testing.assert_close(logits(model, tokens_BN), expected, atol=1e-5, rtol=1e-5)
    local = logits(configured(family, selection="none"), tokens_BN)
    assert (local - expected).abs().max() > 1e-3, "fewer keys are another function"


@pytest.mark.parametrize("per", ["head", "group"])
@pytest.mark.parametrize("name", CHOOSING)
def test_the_mask_is_the_rule_of_rtx_on_the_far_queries_and_keys(name: str, per: str) -> None:
    torch.manual_seed(3)
    q_BHND = torch.randn(2, 4, 32, 8)
    k_BGND = torch.randn(2, 2, 32, 8)
    far_keys = FarKeys(Choice(selection=name, per=per, **SMALL), 4, 2, 8, layer=1)
    far_keys.fit(q_BHND, k_BGND, 3)
    mask_BHNN = far_keys.far_mask(q_BHND, k_BGND)
    pattern = far_keys.pattern
    assert pattern is not None
    near = 4 + 1
    q_BXMD, k_BXMD = far_keys.far_vectors(q_BHND[:, :, near:], k_BGND)
    for b in range(2):
        qk = pattern.inputs(q_BXMD[b : b + 1], k_BXMD[b : b + 1], None)
        for h in range(4):
            choosing = h if per == "head" else h // 2
            rule_MM = pattern.rule(qk, choosing, streaming=True).any(0)
            expected_NN = torch.zeros(32, 32, dtype=torch.bool)
            expected_NN[near:, 1:28] = rule_MM
            assert torch.equal(mask_BHNN[b, h], expected_NN)
    if not isinstance(pattern, Routing):
        assert mask_BHNN.any(), "something is read"
    position_P = torch.tensor([near, 17, 31])
    some_BHPN = far_keys.far_mask_at(q_BHND, k_BGND, position_P)
    assert torch.equal(some_BHPN, mask_BHNN[:, :, position_P])


def test_every_query_reads_its_window_the_sinks_and_at_most_the_keys_in_between() -> None:
    torch.manual_seed(3)
    q_BHND = torch.randn(1, 4, 32, 8)
    k_BGND = torch.randn(1, 2, 32, 8)
    far_keys = FarKeys(Choice(selection="exact", window=3, sinks=2, keys=5), 4, 2, 8, layer=0)
    mask_NN = far_keys.mask(q_BHND, k_BGND)[0, 0]
    for i in range(32):
        read = set(mask_NN[i].nonzero().flatten().tolist())
        near = {j for j in range(i + 1) if j < 2 or j > i - 3}
        assert near <= read <= set(range(i + 1))
        assert len(read - near) == min(5, max(0, i - 3 - 2 + 1))


@pytest.mark.parametrize("name", STREAMING)
def test_decoding_with_a_cache_gives_the_scores_of_one_pass(name: str) -> None:
    model: Any = configured("llama", selection=name)
    tokens_BN = random_tokens(2, 24)
    expected = logits(model, tokens_BN)
    with torch.no_grad():
        out = model(tokens_BN[:, :14], use_cache=True)
        scores = [out.logits]
        # Some tokens at once, and then one after the other.
        for piece in (tokens_BN[:, 14:20], *tokens_BN[:, 20:].split(1, dim=1)):
            out = model(piece, cache=out.cache, use_cache=True)
            scores.append(out.logits)
    torch.testing.assert_close(torch.cat(scores, dim=1), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_generation_takes_the_best_token_of_each_pass(family: str) -> None:
    model: Any = configured(family, selection="probed")
    tokens_1N = random_tokens(1, 16)
    generated = model.generate(tokens_1N, max_new_tokens=4, do_sample=False, pad_token_id=0)
    for _ in range(4):
        best = logits(model, tokens_1N)[:, -1:].argmax(-1)
        tokens_1N = torch.cat([tokens_1N, best], dim=1)
    assert torch.equal(generated, tokens_1N)


def test_a_layer_with_a_sliding_window_reads_the_keys_of_both() -> None:
    tokens_BN = random_tokens(2, 24)
    model: Any = small_mistral(sliding_window=8)
    expected = logits(model, tokens_BN)
    rtx.hf.configure(model, **{**SMALL, "selection": "exact", "keys": 24})
    torch.testing.assert_close(logits(model, tokens_BN), expected, atol=1e-5, rtol=1e-5)
    rtx.hf.configure(model, **{**SMALL, "selection": "none", "sinks": 0})
    shorter = small_mistral(sliding_window=SMALL["window"])
    expected = logits(shorter, tokens_BN)
    torch.testing.assert_close(logits(model, tokens_BN), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", CHOOSING)
def test_no_score_depends_on_a_later_token(name: str) -> None:
    model = configured("llama", selection=name)
    tokens_BN = random_tokens(1, 24)
    changed_BN = tokens_BN.clone()
    changed_BN[:, 16:] = 5
    before = logits(model, tokens_BN)[:, :16]
    torch.testing.assert_close(logits(model, changed_BN)[:, :16], before)


def test_gradients_are_those_of_attention_with_the_mask() -> None:
    model = configured("llama", selection="probed")
    eager = copy.deepcopy(model)
    tokens_BN = random_tokens(2, 24)
    masks = masks_of(model, tokens_BN)
    eager.set_attn_implementation("sdpa")
    for layer, mask_BHNN in zip(eager.model.layers, masks, strict=True):  # type: ignore[union-attr]
        layer.self_attn.register_forward_pre_hook(with_mask(mask_BHNN), with_kwargs=True)
    for one in (model, eager):
        one(tokens_BN, labels=tokens_BN).loss.backward()
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-5, rtol=1e-4)


def masks_of(model: PreTrainedModel, tokens_BN: Tensor) -> list[Tensor]:
    """Return which keys each layer reads in a pass."""
    masks = []
    whole = FarKeys.mask

    def remembered(self: FarKeys, *vectors: Tensor) -> Tensor:
        masks.append(whole(self, *vectors))
        return masks[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FarKeys, "mask", remembered)
        logits(model, tokens_BN)
    return masks


def with_mask(mask_BHNN: Tensor) -> Callable[..., Any]:
    """Return a hook that gives an attention module its mask."""

    def hook(module: Any, args: Any, options: dict[str, Any]) -> Any:
        return args, {**options, "attention_mask": mask_BHNN}

    return hook


def test_choosing_before_rotary_angles_compares_the_projected_queries_and_keys() -> None:
    for family in ("llama", "gpt_neox"):
        model = small_model(family)
        watch(model)
        tokens_BN = random_tokens(1, 16)
        seen: dict[str, Any] = {}

        def spy(module: Any, query: Tensor, key: Tensor, *args: Any, seen=seen, **options: Any):
            if module.layer_idx == 0:
                seen["vectors"] = turned_back(module, query, key)
                seen["module"] = module
            return attention_function(module, query, key, *args, **options)

        from transformers import AttentionInterface

        AttentionInterface.register("spy", spy)
        model.set_attn_implementation("spy")
        inputs = {}
        attention = first_attention(model)
        attention.register_forward_pre_hook(
            lambda module, args, options, inputs=inputs: inputs.update(
                x=options.get("hidden_states", args[0] if args else None)
            ),
            with_kwargs=True,
        )
        logits(model, tokens_BN)
        q_BHND, k_BGND = seen["vectors"]
        if family == "llama":
            expected_q = attention.q_proj(inputs["x"]).view(1, 16, 4, 8).transpose(1, 2)
            expected_k = attention.k_proj(inputs["x"]).view(1, 16, 2, 8).transpose(1, 2)
        else:
            qkv = attention.query_key_value(inputs["x"]).view(1, 16, 4, 24).transpose(1, 2)
            expected_q, expected_k, _ = qkv.chunk(3, dim=-1)
        torch.testing.assert_close(q_BHND, expected_q, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(k_BGND, expected_k, atol=1e-4, rtol=1e-4)


def first_attention(model: PreTrainedModel) -> Any:
    """Return the attention module of the first layer."""
    return next(module for module in model.modules() if hasattr(module, "layer_idx"))


def test_a_saved_model_has_its_options_and_the_weights_of_before(tmp_path: Path) -> None:
    model = configured("llama", selection="blocks")
    tokens_BN = random_tokens(1, 24)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="rtx")
    assert again.config.rtx["selection"] == "blocks"
    torch.testing.assert_close(logits(again, tokens_BN), logits(model, tokens_BN))


def test_bad_input_is_refused_with_the_option_or_the_reason() -> None:
    model = small_model("llama")
    cases: dict[str, dict[str, Any]] = {
        "selection=exakt: must be one of .*did you mean 'exact'": {"selection": "exakt"},
        "window=0: must be an integer, at least 1": {"window": 0},
        "candidates=3: must be an integer, at least 4": {"keys": 4, "candidates": 3},
        "buckets=3: must be even": {"buckets": 3},
    }
    for message, options in cases.items():
        with pytest.raises(ValueError, match=message):
            rtx.hf.configure(model, **options)
    tokens_BN = random_tokens(2, 24)
    rtx.hf.configure(model, **{**SMALL, "selection": "probed"})
    with pytest.raises(ValueError, match=r"not fitted; call rtx\.hf\.fit"):
        logits(model, tokens_BN)
    real_BN = torch.ones_like(tokens_BN)
    real_BN[0, :3] = 0
    with pytest.raises(ValueError, match="sequences of equal length"):
        logits(configured("llama"), tokens_BN, attention_mask=real_BN)
    with pytest.raises(ValueError, match="GPT2Attention has no rotary angles"):
        logits(configured("gpt2", rotary="before"), tokens_BN)
    sliding: Any = small_mistral(sliding_window=16)
    rtx.hf.configure(sliding, **{**SMALL, "selection": "exact"})
    with pytest.raises(ValueError, match="sequences of equal length"):
        logits(sliding, tokens_BN, attention_mask=real_BN)
    with pytest.raises(ValueError, match="its sliding window of 16 drops keys"):
        sliding.generate(tokens_BN, max_new_tokens=2, do_sample=False, pad_token_id=0)
    sliding.generate(tokens_BN, max_new_tokens=2, use_cache=False, pad_token_id=0)
    topk: Any = configured("llama", selection="topk")
    with pytest.raises(ValueError, match="selection=topk: a cache has no queries"):
        topk.generate(tokens_BN, max_new_tokens=2)
