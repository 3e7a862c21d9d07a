"""Combine attention over several lists into one softmax, by their outputs and log-sums.

Let a row have the output o_l and the log-sum s_l = ln(sum of e^logit over the keys) in list l. One
softmax over the keys of all its lists has the output

    out = sum_l share_l o_l,    share_l = e^(s_l - top) / sum_l' e^(s_l' - top),    top = max_l s_l.

For example, outputs 1 and 4 with log-sums ln 2 and ln 1 give shares 2/3 and 1/3, and the output 2.

A gradient g of the output gives the gradients

    do_l = share_l g,    ds_l = share_l (g . o_l - g . out).

These need no sum over lists, so the backward pass only gathers. Automatic differentiation would add
up by row. On a GPU, additions to one row wait for each other, and a row may have thousands of
members (see `places`).

Shapes: S members of all lists (a row has one member in each list that it is in), D head size, R
rows.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

SPARE = 64
"""Extra rows after the real ones, for members that read nothing."""


class Partial(NamedTuple):
    """Outputs and log-sums of some members, in any order."""

    row_S: Tensor
    """The row of each member."""
    out_SD: Tensor
    sum_S: Tensor
    """Log-sums; -inf where the member reads no key."""


def combine(partials: list[Partial], rows: int) -> Tensor:
    """Return one softmax attention over the keys of all lists of each row, `[rows, D]`.

    It is zero for rows that read nothing, and has the type of the log-sums, float32 or wider.

    Raises:
        RuntimeError: in a backward pass with create_graph=True, as there are no second derivatives.
    """
    row_S = torch.cat([partial.row_S for partial in partials])
    sum_S = torch.cat([partial.sum_S for partial in partials])
    out_RD, _ = combined(row_S, sum_S, [partial.out_SD for partial in partials], rows)
    return out_RD


@torch.library.custom_op("rtx::combined", mutates_args=())
def combined(row_S: Tensor, sum_S: Tensor, outs: list[Tensor], rows: int) -> tuple[Tensor, Tensor]:
    """Return the outputs of rows `[R, D]`, and the share of each member in them `[S]`.

    Args:
        outs: `out_SD` of each partial.
        rows: R.
    """
    place_S = places(row_S, sum_S, rows)
    share_S = shares(place_S, sum_S, rows + SPARE)
    out_RD = sum_S.new_zeros(rows + SPARE, outs[0].shape[1])
    # One partial at a time: the products of all partials would be two more copies of all outputs.
    counts = [len(out_SD) for out_SD in outs]
    pieces = zip(outs, place_S.split(counts), share_S.split(counts), strict=True)
    for out_SD, some_place_S, some_share_S in pieces:
        out_RD.index_add_(0, some_place_S, some_share_S[:, None] * out_SD)
    return out_RD[:rows], share_S


@combined.register_fake
def _(row_S, sum_S, outs, rows):
    """Return tensors of the shapes that `combined` returns."""
    return sum_S.new_empty(rows, outs[0].shape[1]), torch.empty_like(sum_S)


def save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Save on `ctx` what `gradients` reads."""
    row_S, _, outs, _ = inputs
    out_RD, share_S = output
    ctx.save_for_backward(row_S, share_S, out_RD, *outs)
    ctx.mark_non_differentiable(share_S)


def gradients(ctx: Any, dout_RD: Tensor, _: None) -> tuple[Any, ...]:
    """Return the gradients of log-sums and outputs; None for rows."""
    # Not by torch's once_differentiable: it overlooks torch.autograd.grad of a single input.
    if torch.is_grad_enabled():
        raise RuntimeError("create_graph=True: this attention has first derivatives alone")
    row_S, share_S, out_RD, *outs = ctx.saved_tensors
    counts = [len(out_SD) for out_SD in outs]
    delta_R = (dout_RD * out_RD).sum(-1)
    dsums = []
    douts = []
    pieces = zip(outs, row_S.split(counts), share_S.split(counts), strict=True)
    for out_SD, some_row_S, some_share_S in pieces:
        dout_SD = dout_RD[some_row_S]
        douts.append((some_share_S[:, None] * dout_SD).to(out_SD.dtype))
        dsums.append(some_share_S * ((dout_SD * out_SD).sum(-1) - delta_R[some_row_S]))
    return None, torch.cat(dsums), douts, None


combined.register_autograd(gradients, setup_context=save_for_backward)


def places(row_S: Tensor, sum_S: Tensor, rows: int) -> Tensor:
    """Return the rows of members, and one of SPARE extra rows for members that read nothing.

    In lists with room, all empty places have the same row. There may be many, and on a GPU
    additions to one row wait for each other.
    """
    spare_S = torch.arange(len(row_S), device=row_S.device) % SPARE + rows
    return torch.where(sum_S == float("-inf"), spare_S, row_S)


def shares(row_S: Tensor, sum_S: Tensor, rows: int) -> Tensor:
    """Return the share of each member in its row, `[S]`.

    The shares of a row add up to 1, or to 0 if it reads nothing.

    Args:
        rows: the number of rows, the extra ones included.
    """
    nothing_R = sum_S.new_full((rows,), float("-inf"))
    top_R = nothing_R.scatter_reduce(0, row_S, sum_S, "amax")
    # A row without keys has -inf, and -inf - (-inf) would be NaN.
    top_R = top_R.masked_fill(top_R.isinf(), 0)
    weight_S = (sum_S - top_R[row_S]).exp()
    total_R = weight_S.new_zeros(rows).index_add(0, row_S, weight_S)
    return weight_S / total_R.masked_fill(total_R == 0, 1)[row_S]
