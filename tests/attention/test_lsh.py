"""LSH attention against the oracle: both variants, one and several rounds; what leaks, streaming, padding, hashes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import pytest
import torch
from oracle_cases import PLAIN, Case, Leaves, assert_same, cases, leaves, plain_rotate, tables

from rtx.attention import hashing, reference
from rtx.attention.hashing import hash_positions, rotations
from rtx.attention.lsh import LshHeads, lsh
from rtx.model.positions import Rotary

VARIANTS = ("causal", "reformer", "prefix")
LONG = PLAIN._replace(N=45, W=6, C=2, H=2)


def turns(case: Case, rounds: int) -> torch.Tensor:
    """Rotations into 2 C buckets."""
    return rotations(case.H, rounds, case.D, 2 * case.C, seed=case.seed).double()


def fast(
    case: Case,
    inputs: Leaves,
    rounds: int,
    variant: str = "causal",
    mask_BN: torch.Tensor | None = None,
    backend: str = "torch",
) -> torch.Tensor:
    rotate = plain_rotate if backend == "reference" else Rotary(case.D)
    return lsh(
        inputs["q"],
        inputs["v"],
        turns(case, rounds),
        window=case.W,
        variant="reformer" if variant == "prefix" else variant,
        streaming=variant == "prefix",
        scale=case.scale,
        relative=tables(inputs),
        rotate=rotate if case.rotary else None,
        mask_BN=mask_BN,
        backend=backend,
    )


def truth(
    case: Case, inputs: Leaves, rounds: int, variant: str = "causal", mask_BN: torch.Tensor | None = None
) -> torch.Tensor:
    return fast(case, inputs, rounds, variant, mask_BN, backend="reference")


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("case", cases())
def test_oracle(case: Case, rounds: int, variant: str) -> None:
    assert_same(lambda x: fast(case, x, rounds, variant), lambda x: truth(case, x, rounds, variant), leaves(case))


@pytest.mark.parametrize("variant", VARIANTS)
def test_long_lists_in_small_pieces(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["rtx.attention.lsh"], "MAX_SCORES", 50)
    for window in (1, 2, 3, 7, 60):
        case = LONG._replace(W=window, distances=5)
        assert_same(lambda x: fast(case, x, 3, variant), lambda x: truth(case, x, 3, variant), leaves(case))  # noqa: B023


@pytest.mark.parametrize("variant", VARIANTS)
def test_rounds_that_show_the_same_count_once(variant: str) -> None:
    inputs, turn_HTDF = leaves(LONG), turns(LONG, 1)
    options = {"window": 6, "variant": variant.replace("prefix", "reformer"), "streaming": variant == "prefix"}
    one = lsh(inputs["q"], inputs["v"], turn_HTDF, **options)
    three = lsh(inputs["q"], inputs["v"], turn_HTDF.expand(-1, 3, -1, -1), **options)
    torch.testing.assert_close(three, one, rtol=1e-10, atol=1e-12)


def with_another_future(inputs: Leaves, prefix: int) -> Leaves:
    other = leaves(LONG._replace(seed=99))
    return {n: torch.cat([x[:, :, :prefix], 3 * other[n][:, :, prefix:]], dim=2) for n, x in inputs.items()}


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("read", [fast, truth])
def test_only_the_published_variant_lets_the_future_in(read: Callable[..., torch.Tensor], rounds: int) -> None:
    inputs = leaves(LONG)
    moved = {}
    for variant in VARIANTS:
        before = read(LONG, inputs, rounds, variant)
        changes = []
        for prefix in (1, 2, 5, 6, 7, 31, 44):
            after = read(LONG, with_another_future(inputs, prefix), rounds, variant)
            changes.append(float((after - before)[:, :, :prefix].abs().max()))
            assert not torch.equal(after, before)
        moved[variant] = max(changes)
    assert moved["causal"] <= 1e-13 and moved["prefix"] <= 1e-13
    assert moved["reformer"] > 0.1


def test_the_prefix_rule_is_the_published_one_at_the_end_of_every_prefix() -> None:
    inputs = leaves(LONG)
    streamed = fast(LONG, inputs, 2, "prefix")
    for i in range(LONG.N):
        prefix = {n: x[:, :, : i + 1] for n, x in inputs.items()}
        last = fast(LONG, prefix, 2, "reformer")[:, :, -1]
        torch.testing.assert_close(streamed[:, :, i], last, rtol=1e-10, atol=1e-12)


def make(case: Case, rounds: int, variant: str) -> LshHeads:
    options = {"window": case.W, "rounds": rounds, "buckets": 2 * case.C, "seed": case.seed, "variant": variant}
    return LshHeads(case.H, case.D, scale=case.scale, **options).double()


@pytest.mark.parametrize("variant", ["causal", "reformer"])
@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("case", [*cases(6), LONG, LONG._replace(W=1)])
def test_streaming(case: Case, rounds: int, variant: str) -> None:
    inputs, heads = leaves(case), make(case, rounds, variant)
    rotary = Rotary(case.D) if case.rotary else None
    state = heads.start(tables(inputs))
    steps = []
    for i in range(case.N):
        rotate = None if rotary is None else partial(rotary, first=i)
        steps.append(state.step(inputs["q"][:, :, i], None, inputs["v"][:, :, i], i, rotate))
    whole, loss = heads(inputs["q"], None, inputs["v"], rotate=rotary, relative=tables(inputs), streaming=True)
    torch.testing.assert_close(torch.stack(steps, 2), whole, rtol=1e-10, atol=1e-12)
    assert loss == 0
    assert state.keys_BHTCWD is not None and state.keys_BHTCWD.shape[-2] <= max(2, case.W)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("rounds", [1, 3])
def test_padding_is_not_read_and_gets_zero(rounds: int, variant: str) -> None:
    case = LONG._replace(B=3, rotary=True)
    inputs = leaves(case)
    mask_BN = torch.rand(3, 45, generator=torch.Generator().manual_seed(1)) < 0.6
    mask_BN[0] = torch.arange(45) < 20
    mask_BN[1] = False
    spoiled = {n: x.masked_fill(~mask_BN[:, None, :, None], float("nan")) for n, x in inputs.items()}
    copies = {n: x.requires_grad_() for n, x in spoiled.items()}
    out = fast(case, copies, rounds, variant, mask_BN)
    assert (out.masked_select(~mask_BN[:, None, :, None]) == 0).all() and out.isfinite().all()
    out.square().sum().backward()
    assert all(x.grad is None or x.grad.isfinite().all() for x in copies.values())
    alone = fast(case, {n: x[:1, :, :20] for n, x in inputs.items()}, rounds, variant)
    torch.testing.assert_close(out[:1, :, :20], alone, rtol=1e-10, atol=1e-12)


def test_no_positions_and_no_sequences() -> None:
    for shape in ((0, 2, 7, 4), (2, 2, 0, 4)):
        for variant in ("causal", "reformer"):
            x = torch.zeros(shape)
            out = lsh(x, x, turns(LONG, 2).float(), window=3, variant=variant)
            assert out.shape == shape


@pytest.mark.parametrize("rounds", [1, 2])
def test_a_causal_query_reads_at_most_window_keys_a_round(rounds: int) -> None:
    q = torch.randn(1, 1, 60, 4, generator=torch.Generator().manual_seed(0))
    v = torch.eye(60)[None, None]
    for variant in ("causal", "reformer"):
        weights = lsh(q, v, rotations(1, rounds, 4, 2, seed=0), window=6, variant=variant)[0, 0]
        read_N = (weights > 0).sum(-1)
        assert read_N.max() <= 6 * rounds and read_N.min() >= 1
        torch.testing.assert_close(weights.sum(-1), torch.ones(60))
        assert (weights.diagonal() > 0).sum() == sum((weights[i, :i] == 0).all() for i in range(60))


def test_hashes_are_the_largest_of_both_signs_in_any_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    q, turn_HTDF = leaves(LONG)["q"], turns(LONG, 3)
    bucket_TBHN = hash_positions(q, turn_HTDF)
    for h in range(2):
        assert torch.equal(bucket_TBHN[:, 0, h], reference.buckets(q[0, h], turn_HTDF[h]))
    monkeypatch.setattr(hashing, "MAX_SCORES", 30)
    assert torch.equal(hash_positions(q, turn_HTDF), bucket_TBHN)
    assert torch.equal(hash_positions(7 * q, turn_HTDF), bucket_TBHN)


def test_rotations_are_a_function_of_seed_and_head_and_are_not_saved() -> None:
    turn_HTDF = rotations(3, 2, 4, 6, seed=9)
    assert turn_HTDF.shape == (3, 2, 4, 3)
    assert torch.equal(turn_HTDF[:2], rotations(2, 2, 4, 6, seed=9))
    assert not torch.equal(turn_HTDF, rotations(3, 2, 4, 6, seed=10))
    assert not torch.equal(turn_HTDF[0], turn_HTDF[1])
    before = torch.get_rng_state()
    heads = make(LONG, 2, "causal")
    assert torch.equal(before, torch.get_rng_state()) and heads.state_dict() == {}


@pytest.mark.parametrize("variant", ["causal", "reformer"])
def test_dropout_is_on_weights_and_for_training(variant: str) -> None:
    inputs = leaves(LONG)
    heads = LshHeads(2, 4, window=6, rounds=2, buckets=4, seed=0, variant=variant, dropout=0.5).double()
    torch.manual_seed(0)
    first, second = (heads(inputs["q"], None, inputs["v"])[0] for _ in range(2))
    assert not torch.equal(first, second)
    heads.eval()
    first, second = (heads(inputs["q"], None, inputs["v"])[0] for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("variant", ["causal", "reformer"])
@pytest.mark.parametrize("rounds", [1, 2])
def test_half_precision(rounds: int, variant: str) -> None:
    x = leaves(LONG)
    q, v = x["q"].bfloat16(), x["v"].bfloat16()
    out = lsh(q, v, turns(LONG, rounds), window=6, variant=variant)
    expected = lsh(q.double(), v.double(), turns(LONG, rounds), window=6, variant=variant)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), expected, rtol=0.05, atol=0.05)


def test_what_is_refused() -> None:
    x = torch.zeros(1, 2, 5, 4)
    with pytest.raises(ValueError, match="variant='linear': must be one of causal, reformer"):
        lsh(x, x, turns(LONG, 1), window=3, variant="linear")
    with pytest.raises(ValueError, match="window=0"):
        lsh(x, x, turns(LONG, 1), window=0)
    with pytest.raises(ValueError, match="rotation_HTDF has the shape"):
        lsh(x, x, turns(LONG, 1)[:1], window=3)
    with pytest.raises(ValueError, match="v_BHND has the shape"):
        lsh(x, x[:, :, :3], turns(LONG, 1), window=3)
    with pytest.raises(ValueError, match="mask_BN has the shape"):
        lsh(x, x, turns(LONG, 1), window=3, mask_BN=torch.ones(2, 5, dtype=torch.bool))
    with pytest.raises(ValueError, match="buckets=5: must be even"):
        rotations(2, 1, 4, 5, seed=0)
