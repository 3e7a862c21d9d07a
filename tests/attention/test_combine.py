"""One softmax over lists, by the outputs and log-sums of each."""

import math

import pytest
import torch
from torch import Tensor

from rtx.attention.engine.combine import Partial, combine, combined


def drawn() -> list[Partial]:
    """Return members of 5 rows: rows in several lists, row 3 in none, and many members that read
    nothing.
    """
    partials = []
    for row_S in ([0, 1, 1, 4, 2, 0], [1, 2, 4, *[0] * 100]):
        sum_S = torch.randn(len(row_S), dtype=torch.float64)
        sum_S[3:] = -math.inf
        out_SD = torch.randn(len(row_S), 4, dtype=torch.float64)
        partials.append(
            Partial(torch.tensor(row_S), out_SD.requires_grad_(), sum_S.requires_grad_())
        )
    return partials


def by_definition(partials: list[Partial], rows: int) -> Tensor:
    row_S, out_SD, sum_S = (torch.cat(tensors) for tensors in zip(*partials, strict=True))
    weight_SR = sum_S.exp()[:, None] * (row_S[:, None] == torch.arange(rows))
    return weight_SR.T @ out_SD / weight_SR.sum(0).clamp(min=1e-300)[:, None]


def test_outputs_and_gradients_are_those_of_one_softmax() -> None:
    torch.manual_seed(0)
    partials = drawn()
    leaves = [x for partial in partials for x in partial[1:]]
    dout_RD = torch.randn(5, 4, dtype=torch.float64)
    found = combine(partials, 5)
    right = by_definition(partials, 5)
    assert not found[3].any()
    torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)
    gradients = torch.autograd.grad(found, leaves, dout_RD)
    torch.testing.assert_close(
        gradients, torch.autograd.grad(right, leaves, dout_RD), rtol=1e-12, atol=1e-12
    )


def test_it_has_first_derivatives_alone() -> None:
    partials = drawn()
    with pytest.raises(RuntimeError, match="first derivatives alone"):
        torch.autograd.grad(combine(partials, 5).sum(), partials[0].out_SD, create_graph=True)


def test_it_is_one_graph() -> None:
    partials = drawn()
    compiled = torch.compile(combine, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(partials, 5).sum(), partials[0].out_SD)
    right = torch.autograd.grad(combine(partials, 5).sum(), partials[0].out_SD)
    torch.testing.assert_close(found, right)


def test_the_operator_keeps_the_rules_of_torchs_library() -> None:
    partials = drawn()
    row_S, _, sum_S = (torch.cat(tensors) for tensors in zip(*partials, strict=True))
    tests = "test_schema", "test_autograd_registration", "test_faketensor"
    torch.library.opcheck(
        combined, (row_S, sum_S, [x.out_SD for x in partials], 5), test_utils=tests
    )
