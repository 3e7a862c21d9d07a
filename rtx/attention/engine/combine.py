"""Combine attention over several lists into one softmax, by the output and the log-sum of each
list.

Let list l give the output o_l and the log-sum s_l = ln(sum of e^logit over its keys). One softmax
over the keys of all lists has the output

    sum_l share_l o_l,    share_l = e^(s_l - top) / sum_l' e^(s_l' - top),    top = max_l s_l.

For example, outputs 1 and 4 with log-sums ln 2 and ln 1 give shares 2/3 and 1/3, and the output 2.

Shapes: S members of all lists (a row is one member of each list that it is in), D head size, R
rows.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Partial(NamedTuple):
    """Outputs and log-sums of some members, in any order."""

    row_S: Tensor
    """The row of each member."""
    out_SD: Tensor
    sum_S: Tensor
    """Log-sums; -inf where the member reads no key."""


def combine(partials: list[Partial], rows: int) -> Tensor:
    """Return softmax attention over the keys of all lists that a row reads, `[rows, D]`; zero where
    it reads nothing.

    It has the type of the log-sums, float32 or wider.
    """
    row_S = torch.cat([partial.row_S for partial in partials])
    sum_S = torch.cat([partial.sum_S for partial in partials])
    share_S = shares(row_S, sum_S, rows)
    counts = [len(partial.row_S) for partial in partials]
    out_RD = sum_S.new_zeros(rows, partials[0].out_SD.shape[1])
    # One partial at a time: the products of all of them would take two more copies of all outputs.
    for partial, part_S in zip(partials, share_S.split(counts), strict=True):
        out_RD = out_RD.index_add(0, partial.row_S, part_S[:, None] * partial.out_SD)
    return out_RD


def shares(row_S: Tensor, sum_S: Tensor, rows: int) -> Tensor:
    """Return by what each member's output is multiplied, `[S]`; the shares of a row add up to 1, or
    0 if it reads nothing.

    The highest log-sum of a row only keeps exponentials in range; shares do not depend on it, so it
    needs no gradient.
    """
    nothing_R = sum_S.new_full((rows,), float("-inf"))
    top_R = nothing_R.scatter_reduce(0, row_S, sum_S.detach(), "amax")
    top_R = top_R.masked_fill(top_R.isinf(), 0)  # -inf - (-inf) would be NaN
    weight_S = (sum_S - top_R[row_S]).exp()
    total_R = weight_S.new_zeros(rows).index_add(0, row_S, weight_S)
    return weight_S / total_R.masked_fill(total_R == 0, 1)[row_S]
