"""One softmax over the keys of several lists, from the output and the log-sum of each.

Shapes: S members, D head size, R rows.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Partial(NamedTuple):
    """What some rows got, each in one list."""

    row_S: Tensor
    out_SD: Tensor
    sum_S: Tensor
    """Natural logarithms of the summed exponentials; -inf where no key is read."""


def combine(partials: list[Partial], rows: int) -> Tensor:
    """Return softmax attention over the keys of all lists that a row reads, `[rows, D]`; zero where it reads nothing.

    Outputs are added list by list: all of them at once would be held twice more.
    """
    row_S = torch.cat([partial.row_S for partial in partials])
    sum_S = torch.cat([partial.sum_S for partial in partials])
    top_R = sum_S.new_full((rows,), float("-inf")).scatter_reduce(0, row_S, sum_S.detach(), "amax")
    weight_S = (sum_S - top_R.masked_fill(top_R.isinf(), 0)[row_S]).exp()
    total_R = weight_S.new_zeros(rows).index_add(0, row_S, weight_S)
    share_S = weight_S / total_R.masked_fill(total_R == 0, 1)[row_S]
    shares = share_S.split([len(partial.row_S) for partial in partials])
    out_RD = sum_S.new_zeros(rows, partials[0].out_SD.shape[1])  # wide, as log-sums are
    for partial, part_S in zip(partials, shares, strict=True):
        out_RD = out_RD.index_add(0, partial.row_S, part_S[:, None] * partial.out_SD)
    return out_RD
