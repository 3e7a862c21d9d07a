"""What an engine computes: one part of a call of attention."""

from typing import NamedTuple

from torch import Tensor

from rtx.attention.engine.softmax import Terms
from rtx.attention.packed import Part


class Problem(NamedTuple):
    """Queries, keys and values of B sequences and H heads, and who reads whom.

    An engine returns outputs and log-sums. Without `by_member` the outputs are `[R, D]`, for each row
    the mean over the lists in which it reads something; the log-sums are undefined. With `by_member`
    the outputs are `[P, D]` and the log-sums `[P]`, one for each query member (of an index: each row).
    A log-sum is the natural logarithm of the summed exponentials, -inf where nothing is read.

    Shapes: R = B * H * N rows, P query members, D head size.
    """

    q_BHND: Tensor
    k_BHND: Tensor
    """The same tensor object as `q_BHND` where queries serve as keys."""
    v_BHND: Tensor
    part: Part
    terms: Terms
    by_member: bool

    @property
    def shared(self) -> bool:
        """Whether queries serve as keys."""
        return self.k_BHND is self.q_BHND

    def rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values by row, `[R, D]`; views where the tensors are contiguous."""
        q_RD = self.q_BHND.flatten(0, 2)
        k_RD = q_RD if self.shared else self.k_BHND.flatten(0, 2)
        return q_RD, k_RD, self.v_BHND.flatten(0, 2)


Result = tuple[Tensor, Tensor]
"""Outputs and log-sums, see `Problem`."""
