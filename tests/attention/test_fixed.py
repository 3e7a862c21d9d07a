"""Fixed attention against the oracle: shapes, padding masks, a sub-block per head, groups, streaming."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from oracle_cases import PLAIN, Case, Leaves, assert_same, cases, leaves, qkv, tables
from padding_cases import padding

from rtx.attention.fixed import FixedHeads, FixedState, fixed
from rtx.attention.full import full
from rtx.model.positions import Rotary


def sizes(case: Case) -> dict[str, int]:
    """Block and summary of a case; the clusters stand for the summary."""
    return {"block": case.W, "summary": min(case.C, case.W)}


def truth(case: Case, inputs: Leaves, mask_BN: torch.Tensor | None = None) -> torch.Tensor:
    return fast(case, inputs, mask_BN, backend="reference")


def fast(case: Case, inputs: Leaves, mask_BN: torch.Tensor | None = None, backend: str = "torch") -> torch.Tensor:
    options = {"scale": case.scale, "relative": tables(inputs), "mask_BN": mask_BN, "backend": backend}
    return fixed(*qkv(inputs), block=case.W, summary=min(case.C, case.W), **options)


SHAPES = [*cases(20), PLAIN._replace(H=5, N=50, W=6, C=2), PLAIN._replace(H=4, N=41, W=5, C=2, distances=9)]


@pytest.mark.parametrize("case", SHAPES)
def test_oracle(case: Case) -> None:
    assert_same(lambda x: fast(case, x), lambda x: truth(case, x), leaves(case))


@pytest.mark.parametrize("case", SHAPES)
def test_padding(case: Case) -> None:
    mask_BN = padding(case)
    assert_same(lambda x: fast(case, x, mask_BN), lambda x: truth(case, x, mask_BN), leaves(case))


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("kept", [0, 100])
def test_groups_of_many_blocks(groups: int, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fixed.__globals__, "GROUPS", groups)
    monkeypatch.setitem(fixed.__globals__, "KEPT", kept)
    for case in SHAPES[-2:]:
        assert_same(lambda x, c=case: fast(c, x), lambda x, c=case: truth(c, x), leaves(case))


def test_what_stands_in_padding_is_never_read() -> None:
    case = PLAIN._replace(B=2, N=17)
    inputs, mask_BN = leaves(case), padding(case)
    spoilt = {n: x.masked_fill(~mask_BN[:, None, :, None], float("nan")).requires_grad_() for n, x in inputs.items()}
    out = fast(case, spoilt, mask_BN)
    assert torch.equal(out, fast(case, inputs, mask_BN))
    out.sum().backward()
    assert all(torch.isfinite(x.grad).all() for x in spoilt.values() if x.grad is not None)


@pytest.mark.parametrize("case", SHAPES)
def test_streaming(case: Case) -> None:
    inputs = leaves(case)
    state = FixedState(**sizes(case), scale=case.scale, relative=tables(inputs))
    q, k, v = qkv(inputs)
    steps = [state.step(q[:, :, i], k[:, :, i], v[:, :, i], i) for i in range(case.N)]
    torch.testing.assert_close(torch.stack(steps, 2), fast(case, inputs), rtol=1e-10, atol=1e-12)


def test_the_state_keeps_a_block_and_the_summaries() -> None:
    state, x = FixedState(block=16, summary=2), torch.randn(1, 3, 4)
    for position in range(1600):
        state.step(x, x, x, position)
    needed = 100 * 2 + 16
    assert state.keys_BHKD is not None and needed <= state.keys_BHKD.shape[2] + 2 <= 1.5 * needed


def test_each_head_reads_its_own_sub_block() -> None:
    q = torch.zeros(1, 4, 20, 20, dtype=torch.float64)
    weights = fixed(q, q, torch.eye(20, dtype=torch.float64).expand(1, 4, 20, 20), block=7, summary=2)[0]
    for head, columns in enumerate([(5, 6), (3, 4), (1, 2), (5, 6)]):
        for i in range(20):
            own = set(range(i // 7 * 7, i + 1))
            assert set(weights[head, i].nonzero()[:, 0].tolist()) == own | {
                j for j in range(i // 7 * 7) if j % 7 in columns
            }


def test_up_to_one_block_is_full_attention() -> None:
    x = leaves(PLAIN._replace(distances=4, B=2))
    whole = full(*qkv(x), relative=tables(x))
    for block in (13, 14, 500):
        torch.testing.assert_close(fixed(*qkv(x), block=block, summary=3, relative=tables(x)), whole)
    torch.testing.assert_close(fixed(*qkv(x), block=5, summary=5, relative=tables(x)), whole)


@pytest.mark.parametrize("changed", [1, 2, 5, 6, 7, 31, 44])
def test_the_future_moves_nothing(changed: int) -> None:
    case = PLAIN._replace(H=3, N=45, W=6, C=2, distances=9)
    inputs, other = leaves(case), leaves(case._replace(seed=99))
    moved = {n: torch.cat([inputs[n][:, :, :changed], other[n][:, :, changed:]], 2) for n in "qkv"}
    before, after = fast(case, inputs), fast(case, {**inputs, **moved})
    torch.testing.assert_close(after[:, :, :changed], before[:, :, :changed], rtol=1e-12, atol=1e-14)
    assert not torch.equal(after, before)


def test_heads_turn_queries_and_keys() -> None:
    inputs = leaves(PLAIN._replace(B=2, H=3))
    rotary, heads = Rotary(4), FixedHeads(block=5, summary=2, dropout=0.5).eval()
    q, k, v = qkv(inputs)
    out, loss = heads(q, k, v, rotate=rotary)
    torch.testing.assert_close(out, fixed(rotary(q), rotary(k), v, block=5, summary=2))
    assert loss == 0
    state = heads.start()
    steps = [state.step(q[:, :, i], k[:, :, i], v[:, :, i], i, partial(rotary, first=i)) for i in range(q.shape[2])]
    torch.testing.assert_close(torch.stack(steps, 2), out)
    assert not torch.equal(heads.train()(q, k, v)[0], fixed(q, k, v, block=5, summary=2)), "dropout while training"


@pytest.mark.parametrize("relative", [False, True])
def test_dropout_drops_the_same_again(relative: bool) -> None:
    # The values' gradient is the weights that were used: made again with others, it would differ.
    case = PLAIN._replace(N=40, W=4, C=4, distances=3 if relative else 0)
    x = leaves(case)
    x["v"] = torch.eye(40, dtype=torch.float64)[None, None].requires_grad_()
    table = None if not relative else tables(x)._replace(values_MD=torch.zeros(3, 40))  # type: ignore[union-attr]
    torch.manual_seed(0)
    out = fixed(*qkv(x), block=4, summary=4, dropout=0.5, relative=table)
    upstream = torch.randn_like(out)
    out.backward(upstream)
    torch.testing.assert_close(x["v"].grad, out.detach().transpose(2, 3) @ upstream)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32])
def test_precisions(kind: torch.dtype) -> None:
    x = leaves(PLAIN._replace(N=40))
    rough = fixed(*(t.to(kind) for t in qkv(x)), block=5, summary=2)
    assert rough.dtype == kind
    torch.testing.assert_close(rough.double(), fixed(*qkv(x), block=5, summary=2), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("shape", [(0, 2, 9, 4), (2, 2, 0, 4)])
def test_nothing_to_attend(shape: tuple[int, ...]) -> None:
    q = torch.zeros(shape, requires_grad=True)
    fixed(q, q, q, block=3, summary=1).sum().backward()
    assert fixed(q, q, q, block=3, summary=1).shape == shape


@pytest.mark.parametrize(
    ("block", "summary", "said"),
    [(0, 1, "block=0: must be at least 1"), (4, 5, "summary=5: must be from 1 to block=4"), (4, 0, "summary=0: ")],
)
def test_sizes_that_do_not_fit(block: int, summary: int, said: str) -> None:
    q = torch.zeros(1, 1, 3, 2)
    for use in (lambda: fixed(q, q, q, block=block, summary=summary), lambda: FixedHeads(block=block, summary=summary)):
        with pytest.raises(ValueError, match=said):
            use()
