"""Combine attention over several lists of keys into attention with one softmax over all of them.

Let a row have, in list l, the output o_l and the log-sum s_l = ln(sum of e^logit over the keys of
l). One softmax over the keys of all its lists has the output

    out = sum_l share_l o_l,    share_l = e^(s_l - top) / sum_l' e^(s_l' - top),    top = max_l s_l.

For example, outputs 1 and 4 with log-sums ln 2 and ln 1 give shares 2/3 and 1/3, and the output 2.

A gradient g of the output gives the gradients

    do_l = share_l g,    ds_l = share_l (g . o_l - g . out).

Each depends only on list l and on the row's g and out. So the backward pass gathers rows, and needs
no scatter-add. Automatic differentiation would add the gradients of all members of a row. That is
slow on a GPU, where additions to one row wait for each other. All empty places of lists share one
row, which may have thousands of members (see `target_rows`).

Shapes: S members of all lists, D head size, R rows. A row has one member in each list that it is
in.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rtx.attention.typed_torch import custom_op

SPARE_ROWS = 64
"""The number of extra rows, after the R rows, for members that read nothing."""


class Partial(NamedTuple):
    """Outputs and log-sums of the members of some lists, in any order."""

    row_S: Tensor
    """The row of each member."""
    out_SD: Tensor
    """The output o_l of each member."""
    log_sum_S: Tensor
    """The log-sum s_l of each member; -inf if it reads no key."""


def combine(partials: list[Partial], rows: int) -> Tensor:
    """Return the output of each row, with one softmax over the keys of all its lists, `[R, D]`.

    Rows that read nothing get zero. The dtype is that of the log-sums, float32 or wider.

    Args:
        rows: R.

    Raises:
        RuntimeError: later, in a backward pass with create_graph=True: there are no second
            derivatives.
    """
    row_parts = [partial.row_S for partial in partials]
    sum_parts = [partial.log_sum_S for partial in partials]
    outs = [partial.out_SD for partial in partials]
    row_S = torch.cat(row_parts)
    sum_S = torch.cat(sum_parts)
    out_RD, _ = combined(row_S, sum_S, outs, rows)
    return out_RD


def with_sink(partial: Partial, sink_S: Tensor) -> Partial:
    """Return outputs of softmaxes with sinks, and log-sums by which `combine` takes their mean.

    With the log-sum s over the keys that are read and the sink z, the output is multiplied by
    e^s / (e^s + e^z). Members that read nothing do not count in the mean.
    """
    share_S = (partial.log_sum_S - sink_S).sigmoid()
    share_S = share_S.to(partial.out_SD.dtype)
    share_S1 = share_S[:, None]
    reads_nothing_S = partial.log_sum_S == -math.inf
    # Equal log-sums, by which all members of a row that read something weigh the same.
    zero_S = torch.zeros_like(partial.log_sum_S)
    equal_sum_S = zero_S.masked_fill(reads_nothing_S, -math.inf)
    return Partial(
        partial.row_S,
        partial.out_SD * share_S1,
        equal_sum_S,
    )


def sinks_alone(sink_R: Tensor, partial: Partial) -> Partial:
    """Return one more list, in which each row has its sink: the output 0, and the log-sum z.

    Args:
        sink_R: the sink of each row.
        partial: outputs of lists, whose head size and types the result has.
    """
    rows = len(sink_R)
    row_R = torch.arange(rows, device=sink_R.device)
    value_size = partial.out_SD.shape[1]
    no_value_RD = partial.out_SD.new_zeros(rows, value_size)
    log_sum_R = sink_R.to(partial.log_sum_S.dtype)
    return Partial(row_R, no_value_RD, log_sum_R)


@custom_op("rtx::combined")
def combined(
    row_S: Tensor,
    sum_S: Tensor,
    outs: list[Tensor],
    rows: int,
) -> tuple[Tensor, Tensor]:
    """Return the output of each row, `[R, D]`, and the share of each member in its row, `[S]`.

    This is `combine` as an operator of PyTorch. The backward pass reads the shares.

    Args:
        row_S, sum_S: those of all partials, one after another.
        outs: `out_SD` of each partial.
        rows: R.
    """
    target_S = target_rows(row_S, sum_S, rows)
    rows_and_spare = rows + SPARE_ROWS
    share_S = shares_of(target_S, sum_S, rows_and_spare)
    head_size = outs[0].shape[1]
    out_RD = sum_S.new_zeros(rows_and_spare, head_size)
    # One partial at a time: joining all outputs and weighting them would take two more copies.
    counts = [len(out_SD) for out_SD in outs]
    targets = torch.split(target_S, counts)
    shares = torch.split(share_S, counts)
    parts = zip(outs, targets, shares, strict=True)
    for out_SD, some_target_S, some_share_S in parts:
        some_share_S1 = some_share_S[:, None]
        weighted_SD = some_share_S1 * out_SD
        out_RD.index_add_(0, some_target_S, weighted_SD)
    return out_RD[:rows], share_S


@combined.register_fake
def _(
    row_S: Tensor,
    sum_S: Tensor,
    outs: list[Tensor],
    rows: int,
) -> tuple[Tensor, Tensor]:
    """Return empty tensors with the shapes and dtypes of the results of `combined`."""
    head_size = outs[0].shape[1]
    out_RD = sum_S.new_empty(rows, head_size)
    share_S = torch.empty_like(sum_S)
    return out_RD, share_S


def save_for_backward(
    ctx: Any,
    inputs: tuple[Any, ...],
    output: tuple[Tensor, Tensor],
) -> None:
    """Save on `ctx` what `gradients` reads."""
    row_S, _, outs, _ = inputs
    out_RD, share_S = output
    ctx.save_for_backward(row_S, share_S, out_RD, *outs)
    ctx.mark_non_differentiable(share_S)


def gradients(ctx: Any, dout_RD: Tensor, _: None) -> tuple[Any, ...]:
    """Return the gradients of the arguments of `combined`; None for `row_S` and `rows`.

    Args:
        dout_RD: the gradient g of the outputs of rows.
        _: the gradient of shares, which have none.
    """
    # Checked here: torch's once_differentiable misses torch.autograd.grad with a single input.
    if torch.is_grad_enabled():
        raise RuntimeError("create_graph=True: this attention has first derivatives alone")
    row_S, share_S, out_RD, *outs = ctx.saved_tensors
    counts = [len(out_SD) for out_SD in outs]
    row_parts = torch.split(row_S, counts)
    shares = torch.split(share_S, counts)
    g_dot_out_R = (dout_RD * out_RD).sum(-1)
    dsums: list[Tensor] = []
    douts: list[Tensor] = []
    parts = zip(outs, row_parts, shares, strict=True)
    for out_SD, some_row_S, some_share_S in parts:
        g_SD = dout_RD[some_row_S]
        some_share_S1 = some_share_S[:, None]
        dout_SD = some_share_S1 * g_SD
        douts.append(dout_SD.to(out_SD.dtype))
        g_dot_out_S = (g_SD * out_SD).sum(-1)
        g_dot_row_S = g_dot_out_R[some_row_S]
        dsum_S = some_share_S * (g_dot_out_S - g_dot_row_S)
        dsums.append(dsum_S)
    return None, torch.cat(dsums), douts, None


combined.register_autograd(gradients, setup_context=save_for_backward)


def target_rows(row_S: Tensor, sum_S: Tensor, rows: int) -> Tensor:
    """Return the row to which each member's output is added, `[S]`.

    It is the member's own row, or a spare row if the member reads nothing. Such members take the
    spare rows in turn, as additions to one row wait for each other on a GPU.
    """
    number_S = torch.arange(len(row_S), device=row_S.device)
    spare_row_S = rows + number_S % SPARE_ROWS
    reads_nothing_S = sum_S == -math.inf
    return torch.where(reads_nothing_S, spare_row_S, row_S)


def shares_of(target_S: Tensor, sum_S: Tensor, rows: int) -> Tensor:
    """Return the share of each member in its row, `[S]`.

    The shares of a row add up to 1, or to 0 if it reads nothing.

    Args:
        target_S: the row of each member, see `target_rows`.
        rows: the number of rows, including the spare ones; R here.
    """
    lowest_R = sum_S.new_full((rows,), -math.inf)
    top_R = lowest_R.scatter_reduce(0, target_S, sum_S, "amax")
    # A row without keys has -inf, and -inf - (-inf) would be NaN.
    is_infinite_R = top_R.isinf()
    top_R = top_R.masked_fill(is_infinite_R, 0)
    top_S = top_R[target_S]
    weight_S = (sum_S - top_S).exp()
    zero_R = weight_S.new_zeros(rows)
    total_R = zero_R.index_add(0, target_S, weight_S)
    # A row without keys has 0, and 0 / 0 would be NaN.
    divisor_R = total_R.masked_fill(total_R == 0, 1)
    divisor_S = divisor_R[target_S]
    return weight_S / divisor_S
