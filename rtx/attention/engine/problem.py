"""What an engine computes (`Problem`), and what it returns (`Result`).

`rtx.attention.reads` explains rows, lists and members by an example. A row in two lists is two
query members, each with an output. With an index (`rtx.attention.reads.IndexReads`) there are no
lists, and every row is one query member.

Shapes: B sequences, H heads, N positions, R = B * H * N rows, P query members, D head size (values
may have another one than queries and keys).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rtx.attention.engine.softmax import LogitTerms
from rtx.attention.reads import RangeReads, Reads

Result = tuple[Tensor, Tensor]
"""Outputs and log-sums. Their shapes depend on `Problem.by_member`:

| by_member | outputs | log-sums |
|---|---|---|
| false | `[R, D]`, of each row the mean over its lists in which it reads something | undefined |
| true | `[P, D]`, of each query member | `[P]` |

The output is 0 if nothing is read. A log-sum is ln(sum of e^logit) over the keys that are read, and
-inf if there are none.
"""

PRODUCTS_ALONE = "it has no dropout, and no tables by distance (relative positions, adaptive spans)"
"""Why an engine refuses if its logits are scaled products alone."""


class Problem(NamedTuple):
    """One part of a call: queries, keys and values, and which query reads which keys."""

    q_BHND: Tensor
    k_BHND: Tensor
    """The same object as `q_BHND` where queries serve as keys; engines then read them once."""
    v_BHND: Tensor
    part: Reads
    """Which query reads which keys: packed lists, or an index."""
    terms: LogitTerms
    """The other terms of logits and weights: scale, dropout and terms by distance."""
    by_member: bool
    """Whether outputs are by query member, and not by row; see `Result`."""

    @property
    def shared(self) -> bool:
        """Whether queries serve as keys."""
        return self.k_BHND is self.q_BHND

    def rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values by row, `[R, D]`; contiguous tensors are not copied."""
        q_RD = self.q_BHND.flatten(0, 2)
        k_RD = q_RD
        if not self.shared:
            k_RD = self.k_BHND.flatten(0, 2)
        v_RD = self.v_BHND.flatten(0, 2)
        return q_RD, k_RD, v_RD

    def query_rows(self) -> Tensor:
        """Return the row of each query member, `[P]`, int64."""
        if isinstance(self.part, RangeReads):
            return self.part.query.row_M.long()
        rows = self.q_BHND.shape[:3].numel()
        return torch.arange(rows, device=self.q_BHND.device)
