"""Padding is not read, gets zero and moves nothing, whatever stands in it."""

from __future__ import annotations

import pytest
import torch
from cases import KINDS, Case, gradients, leaves, make, run, tensors

from rtx.attention import oracle
from rtx.attention.choices import Choice
from rtx.attention.pattern import PositionPattern

CASE = Case(B=2, H=2, N=19, D=4, C=3, W=6, seed=5)
REAL_BN = torch.rand(2, 19, generator=torch.Generator().manual_seed(1)) < 0.7
PADDED = [kind for kind in KINDS if not isinstance(make(kind, CASE), Choice)]


@pytest.mark.parametrize("distances", [0, 4])
@pytest.mark.parametrize("kind", PADDED)
def test_real_positions_read_what_they_would_without_padding(kind: str, distances: int) -> None:
    case = CASE.with_(distances=distances)
    pattern = make(kind, case)
    here = tensors(pattern, case)
    out = run(pattern, here, real_BN=REAL_BN)
    assert not out.transpose(1, 2)[~REAL_BN].any()
    for b, real_N in enumerate(REAL_BN):
        at = real_N.nonzero()[:, 0]
        if isinstance(pattern, PositionPattern) or kind.startswith("random"):
            expected = by_rule(pattern, here, b, real_N)
        elif distances:
            continue  # positions of the sequence without padding are others
        else:
            short = {n: x[b : b + 1, :, at] if torch.is_tensor(x) else x for n, x in here.items()}
            expected = run(pattern, short)[0]
        torch.testing.assert_close(out[b][:, at], expected, rtol=1e-9, atol=1e-9)


def by_rule(pattern, here, b: int, real_N):
    """Return the oracle's outputs at real positions, `[H, R, D]`."""
    outs = []
    given = pattern.inputs(here["q"][b : b + 1], None if here["k"] is None else here["k"][b : b + 1], None)
    for h in range(CASE.H):
        if isinstance(pattern, PositionPattern):
            mask_PNN = pattern.rule(given, h, False) & real_N & real_N[:, None]
        else:
            member_CN = pattern.member_HCN(CASE.N)[h] & real_N
            mask_PNN = oracle.last_members(member_CN, member_CN, CASE.W)
        q, k = given.turned_q_BHND[0, h], given.turned_k_BHND[0, h]
        out_ND, _ = oracle.dense(q, k, here["v"][b, h], mask_PNN, pattern.terms(CASE.D, here["relative"]), h)
        outs.append(out_ND[real_N])
    return torch.stack(outs)


@pytest.mark.parametrize("kind", PADDED)
def test_nan_in_padding_goes_nowhere(kind: str) -> None:
    pattern = make(kind, CASE)
    here = tensors(pattern, CASE)
    clean = run(pattern, here, real_BN=REAL_BN)
    dirty = dict(here)
    for name in ("q", "k", "v"):
        if here[name] is not None:
            x = here[name].detach().clone()
            x[~REAL_BN[:, None].expand(2, 2, 19)] = float("nan")
            dirty[name] = x.requires_grad_()
    out = run(pattern, dirty, real_BN=REAL_BN, check_finite=True)
    assert torch.equal(out, clean)
    assert all(g.isfinite().all() for g in gradients(out, leaves(pattern, dirty)).values())


def test_heads_that_choose_keys_query_by_query_refuse_padding() -> None:
    pattern = make("exact", CASE)
    with pytest.raises(ValueError, match="real_BN: heads that choose keys"):
        run(pattern, tensors(pattern, CASE), real_BN=REAL_BN)
